"""One request while it lives on a rank, and what is said of it. Pure."""

from dataclasses import dataclass, field

from moeyard_worker.protocol import Message, SamplingParams, TokenLogprob

Key = tuple[bytes, str]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen for one sampled chunk."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A message and the client (ZMQ identity) it goes to."""

    client: bytes
    message: Message


@dataclass(slots=True, eq=False)
class Sequence:
    """One request while it lives. `num_computed` positions have their state in `pages`."""

    client: bytes
    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrived: float
    hashes: list[bytes]
    key: str
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    running: bool = False
    num_computed: int = 0
    num_registered: int = 0
    cached_tokens: int = 0
    started: float | None = None
    first_token: float | None = None

    @property
    def length(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt) + len(self.output)

    @property
    def decoding(self) -> bool:
        """The whole prompt is computed: what is left are output positions."""
        return self.num_computed >= len(self.prompt)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Token ids at positions [start, end), which do not cross the end of the prompt."""
        p = len(self.prompt)
        return self.prompt[start:end] if start < p else tuple(self.output[start - p : end - p])


@dataclass(slots=True)
class SchedulerStats:
    """Running totals for the metrics; the lists are drained by their reader."""

    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefill_tokens: int = 0
    generation_tokens: int = 0
    queue_seconds: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
