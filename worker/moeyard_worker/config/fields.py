"""Typed access to a parsed JSON object, with errors that name file and key. Pure."""

import json
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.files import read_text

# Limits on the sizes in a checkpoint, which is untrusted. Every limit is at least 4 times the largest published value
# (2026-11). It is low enough that a structure per layer, expert or id cannot exhaust memory.
MAX_DIMENSION = 1 << 20  # widths, heads, experts of a layer
MAX_LAYERS = 1 << 11
MAX_POSITIONS = 1 << 26
MAX_VOCAB = 1 << 22
MAX_IDS = 1 << 12  # entries of a list of ids or layers


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises CheckpointError if the file is missing or holds something else."""
    try:
        value = json.loads(read_text(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; a checkpoint is a local Hugging Face directory") from error
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {shown(value)}")
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """The `values` of `file`, read with a type and a default. A key that is null counts as absent."""

    file: str
    values: Mapping[str, Any]

    def error(self, key: str, message: str) -> CheckpointError:
        """Return the error to raise about one key."""
        return CheckpointError(f"{self.file}: {key} {message}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_DIMENSION) -> int:
        """Return an int from `minimum` to `maximum`. Required without a default."""
        value = self._get(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.error(key, f"is {shown(value)}, expected an integer from {minimum} to {maximum}")
        return value

    def optional_integer(self, key: str, *, maximum: int = MAX_DIMENSION) -> int | None:
        """Return an int from 1 to `maximum`, or None if absent."""
        return None if self.values.get(key) is None else self.integer(key, maximum=maximum)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number. Required without a default."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise self.error(key, f"is {shown(value)}, expected a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {shown(value)}, expected true or false")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Return the int or list of ints under `key`, each below MAX_VOCAB, or () if absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if len(ids) > MAX_IDS:
            raise self.error(key, f"has {len(ids)} entries, at most {MAX_IDS} are expected")
        if not all(type(i) is int and 0 <= i < MAX_VOCAB for i in ids):
            raise self.error(key, f"is {shown(value)}, expected one or more integers below {MAX_VOCAB}")
        return tuple(ids)

    def require(self, key: str, supported: tuple[Any, ...], default: Any) -> Any:
        """Return the value under `key`, which must be one of `supported`."""
        value = self._get(key, default)
        if value not in supported:
            known = ", ".join(each if isinstance(each, str) else shown(each) for each in supported)
            raise self.error(key, f"{shown(value)} is not supported (supported: {known})")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value


def shown(value: Any) -> str:
    """Return a JSON value as error messages quote it, at most 200 characters long."""
    return json.dumps(value) if value is None or isinstance(value, bool) else f"{reprlib.repr(value):.200}"
