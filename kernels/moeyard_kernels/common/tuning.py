"""Stored kernel configs per device and shape class, so that no server start tunes.

Tiles can be tuned freely, because the order of a sum never depends on them (docs/kernels.md). The tests assert that for
every config. Each op's module has `CONFIGS` (all configs that may be stored), `shape_class(...)` (a short text such as
"M16 N2112 K7168") and `default_config(...)` for untuned shapes. `python bench/kernel_times.py --tune` writes the files.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

# Multiprocessors of an H100 or H200; default configs assume them.
MULTIPROCESSORS = 132
FOLDER = Path(__file__).resolve().parents[1] / "configs"
# The same chip with slower memory uses the other's configs for shape classes that its file lacks.
_TUNED_AS = MappingProxyType({"NVIDIA H100 80GB HBM3": "NVIDIA H200"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Options of every launch. Kernel families add the kernel's name, `kernel`, and their block sizes.

    num_warps (per program) and num_stages (loop iterations in flight) are Triton's.
    """

    num_warps: int = 4
    num_stages: int = 3

    def as_dict(self) -> dict[str, Any]:
        """The fields as they are stored."""
        return dataclasses.asdict(self)

    @property
    def options(self) -> dict[str, int]:
        """Launch options of Triton."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowConfig(Config):
    """Config of row kernels: a program takes BLOCK columns of a row (or heads of a token)."""

    kernel: Literal["rows"] = "rows"
    BLOCK: int


C = TypeVar("C", bound=Config)
Table = dict[str, dict[str, dict[str, Any]]]


def device_file(name: str) -> Path:
    """Return the config file of a device, by its CUDA name."""
    return FOLDER / f"{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}.json"


def stored_for(name: str) -> Table:
    """Return {op: {shape class: fields}} of a device's file, {} without a file. Raises ValueError for invalid JSON."""
    path = device_file(name)
    if not path.exists():
        return {}
    try:
        table: Table = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return table


@functools.cache
def stored(name: str) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Return a device's configs, completed by those of the device that it is tuned as."""
    table = stored_for(_TUNED_AS[name]) if name in _TUNED_AS else {}
    for op, classes in stored_for(name).items():
        table[op] = table.get(op, {}) | classes
    return MappingProxyType(table)


def parse(kinds: tuple[type[C], ...], fields: Mapping[str, Any]) -> C:
    """Build the config of these fields, with the class among `kinds` that has this kernel.

    Raises ValueError for an unknown kernel, for unknown or missing fields, and for values of another type.
    """
    for kind in kinds:
        wanted = get_type_hints(kind)
        if fields.get("kernel") not in get_args(wanted["kernel"]):
            continue
        if fields.keys() != wanted.keys():
            raise ValueError(f"config {dict(fields)}: {kind.__name__} has the fields {sorted(wanted)}")
        for name, value in fields.items():
            if not _fits(value, wanted[name]):
                raise ValueError(f"config {dict(fields)}: {name} is {value!r}, expected {wanted[name]}")
        return kind(**fields)
    raise ValueError(f"config {dict(fields)}: no kernel of that name in {[kind.__name__ for kind in kinds]}")


def _fits(value: object, wanted: object) -> bool:
    return value in get_args(wanted) if get_origin(wanted) is Literal else type(value) is wanted


@functools.cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@functools.cache
def _found(device: str, op: str, shape_class: str, kinds: tuple[type[C], ...]) -> C | None:
    fields = stored(device).get(op, {}).get(shape_class)
    if fields is None:
        return None
    try:
        return parse(kinds, fields)
    except ValueError as error:
        own = shape_class in stored_for(device).get(op, {})
        path = device_file(device if own else _TUNED_AS[device])
        raise ValueError(f"{path}: {op} {shape_class}: {error}") from error


def choose(op: str, shape_class: str, x: torch.Tensor, kinds: tuple[type[C], ...], default: Callable[[], C]) -> C:
    """Return the stored config of `op` for the device of `x` and this shape class, or `default()`.

    Raises ValueError, naming the file, for an invalid stored config.
    """
    if not x.is_cuda:
        return default()
    found: C | None = _found(_name(x.device), op, shape_class, kinds)
    return default() if found is None else found
