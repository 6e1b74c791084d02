"""The size of a captured step. Pure."""

from dataclasses import dataclass

from moeyard_kernels.types.step import StepRows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """Capacity of a captured step; smaller steps are padded to it.

    It holds `prompt` prompt rows in `chunks` chunks, and `sequences` sequences with `queries` decode rows each. A
    sequence has up to `width` pages. `keys`: keys of all prompts together, if prompts decompress their keys. `peers`:
    rows that each rank, this one included, may send to this rank's experts.
    """

    prompt: int = 0
    chunks: int = 0
    keys: int = 0
    sequences: int = 0
    queries: int = 1
    width: int
    peers: int = 0

    @property
    def decode(self) -> int:
        """Decode rows."""
        return self.sequences * self.queries

    @property
    def rows(self) -> int:
        """Rows of every activation."""
        return self.prompt + self.decode

    @property
    def samples(self) -> int:
        """Rows of logits."""
        return self.chunks + self.decode

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Sort key: cheapest size first."""
        return self.rows, self.keys, self.width, self.peers

    @staticmethod
    def of(step: StepRows) -> "StepSize | None":
        """Return the exact size of a step; None for a step without rows or with a prompt compaction."""
        chunks = (*step.prefill, *step.decode)
        if not chunks or any(c.compaction is not None for c in step.prefill):
            return None
        return StepSize(
            prompt=sum(len(c.token_ids) for c in step.prefill),
            chunks=len(step.prefill),
            keys=sum(c.start + len(c.token_ids) for c in step.prefill),
            sequences=len(step.decode),
            queries=max((len(c.token_ids) for c in step.decode), default=1),
            width=max(len(c.pages) for c in chunks),
        )

    def holds(self, size: "StepSize") -> bool:
        """Return whether a step of `size` fits this one. Steps without prompts fit only sizes without prompts."""
        return (
            size.prompt <= self.prompt
            and bool(size.prompt) == bool(self.prompt)
            and size.chunks <= self.chunks
            and size.keys <= (self.keys or size.keys)
            and size.sequences <= self.sequences
            and size.queries <= self.queries
            and size.width <= self.width
        )
