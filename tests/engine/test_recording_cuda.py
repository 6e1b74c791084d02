"""`--record-routing` with captured steps: the recording is that of steps that are launched kernel by kernel.

Without a GPU the same steps run over the kernels' references in fp32 (captured_on_cpu.py).
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import DEMO
from tests.engine.captured_on_cpu import PLACE, gpu_steps
from tests.fleet import Client
from tests.rank import Rank

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.experts.offline.trace import read_trace

LIMITS: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 4, "max_batch_tokens": 128, "prefill_chunk": 64}


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    with gpu_steps():
        yield


def recorded(path: Path, **options: Any) -> tuple[list[Any], int]:
    """Run requests one after the other. Return what each layer of each step needed, and the number of replays."""
    with Rank(DEMO, record_routing=str(path), **PLACE, **LIMITS, **options) as rank:
        rank.worker.start()
        with closing(Client([rank.worker.endpoints()["frontend"]])) as client:
            for size in (1, 40, 100):
                prompt = [7 * i % 250 for i in range(3, 3 + size)]
                client.submit(0, str(size), prompt, max_tokens=6, temperature=0.0, ignore_eos=True)
                client.wait()
        assert isinstance(rank.worker.runner, GpuRunner)
        replayed = rank.worker.runner.num_replayed
    [trace] = read_trace(path)
    return [(access.layer, access.decode, access.prefill) for access in trace], replayed


@pytest.mark.parametrize(
    ("slots", "ahead"),
    [(None, False), (None, True), (40, False)],
    ids=["all slots", "two steps in flight", "few slots"],
)
def test_recording_is_that_of_eager_steps(tmp_path: Path, slots: int | None, ahead: bool) -> None:
    eager, none = recorded(tmp_path / "eager", expert_slots=slots, async_scheduling=False, enforce_eager=True)
    captured, replayed = recorded(tmp_path / "captured", expert_slots=slots, async_scheduling=ahead)
    assert captured == eager
    assert none == 0 < replayed
    assert any(decode for _, decode, _ in captured)
    assert any(prefill for _, _, prefill in captured)


@pytest.mark.parametrize("changes", [{"num_workers": 2}, {"speculate": "mtp"}], ids=str)
def test_other_steps_are_recorded_eagerly(changes: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model_path": str(DEMO), "device": "cuda", "record_routing": "x", **changes}
    with pytest.raises(ValueError, match=f"with {next(iter(changes))} .* needs enforce_eager"):
        EngineConfig(**options)
    EngineConfig(**options, enforce_eager=True)
