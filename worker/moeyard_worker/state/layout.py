"""The state that layers keep of a sequence: arrays in pages (per token) and in slots (per sequence). Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moeyard_worker.state.spec import StateSpec

_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedArray:
    """Values per position in the served dtype: `heads` rows of `width`, or one row that all heads share (None).

    Memory layout: [heads, num_pages, page_size, width], without the first dimension if `heads` is None.
    """

    heads: int | None
    width: int

    @property
    def values_per_token(self) -> int:
        """Number of values of one position."""
        return self.width * (1 if self.heads is None else self.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotArray:
    """State of one sequence of fixed size: `shape` values in fp32 or in the served dtype.

    Memory layout: [num_slots, *shape].
    """

    shape: tuple[int, ...]
    fp32: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """One layer's arrays by name.

    chunk_alignment: all prompt chunks but the last end at a multiple of this many positions.
    by_position: slots hold rows by position, with room for drafts. So rejected drafts overwrite nothing that is needed.
    compressible: whether a part of a prompt's positions may be kept (`kv_compression`).
    """

    paged: dict[str, PagedArray]
    slots: dict[str, SlotArray]
    chunk_alignment: int = 1
    by_position: bool = False
    compressible: bool = True

    def bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of one position, for served values of `itemsize` bytes."""
        return sum(array.values_per_token for array in self.paged.values()) * itemsize

    def bytes_per_sequence(self, itemsize: int) -> int:
        """Return the bytes of one slot."""
        return sum(math.prod(a.shape) * (_FP32 if a.fp32 else itemsize) for a in self.slots.values())


def paged(**arrays: PagedArray) -> LayerState:
    """Return the state of a layer that keeps everything in pages."""
    return LayerState(paged=arrays, slots={})


def state_spec(layers: Iterable[LayerState], itemsize: int) -> StateSpec:
    """Return the sums over a model's layers. Pages alone make a prefix reusable if no layer has slots."""
    states = tuple(layers)
    return StateSpec(
        bytes_per_token=sum(state.bytes_per_token(itemsize) for state in states),
        bytes_per_sequence=sum(state.bytes_per_sequence(itemsize) for state in states),
        chunk_alignment=math.lcm(*(state.chunk_alignment for state in states)),
        prefix_reusable=not any(state.slots for state in states),
        by_position=all(state.by_position for state in states if state.slots),
        compressible=all(state.compressible for state in states),
    )
