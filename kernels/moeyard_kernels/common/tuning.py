"""Which tile a kernel runs with: stored per device and shape class, so that no server start ever tunes by surprise.

A config is a mapping of the kernel's own block names plus "num_warps" and "num_stages". Tiles may be tuned freely,
because the order of a sum never depends on them (DESIGN section 6); the tests assert that over every list of configs.
Each op's module has `CONFIGS` (all that may be stored), `shape_class(...)` (a short text such as "M16 N2112 K7168") and
`default_config(...)`, used for shapes that nobody tuned. `python -m moeyard_kernels.bench --tune` writes the files.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

FOLDER = Path(__file__).resolve().parents[1] / "configs"

Config = Mapping[str, int]


def device_file(name: str) -> Path:
    """Where the configs of a device live, by the name that CUDA gives it."""
    return FOLDER / f"{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}.json"


@functools.cache
def stored(name: str) -> Mapping[str, Mapping[str, Config]]:
    """{op: {shape class: config}} of one device; empty where there is no file. Raises ValueError for a broken file."""
    path = device_file(name)
    if not path.exists():
        return MappingProxyType({})
    try:
        table: dict[str, dict[str, Config]] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return MappingProxyType(table)


def choose(op: str, shape_class: str, x: torch.Tensor, default: Callable[[], Config]) -> Config:
    """The stored config of `op` for the device of `x` and that class of shapes, or `default()`."""
    if not x.is_cuda:
        return default()
    found = stored(torch.cuda.get_device_name(x.device)).get(op, {}).get(shape_class)
    return default() if found is None else found


def config(num_warps: int = 4, num_stages: int = 3, **blocks: int) -> Config:
    """A config as tests and tables write it."""
    return MappingProxyType({**blocks, "num_warps": num_warps, "num_stages": num_stages})
