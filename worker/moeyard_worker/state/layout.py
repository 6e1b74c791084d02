"""What the layers of a model keep of a sequence: arrays in pages (per token) and in slots (per sequence). Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moeyard_worker.state.spec import StateSpec

_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedArray:
    """Values of every position: `heads` rows of `width` in the served dtype, or one row that all heads share (None).

    In memory [heads, num_pages, page_size, width], without the first dimension where there are no heads.
    """

    heads: int | None
    width: int

    @property
    def values_per_token(self) -> int:
        """Values of one position."""
        return self.width * (1 if self.heads is None else self.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotArray:
    """State of one sequence whatever its length: `shape` values, in fp32 or in the served dtype.

    In memory [num_slots, *shape].
    """

    shape: tuple[int, ...]
    fp32: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """One layer's arrays by the names under which its block is given them.

    `chunk_alignment`: prompt chunks end at multiples of so many positions, but for the prompt's last.
    """

    paged: dict[str, PagedArray]
    slots: dict[str, SlotArray]
    chunk_alignment: int = 1

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one position, served in values of `itemsize` bytes."""
        return sum(array.values_per_token for array in self.paged.values()) * itemsize

    def bytes_per_sequence(self, itemsize: int) -> int:
        """Bytes of one slot."""
        return sum(math.prod(a.shape) * (_FP32 if a.fp32 else itemsize) for a in self.slots.values())


def paged(**arrays: PagedArray) -> LayerState:
    """The state of a layer that keeps everything in pages."""
    return LayerState(paged=arrays, slots={})


def state_spec(layers: Iterable[LayerState], itemsize: int) -> StateSpec:
    """What the scheduler is told of a model: sums over its layers. A prefix is its pages where no layer has slots."""
    states = tuple(layers)
    return StateSpec(
        bytes_per_token=sum(state.bytes_per_token(itemsize) for state in states),
        bytes_per_sequence=sum(state.bytes_per_sequence(itemsize) for state in states),
        chunk_alignment=math.lcm(*(state.chunk_alignment for state in states)),
        prefix_reusable=not any(state.slots for state in states),
    )
