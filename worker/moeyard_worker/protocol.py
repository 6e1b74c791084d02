"""The boundary between a router and a worker: what crosses it, and nothing else.

A router may know this file and `wire.py`, which makes frames of these messages, and no other of the worker's; it never
sees a tensor, a page or a rank's memory. Both are stdlib + msgpack only, so importing them loads no torch.

Router to worker: `Hello`, `Submit`, `Abort`, `Inspect`. Worker to router: `Snapshot`, `PromptLogprobs`, `Tokens`,
`TokenBatch`, `Done`, `Rejected`, `ExpertLoads`. Every `Submit` is answered by exactly one `Done` or `Rejected`;
`PromptLogprobs` of a request precede its `Tokens`, and these its `Done`.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Union, get_args

# The most alternatives that an answer lists beside a chosen token, as in the OpenAI API.
MAX_LOGPROBS = 20
# The most tokens that one `PromptLogprobs` tells of: what a router decodes at once stays below a millisecond or two.
MAX_PROMPT_LOGPROBS = 32

FinishReason = Literal["stop", "length", "abort", "error"]
RejectReason = Literal[
    "queue_full", "queue_timeout", "prompt_too_long", "never_fits", "bad_request", "duplicate", "fleet_failed"
]
WorkerState = Literal["ready", "recovering", "failed", "stopping"]
KvMethod = Literal["snapkv"]
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]

FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)
REJECT_REASONS: tuple[str, ...] = get_args(RejectReason)
WORKER_STATES: tuple[str, ...] = get_args(WorkerState)
GRAMMAR_KINDS: tuple[str, ...] = get_args(GrammarKind)
KV_METHODS: tuple[str, ...] = get_args(KvMethod)
# The most UTF-8 bytes of a grammar's text, a schema of a thousand lines: what a rank spends on one grows with it.
MAX_GRAMMAR_BYTES = 65536


class TokenIds(Sequence[int]):
    """The ids of a prompt as they are sent, packed once for all choices. `ValueError`: `data` is not whole ids."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        if len(data) % 4:
            raise ValueError(f"{len(data)} bytes are not a number of token ids of 4 bytes each")
        self.data = data

    @classmethod
    def of(cls, ids: Iterable[int]) -> "TokenIds":
        """Raises `OverflowError` for an id outside [0, 2**32)."""
        return cls(array("I", ids).tobytes())

    def __len__(self) -> int:
        return len(self.data) // 4

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[int]:
        return iter(array("I", self.data))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


# Keywords of JSON Schema whose values map names to schemas.
SCHEMA_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an answer must look like, whole: the worker lets no token through that cannot lead there.

    `kind` says what `text` is: "json_object" (any JSON object; `text` is empty), "json_schema" (a schema, as JSON),
    "regex" (a regular expression that matches the whole answer), "choice" (a JSON list of strings, one of which is the
    answer), "lark" (a grammar in llguidance's dialect of Lark, which may hold `%json`; GBNF is taken too).
    """

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCompression:
    """What is kept of a prompt's keys and values once it is computed.

    `method` "snapkv" (arXiv 2404.14469): `budget` positions, which each layer chooses by the prompt's last `window`
    queries; these stay, and 1 <= window <= budget. A prompt of `budget` tokens or fewer is kept whole.
    """

    method: str
    budget: int
    window: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen. The router fills every field; `seed` is always explicit.

    Units and ranges: `temperature` >= 0 (0 is greedy); `top_p` in (0, 1]; `top_k` >= 0 (0 is off); `min_p` in [0, 1];
    penalties as OpenAI (presence, frequency in [-2, 2]) and CTRL (repetition > 0, 1 is off); `logprobs` None for none,
    otherwise the number of alternatives reported beside the chosen token, 0 to MAX_LOGPROBS. `prompt_logprobs` is the
    same for every prompt token but the first. `max_tokens` 0 computes the prompt and ends. `kv_compression` None keeps
    all of the prompt for the tokens behind it; log-probabilities of the prompt never depend on it.

    With a `grammar` an end-of-sequence token is let through where the answer may end there; where nothing else may
    follow it ends the answer, whatever `min_tokens` and `ignore_eos` say.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    kv_compression: KvCompression | None = None

    def kept(self, num_prompt: int) -> int:
        """How many of a prompt's positions are kept for the tokens behind it; all where there are none."""
        asked = self.kv_compression
        return num_prompt if asked is None or not self.max_tokens else min(asked.budget, num_prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability (natural log, of the unmodified distribution) of a token and of the `top` likeliest ones.

    `rank` is 1 for the likeliest token. `top` is sorted by falling log-probability, ties by lower id.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A router introduces itself and asks for snapshots: one at once, then on every change of load or state."""

    type: ClassVar[str] = "hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Run one sequence. `request_id` is unique per router; `prompt_token_ids` is not empty, decoded it is a tuple.

    A sequence whose worker was lost goes on elsewhere: `output_token_ids` are those of its output that have been told,
    and `num_scored` counts the prompt tokens whose log-probabilities have. The next words about it begin behind these.
    """

    type: ClassVar[str] = "submit"
    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    output_token_ids: Sequence[int] = ()
    num_scored: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop a request and free its slot and pages within one step; answered by `Done(finish_reason="abort")`.

    An abort of an unknown or ended request is ignored: its terminal reply is already on the way.
    """

    type: ClassVar[str] = "abort"
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Asks for one `ExpertLoads`. For people who look: nothing is sent while nobody does."""

    type: ClassVar[str] = "inspect"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens `start`, `start + 1` and so on, each under the tokens before it.

    Sent as the prompt is computed, at most MAX_PROMPT_LOGPROBS at once, each token once and in order. The first has no
    tokens before it, so `start` is at least 1.
    """

    type: ClassVar[str] = "prompt_logprobs"
    request_id: str
    start: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(slots=True, kw_only=True)
class Tokens:
    """New output tokens of a request. `start` is the index of the first one among the request's output tokens.

    The first ones say `cached_tokens`, as `Done` does: a router that ends a request at a stop string hears no `Done`.
    Never modified. It is not frozen because one is made for every token there is: 0.4 us instead of 1.4.
    """

    type: ClassVar[str] = "tokens"
    request_id: str
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The `Tokens` of one request or more, as a step yields them: one frame and one check of types for all its rows."""

    type: ClassVar[str] = "token_batch"
    rows: tuple[Tokens, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of a request. Seconds are measured on the worker's monotonic clock.

    `cached_tokens` of the prompt were in the prefix cache when the request started for the first time.
    `stop_token_id` is set when `finish_reason` is "stop" (the id is the last of the output tokens).
    `error` names what failed when `finish_reason` is "error"; `retryable` says whether another try may help.
    """

    type: ClassVar[str] = "done"
    request_id: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stop_token_id: int | None = None
    error: str | None = None
    retryable: bool = True
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A request that was never run. `retry_after` (seconds) is set where trying again may help, `param` where one field
    of the request is at fault."""

    type: ClassVar[str] = "rejected"
    request_id: str
    reason: str
    message: str
    retry_after: float | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A worker's load and state, for the router's choice of rank.

    `step` counts lockstep steps of the fleet; `failure` names what broke when `state` is "failed" or "recovering": then
    a peer was lost, the rank keeps what it has and takes requests, and goes on when the fleet is whole again.
    KV pages are counted for this rank; `kv_pages_free` includes pages that only the prefix index holds.
    From `generation_tokens` on: running totals of this rank since its start, as its own metrics have them, and its
    expert slots. None where the rank does not know (hits of experts that a device looks up without telling the host) or
    does nothing of the kind: drafts verified, and those of them that were accepted.
    """

    type: ClassVar[str] = "snapshot"
    rank: int
    world_size: int
    epoch: int
    step: int
    state: str
    failure: str | None
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    kv_pages_total: int
    kv_pages_free: int
    page_size: int
    max_model_len: int
    vocab_size: int
    generation_tokens: int | None = None
    prefill_tokens: int | None = None
    prefix_query_tokens: int | None = None
    prefix_hit_tokens: int | None = None
    preemptions: int | None = None
    expert_hits: int | None = None
    expert_misses: int | None = None
    expert_evictions: int | None = None
    expert_slots: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoads:
    """What experts have computed since the start, by layer. `layers` are the MoE layers in order, `experts` the global
    ids that are the rank's in any of them, ascending.

    `rows` [layer, expert] are those that each of these has computed, where the host knows. A GPU counts what the rank's
    own rows choose instead, `chosen` [layer, every expert there is]. Then `held` [layer, expert] is 1 where an expert
    is the rank's in that layer and 0 where it is elsewhere; empty if `experts` are the rank's in every layer.
    """

    type: ClassVar[str] = "expert_loads"
    rank: int
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    rows: tuple[int, ...] = ()
    chosen: tuple[int, ...] = ()
    held: tuple[int, ...] = ()


Message = Union[  # noqa: UP007 - get_args needs the union object
    Hello, Submit, Abort, Inspect, PromptLogprobs, Tokens, TokenBatch, Done, Rejected, Snapshot, ExpertLoads
]
