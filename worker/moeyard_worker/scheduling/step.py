"""What one step computes: the frozen batch that the scheduler plans and the runner turns into tensors. Pure."""

from dataclasses import dataclass

RequestKey = tuple[bytes, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Rows of a prompt chunk whose next tokens are known and to be scored: `targets[i]` follows row `first` + i.

    `num_top` likeliest tokens are wanted beside each.
    """

    first: int
    targets: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """What is kept of a prompt: `kept` positions, chosen by the queries of its last `window`, first of all of `pages`.

    `dropped`: how many are not. `pages` may reach further, for what comes behind the prompt.
    """

    kept: int
    dropped: int
    window: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive rows of one request that one step computes.

    `key`: client and request id. `token_ids[i]` sits at position `start + i`. `pages`: the request's page table, which
    covers at least positions [0, max_start + num_tokens) but for the `dropped` ones of its prompt that were not kept:
    position p has place p - dropped there. `compaction`: what is kept from here on, in the chunk that ends its prompt;
    None for all. `state_slot`: the first of the `state_ring` slots where its state per sequence lives, that behind
    position p in slot state_slot + p % state_ring; -1 for a model that has none. A chunk that starts at
    0 starts from a blank state, whatever the slots held before. `restored`: the slot of a snapshot that it starts from
    instead, taken at `start`; -1 goes on from its own. `snapshots`: (position, slot) of those to be taken on the
    way, in (start, end], ascending, two at most: the state behind the rows before that position, as a chunk that ended
    there would leave it. A slot that one chunk restores may be one that it, or a later chunk of the step, writes: what
    is read is read before.
    `prompt` selects the arithmetic: positions of the prompt use the prompt formula, output positions the decode
    formula, however they are scheduled (one answer).

    `num_sampled`: the last so many rows are sampled: none, as a rule one, or 1 + k to verify the k drafts that are
    `token_ids[1:]`.

    `fed` is None as a rule. In a step that was planned while another was in flight (never more than one) the host may
    not know this chunk's tokens yet: then `fed` is the index of the request's chunk among that other's `sampled` ones.
    The device takes the last accepted token, the drafts behind it and the exact start from there; `token_ids` are
    zeros, and the start is any of [start, max_start], at most `slack` later (0 without drafts). All rows of a fed chunk
    are sampled; a row that no draft is proposed for may hold any token.

    `scoring` is None unless log-probabilities of the prompt are asked for. `following` is the token behind the last row
    where it is known and will be wanted for drafts; None for one that is sampled.
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
        """The largest start possible."""
        return self.start + self.slack

    @property
    def end(self) -> int:
        """One past the last position (with the least start)."""
        return self.start + len(self.token_ids)

    @property
    def behind(self) -> tuple[tuple[int, ...], int]:
        """`pages` and `dropped` of the positions behind it."""
        if self.compaction is not None:
            return self.compaction.pages, self.compaction.dropped
        return self.pages, self.dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One lockstep step of one rank: prompt chunks first, then decode chunks; rows are numbered in that order.

    A decode chunk has one row as a rule, and several when drafts are verified or when output positions are recomputed
    after a preemption. `num_drafts`: how many tokens are to be drafted behind the sampled ones; the ranks agree on the
    most that one of them wants.
    """

    prefill: tuple[Chunk, ...] = ()
    decode: tuple[Chunk, ...] = ()
    num_drafts: int = 0

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
        """The chunks of which rows are sampled, in row order."""
        return tuple(c for c in self.chunks if c.num_sampled)

    @property
    def scored(self) -> tuple[Chunk, ...]:
        """The chunks of which rows are scored, in row order."""
        return tuple(c for c in self.prefill if c.scoring is not None)

    @property
    def sample_rows(self) -> tuple[int, ...]:
        """Indices of all sampled rows in order, `num_sampled` of each of `sampled`."""
        rows: list[int] = []
        end = 0
        for chunk in self.chunks:
            end += len(chunk.token_ids)
            rows += range(end - chunk.num_sampled, end)
        return tuple(rows)
