"""`--otlp-traces-endpoint`: an OpenTelemetry trace per generating request, sent to a collector by OTLP.

The span of a request has a child for each phase of each choice: `queue`, `prefill`, `decode`. They are made at the end
of a choice from times that the router has anyway. Attributes have the names of OpenTelemetry's GenAI conventions
(0.1.0) and of vLLM. No text or token of a request is in them.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from moeyard_router.api.intake import Job
from moeyard_router.api.request_scope import RequestRecord
from moeyard_router.config import RouterConfig, otlp_target
from moeyard_router.metrics import Timing
from moeyard_worker.protocol import Done

_log = logging.getLogger(__name__)
_SDK_LOG = "opentelemetry"
# Seconds at the end for spans that were not sent yet.
_CLOSE_SECONDS = 2.0
# OpenTelemetry's names of operations, by path.
OPERATIONS: Mapping[str, str] = MappingProxyType(
    {
        "/v1/completions": "text_completion",
        "/v1/chat/completions": "chat",
        "/inference/v1/generate": "text_completion",
        "/v1/responses": "chat",
        "/v1/messages": "chat",
    }
)


class Traces:
    """Owner of the tracer and its exporter. Spans queue for a thread; a full queue drops them, and no request waits.

    OpenTelemetry's own variables set the rest: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_BSP_*,
    OTEL_EXPORTER_OTLP_TRACES_HEADERS and so on.
    """

    def __init__(self, config: RouterConfig) -> None:
        assert config.access.otlp_traces_endpoint is not None, "the caller checks it"
        protocol, url = otlp_target(config.access.otlp_traces_endpoint, config.access.otlp_traces_protocol)
        inner: SpanExporter = (
            GrpcExporter(endpoint=url, insecure=url.startswith("http://"))
            if protocol == "grpc"
            else HttpExporter(endpoint=url)
        )
        self._exporter = _Exporter(inner, f"{url} ({protocol})")
        # `Resource.create` lets OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES replace these.
        resource = Resource.create({"service.version": config.version})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "moeyard"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("moeyard", config.version)
        self._context = TraceContextTextMapPropagator()
        self._model = config.model_name

    def begin(self, path: str, headers: Mapping[bytes, bytes], record: RequestRecord) -> "RequestTrace | None":
        """Begin the trace of a generating request, in the trace that its headers name. None for another path."""
        operation = OPERATIONS.get(path)
        if operation is None:
            return None
        given = {n: headers[n.encode()].decode("latin-1") for n in self._context.fields if n.encode() in headers}
        wall = time.time_ns() - int((time.monotonic() - record.began) * 1e9)
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._context.extract(given, context=Context()),
            kind=SpanKind.SERVER,
            start_time=wall,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "moeyard",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "gen_ai.request.id": record.request_id,
                "http.request.method": "POST",
                "http.route": path,
            },
        )
        return RequestTrace(self, span, began=record.began, wall=wall)

    def phase(self, name: str, parent: Context, start: int, attributes: dict[str, Any]) -> Span:
        """Begin the span of a phase. `start`: Unix nanoseconds."""
        return self._tracer.start_span(name, context=parent, start_time=start, attributes=attributes)

    def close(self) -> None:
        """Send queued spans, for a limited time."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)
        self._exporter.close()


@dataclass(frozen=True, slots=True)
class _Phase:
    """Monotonic seconds of one phase of a choice."""

    name: str
    start: float
    end: float


class RequestTrace:
    """The span of one request. Times are monotonic seconds."""

    def __init__(self, traces: Traces, span: Span, *, began: float, wall: int) -> None:
        self._traces, self._span, self._began, self._wall = traces, span, began, wall
        self._records = span.is_recording()
        self._runs: dict[int, list[tuple[float, int | None]]] = {}  # by choice: when it was sent to which rank
        self._longest: dict[str, float] = {}
        self._reasons: dict[int, str] = {}

    @property
    def traceparent(self) -> str:
        """The header that names this span (W3C Trace Context)."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    @property
    def trace_id(self) -> str:
        """The trace's id, for logs."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def accepted(self, job: Job, reply_id: str) -> None:
        """Note the parameters of a valid request."""
        if not self._records:
            return
        sampling, count = job.continuations[0].sampling, len(job.continuations)
        found: dict[str, Any] = {
            "gen_ai.response.id": reply_id,
            "gen_ai.request.stream": job.stream,
            "gen_ai.request.max_tokens": sampling.max_tokens - job.num_forced,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.n": count // len(job.prompts),
            "gen_ai.usage.num_sequences": count,
        }
        if sampling.top_k:
            found["gen_ai.request.top_k"] = sampling.top_k
        if count > len(job.prompts):
            found["gen_ai.request.choice.count"] = count // len(job.prompts)
        self._span.set_attributes(found)

    def moved(self, now: float, index: int, rank: int | None) -> None:
        """Note that a choice was sent to a rank: its first one, or another after a loss or an order."""
        self._runs.setdefault(index, []).append((now, rank))

    def ended(
        self, now: float, index: int, reason: str, *, timing: Timing, done: Done | None, cached_tokens: int | None
    ) -> None:
        """Write the phases of a choice that has ended. `done`: its rank's last message, if it came."""
        self._reasons[index] = reason
        if not self._records:
            return
        runs = self._runs.get(index, [])
        phases = list(_phases(now, timing, done if len(runs) == 1 else None, runs, whole=reason in ("stop", "length")))
        events = [
            (at, "recovery", {"moeyard.from_rank": _rank(old), "moeyard.rank": _rank(new)})
            for (_, old), (at, new) in pairwise(runs)
        ]
        if done is not None:
            # The rank counts from its start of the sequence, which is the end of the queue.
            start = next((p.start for p in phases if p.name == "prefill"), now) if len(runs) == 1 else runs[-1][0]
            events += [(start + seconds, "preemption", {}) for seconds in done.preempted_seconds]
        parent = set_span_in_context(self._span, Context())
        for phase in phases:
            attributes: dict[str, Any] = {"moeyard.choice": index}
            if runs:
                attributes["moeyard.rank"] = _rank(runs[-1][1])
            if phase.name == "prefill" and cached_tokens is not None:
                attributes["gen_ai.usage.cache_read.input_tokens"] = cached_tokens
            if phase is phases[-1]:
                attributes["moeyard.finish_reason"] = reason
                attributes["gen_ai.usage.output_tokens"] = timing.num_tokens
            span = self._traces.phase(phase.name, parent, self._unix(phase.start), attributes)
            for at, name, more in events:
                # An event at the edge of two phases belongs to the earlier one; the last phase takes what is left.
                if at > phase.start and (at <= phase.end or phase is phases[-1]):
                    span.add_event(name, {"moeyard.choice": index, **more}, timestamp=self._unix(at))
            span.end(end_time=self._unix(phase.end))
            events = [event for event in events if event[0] > phase.end]
            self._longest[phase.name] = max(self._longest.get(phase.name, 0.0), phase.end - phase.start)

    def end(self, status: int, record: RequestRecord) -> None:
        """End the request's span. `status`: that of the answer."""
        now = time.monotonic()
        if self._records:
            self._span.set_attributes(self._outcome(now, status, record))
            failure = record.failure or (status if status >= 400 else None)
            if failure is not None and not record.client_left:
                self._span.set_attribute("error.type", str(failure))
            elif record.client_left or record.cut is not None:
                self._span.set_attribute("error.type", record.cut or "client_left")
            if failure is not None and failure >= 500:
                self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(end_time=self._unix(now))

    def _outcome(self, now: float, status: int, record: RequestRecord) -> dict[str, Any]:
        """Return the attributes that are known at the end. Several choices give their longest phases."""
        found: dict[str, Any] = {"http.response.status_code": status, "gen_ai.latency.e2e": now - self._began}
        if self._reasons:
            found["gen_ai.response.finish_reasons"] = [self._reasons[index] for index in sorted(self._reasons)]
        for tokens, names in (
            (record.prompt_tokens, ("input_tokens", "prompt_tokens")),
            (record.output_tokens, ("output_tokens", "completion_tokens")),
        ):
            if tokens is not None:
                found |= {f"gen_ai.usage.{name}": tokens for name in names}
        if record.first_token is not None:
            seconds = record.first_token - self._began
            found["gen_ai.server.time_to_first_token"] = found["gen_ai.latency.time_to_first_token"] = seconds
        for phase, name in (("queue", "time_in_queue"), ("prefill", "time_in_model_prefill")):
            if phase in self._longest:
                found[f"gen_ai.latency.{name}"] = self._longest[phase]
        if (decode := self._longest.get("decode")) is not None:
            found["gen_ai.latency.time_in_model_decode"] = decode
            found["gen_ai.latency.time_in_model_inference"] = decode + self._longest.get("prefill", 0.0)
            if len(self._reasons) == 1 and (record.output_tokens or 0) > 1:
                found["gen_ai.server.time_per_output_token"] = decode / ((record.output_tokens or 0) - 1)
        return found

    def _unix(self, at: float) -> int:
        return self._wall + int((at - self._began) * 1e9)


def _rank(rank: int | None) -> int:
    return -1 if rank is None else rank


def _phases(
    now: float, timing: Timing, done: Done | None, runs: Sequence[tuple[float, int | None]], *, whole: bool
) -> Iterator[_Phase]:
    """Yield the phases of a choice that ended at `now`.

    `done` has the rank's own times. Without it (a stop string or the client ended the choice) or after a move, the
    queue ends when the router first sent the choice, and the prefill includes its wait at the rank. `whole`: whether it
    ended by itself, at its last token.
    """
    arrived, first = timing.arrived, timing.first
    computed = now if first is None else first
    if done is not None:
        start = max(arrived, computed - done.prefill_seconds)
        yield _Phase("queue", max(arrived, start - done.queue_seconds), start)
    else:
        start = min(runs[0][0], computed) if runs else now
        yield _Phase("queue", arrived, start)
        if not runs:
            return
    yield _Phase("prefill", start, computed)
    if first is not None:
        yield _Phase("decode", first, timing.last if whole else max(now, first))


class _Exporter(SpanExporter):
    """Sends spans by another exporter. Says once that the collector is not reached, and once that it is again.

    The SDK's own lines, which come with each retry, give the reason and are not written.
    """

    def __init__(self, inner: SpanExporter, target: str) -> None:
        self._inner, self._target = inner, target
        self._lock = threading.Lock()
        self._fails = False
        self._lost = 0
        self._handler = _Complaints(self._complain)
        sdk = logging.getLogger(_SDK_LOG)
        self._propagated, sdk.propagate = sdk.propagate, False
        sdk.addHandler(self._handler)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans. Never raises."""
        try:
            result = self._inner.export(spans)
        except Exception as error:  # boundary: the thread of the batches must go on
            self._complain(f"{type(error).__name__}: {error}")
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            self._lost += len(spans)
            self._complain("it refused them")
        elif self._fails:
            _log.warning("traces reach %s again; %d spans were lost", self._target, self._lost)
            self._fails, self._lost = False, 0
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def close(self) -> None:
        """End retries, and give the SDK its log back."""
        self._inner.shutdown()
        sdk = logging.getLogger(_SDK_LOG)
        sdk.removeHandler(self._handler)
        sdk.propagate = self._propagated

    def _complain(self, reason: str) -> None:
        with self._lock:
            first, self._fails = not self._fails, True
        if first:
            _log.warning("traces do not reach --otlp-traces-endpoint %s: %s", self._target, reason)


class _Complaints(logging.Handler):
    """Passes warnings on to a function."""

    def __init__(self, complain: Any) -> None:
        super().__init__(logging.WARNING)
        self._complain = complain

    def emit(self, record: logging.LogRecord) -> None:
        if "already shutdown" not in record.getMessage():
            self._complain(record.getMessage())
