"""A step: the frozen batch that the scheduler plans and the runner turns into tensors. Pure."""

from dataclasses import dataclass

RequestKey = tuple[bytes, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Rows of a chunk whose known next tokens are scored: `targets[i]` follows row `first` + i.

    num_top: number of most likely tokens to report with each.
    """

    first: int
    targets: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """Compression of a prompt to `kept` positions, which the queries of its last `window` positions choose.

    The kept positions are copied to the beginning of `pages`, which may have room for output, too. `dropped` is the
    number of other positions.
    """

    kept: int
    dropped: int
    window: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive rows of one request in one step.

    key: client and request id.
    start, token_ids: `token_ids[i]` is at position `start + i`.
    pages: the request's page table. It covers at least positions [0, max_start + num_tokens). After compression of the
        prompt, position p has place p - `dropped` in it.
    state_slot: first of the `state_ring` slots with state per sequence; -1 if the model has none. The state after
        position p is in slot state_slot + p % state_ring. A chunk that starts at 0 starts from a blank state.
    restored: slot of a snapshot, taken at `start`, that the chunk starts from; -1 for its own state.
    snapshots: (position, slot) of at most two snapshots to take, ascending, in (start, end]. Each is the state that a
        chunk ending at that position would leave. A restored slot may also be written by this chunk or a later one of
        the step, because all reads come first.
    prompt: whether the positions belong to the prompt. Prompt positions use the prompt formula and output positions the
        decode formula, however they are scheduled (one answer).
    num_sampled: number of rows at the end that are sampled: usually 0 or 1, and 1 + k to verify the k drafts in
        `token_ids[1:]`.
    fed: usually None. If the step was planned while another one was in flight, the host may not know this chunk's
        tokens. Then `fed` is the index of the request's chunk among the sampled chunks of that step. The device takes
        the last accepted token, the drafts and the exact start from there, and `token_ids` are zeros. All rows of a fed
        chunk are sampled. A row without a draft may hold any token.
    slack: how much later than `start` a fed chunk may start; 0 without drafts.
    scoring: rows to score, None unless log-probabilities of the prompt or of a forced output are requested.
    following: the token after the last row, if it is known and drafts need it.
    compaction: compression of the prompt that this chunk ends, or None.
    """

    key: RequestKey
    start: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    state_slot: int = -1
    state_ring: int = 1
    restored: int = -1
    snapshots: tuple[tuple[int, int], ...] = ()
    prompt: bool
    num_sampled: int
    fed: int | None = None
    slack: int = 0
    scoring: Scoring | None = None
    following: int | None = None
    dropped: int = 0
    compaction: Compaction | None = None

    @property
    def num_tokens(self) -> int:
        """Number of rows of this chunk."""
        return len(self.token_ids)

    @property
    def max_start(self) -> int:
        """The largest possible start."""
        return self.start + self.slack

    @property
    def end(self) -> int:
        """One past the last position, at the smallest start."""
        return self.start + len(self.token_ids)

    @property
    def behind(self) -> tuple[tuple[int, ...], int]:
        """`pages` and `dropped` of the positions after this chunk."""
        if self.compaction is not None:
            return self.compaction.pages, self.compaction.dropped
        return self.pages, self.dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One lockstep step of one rank. Rows of prompt chunks come first, then those of decode chunks.

    A decode chunk usually has one row. It has more when it verifies drafts, computes a forced output, or recomputes
    output after a preemption.

    num_drafts: how many tokens to draft after each sampled one. Ranks agree on the largest wish.
    """

    prefill: tuple[Chunk, ...] = ()
    decode: tuple[Chunk, ...] = ()
    num_drafts: int = 0

    @staticmethod
    def empty() -> "Step":
        """Return the step of an idle rank, which still takes part in the exchanges."""
        return Step()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks in row order."""
        return self.prefill + self.decode

    @property
    def num_prefill_tokens(self) -> int:
        """Number of rows that use the prompt formula. They come first."""
        return sum(c.num_tokens for c in self.prefill)

    @property
    def num_tokens(self) -> int:
        """Number of rows of the step, without padding."""
        return sum(c.num_tokens for c in self.chunks)

    @property
    def sampled(self) -> tuple[Chunk, ...]:
        """The chunks with sampled rows, in row order."""
        return tuple(c for c in self.chunks if c.num_sampled)

    @property
    def scored(self) -> tuple[Chunk, ...]:
        """The chunks with scored rows, in row order."""
        return tuple(c for c in self.chunks if c.scoring is not None)

    @property
    def sample_rows(self) -> tuple[int, ...]:
        """Indices of all sampled rows in order, `num_sampled` per chunk of `sampled`."""
        rows: list[int] = []
        end = 0
        for chunk in self.chunks:
            end += len(chunk.token_ids)
            rows += range(end - chunk.num_sampled, end)
        return tuple(rows)
