"""One request on a rank, and the results of its steps. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from moeyard_worker.protocol import Message, SamplingParams, Submit, TokenLogprob
from moeyard_worker.scheduling.step import Chunk, RequestKey


class Waits(NamedTuple):
    """Running totals of a rank's waits in seconds: for its peers' plans, and for expert weights (None: unknown)."""

    lockstep: float | None = 0.0
    fetch: float | None = None

    def since(self, before: "Waits | None") -> "Waits":
        """Return the waits since the totals were `before`. None there: no time has begun."""
        pairs = zip(self, before or (None, None), strict=True)
        return Waits(*(None if now is None or then is None else now - then for now, then in pairs))


@dataclass(frozen=True, slots=True)
class Accepted:
    """The result of one sampled chunk.

    token_ids: the accepted tokens, from one to the chunk's `num_sampled`.
    logprobs: one per token, or empty.
    drafts: proposals for the positions after the last accepted token, empty without speculation.
    error: usually None. Otherwise the request ends with this error and without these tokens.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    drafts: tuple[int, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """The tokens that a grammar allows next.

    words: 32-bit words, little-endian. Token t is bit t % 32 of word t // 32. None allows every token.
    error: usually None. Otherwise the request ends with this error.
    """

    words: bytes | None = None
    error: str | None = None


class Constraint(Protocol):
    """The grammar of a request. The engine implements it, and the scheduler only carries it."""

    def mask(self, output: Sequence[int]) -> Mask:
        """Return the tokens that may follow `output`, which may include drafts."""
        ...

    def expect(self, output: Sequence[int]) -> None:
        """Start to compute `mask(output)` without waiting for it."""
        ...


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many of the sampled tokens t_0 .. t_k equal those of plain decoding, given the drafts d_1 .. d_k.

    t_0 always does. t_j does if its row read the right tokens, so if d_1 .. d_j equal t_0 .. t_(j-1).
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
    """A message and the client (ZMQ identity) that it goes to."""

    client: bytes
    message: Message


@dataclass(slots=True, eq=False)
class Request:
    """One live request, or an ended one that a step in flight still uses.

    serial: its place in the order of arrival.
    drafts: proposals for the positions after the last token.
    pages: its page table. With `state_slot` it holds the state of `num_computed` positions as of the last completed
        step. Rejecting a draft only means not counting its position.
    compact: until the prompt is computed, the pages for its compressed version and for all output. Then they become
        `pages`. Empty without compression.
    num_dropped: positions of the prompt that compression drops: logical length less kept length.
    restored: slot of the snapshot that the next chunk starts from; -1 for none.
    snapshots_at: positions at which snapshots of the state are wanted. `taking`: those that planned steps take.
    num_registered: pages of the prompt that are in the prefix index.
    forced: the output tokens that are known from the start and scored like those of a prompt (`as_decoded`).
    num_scored: positions whose next token's log-probability was sent, or is not requested. Only requests with
        `prompt_logprobs` or a `forced` output count them.
    num_routed: the prompt's experts were sent up to this position, if they are wanted.
    num_given: output tokens that it came with: from a lost rank, or forced.
    weight_version: the version of the weights that its client knows; None before the first token and after a change.
    excused: seconds of waiting in which no steps ran.
    in_flight: its chunks in planned steps that are not completed, oldest first.
    sample_index: index of the newest of them among the sampled chunks of its step.
    preempted: times of its first preemptions, as `Done` has them.
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
    forced: tuple[int, ...] = ()
    state_slot: int = -1
    restored: int = -1
    snapshots_at: tuple[int, ...] = ()
    taking: list[int] = field(default_factory=list)
    running: bool = False
    ended: bool = False
    num_computed: int = 0
    num_registered: int = 0
    num_scored: int = 0
    num_routed: int = 0
    num_given: int = 0
    weight_version: str | None = None
    excused: float = 0.0
    cached_tokens: int = 0
    in_flight: list[Chunk] = field(default_factory=list)
    sample_index: int = 0
    started: float | None = None
    waits: Waits | None = None
    first_token: float | None = None
    preempted: list[float] = field(default_factory=list)

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
        """Return the request of a `Submit` with these prompt ids. `hashes` belong to its full pages."""
        output, params, num_scored = list(submit.output_token_ids), submit.sampling, submit.num_scored
        forced = params.trace_decode_token_ids[: params.max_tokens] if params.as_decoded else ()
        if forced and (output or params.prompt_logprobs is None):
            # The row of the prompt's last token scores the first output token.
            num_scored = len(prompt) - 1 + len(output)
        return cls(
            client=client,
            request_id=submit.request_id,
            prompt=prompt,
            sampling=params,
            arrived=arrived,
            hashes=hashes,
            constraint=constraint,
            output=output,
            forced=forced,
            num_scored=num_scored,
            num_routed=max(submit.num_routed, params.routed_experts_start or 0),
            num_given=max(len(output), len(forced)),
            num_dropped=num_dropped(params, len(prompt)),
        )

    @property
    def key(self) -> RequestKey:
        """Its name among the live requests of a rank. It is free again after the request's end."""
        return self.client, self.request_id

    @property
    def known_output(self) -> Sequence[int]:
        """The output so far, or all of the forced output if that is longer."""
        return self.output if len(self.output) >= len(self.forced) else self.forced

    @property
    def length(self) -> int:
        """Number of known tokens of prompt and output."""
        return len(self.prompt) + max(len(self.output), len(self.forced))

    @property
    def limit(self) -> int:
        """Number of positions to compute: the prompt, and all output but the last token, which is not fed back."""
        return len(self.prompt) + max(self.sampling.max_tokens, 1) - 1

    @property
    def num_fed(self) -> int:
        """Number of positions of known tokens: all but the last token of the request, which is not fed back."""
        return min(self.length, self.limit)

    @property
    def window(self) -> int:
        """Least number of rows of the prompt's last chunk. Compression chooses positions by these rows' queries."""
        kept = self.sampling.kv_compression
        return kept.window if self.num_dropped and kept is not None else 1

    @property
    def kept_pages(self) -> list[int]:
        """The pages of output positions and of the kept part of the prompt."""
        return self.compact or self.pages

    @property
    def num_places(self) -> int:
        """Number of used places in `pages` as of the last completed step: the kept length."""
        return self.num_computed - (self.num_dropped if self.num_computed >= len(self.prompt) else 0)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return the known token ids at positions [start, end), which must not cross the end of the prompt."""
        p = len(self.prompt)
        return self.prompt[start:end] if start < p else tuple(self.known_output[start - p : end - p])


def num_dropped(sampling: SamplingParams, num_prompt: int) -> int:
    """Return how many positions of a prompt compression drops. It drops none if no output follows."""
    return num_prompt - sampling.kept(num_prompt)


@dataclass(slots=True)
class SchedulerStats:
    """Running totals for the metrics. Their reader drains the lists of seconds.

    token_seconds: mean time per token of each request that finished with 2 tokens or more.
    dropped_tokens: positions of computed prompts that compression dropped.
    drafts, accepted: drafts verified and accepted at the j-th position after a known token.
    waits: of the rank. The engine counts them.
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
    waits: Waits = field(default_factory=Waits)

    def computed(self, chunk: Chunk) -> None:
        """Count a computed chunk of a prompt, and the positions that its compaction dropped."""
        self.prefill_tokens += chunk.num_tokens
        if chunk.compaction is not None:
            self.dropped_tokens += chunk.compaction.dropped

    def prefilled(self, request: Request, now: float) -> None:
        """Note that a request's prompt is computed."""
        assert request.started is not None, f"{request.key} was computed before it started"
        request.first_token = now
        self.prefill_seconds.append(now - request.started)
