"""What the scheduler knows of a model: how much state a sequence costs and whether its prefix can be reused. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """Sizes are bytes on one rank, over all layers.

    State is paged, `bytes_per_token`, or sits in one slot per sequence, `bytes_per_sequence` (0 for models whose state
    is all paged), or both. Every prompt chunk but the last ends at a multiple of `chunk_alignment`, counted from
    position 0: 64 for linear attention that is computed in chunks, 1 where any cut gives the same bits.
    `prefix_reusable` is True when the state of a prompt prefix is exactly its pages; where a layer keeps one state per
    sequence it is False, and a prefix is reused only behind a snapshot of that, of `bytes_per_sequence`.
    """

    bytes_per_token: int
    bytes_per_sequence: int = 0
    chunk_alignment: int = 1
    prefix_reusable: bool = True
