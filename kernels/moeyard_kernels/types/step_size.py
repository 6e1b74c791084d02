"""The size of a captured step. Pure."""

from dataclasses import dataclass

from moeyard_kernels.types.step import StepRows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The most that a captured step holds; smaller steps are padded to it.

    Up to `prompt` prompt rows in up to `chunks` chunks, and up to `sequences` sequences with up to `queries` decode
    rows each; a sequence has up to `width` pages. `keys`: how many keys all prompts together may have, where prompts
    decompress their keys. `peers`: how many rows each rank may bring to this rank's experts, this rank included.
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
        """Key that sorts sizes from the cheapest on."""
        return self.rows, self.keys, self.width, self.peers

    @staticmethod
    def of(step: StepRows) -> "StepSize | None":
        """The exact size of a step; None for one without rows, or that ends a prompt of which a part is kept."""
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
        """Whether a step of that size runs in this one. Steps without prompts run in sizes without prompts only."""
        return (
            size.prompt <= self.prompt
            and bool(size.prompt) == bool(self.prompt)
            and size.chunks <= self.chunks
            and size.keys <= (self.keys or size.keys)
            and size.sequences <= self.sequences
            and size.queries <= self.queries
            and size.width <= self.width
        )
