"""The parameters of a layer, and the checkpoint tensors that form each of them. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# Loaded parameters or state by name: a `Matrix` if the weight says so, else a tensor.
Loaded = Mapping[str, Any]
# The number of groups of stored rows, and the rows [begin, end) of each piece of a group.
Regroup = tuple[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class Part:
    """Checkpoint tensor `key` of `shape`, stored in rows [row, row + shape[0]) of a weight seen as shape[1:] rows.

    `regroup` reorders rows that the file stores head by head. The stored rows are groups of one size. The weight has
    the rows [begin, end) of the first piece of all groups, then those of the second piece, and so on. `whole` is the
    shape of the stored tensor if the part is a slice of it; the slice starts at row `begin`, in shape[1:] rows. `ids`:
    the tensor holds integers.
    """

    key: str
    shape: tuple[int, ...]
    row: int = 0
    regroup: Regroup | None = None
    whole: tuple[int, ...] | None = None
    begin: int = 0
    ids: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of `shape`; rows without a part are zero.

    `fp32`: kept in float32 whatever dtype is served. `matrix`: used only as the right side of `linear`, so kept in that
    kernel's layout. `plus` is added to the stored values, for families that store norms minus one. Rows of parts count
    in the flattened form [rows, columns].
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    fp32: bool = False
    matrix: bool = False
    plus: float = 0.0

    def kept(self, dtype: str) -> str:
        """Return the dtype in memory of a plain parameter, served in `dtype`."""
        return "int32" if self.parts[0].ids else "float32" if self.fp32 else dtype

    @property
    def columns(self) -> int:
        """Values of a row of the parts."""
        return num_elements(self.parts[0].shape[1:])

    @property
    def rows(self) -> int:
        """Rows of all parts together."""
        return num_elements(self.shape) // self.columns


def weight(key: str, *shape: int, fp32: bool = False) -> Weight:
    """Return a parameter that is one checkpoint tensor."""
    return Weight(shape, (Part(key, shape),), fp32)


def table(key: str, *shape: int) -> Weight:
    """Return a table of integers that is one checkpoint tensor."""
    return Weight(shape, (Part(key, shape, ids=True),))


def norm(key: str, width: int, *, less_one: bool) -> Weight:
    """Return the weight of a norm. One that is stored minus one is kept in fp32, which holds the sum exactly."""
    found = weight(key, width, fp32=less_one)
    return replace(found, plus=1.0) if less_one else found


def matrix(key: str, *shape: int, fp32: bool = False) -> Weight:
    """Return a matrix of a linear layer that is one checkpoint tensor."""
    return replace(weight(key, *shape, fp32=fp32), matrix=True)


def stacked(*rows: tuple[str | None, int], width: int | None = None) -> Weight:
    """Stack checkpoint tensors, (key, number of rows) each: a matrix of `width` columns, or a vector. A key of None
    leaves its rows zero (the bias of a projection without one)."""
    columns = () if width is None else (width,)
    parts, row = [], 0
    for key, count in rows:
        if key is not None:
            parts.append(Part(key, (count, *columns), row))
        row += count
    return Weight((row, *columns), tuple(parts), matrix=width is not None)


def regrouped(found: Weight, regroup: Mapping[str, Regroup]) -> Weight:
    """Return the weight with the rows of some tensors, by key, in another order than stored: see `Part`."""
    return replace(found, parts=tuple(replace(part, regroup=regroup.get(part.key)) for part in found.parts))


def num_elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a tensor of `shape`."""
    return math.prod(shape)
