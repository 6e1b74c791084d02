"""A rank that has slept answers as before, or as a fresh rank with the weights that it got meanwhile.

On a CPU, and with a GPU's steps, which are played on a CPU (`captured_on_cpu.py`).
"""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.checkpoints import make_checkpoint
from tests.engine.captured_on_cpu import PLACE, gpu_steps
from tests.engine.test_speculation_cuda import same
from tests.engine.test_weights_in_place import CASES, answers, checkpoints
from tests.rank import Rank

import moeyard_worker.engine.assembly.worker
from moeyard_worker.config.worker_spec import ServedWeights
from moeyard_worker.engine.assembly.sleeping import Sleeper
from moeyard_worker.engine.memory.plan import step_bytes, sums_bytes

SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_batch_tokens": 128, "max_model_len": 128}


# A GPU's steps take long on a CPU, so the fast tier has them for one family.
PLACES = [
    pytest.param((name, captured), id=f"{name}-{'captured' if captured else 'cpu'}", marks=marks)
    for captured in (False, True)
    for name in CASES
    for marks in ([pytest.mark.slow] if captured and name != "kda" else [],)
]


@pytest.fixture(scope="module", params=PLACES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, Any], list[Path]]]:
    """The options of a rank and two checkpoints."""
    name, captured = request.param
    found, options = checkpoints(tmp_path_factory.mktemp(name), name), CASES[name][2]
    with gpu_steps() if captured else nullcontext():
        yield {**options, **(PLACE if captured else {"dtype": "float32"})}, found


def held(rank: Rank) -> int:
    """Return the bytes of the rank's state and slots."""
    experts, states = rank.worker.experts, rank.worker._sleeper.runner.states()
    slots = experts.regions or [part for slot in range(experts.num_slots) for part in experts._slots.contents(slot)]
    return sum(each.untyped_storage().nbytes() if each.layout == torch.strided else 1 for each in (*states, *slots))


def test_level_1_needs_room_for_its_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on a CPU copies nothing. One on a GPU copies its weights, and level 2 does not.

    This test comes first, because `case` may leave a GPU's steps behind.
    """
    path = make_checkpoint(tmp_path / "a", "qwen3_moe")
    with Rank(path, **SIZES, dtype="float32") as rank:
        monkeypatch.setattr(moeyard_worker.engine.assembly.worker, "available_memory", lambda: 1000)
        rank.worker.check_sleep(1)
        monkeypatch.undo()
    with gpu_steps(), Rank(path, **SIZES, **PLACE) as rank:
        monkeypatch.setattr(moeyard_worker.engine.assembly.worker, "available_memory", lambda: 1000)
        with pytest.raises(ValueError, match=r"rank 0: level 1 copies .* to host memory, which has 1000 B; level 2"):
            rank.worker.check_sleep(1)
        rank.worker.check_sleep(2)


def test_answers_after_sleep_are_those_of_before(case: tuple[dict[str, Any], list[Path]]) -> None:
    options, (a, b) = case
    with Rank(b, **SIZES, **options) as fresh:
        wanted = answers(fresh)
    with Rank(a, **SIZES, **options) as rank:
        first, worker = answers(rank), rank.worker
        for level in (1, 2):
            assert held(rank) > 0
            freed = worker.sleep(level)
            assert held(rank) == 0
            assert freed > 0
            assert worker.sleep(level) == 0, "it sleeps already"
            worker.check_wake()
            assert worker.wake() == freed
            assert worker.wake() == 0
            same(answers(rank), first)
            worker.experts.validate()
        # New weights may come while it sleeps.
        one = worker.sleep(1)
        weights = ServedWeights(version="b", directory=str(b))
        worker.stage_weights(weights)
        worker.use_weights(weights)
        assert worker.wake() >= one
        same(answers(rank), wanted)


def test_rank_without_room_does_not_wake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Rank(make_checkpoint(tmp_path / "a", "qwen3_moe"), **SIZES) as rank:
        rank.worker.sleep(2)
        monkeypatch.setattr(rank.worker._device, "available", lambda: 1000)
        with pytest.raises(ValueError, match=r"rank 0 needs .* to wake and has 1000 B; free memory"):
            rank.worker.check_wake()
        monkeypatch.undo()
        rank.worker.wake()
        assert answers(rank)


@pytest.mark.parametrize("captured", [False, True])
def test_room_to_wake_includes_that_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: bool) -> None:
    """Weights and state alone would fit, and then captured steps, or the first step, would find no memory."""
    with gpu_steps() if captured else nullcontext():
        place = PLACE if captured else {"dtype": "float32"}
        with Rank(make_checkpoint(tmp_path / "a", "qwen3_moe"), **SIZES, **place) as rank:
            worker = rank.worker
            config, model, footprints = worker._spec.config, worker._model, worker._device.footprints
            steps = step_bytes(config, model, footprints)
            steps += sums_bytes(config, model, worker._dtype.itemsize, footprints)
            worker.check_wake()
            freed = worker.sleep(1)
            monkeypatch.setattr(worker._device, "available", lambda: freed + steps - 1)
            with pytest.raises(ValueError, match=r"rank 0 needs .* to wake and has"):
                worker.check_wake()
            monkeypatch.setattr(worker._device, "available", lambda: freed + steps)
            worker.check_wake()
            worker.wake()


def test_rank_that_cannot_sleep_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sleeper, "refusal", lambda *_: "it may not")
    with Rank(make_checkpoint(tmp_path / "a", "qwen3_moe"), **SIZES) as rank:
        with pytest.raises(ValueError, match="rank 0: it may not"):
            rank.worker.check_sleep(1)
        assert answers(rank)


def test_memory_goes_back_to_the_system(tmp_path: Path) -> None:
    """Pages of 64 MiB are written to before."""
    with Rank(make_checkpoint(tmp_path / "a", "qwen3_moe"), **{**SIZES, "kv_memory": 64 << 20}) as rank:
        with torch.inference_mode():
            for state in rank.worker._sleeper.runner.states():
                state.fill_(1)
        before = psutil.Process().memory_info().rss
        freed = rank.worker.sleep(1)
        after = psutil.Process().memory_info().rss
        assert freed > 60 << 20
        assert before - after > 0.9 * freed, f"{freed} bytes were freed, and {before - after} went back"
        rank.worker.wake()
        assert not any(state.any() for state in rank.worker._sleeper.runner.states())
