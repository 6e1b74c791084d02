"""Typed access to a parsed JSON object, with errors that name file and key. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moeyard_worker.config.checkpoint_error import CheckpointError

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises CheckpointError when the file is missing or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; a checkpoint is a local Hugging Face directory") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """`values` of `file`, read with a type and a default. A key that is null counts as absent."""

    file: str
    values: Mapping[str, Any]

    def error(self, key: str, message: str) -> CheckpointError:
        """The error to raise about one key."""
        return CheckpointError(f"{self.file}: {key} {message}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An int of at least `minimum`; required without a default."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, f"is {value!r}, expected an integer of at least {minimum}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """An int of at least 1, or None when absent."""
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive float or int; required without a default."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(key, f"is {value!r}, expected a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, expected true or false")
        return value

    def integers(self, *keys: str) -> tuple[int, ...]:
        """The int or list of ints under the first of `keys` that is present; () when none is."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                ids = value if isinstance(value, list) else [value]
                if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                    raise self.error(key, f"is {value!r}, expected one or more integers")
                return tuple(ids)
        return ()

    def require(self, key: str, supported: Mapping[Any, T] | tuple[Any, ...], default: Any) -> Any:
        """The value under `key`, refused unless it is one of `supported`."""
        value = self.values.get(key)
        value = default if value is None else value
        if value not in (supported if isinstance(supported, tuple) else tuple(supported)):
            raise self.error(key, f"{value!r} is not supported (supported: {', '.join(map(str, supported))})")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value
