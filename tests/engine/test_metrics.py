"""The metrics of a rank after a step."""

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.assembly import worker as worker_module
from moeyard_worker.engine.assembly.worker import Worker
from moeyard_worker.engine.loop.metrics import REFUSALS, WorkerMetrics
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.protocol import STEP_ROWS
from moeyard_worker.scheduling.scheduler import Scheduler

CONFIG = EngineConfig(
    model_path=None, load_format="dummy", shape="moeyard-demo", num_layers=2, kv_memory=1 << 20, max_model_len=64
)
SPEC = WorkerSpec(config=CONFIG, rank=0, epoch=1, host="127.0.0.1", version="test")


@pytest.fixture
def parts() -> dict[str, Any]:
    """Return the arguments of `observe_step`, from a worker without requests."""
    worker = Worker(SPEC)
    worker.connect([worker.endpoints()["mesh"]])
    worker.load(1)
    engine = worker._engine
    found = {
        "scheduler": worker.scheduler,
        "experts": worker.experts,
        "exchange": engine._exchange,
        "lockstep": engine._lockstep,
    }
    worker.stop()
    return found


def test_device_time_is_absent_without_a_device(parts: dict[str, Any]) -> None:
    metrics = WorkerMetrics(model_name="tiny", rank=3, version="test")
    metrics.observe_step(num_tokens=2, seconds=0.25, device_seconds=None, **parts)
    page = generate_latest(metrics.registry).decode()
    assert 'moeyard_step_seconds_sum{model_name="tiny",rank="3"} 0.25' in page
    assert "moeyard_step_device_seconds_count" not in page
    metrics.observe_step(num_tokens=2, seconds=0.25, device_seconds=0.125, **parts)
    page = generate_latest(metrics.registry).decode()
    assert 'moeyard_step_device_seconds_sum{model_name="tiny",rank="3"} 0.125' in page
    assert 'moeyard_step_device_seconds_bucket{le="0.15",model_name="tiny",rank="3"} 1.0' in page
    assert 'moeyard_step_seconds_count{model_name="tiny",rank="3"} 2.0' in page


def test_steps_with_rows_are_counted_for_snapshots(parts: dict[str, Any]) -> None:
    metrics = WorkerMetrics(model_name="tiny", rank=3, version="test")
    for num_tokens in (0, 1, 3, 4, 20_000):
        metrics.observe_step(num_tokens=num_tokens, seconds=0.25, device_seconds=None, **parts)
    assert metrics.steps_by_rows == [1, 0, 2, *[0] * (len(STEP_ROWS) - 3), 1]
    assert metrics.step_rows == 20_008


def test_time_per_output_token_covers_ended_requests(parts: dict[str, Any]) -> None:
    parts["scheduler"].stats.token_seconds += [0.012, 0.004]
    metrics = WorkerMetrics(model_name="tiny", rank=3, version="test")
    metrics.observe_step(num_tokens=2, seconds=0.25, device_seconds=None, **parts)
    page = generate_latest(metrics.registry).decode()
    assert 'moeyard_request_time_per_output_token_seconds_count{model_name="tiny",rank="3"} 2.0' in page
    assert 'moeyard_request_time_per_output_token_seconds_bucket{le="0.005",model_name="tiny",rank="3"} 1.0' in page
    assert parts["scheduler"].stats.token_seconds == []


def test_refusals_are_counted_by_port_and_reason() -> None:
    """All series exist from the first scrape, and a scrape shows the current counts."""
    metrics = WorkerMetrics(model_name="tiny", rank=3, version="test")
    counts = metrics.refused["router"] = {}
    assert (
        'moeyard_refused_total{door="peer",model_name="tiny",rank="3",reason="handshake"} 0.0'
        in generate_latest(metrics.registry).decode()
    )
    counts["message"] = 2
    page = generate_latest(metrics.registry).decode()
    assert 'moeyard_refused_total{door="router",model_name="tiny",rank="3",reason="message"} 2.0' in page
    assert page.count("moeyard_refused_total{") == sum(map(len, REFUSALS.values()))


def test_refusals_by_peers_add_up_over_epochs() -> None:
    worker = Worker(SPEC)
    try:
        worker._mesh.refused["handshake"] = 2
        worker.rebind(2)
        assert worker._metrics.refused["peer"] == {"handshake": 2}
        worker._mesh.refused["handshake"] += 1
        assert worker._metrics.refused["peer"] == {"handshake": 3}
    finally:
        worker.stop()


def test_failed_construction_frees_the_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    for each in (WorkerMetrics, Mesh):
        close = each.close
        monkeypatch.setattr(each, "close", lambda self, close=close: (closed.append(type(self).__name__), close(self)))

    def no_port(*_: Any, **__: Any) -> Any:
        raise OSError("no port is free")

    monkeypatch.setattr(worker_module, "Frontend", no_port)
    with pytest.raises(OSError, match="no port is free"):
        Worker(SPEC)
    assert closed == ["WorkerMetrics", "Mesh"]


def test_drafts_are_counted_by_position_and_steps_by_depth(parts: dict[str, Any]) -> None:
    metrics = WorkerMetrics(model_name="tiny", rank=3, version="test")
    metrics.observe_step(num_tokens=2, seconds=0.25, device_seconds=None, **parts)
    assert "moeyard_spec_decode_steps_total{" not in generate_latest(metrics.registry).decode()
    config = replace(parts["scheduler"].config, num_drafts=2)
    parts["scheduler"] = scheduler = Scheduler(config)
    stats, lockstep = scheduler.stats, parts["lockstep"]
    for _ in range(2):
        stats.drafts, stats.accepted = [9, 8], [6, 3]
        lockstep.agree(lockstep.mesh.step + 1, 2, 2)
        lockstep.agree(lockstep.mesh.step + 1, 2, 0)
        metrics.observe_step(num_tokens=2, seconds=0.25, device_seconds=None, **parts)
    page = generate_latest(metrics.registry).decode()
    assert 'moeyard_spec_decode_draft_tokens_total{model_name="tiny",position="1",rank="3"} 9.0' in page
    assert 'moeyard_spec_decode_accepted_tokens_total{model_name="tiny",position="2",rank="3"} 3.0' in page
    assert 'moeyard_spec_decode_steps_total{drafts="2",model_name="tiny",rank="3"} 2.0' in page
    assert 'moeyard_spec_decode_steps_total{drafts="0",model_name="tiny",rank="3"} 2.0' in page


def test_every_series_names_model_and_rank(parts: dict[str, Any]) -> None:
    """One Prometheus can watch several fleets."""
    metrics = WorkerMetrics(model_name="tiny", rank=3, version="test")
    metrics.observe_step(num_tokens=2, seconds=0.25, device_seconds=0.125, **parts)
    metrics.observe_load(parts["scheduler"])
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert len(samples) > 100
    assert {(s.labels["model_name"], s.labels["rank"]) for s in samples} == {("tiny", "3")}
