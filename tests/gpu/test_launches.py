"""Steps that are launched kernel by kernel never make the host wait for the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import MLA, make_checkpoint
from tests.rank import Rank

from moeyard_worker.protocol import SamplingParams

pytestmark = pytest.mark.gpu

FAMILIES: dict[str, dict[str, Any]] = {"qwen3_moe": {}, "deepseek_v3": MLA, "kimi_linear": MLA, "deepseek_v4": {}}


# Torch warns once per process that this mode is new and may miss a synchronization.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_launch_never_synchronizes(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps in flight with prefill and decode rows, greedy, sampled and with log-probabilities."""
    model = make_checkpoint(tmp_path, family, dtype=torch.bfloat16, **FAMILIES[family])
    requests = {
        name: (list(range(1, 1 + length)), SamplingParams(max_tokens=8, ignore_eos=True, **how))
        for name, length, how in (
            ("greedy", 90, {"temperature": 0.0}),
            ("sampled", 30, {"temperature": 1.0, "seed": 3}),
            ("logprobs", 70, {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 0}),
        )
    }
    options: dict[str, Any] = {"page_size": 16, "max_num_seqs": 4, "max_batch_tokens": 128, "max_model_len": 208}
    with Rank(model, device="cuda", enforce_eager=True, **options) as rank:
        # The first run compiles kernels and allocates memory.
        expected, _ = rank.run(requests, max_in_flight=2)
        launch = rank.worker.runner.launch

        def watched(*args: Any, **named: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(*args, **named)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(rank.worker.runner, "launch", watched)
        assert rank.run(requests, max_in_flight=2)[0] == expected
