"""Typed access to a parsed JSON object, with errors that name file and key. Pure."""

import json
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.files import read_text

T = TypeVar("T")

# What a checkpoint may say of its sizes. Every bound is at least 4 times what any published model has (2026-11), and
# low enough that nothing made per layer, expert or id from it alone fills a memory.
MAX_DIMENSION = 1 << 20  # widths, heads, experts of a layer
MAX_LAYERS = 1 << 11
MAX_POSITIONS = 1 << 26
MAX_VOCAB = 1 << 22
MAX_IDS = 1 << 12  # entries of a list of ids or layers


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises CheckpointError when the file is missing or holds something else."""
    try:
        value = json.loads(read_text(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; a checkpoint is a local Hugging Face directory") from error
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
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

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_DIMENSION) -> int:
        """An int from `minimum` to `maximum`; required without a default."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.error(key, f"is {_shown(value)}, expected an integer from {minimum} to {maximum}")
        return value

    def optional_integer(self, key: str, *, maximum: int = MAX_DIMENSION) -> int | None:
        """An int from 1 to `maximum`, or None when absent."""
        return None if self.values.get(key) is None else self.integer(key, maximum=maximum)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive float or int; required without a default."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise self.error(key, f"is {_shown(value)}, expected a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {_shown(value)}, expected true or false")
        return value

    def integers(self, *keys: str) -> tuple[int, ...]:
        """The int or list of ints under the first of `keys` that is present, each below MAX_VOCAB; () when none is."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                ids = value if isinstance(value, list) else [value]
                if len(ids) > MAX_IDS:
                    raise self.error(key, f"has {len(ids)} entries, at most {MAX_IDS} are expected")
                if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < MAX_VOCAB for i in ids):
                    raise self.error(key, f"is {_shown(value)}, expected one or more integers below {MAX_VOCAB}")
                return tuple(ids)
        return ()

    def require(self, key: str, supported: Mapping[Any, T] | tuple[Any, ...], default: Any) -> Any:
        """The value under `key`, refused unless it is one of `supported`."""
        value = self.values.get(key)
        value = default if value is None else value
        if value not in (supported if isinstance(supported, tuple) else tuple(supported)):
            raise self.error(key, f"{_shown(value)} is not supported (supported: {', '.join(map(str, supported))})")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value


def _shown(value: Any) -> str:
    """What an error says of a value, whatever its size."""
    return reprlib.repr(value)
