"""Random weights for a shape: one model for any number of ranks, without reading a file."""

from typing import Any

import pytest
from tests.fleet import ProcessPool, start_fleet

from moeyard_worker.config.engine_config import EngineConfig

PROMPTS = [[(7 * i + j) % 4096 for i in range(5 + 11 * j)] for j in range(4)]


def answers(processes: ProcessPool, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the answers of a fleet with the bundled model's shape, spread over its ranks, and one rank's report."""
    config = EngineConfig(
        model_path=None,
        load_format="dummy",
        shape="moeyard-demo",
        num_layers=3,
        max_batch_tokens=128,
        kv_memory=1 << 22,
        max_model_len=256,
        **options,
    )
    with start_fleet(processes, config) as fleet:
        for i, prompt in enumerate(PROMPTS):
            sampling = {"temperature": 0.0} if i % 2 else {"temperature": 1.0, "seed": i}
            fleet.client.submit(
                i % len(fleet.ranks), f"r{i}", prompt, max_tokens=12, ignore_eos=True, logprobs=2, **sampling
            )
        return [(a.token_ids, a.logprobs) for a in fleet.client.wait()], fleet.reports[0]


@pytest.mark.slow
def test_answers_do_not_depend_on_ranks_or_residency(processes: ProcessPool) -> None:
    alone, report = answers(processes)
    assert report["skipped"] == {}
    assert report["expert_slots"] == report["num_experts"] == 2 * 32
    assert len({tuple(ids) for ids, _ in alone}) == len(PROMPTS)
    assert answers(processes, num_workers=2)[0] == alone
    # A miss draws a cold expert again.
    assert answers(processes, num_workers=2, expert_slots=5)[0] == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_progress_reaches_its_total(processes: ProcessPool, dtype: str) -> None:
    config = EngineConfig(
        model_path=None, load_format="dummy", shape="moeyard-demo", num_layers=2, dtype=dtype, kv_memory=1 << 22
    )
    with start_fleet(processes, config) as fleet:
        ((loaded, total),) = fleet.call("progress")
        assert loaded == total > 0
        assert fleet.reports[0]["dtype"] == dtype
