"""The settings of a router, fixed at its start."""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from moeyard_worker.keys import RouterKeys
from moeyard_worker.options import option
from moeyard_worker.protocol import KvCompression

METRIC_ALIASES = ("vllm",)
UNKNOWN_FIELDS = ("reject", "ignore")
# Not OPENAI_API_KEY, so that a key for api.openai.com never reaches another server.
KEY_VARIABLE = "MOEYARD_API_KEY"
OTLP_PROTOCOLS = ("grpc", "http/protobuf")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """The addresses of one rank.

    endpoint: its ZMQ ROUTER address. If it is empty, the rank is absent, and the others serve without it.
    metrics_url: its Prometheus page, if it has one.
    draining: whether it takes no new sequences.
    changes: settings in which it differs from the others since `moeyard restart`, as flags with their values.
    """

    rank: int
    endpoint: str
    metrics_url: str | None = None
    draining: bool = False
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def away(self) -> bool:
        """Whether the others serve without it."""
        return not self.endpoint


SettingSource = Literal["default", "flag", "config file", "environment", "checkpoint", "derived"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An effective setting of the server, for operators. It holds no secret, and of a path only the last part.

    name: the flag without dashes, or a name of something without a flag. `group`: its section in the help of `serve`.
    value: as JSON. `source`: where it comes from. "derived" means from the machine, the fleet or other settings.
    why: the reason for a value that is neither given nor the default, or the meaning of an absent default.
    """

    name: str
    group: str
    value: Any
    source: SettingSource
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedShape:
    """Shape of a token's routed experts. Workers send ids [MoE layers, top_k].

    id_bytes: bytes of an id, 1 or 2.
    places: index of each MoE layer in a model of `num_layers` layers.
    """

    top_k: int
    id_bytes: int
    places: tuple[int, ...]
    num_layers: int

    @property
    def row_bytes(self) -> int:
        """Bytes per token."""
        return len(self.places) * self.top_k * self.id_bytes


# Fields of `RouterConfig` that must be at least 1, or None where that is allowed.
_COUNTS = (
    *("max_model_len", "vocab_size", "max_inflight", "max_choices", "intake_processes"),
    *("max_body_bytes", "max_buffered_bytes", "max_header_bytes"),
    *("max_waiting_tokens", "worker_places", "inflight_per_worker", "max_connections"),
)
# Fields that must be more than 0 seconds, or None where that is allowed.
_DURATIONS = (
    *("max_queue_seconds", "step_deadline", "canary_interval", "canary_timeout"),
    *("header_timeout", "body_timeout", "keep_alive_timeout", "send_timeout"),
)


def otlp_target(endpoint: str, protocol: str | None) -> tuple[str, str]:
    """Return the protocol and the URL of a collector. Raises `ValueError` for another kind of endpoint.

    Without a `protocol`, an endpoint with a path, or with OTLP's port for HTTP (4318), gets HTTP; others get gRPC. HTTP
    without a path gets the path of OTLP. `grpc://` is http://, as is HOST:PORT without a scheme.
    """
    what = f"--otlp-traces-endpoint {endpoint}"
    example = "http://localhost:4317 (gRPC) or http://localhost:4318 (HTTP)"
    try:
        url = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        host, port, path = url.hostname, url.port, url.path.rstrip("/")
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    if not host or url.scheme not in ("http", "https", "grpc") or (port is None and "://" not in endpoint):
        raise ValueError(f"{what}: not the URL of a collector, such as {example}")
    if protocol is None:
        over_http = url.scheme != "grpc" and (path or port == 4318)
        protocol = "http/protobuf" if over_http else "grpc"
    if protocol not in OTLP_PROTOCOLS:
        raise ValueError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: '{protocol}' is none of {', '.join(OTLP_PROTOCOLS)}")
    if protocol != "grpc" and url.scheme == "grpc":
        raise ValueError(
            f"{what}: grpc:// contradicts OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={protocol}; give a URL such as {example}"
        )
    scheme = "https" if url.scheme == "https" else "http"
    if protocol == "grpc":
        return protocol, f"{scheme}://{url.netloc}"
    return protocol, url._replace(scheme=scheme, path=path or "/v1/traces").geturl()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Access to the API: keys, TLS, allowed origins and the access log (docs/security.md).

    api_key_file, api_keys: all keys of both are valid (`api_keys` are plain, from the environment). Without any, no key
        is required.
    access_log: whether to log requests on the logger `moeyard.access`.
    log_requests, log_prompts: see api/request_log.py.
    otlp_traces_endpoint: see api/spans.py. `otlp_traces_protocol`: one of OTLP_PROTOCOLS. None: by the endpoint's form.
    """

    api_key_file: Path | None = option(
        None,
        f"API keys, one per line: KEY, NAME:KEY or NAME:sha256:HEX (one more may be in {KEY_VARIABLE})",
        group="keys, TLS and logs",
    )
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    protect_metrics: bool = option(False, "ask for an API key on /metrics too")
    ssl_certfile: Path | None = option(None, "PEM certificate chain: serve HTTPS")
    ssl_keyfile: Path | None = option(None, "its PEM private key (default: in the same file)")
    ssl_ca_certs: Path | None = option(None, "PEM authorities: clients must show a certificate of theirs")
    allowed_origins: tuple[str, ...] = option(
        (),
        "web pages that may call from a browser, e.g. https://chat.example.com, or '*' (default: only our own)",
        nargs="+",
        metavar="ORIGIN",
    )
    access_log: bool = option(False, "one line per request on stderr (default: yes)", both=True, text="yes")
    log_requests: Path | None = option(
        None, "append a line of JSON for each request, for `moeyard replay`", metavar="FILE"
    )
    log_prompts: bool = option(False, "with --log-requests: also prompts, answers and log-probabilities")
    otlp_traces_endpoint: str | None = option(
        None, "OpenTelemetry collector that gets a trace of each request, e.g. http://localhost:4317", metavar="URL"
    )
    otlp_traces_protocol: str | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` for settings that contradict each other."""
        if self.log_prompts and self.log_requests is None:
            raise ValueError("--log-prompts says what --log-requests FILE writes; give both")
        if self.otlp_traces_endpoint is not None:
            otlp_target(self.otlp_traces_endpoint, self.otlp_traces_protocol)

    @property
    def asks_for_key(self) -> bool:
        """Whether requests need a key."""
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def scheme(self) -> str:
        """The scheme of the API's URL."""
        return "http" if self.ssl_certfile is None else "https"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Defaults of sampling parameters, with the ranges of `SamplingParams`. None is neutral, as in the OpenAI API.

    max_tokens: for chats. Completions have OpenAI's default of 16, or this one if it is less.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` naming the first value that cannot work."""
        for name, value, low, high in (
            ("temperature", self.temperature, 0.0, math.inf),
            ("top_p", self.top_p, 0.0, 1.0),
            ("top_k", self.top_k, -1, math.inf),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
            ("max_tokens", self.max_tokens, 1, math.inf),
        ):
            # NaN fails this comparison.
            if value is not None and not (low <= value <= high and value != math.inf):
                raise ValueError(f"{name}: expected {low:g} to {high:g}, got {value}")
        if self.top_p == 0:
            raise ValueError("top_p: expected more than 0")

    def given(self) -> dict[str, float]:
        """Return the defaults that are set."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The settings of one router of one fleet. Times are seconds.

    model_name, model_aliases: the model's name in answers, and other names that clients may use.
    model_path: directory with tokenizer and chat template. None: prompts and answers are token ids.
    chat_template: a file that replaces the template of that directory.
    tool_call_parser, reasoning_parser: formats of text/answer_formats.py; "auto" derives them from the template.
    enable_auto_tool_choice: None is true if a format of tool calls is known.
    max_model_len: prompt and output tokens of a sequence. vocab_size: the model's, which may exceed the tokenizer's.
    eos_token_ids: the ids at which the workers end a sequence.
    max_inflight: sequences at the workers before 429. `inflight_per_worker`: if set, the limit follows the number of
        workers, and `max_inflight` is that of the first ones.
    max_waiting_tokens: prompt tokens of sequences without a first token, before 429. None: no limit.
    worker_places: sequences that a worker runs at once. Others wait in the router. None: all are sent on at once.
    max_queue_seconds: longest wait in the router, before 429. None: no limit, but in overload half the time to the
        first token (fleet/waiting.py).
    max_body_bytes, max_buffered_bytes: bytes of one body (413), and of all that are being read (503).
    intake_processes: processes that turn large bodies into jobs beside the event loop.
    max_header_bytes, header_timeout, body_timeout: limits of a request's headers and body.
    keep_alive_timeout: how long an idle connection is kept. send_timeout: how long a client may stop
        reading its answer.
    max_connections: connections before 503. None: no limit.
    step_deadline: how long a worker may be silent before its connection counts as broken, and how long it then has to
        answer on another connection before it counts as lost.
    recovery_timeout: how long requests wait for an incomplete fleet. 0: the loss of a worker ends all of them at once.
    canary_interval, canary_timeout: idle time before a tiny request tests the fleet, and how long that may take.
    shutdown_grace: how long open streams may continue after SIGTERM.
    kv_compression: default of requests. prefix_caching: whether workers reuse prefixes, so that routing by prefix pays.
    routing: the form of routed experts, if the workers keep them.
    unknown_fields: "reject" answers unknown fields with 400; otherwise they are dropped and named in a header.
    metric_aliases: further sets of metric names; "vllm" is the only one.
    control: the launcher's control socket, if trainers may use this port, and the file of their keys.
    held: whether it starts no requests at first, because an operator has paused the server.
    asleep: the level at which the server sleeps at first, 0 if it is awake.
    restarted: whether this router replaces one that served these workers. Then requests wait until all workers are
        connected. A first router answers 503.
    keys: CURVE keys for the workers' sockets. None: no keys (workers of a test).
    settings: the server's settings and their sources, for /v1/fleet/config.
    version: the answer of /version.
    fingerprint: `system_fingerprint` of answers by the weights of the start. None: they have none.
    """

    model_name: str
    model_path: Path | None
    workers: tuple[WorkerAddress, ...]
    max_model_len: int
    vocab_size: int
    model_aliases: tuple[str, ...] = ()
    chat_template: Path | None = option(
        None, "a jinja template in place of the checkpoint's own", group="the model in the API"
    )
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    kv_compression: KvCompression | None = option(
        None,
        'what is kept of prompts where requests do not say: {"method": "snapkv", "budget": 2048, "window": 32}, which '
        "changes answers; docs/snapkv.md (default: all)",
        metavar="JSON",
    )
    tool_call_parser: str = option(
        "auto", "format of the model's tool calls: {choices} (default auto: by the chat template)", metavar="NAME"
    )
    reasoning_parser: str = option(
        "auto", "format of its reasoning: {choices} (default auto: by the chat template)", metavar="NAME"
    )
    enable_auto_tool_choice: bool | None = option(
        None, 'tools with tool_choice "auto" (default: where the format of tool calls is known)', both=True
    )
    unknown_fields: str = option(
        "reject",
        "what becomes of unknown fields in requests: reject answers 400, ignore drops them and names them in a header "
        "of the answer",
        choices=UNKNOWN_FIELDS,
    )
    eos_token_ids: tuple[int, ...] = ()
    host: str = option("127.0.0.1", "address of the API", group="HTTP")
    port: int = option(8000, "port of the API, 0 picks one", kind="port")
    metric_aliases: tuple[str, ...] = option(
        (),
        "add this program's names of metrics to the router's /metrics",
        choices=METRIC_ALIASES,
        action="append",
    )
    shutdown_grace: float = option(
        3.0,
        "seconds for open answers on SIGTERM or Ctrl-C; a second signal ends them at once",
        flag="--shutdown-timeout",
        kind="duration",
    )
    max_inflight: int = option(
        256,
        "sequences at all ranks before 429 (default: what their places and queues hold)",
        group="limits for clients",
        kind="count",
        unset=True,
    )
    inflight_per_worker: int | None = None
    max_waiting_tokens: int | None = option(
        None,
        "prompt tokens of sequences without a token yet, at all ranks, before 429 (default no limit)",
        kind="count",
    )
    worker_places: int | None = None
    max_queue_seconds: float | None = None
    max_choices: int = 128
    max_logprobs: int = 20
    max_body_bytes: int = option(16 * 1024 * 1024, "longest request body, then 413", kind="size")
    max_buffered_bytes: int = option(256 * 1024 * 1024, "bodies that are being read, together, then 503", kind="size")
    max_header_bytes: int = option(64 * 1024, "longest request line and headers, then 431", kind="size")
    header_timeout: float = option(10.0, "time for a request's headers, then 408", kind="seconds")
    body_timeout: float = option(60.0, "time for a request's body, then 408", kind="seconds")
    keep_alive_timeout: float = option(75.0, "time without a request before a connection is closed", kind="seconds")
    send_timeout: float = option(
        30.0, "time without a byte of its answer taken before a client is cut off", kind="seconds"
    )
    intake_processes: int = option(2, "processes that read request bodies of more than 64 KiB", kind="count")
    max_connections: int | None = None
    step_deadline: float = 5.0
    recovery_timeout: float = option(300.0, "how long requests wait for a fleet that has lost a worker", kind="seconds")
    canary_interval: float = 30.0
    canary_timeout: float = 15.0
    prefix_caching: bool = True
    routing: RoutedShape | None = None
    access: AccessConfig = AccessConfig()
    control: tuple[Path, Path] | None = None
    held: bool = False
    asleep: int = 0
    restarted: bool = False
    keys: RouterKeys | None = None
    settings: tuple[Setting, ...] = ()
    version: str = "unknown"
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` naming the first value that cannot work."""
        if not self.workers:
            raise ValueError("workers: a router needs at least one worker")
        ranks = [w.rank for w in self.workers]
        if ranks != list(range(len(ranks))):
            raise ValueError(f"workers: ranks must be 0..{len(ranks) - 1} in order, got {ranks}")
        for name in _COUNTS:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        for name in _DURATIONS:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name}: expected more than 0 seconds, got {value}")
        if not 0 <= self.recovery_timeout < math.inf:
            raise ValueError(f"recovery_timeout: expected 0 seconds or more, got {self.recovery_timeout}")
        if self.unknown_fields not in UNKNOWN_FIELDS:
            raise ValueError(f"unknown_fields: '{self.unknown_fields}' is none of {', '.join(UNKNOWN_FIELDS)}")
        for name in self.metric_aliases:
            if name not in METRIC_ALIASES:
                raise ValueError(f"metric_aliases: '{name}' is none of {', '.join(METRIC_ALIASES)}")
        if len(set(self.model_names)) < len(self.model_names) or not all(self.model_names):
            raise ValueError(f"model names must differ and not be empty, got {', '.join(map(repr, self.model_names))}")
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"eos_token_ids: {token_id} is outside the vocabulary of {self.vocab_size}")

    def most_inflight(self, num_workers: int) -> int:
        """Return how many sequences may run or wait at `num_workers` workers before 429."""
        return self.max_inflight if self.inflight_per_worker is None else num_workers * self.inflight_per_worker

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names of the model, the one that answers say first."""
        return (self.model_name, *self.model_aliases)


def system_fingerprint(found: Iterable[str], compression: KvCompression | None) -> str:
    """Return the fingerprint of a fleet's answers: those of its ranks, and the default compression of prompts."""
    facts = [sorted({*found}), None if compression is None else asdict(compression)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
