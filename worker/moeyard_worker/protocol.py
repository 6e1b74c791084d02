"""The boundary between a router and a worker: the messages between them.

A router may import this file, `wire.py`, which encodes the messages, and the other files of this folder. It never sees
a tensor, a page or a rank's memory. They use only the standard library and msgpack, so importing them loads no torch.

Router to worker: `Hello`, `Submit`, `Abort`, `Inspect`. Worker to router: `Snapshot`, `PromptLogprobs`,
`PromptExperts`, `Tokens`, `TokenBatch`, `Done`, `Rejected`, `ExpertLoads`. Every `Submit` is answered by exactly one
`Done` or `Rejected`; `PromptLogprobs` and `PromptExperts` of a request precede its `Tokens`, and these its `Done`.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Union, get_args

# The most alternatives that an answer lists beside a chosen token, as in the OpenAI API.
MAX_LOGPROBS = 20
# The most tokens of one `PromptLogprobs`, or of one `Tokens` with `as_decoded`. A router decodes them in one or two
# milliseconds.
MAX_PROMPT_LOGPROBS = 32
# The most bytes of one `PromptExperts`, or one position's. A router takes any other message in between.
MAX_PROMPT_EXPERTS = 1 << 18

# The version of the weights that a fleet starts with, as in SGLang.
FIRST_VERSION = "default"
# Upper bounds of a step's rows in histograms.
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# The most preemptions that one `Done` lists.
MAX_PREEMPTIONS = 16

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
# The most UTF-8 bytes of a grammar's text (a schema of a thousand lines). A rank's work for a grammar grows with it.
MAX_GRAMMAR_BYTES = 65536


class TokenIds(Sequence[int]):
    """The ids of a prompt, packed once for all choices. Raises ValueError if `data` is not a multiple of 4 bytes."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        if len(data) % 4:
            raise ValueError(f"{len(data)} bytes are not a number of token ids of 4 bytes each")
        self.data = data

    @classmethod
    def of(cls, ids: Iterable[int]) -> "TokenIds":
        """Pack ids. Raises OverflowError for an id outside [0, 2**32)."""
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
    """The form of a complete answer. The worker masks every token that cannot lead to it.

    kind: the meaning of `text`:
        "json_object": any JSON object; `text` is empty.
        "json_schema": a schema, as JSON.
        "regex": a regular expression that matches the whole answer.
        "choice": a JSON list of strings, one of which is the answer.
        "lark": a grammar in llguidance's dialect of Lark, which may hold `%json`, or in GBNF.
    """

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCompression:
    """Compression of a prompt's keys and values after the prompt is computed.

    method: "snapkv" (arXiv 2404.14469). Each layer keeps `budget` positions that the queries of the prompt's last
        `window` positions choose. The window is kept, and 1 <= window <= budget. Prompts of at most `budget` tokens are
        not compressed.
    """

    method: str
    budget: int
    window: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request. The router fills every field, and `seed` is always explicit.

    temperature: at least 0; 0 is greedy. top_p: in (0, 1]. top_k: at least 0; 0 is off. min_p: in [0, 1].
    presence_penalty, frequency_penalty: in [-2, 2], as in the OpenAI API. repetition_penalty: above 0, as in CTRL; 1 is
        off.
    logprobs: None for none, else the number of alternatives beside the chosen token, 0 to MAX_LOGPROBS.
    prompt_logprobs: the same for every prompt token but the first.
    max_tokens: 0 computes the prompt and ends.
    grammar: it allows an end-of-sequence token where the answer may end. If nothing else may follow, that token ends
        the answer regardless of `min_tokens` and `ignore_eos`.
    kv_compression: None keeps the whole prompt. Log-probabilities of the prompt never depend on it.
    routed_experts_start: None, or the first position whose experts are wanted, below the length of the prompt.
    cache_salt: requests share cached prefixes only if their salts are equal.
    trace_decode_token_ids: the output tokens to produce, whatever the others say; empty to sample. Excludes `grammar`.
        The log-probabilities are the model's own. These tokens end the output only by `max_tokens`. Behind them it is
        sampled.
    as_decoded: compute the tokens of `trace_decode_token_ids` many per step, with the bits of one per step. Needs
        `logprobs`.
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
    routed_experts_start: int | None = None
    cache_salt: str = ""
    trace_decode_token_ids: tuple[int, ...] = ()
    as_decoded: bool = False

    def kept(self, num_prompt: int) -> int:
        """Return how many of a prompt's positions are kept for the output; all if there is no output."""
        form = self.kv_compression
        return num_prompt if form is None or not self.max_tokens else min(form.budget, num_prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural log-probability, under the unmodified distribution, of a token and of the `top` most likely ones.

    rank: 1 for the most likely token. `top` is sorted by falling log-probability, ties by lower id.
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
    """Run one sequence.

    request_id: unique per router.
    prompt_token_ids: at least one id; a tuple after decoding.
    output_token_ids, num_scored, num_routed: for a sequence that continues after the loss of its worker: the output
        that the client has, the number of prompt tokens whose log-probabilities it has, and the position up to which it
        has the prompt's experts. Replies begin after these.
    """

    type: ClassVar[str] = "submit"
    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    output_token_ids: Sequence[int] = ()
    num_scored: int = 0
    num_routed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop a request and free its slot and pages within one step. The answer is `Done(finish_reason="abort")`.

    An abort of an unknown or ended request is ignored, because its last reply is already on the way.
    """

    type: ClassVar[str] = "abort"
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Request one `ExpertLoads`."""

    type: ClassVar[str] = "inspect"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens `start`, `start + 1` and so on, each under the tokens before it.

    Sent while the prompt is computed, at most MAX_PROMPT_LOGPROBS in a message, each token once and in order. The first
    prompt token has none, so `start` is at least 1. If the weights change before the first output token, all are sent
    again, from the first one on.
    """

    type: ClassVar[str] = "prompt_logprobs"
    request_id: str
    start: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptExperts:
    """The experts that the prompt positions `start` to `start` + `count` - 1 chose.

    experts: [count, MoE layers, top_k] ids among all experts of the model, in the gate's order. An id has one byte, or
        two (little-endian) in a model with more than 256 experts.

    Sent while the prompt is computed, each position once and in order, from `routed_experts_start` to the last but one.
    If the weights change before the first output token, all are sent again.
    """

    type: ClassVar[str] = "prompt_experts"
    request_id: str
    start: int
    count: int
    experts: bytes


@dataclass(slots=True, kw_only=True)
class Tokens:
    """New output tokens of a request. `start` is the index of the first one among the request's output tokens.

    routed_experts: if wanted, the experts of the position before each token, in the form of `PromptExperts`. The last
        token of an answer is not computed, so it has none.

    The first message of a request has `cached_tokens`, as `Done` does, because a router that ends a request at a stop
    string gets no `Done`. It also has `weight_version`, the version of the weights that computed these and the next
    tokens. The first message after an update of the weights has it, too. Objects are never modified. The class is not
    frozen because one object is made per token: 0.4 us instead of 1.4.
    """

    type: ClassVar[str] = "tokens"
    request_id: str
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int | None = None
    routed_experts: bytes = b""
    weight_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The `Tokens` of a step's requests in one frame, with one check of types for all rows."""

    type: ClassVar[str] = "token_batch"
    rows: tuple[Tokens, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of a request. Seconds are measured on the worker's monotonic clock.

    cached_tokens: prompt tokens that were in the prefix cache when the request first started.
    stop_token_id: the last output token if `finish_reason` is "stop".
    error: the failure if `finish_reason` is "error". `retryable`: whether another try may help.
    preempted_seconds: from its start to each of its first MAX_PREEMPTIONS preemptions.
    lockstep_seconds, fetch_seconds: between its start and its end, how long its rank waited for its peers' plans, and
        for expert weights. None if the request did not start, or if the host does not see the waits.
    weight_version: the version of the weights that computed the last token, or the prompt if there is no output.
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
    preempted_seconds: tuple[float, ...] = ()
    lockstep_seconds: float | None = None
    fetch_seconds: float | None = None
    weight_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A request that was never run.

    retry_after: seconds, if a retry may help. `param`: the field of `SamplingParams` that is at fault, if there is one.
    """

    type: ClassVar[str] = "rejected"
    request_id: str
    reason: str
    message: str
    retry_after: float | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A worker's load and state, for the router's choice of rank.

    step: number of the fleet's lockstep step.
    failure: the reason if `state` is "failed" or "recovering". A recovering rank has lost a peer. It keeps its
        requests, takes new ones, and continues when the fleet is complete.
    weight_version, fingerprint: the weights that it serves, and the hash of all that may change bits of its answers.
    kv_pages_total, kv_pages_free: pages of this rank. Pages that only the prefix index holds count as free.
    generation_tokens and all below: this rank's expert slots, and totals since its start, as in its metrics. None if
        the rank does not know them (hits that a device counts) or does not do it (drafts).
    num_drafts: verifications of one or more drafts of a sequence. accepted_by_place: drafts accepted at each place.
    steps_by_rows, step_rows: the rank's steps with rows, counted by the bounds STEP_ROWS with one count above them, and
        the sum of their rows.
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
    weight_version: str = ""
    fingerprint: str = ""
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
    num_drafts: int | None = None
    accepted_by_place: tuple[int, ...] = ()
    steps_by_rows: tuple[int, ...] = ()
    step_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoads:
    """The rows that experts have computed since the start, by layer.

    layers: the MoE layers in order.
    experts: global ids of all experts that the rank has in any layer, ascending.
    rows: [layer, expert] rows that each of them has computed, if the host knows.
    chosen: [layer, every expert of the model] on a GPU instead: how many of the rank's own rows chose each expert.
    held: [layer, expert] with `chosen`: 1 if the rank has the expert in that layer. Empty if it has all of them in
        every layer.
    """

    type: ClassVar[str] = "expert_loads"
    rank: int
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    rows: tuple[int, ...] = ()
    chosen: tuple[int, ...] = ()
    held: tuple[int, ...] = ()


Message = Union[  # noqa: UP007 - get_args needs the union object
    Hello,
    Submit,
    Abort,
    Inspect,
    PromptLogprobs,
    PromptExperts,
    Tokens,
    TokenBatch,
    Done,
    Rejected,
    Snapshot,
    ExpertLoads,
]
