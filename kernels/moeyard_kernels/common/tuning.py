"""Which kernel runs with which tile: stored per device and shape class, so that no server start ever tunes by surprise.

Tiles may be tuned freely, because the order of a sum never depends on them (docs/kernels.md); the tests assert that
over every list of configs. Each op's module has `CONFIGS` (all that may be stored), `shape_class(...)` (a short text
such as "M16 N2112 K7168") and `default_config(...)`, used for shapes that nobody tuned. `python
bench/kernel_times.py --tune` writes the files.
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

# Of an H100 or H200, for which defaults cut what nobody tuned.
MULTIPROCESSORS = 132
FOLDER = Path(__file__).resolve().parents[1] / "configs"
# The same chip beside slower memory: where its own file says nothing it runs by the other's.
_TUNED_AS = MappingProxyType({"NVIDIA H100 80GB HBM3": "NVIDIA H200"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What every launch is given. A family of kernels adds the name of one, `kernel`, and its own block sizes.

    num_warps and num_stages are Triton's: warps of a program, steps of a loop whose loads are on the way.
    """

    num_warps: int = 4
    num_stages: int = 3

    def as_dict(self) -> dict[str, Any]:
        """The fields as they are stored."""
        return dataclasses.asdict(self)

    @property
    def options(self) -> dict[str, int]:
        """What Triton itself takes of it."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowConfig(Config):
    """For kernels that go over rows by themselves: BLOCK columns of one (or heads of a token) are a program."""

    kernel: Literal["rows"] = "rows"
    BLOCK: int


C = TypeVar("C", bound=Config)
Table = dict[str, dict[str, dict[str, Any]]]


def device_file(name: str) -> Path:
    """Where the configs of a device live, by its name in CUDA."""
    return FOLDER / f"{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}.json"


def stored_for(name: str) -> Table:
    """{op: {shape class: fields}} of one device's own file; empty where there is none. ValueError for a broken one."""
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
    """What a device runs by, as `stored_for`: by another's file where its own says nothing."""
    table = stored_for(_TUNED_AS[name]) if name in _TUNED_AS else {}
    for op, classes in stored_for(name).items():
        table[op] = table.get(op, {}) | classes
    return MappingProxyType(table)


def parse(kinds: tuple[type[C], ...], fields: Mapping[str, Any]) -> C:
    """The config of these fields: of the one of `kinds` that has a kernel of that name.

    Raises ValueError for a kernel that none has, for fields that it has not or lacks, and for values of another type.
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
    """The stored config of `op`, one of `kinds`, for the device of `x` and that class of shapes, or `default()`.

    Raises ValueError, naming the file, for a stored one that is none.
    """
    if not x.is_cuda:
        return default()
    found: C | None = _found(_name(x.device), op, shape_class, kinds)
    return default() if found is None else found
