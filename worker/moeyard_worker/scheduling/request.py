"""One request while it lives on a rank, what its steps yield, and what is said of it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moeyard_worker.protocol import Message, SamplingParams, Submit, TokenLogprob
from moeyard_worker.scheduling.step import Chunk, RequestKey


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one sampled chunk yielded.

    `token_ids`: the accepted tokens, at least one and at most the chunk's `num_sampled`. `logprobs`: one for each of
    them, or none at all. `drafts`: proposals for the positions after the last accepted token; none without speculation.
    `error`: why the request ends here, by name and without these tokens; None as a rule.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    drafts: tuple[int, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Which tokens a grammar lets through.

    `words`: 32-bit words, little-endian, token t at bit t % 32 of word t / 32; None lets every token through. `error`:
    why none can be said; the request ends by it.
    """

    words: bytes | None = None
    error: str | None = None


class Constraint(Protocol):
    """What holds a request to its grammar: the engine's, and only carried here."""

    def mask(self, output: Sequence[int]) -> Mask:
        """What may follow the request's output tokens; drafts may be among them."""
        ...

    def expect(self, output: Sequence[int]) -> None:
        """Begin to compute `mask(output)`, without waiting for it."""
        ...


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many of the tokens t_0 .. t_k sampled behind drafts d_1 .. d_k are what plain decoding would have yielded.

    t_0 always is; t_j is when its row read the right tokens, so when d_1 .. d_j equal t_0 .. t_(j-1).
    """
    assert len(sampled) == len(drafts) + 1, f"{len(sampled)} tokens behind {len(drafts)} drafts"
    count = 1
    for draft, token_id in zip(drafts, sampled, strict=False):
        if draft != token_id:
            break
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Reply:
    """A message and the client (ZMQ identity) it goes to."""

    client: bytes
    message: Message


@dataclass(slots=True, eq=False)
class Request:
    """One request while it lives, and after its end while a step in flight still names it.

    `serial` is its place in the order of arrival. `num_computed` positions have their state in `pages` (and in slot
    `state_slot`), as of the last completed step: a refused draft is undone by not counting it. It has a logical length
    and a kept one: `num_dropped` positions of its prompt are given up once that is computed. Until then `compact` are
    the pages for what is kept and all that follows, afterwards they are its `pages`. Where state
    is kept per sequence, its first chunk restores what is in slot `restored` (-1: nothing, or that is done), snapshots
    are wanted of positions `snapshots_at`, and planned steps are `taking` those. `drafts` are proposed for the
    positions after the last token. `in_flight` are its chunks in planned steps that are not completed, oldest
    first; `sample_index` is the place of the newest one among the sampled chunks of its step. `num_scored`: positions
    whose next token's log-probability has been sent, counted if `prompt_logprobs` are asked for. `num_given`: output
    tokens that it came with, from a rank that was lost. `excused` are seconds of its wait in which nothing ran.
    """

    client: bytes
    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrived: float
    hashes: list[bytes]
    constraint: Constraint | None = None
    serial: int = 0
    output: list[int] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    pages: list[int] = field(default_factory=list)
    compact: list[int] = field(default_factory=list)
    num_dropped: int = 0
    state_slot: int = -1
    restored: int = -1
    snapshots_at: tuple[int, ...] = ()
    taking: list[int] = field(default_factory=list)
    running: bool = False
    ended: bool = False
    num_computed: int = 0
    num_registered: int = 0
    num_scored: int = 0
    num_given: int = 0
    excused: float = 0.0
    cached_tokens: int = 0
    in_flight: list[Chunk] = field(default_factory=list)
    sample_index: int = 0
    started: float | None = None
    first_token: float | None = None

    @classmethod
    def of(
        cls,
        submit: Submit,
        prompt: tuple[int, ...],
        *,
        client: bytes,
        arrived: float,
        hashes: list[bytes],
        constraint: Constraint | None,
    ) -> "Request":
        """What a `Submit` of a client asks for; `prompt` are its prompt's ids, `hashes` those of its full pages."""
        output = list(submit.output_token_ids)
        return cls(
            client=client,
            request_id=submit.request_id,
            prompt=prompt,
            sampling=submit.sampling,
            arrived=arrived,
            hashes=hashes,
            constraint=constraint,
            output=output,
            num_scored=submit.num_scored,
            num_given=len(output),
            num_dropped=num_dropped(submit.sampling, len(prompt)),
        )

    @property
    def key(self) -> RequestKey:
        """What names it among the live requests of a rank; free again when it ended."""
        return self.client, self.request_id

    @property
    def length(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt) + len(self.output)

    @property
    def limit(self) -> int:
        """Positions that are ever computed: the whole prompt, and all output but the last token, never fed back."""
        return len(self.prompt) + max(self.sampling.max_tokens, 1) - 1

    @property
    def window(self) -> int:
        """Rows that the chunk which ends the prompt holds at least: those that choose what is kept of it."""
        kept = self.sampling.kv_compression
        return kept.window if self.num_dropped and kept is not None else 1

    @property
    def kept_pages(self) -> list[int]:
        """The pages of positions behind the prompt, and of what is kept of it."""
        return self.compact or self.pages

    @property
    def num_places(self) -> int:
        """Places in `pages` that are taken as of the last completed step: the kept length."""
        return self.num_computed - (self.num_dropped if self.num_computed >= len(self.prompt) else 0)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Token ids at positions [start, end), as far as known; they do not cross the end of the prompt."""
        p = len(self.prompt)
        return self.prompt[start:end] if start < p else tuple(self.output[start - p : end - p])


def num_dropped(sampling: SamplingParams, num_prompt: int) -> int:
    """Positions of a prompt that are given up once it is computed; none where no token comes behind it."""
    return num_prompt - sampling.kept(num_prompt)


@dataclass(slots=True)
class SchedulerStats:
    """Running totals for the metrics; the lists of seconds are drained by their reader.

    `token_seconds` has, per request that ended by itself with 2 tokens or more, the mean time from token to token.

    `dropped_tokens`: positions of computed prompts that were not kept.
    `drafts[j]` and `accepted[j]` count the drafts verified and accepted at the j-th position after a known token.
    """

    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefill_tokens: int = 0
    dropped_tokens: int = 0
    generation_tokens: int = 0
    queue_seconds: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def computed(self, chunk: Chunk) -> None:
        """A chunk of a prompt is computed, and what is kept of the prompt copied if it says so."""
        self.prefill_tokens += chunk.num_tokens
        if chunk.compaction is not None:
            self.dropped_tokens += chunk.compaction.dropped

    def prefilled(self, request: Request, now: float) -> None:
        """A request's prompt is computed."""
        assert request.started is not None, f"{request.key} was computed before it started"
        request.first_token = now
        self.prefill_seconds.append(now - request.started)
