"""`--otlp-traces-endpoint`: spans that a real OTLP receiver gets over gRPC and HTTP, and a receiver that is away."""

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from tests.router.launcher import WORLD, Launcher, prepared

from moeyard_router.api import tracing
from moeyard_router.config import AccessConfig, otlp_target

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
BODY = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.5, "seed": 3}
ROOT = Path(__file__).resolve().parents[2]


class Receiver(TraceServiceServicer):
    """An OTLP collector. `requests` are the messages that it got."""

    def __init__(self, protocol: str) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        if protocol == "grpc":
            server = grpc.server(ThreadPoolExecutor(2))
            add_TraceServiceServicer_to_server(self, server)
            self.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            server.start()
            self.close = lambda: server.stop(None).wait()
            return
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                requests.append(
                    ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                )
                self.send_response(200)
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, format: str, *args: object) -> None: ...

        http = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{http.server_port}/v1/traces"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()

        def close() -> None:
            http.shutdown()
            thread.join()
            http.server_close()

        self.close = close

    def Export(self, request, context):
        self.requests.append(request)
        return ExportTraceServiceResponse()

    @property
    def spans(self):
        return [s for r in list(self.requests) for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans]

    def roots(self):
        return [s for s in self.spans if s.kind == s.SPAN_KIND_SERVER]

    def phases(self, root):
        return sorted((s for s in self.spans if s.parent_span_id == root.span_id), key=lambda s: s.start_time_unix_nano)


def values(span) -> dict:
    found = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture(params=["grpc", "http/protobuf"])
def receiver(request) -> Iterator[Receiver]:
    receiver = Receiver(request.param)
    yield receiver
    receiver.close()


@pytest.fixture
def grpc_receiver() -> Iterator[Receiver]:
    receiver = Receiver("grpc")
    yield receiver
    receiver.close()


def access(receiver: Receiver) -> AccessConfig:
    return AccessConfig(otlp_traces_endpoint=receiver.endpoint)


def test_request_and_its_phases(start, wait_for, receiver):
    service = start(1, access=access(receiver))
    service.workers[0].phases = (0.002, 0.003)
    service.workers[0].pace = 0.005
    answer = service.client.post("/v1/completions", json={**BODY, "stream": True}, headers=GIVEN)
    assert answer.status_code == 200
    wait_for(lambda: receiver.roots(), "a span")
    [root] = receiver.roots()
    assert root.name == "text_completion tiny"
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert answer.headers["traceparent"] == f"00-{TRACE}-{root.span_id.hex()}-01"
    phases = receiver.phases(root)
    assert [p.name for p in phases] == ["queue", "prefill", "decode"]
    queue, prefill, decode = phases
    assert root.start_time_unix_nano <= queue.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano < decode.end_time_unix_nano
    assert decode.end_time_unix_nano <= root.end_time_unix_nano
    assert prefill.end_time_unix_nano - prefill.start_time_unix_nano == pytest.approx(3e6, abs=2e3)
    found = values(root)
    assert found["gen_ai.request.model"] == "tiny"
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (3, 4)
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (3, 4)
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.max_tokens"]) == (0.5, 4)
    assert (found["gen_ai.response.finish_reasons"], found["http.response.status_code"]) == (["length"], 200)
    assert found["gen_ai.request.id"] == answer.headers["x-request-id"]
    assert found["gen_ai.latency.time_in_model_prefill"] == pytest.approx(0.003, abs=1e-6)
    # The time of the last phases is subtracted from that of all, in floating point.
    assert 0.002 - 1e-6 <= found["gen_ai.latency.time_in_queue"] < found["gen_ai.server.time_to_first_token"] + 0.002
    assert found["gen_ai.server.time_to_first_token"] == found["gen_ai.latency.time_to_first_token"]
    assert found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"]
    resource = {a.key: a.value.string_value for a in receiver.requests[0].resource_spans[0].resource.attributes}
    assert resource["service.name"] == "moeyard"


def test_choices_refusals_and_other_routes(start, wait_for, grpc_receiver):
    service = start(1, access=access(grpc_receiver))
    assert service.post("/v1/completions", **BODY, n=2, stop=["fox"]).status_code == 200
    assert service.post("/v1/completions", **BODY, unknown=1).status_code == 400
    assert "traceparent" not in service.client.get("/v1/models").headers
    unsampled = service.client.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert unsampled.headers["traceparent"][3:35] == TRACE
    assert unsampled.headers["traceparent"].endswith("-00")
    wait_for(lambda: len(grpc_receiver.roots()) == 2, "two spans")
    good, bad = sorted(grpc_receiver.roots(), key=lambda s: s.start_time_unix_nano)
    choices = [values(p)["moeyard.choice"] for p in grpc_receiver.phases(good) if p.name == "decode"]
    assert sorted(choices) == [0, 1]
    assert values(good)["gen_ai.request.choice.count"] == 2
    assert (values(bad)["error.type"], grpc_receiver.phases(bad)) == ("400", [])


def test_recovery_is_an_event(start, script, wait_for, pool, grpc_receiver):
    service = start(WORLD, access=access(grpc_receiver), prepare=lambda worker: prepared(worker, script))
    launcher = Launcher(service, script)
    body = {"prompt": [5, 6, 7], "max_tokens": 60}
    answer = pool.submit(service.post, "/v1/completions", **body)
    wait_for(lambda: any(w.runs for w in service.workers), "a running sequence")
    victim = next(w.rank for w in service.workers if w.runs)
    wait_for(lambda: any(w._sampled > 5 for w in service.workers), "some tokens")
    launcher.kill(victim)
    wait_for(lambda: service.lost, "the loss")
    launcher.heal(victim)
    assert answer.result().status_code == 200
    wait_for(lambda: grpc_receiver.roots(), "a span")
    [root] = grpc_receiver.roots()
    events = [(p.name, e) for p in grpc_receiver.phases(root) for e in p.events]
    [(phase, event)] = events
    assert (phase, event.name, values(event)["moeyard.from_rank"]) == ("decode", "recovery", victim)
    assert values(root)["gen_ai.usage.output_tokens"] == 60


def test_absent_collector_is_named_once_and_harms_nothing(start, wait_for, caplog, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{sock.getsockname()[1]}"
        service = start(1, access=AccessConfig(otlp_traces_endpoint=endpoint))
        for _ in range(12):
            assert service.post("/v1/completions", **BODY).status_code == 200

        def lines():
            return [r.getMessage() for r in caplog.records if "traces do not reach" in r.getMessage()]

        wait_for(lambda: lines(), "a warning")
        for _ in range(12):
            assert service.post("/v1/completions", **BODY).status_code == 200
        [line] = lines()
        assert f"--otlp-traces-endpoint {endpoint} (grpc)" in line
        assert [r for r in caplog.records if r.name.startswith("opentelemetry") and r.levelno > logging.INFO] == []


def test_nothing_is_loaded_without_the_flag():
    code = (
        "import sys; from moeyard_router.http import server, process;"
        "from moeyard_router.api.tracing import check_traces;"
        "from moeyard_router.config import AccessConfig; check_traces(AccessConfig());"
        "print([n for n in sys.modules if n.split('.')[0] in ('opentelemetry', 'grpc')])"
    )
    env = {"PYTHONPATH": ":".join(str(ROOT / folder) for folder in ("worker", "router"))}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (ran.stdout.strip(), ran.returncode) == ("[]", 0), ran.stderr


def test_missing_extra_is_one_line(monkeypatch):
    monkeypatch.delitem(sys.modules, "moeyard_router.api.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"pip install 'moeyard\[tracing\]'") as caught:
        tracing.check_traces(AccessConfig(otlp_traces_endpoint="localhost:4317"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "protocol", "target"),
    [
        ("localhost:4317", None, ("grpc", "http://localhost:4317")),
        ("grpc://c:4317", None, ("grpc", "http://c:4317")),
        ("https://c:4317", None, ("grpc", "https://c:4317")),
        ("http://c:4318", None, ("http/protobuf", "http://c:4318/v1/traces")),
        ("https://c/otel/v1/traces", None, ("http/protobuf", "https://c/otel/v1/traces")),
        ("http://c:4317", "http/protobuf", ("http/protobuf", "http://c:4317/v1/traces")),
        ("http://c:4318/v1/traces", "grpc", ("grpc", "http://c:4318")),
    ],
)
def test_protocol_of_an_endpoint(endpoint, protocol, target):
    assert otlp_target(endpoint, protocol) == target


@pytest.mark.parametrize(
    "endpoint", ["", "foo", "foo/v1/traces", "http://", "tcp://c:4317", "foo:bar", "http://c:port"]
)
def test_unusable_endpoint(endpoint):
    with pytest.raises(ValueError, match=f"^--otlp-traces-endpoint {endpoint}: "):
        AccessConfig(otlp_traces_endpoint=endpoint)


def test_endpoint_of_another_protocol():
    with pytest.raises(ValueError, match=r"^--otlp-traces-endpoint grpc://c:4317: .*such as http://localhost:4317"):
        AccessConfig(otlp_traces_endpoint="grpc://c:4317", otlp_traces_protocol="http/protobuf")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: 'json' is none of grpc, http/protobuf"):
        AccessConfig(otlp_traces_endpoint="c:4317", otlp_traces_protocol="json")
