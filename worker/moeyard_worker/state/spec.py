"""The scheduler's view of a model: the state of a sequence in bytes, and whether a prefix is reusable. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """Bytes of state on one rank, over all layers.

    bytes_per_token: paged state of one position.
    bytes_per_sequence: state in one slot; 0 if all state is paged.
    chunk_alignment: every prompt chunk but the last ends at a multiple of this position. It is 64 for linear attention,
        which computes prompts in chunks, and 1 if any cut gives the same bits.
    prefix_reusable: whether pages alone hold the state of a prefix. Otherwise a prefix needs a snapshot of
        `bytes_per_sequence` as well.
    by_position: whether one slot per sequence serves drafts too. Otherwise a step stores the state behind each row.
    compressible: whether a part of a prompt's positions may be kept. Entries for several positions cannot be cut.
    """

    bytes_per_token: int
    bytes_per_sequence: int = 0
    chunk_alignment: int = 1
    prefix_reusable: bool = True
    by_position: bool = False
    compressible: bool = True

    def slots_per_sequence(self, num_drafts: int) -> int:
        """Return the number of slots of one sequence, with up to `num_drafts` drafts per step."""
        return 1 if self.by_position else 1 + num_drafts
