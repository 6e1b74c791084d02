"""What a layer stores and from which checkpoint tensors it is put together. Pure."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Part:
    """Checkpoint tensor `key` of `shape`, stored in rows [row, row + shape[0]) of a weight seen as shape[1:] rows.

    `regroup`, where the file has rows head by head, is (groups, pieces): its rows are `groups` blocks of one size, and
    a weight has of all of them the rows [begin, end) of the first piece, then those of the second, and so on.
    """

    key: str
    shape: tuple[int, ...]
    row: int = 0
    regroup: tuple[int, tuple[tuple[int, int], ...]] | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of `shape`; rows that no part fills are zero.

    `fp32`: kept in float32 whatever dtype is served. `matrix`: only ever the right side of `linear`, so that it is kept
    in that kernel's own layout. `plus` is added to what is stored: some families store norms less one. The parts' rows
    are counted in the flattened form [-1, *parts[0].shape[1:]].
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    fp32: bool = False
    matrix: bool = False
    plus: float = 0.0


def weight(key: str, *shape: int, fp32: bool = False) -> Weight:
    """A parameter that is one checkpoint tensor."""
    return Weight(shape, (Part(key, shape),), fp32)


def norm(key: str, width: int, *, less_one: bool) -> Weight:
    """The weight of a norm; one that is stored less one is kept in fp32, where the sum has room."""
    found = weight(key, width, fp32=less_one)
    return replace(found, plus=1.0) if less_one else found


def matrix(key: str, *shape: int, fp32: bool = False) -> Weight:
    """A matrix of a linear layer that is one checkpoint tensor."""
    return replace(weight(key, *shape, fp32=fp32), matrix=True)


def stacked(*rows: tuple[str | None, int], width: int | None = None) -> Weight:
    """Checkpoint tensors on top of each other, (key, number of rows) each: a matrix of `width` columns, or a vector.

    A key of None leaves its rows zero (the bias of a projection that has none).
    """
    columns = () if width is None else (width,)
    parts, row = [], 0
    for key, count in rows:
        if key is not None:
            parts.append(Part(key, (count, *columns), row))
        row += count
    return Weight((row, *columns), tuple(parts), matrix=width is not None)


def regrouped(found: Weight, regroup: dict[str, tuple[int, tuple[tuple[int, int], ...]]]) -> Weight:
    """The same with the rows of some of its tensors, by key, in another order than stored: see `Part`."""
    return replace(found, parts=tuple(replace(part, regroup=regroup.get(part.key)) for part in found.parts))


def num_elements(shape: tuple[int, ...]) -> int:
    """Elements of a tensor of `shape`."""
    return math.prod(shape)
