"""What the scheduler knows of a model: how much state a sequence costs and whether its prefix can be reused. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """Sizes are bytes on one rank, over all layers.

    `prefix_reusable` is True when the state of a prompt prefix is exactly its pages (paged KV); a recurrent layer that
    keeps one state per sequence sets it to False.
    """

    bytes_per_token: int
    bytes_per_sequence: int = 0
    chunk_alignment: int = 1
    prefix_reusable: bool = True
