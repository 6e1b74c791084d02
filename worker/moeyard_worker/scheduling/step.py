"""What one step computes: the frozen batch that the scheduler plans and the runner turns into tensors. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive positions of one sequence that one step computes.

    `token_ids[i]` sits at position `start + i`; `pages` is the sequence's page table, covering at least positions
    [0, start + len(token_ids)). `prompt` selects the arithmetic: positions of the prompt use the prompt formula, output
    positions the decode formula, however they are scheduled (one answer). `sample`: the logits of the last position
    are wanted.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    prompt: bool
    sample: bool

    @property
    def state_slot(self) -> int:
        return -1

    @property
    def num_tokens(self) -> int:
        """Number of rows of this chunk."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """One past the last position, which is also the key/value length its last row attends to."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One lockstep step of one rank: prompt chunks first, then decode chunks; rows are numbered in that order.

    A decode chunk has one row as a rule, and several when output positions are recomputed after a preemption.
    """

    prefill: tuple[Chunk, ...] = ()
    decode: tuple[Chunk, ...] = ()

    @staticmethod
    def empty() -> "Step":
        """The step of a rank that has nothing to run but must take part in the exchanges."""
        return Step()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks in row order."""
        return self.prefill + self.decode

    @property
    def num_prefill_tokens(self) -> int:
        """Rows that use the prompt formula; they come first."""
        return sum(c.num_tokens for c in self.prefill)

    @property
    def num_tokens(self) -> int:
        """Rows of the whole step, without padding."""
        return sum(c.num_tokens for c in self.chunks)

    @property
    def sampled(self) -> tuple[Chunk, ...]:
        """The chunks whose last row is sampled, in row order; row i of the runner's logits belongs to chunk i."""
        return tuple(c for c in self.chunks if c.sample)

    @property
    def sample_rows(self) -> tuple[int, ...]:
        rows, end = [], 0
        for chunk in self.chunks:
            end += chunk.num_tokens
            if chunk.sample:
                rows.append(end - 1)
        return tuple(rows)
