"""When the captured graphs of one epoch are released, and when they stay. Graphs and events are fakes."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.engine.steps import graphs as module
from moeyard_worker.engine.steps.graphs import StepGraphs, smallest
from moeyard_worker.exchange.base import ExchangeTraits


class Graph:
    def __init__(self) -> None:
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1


class Exchange:
    """Record calls in order. `per_epoch` sets the trait `graphs_per_epoch`."""

    def __init__(self, *, per_epoch: bool = True) -> None:
        self.calls: list[str] = []
        self.traits = ExchangeTraits(graphs_per_epoch=per_epoch)
        self.steps = self
        self.release_graphs: Any = None

    def set_rows(self, rows: Any) -> None:
        self.calls.append(f"rows {rows.most}")

    def before_capture(self) -> None:
        self.calls.append("before_capture")


def steps(exchange: Exchange, monkeypatch: pytest.MonkeyPatch, device: str = "cuda") -> StepGraphs:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: "stream")
    backend = SimpleNamespace(
        device=torch.device(device),
        without_collection=nullcontext,
        capture=lambda run, pool, ahead: (Graph(), run()),
        capture_while_serving=lambda run, pool: Graph(),
    )

    def program(size: StepSize) -> Any:
        exchange.calls.append(f"inputs {size.rows}")
        return SimpleNamespace(inputs=None, parts={"model": lambda: exchange.calls.append("forward")})

    found = StepGraphs(program, cast(Any, exchange), cast(Any, backend))
    assert found.prepare([StepSize(sequences=2, width=8, peers=4), StepSize(width=8, peers=1)]) == "pool"
    return found


def test_size_is_captured_once_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Exchange()
    found = steps(exchange, monkeypatch)
    assert exchange.calls == ["rows 4", "inputs 2", "forward", "rows 1", "inputs 0", "forward"]
    assert not found.captured
    exchange.calls.clear()
    size = smallest(found.sizes, StepSize(sequences=1, width=3), 3)
    assert size == StepSize(sequences=2, width=8, peers=4)
    assert found.step(size) is found.step(size)
    assert exchange.calls == ["before_capture", "rows 4", "inputs 2"]
    assert [*found.captured] == [size]


def test_graphs_without_epochs_are_captured_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Exchange(per_epoch=False)
    found = steps(exchange, monkeypatch)
    assert exchange.calls == ["rows 4", "inputs 2", "forward", "rows 1", "inputs 0", "forward"]
    assert len(found.captured) == 2
    with pytest.raises(AssertionError, match="was to be captured at the start"):
        found.step(StepSize(sequences=8, width=8))


def event(*, calls: list[Any], says: Any) -> type:
    class Event:
        def record(self, stream: Any) -> None:
            assert stream == "stream"

        def query(self) -> bool:
            calls.append(None)
            if says is None:
                raise RuntimeError("an illegal memory access was encountered")
            return bool(len(calls) >= says)

    return Event


@pytest.mark.parametrize(("says", "goes"), [(3, True), (10**9, False), (None, False)], ids=["ends", "hangs", "failed"])
def test_graphs_are_released_only_when_the_device_is_idle(
    says: int | None, goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No error and no endless wait may delay the report of a peer's loss, which follows."""
    exchange, calls = Exchange(), list[Any]()
    found = steps(exchange, monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", event(calls=calls, says=says))
    monkeypatch.setattr(module, "_END_S", 0.1)
    exchange.release_graphs()
    assert not calls, "nothing was captured"
    size = smallest(found.sizes, StepSize(sequences=1, width=3), 3)
    assert size is not None
    held = found.step(size)
    exchange.release_graphs()
    assert not found.captured
    assert cast(Any, held.graphs["model"]).resets == goes
    assert (len(found._running) == 0) == goes
    assert found.step(size) is not held
