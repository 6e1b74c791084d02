"""Captures compile no kernel, even with an empty Triton cache, and kernels compiled ahead change no answer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import DEMO, MLA, make_checkpoint

pytestmark = pytest.mark.gpu

# family, fields of its config, options of the rank
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gqa": ("qwen3_moe", {}, {}),
    "gqa-slots": ("qwen3_moe", {}, {"expert_slots": 3}),
    "mla": ("deepseek_v3", MLA, {}),
    "kda": ("kimi_linear", MLA, {}),
    "gdn": ("qwen3_5_moe", {}, {}),
    "drafts": ("demo", {}, {"speculate": "mtp"}),
    "drafts-slots": ("demo", {}, {"speculate": "mtp", "expert_slots": 40}),
}
# A rank in a process that has compiled nothing yet. It prints how many kernels were missing from Triton's cache before
# and during captures, and checks that answers equal those without graphs.
CHILD = """
import json, sys
from collections import Counter
from pathlib import Path
from tests.rank import Rank
from triton import knobs
from moeyard_worker.engine.steps import gpu_runner
from moeyard_worker.protocol import SamplingParams

def within(cls, name):
    wrapped = getattr(cls, name)
    def watched(*args, **named):
        where[0] = "captures"
        try:
            return wrapped(*args, **named)
        finally:
            where[0] = "before"
    setattr(cls, name, watched)

where, missed = ["before"], Counter()
knobs.compilation.listener = lambda *, cache_hit, **_: missed.update([] if cache_hit else where)
within(gpu_runner.StepGraphs, "prepare")
within(gpu_runner.StepSampler, "capture")
model, options = Path(sys.argv[1]), {"device": "cuda", "kv_memory": 16 << 20, "page_size": 16}
options |= {"max_num_seqs": 4, "max_batch_tokens": 256, "max_model_len": 400, **json.loads(sys.argv[2])}
requests = {
    name: (list(range(1, 1 + length)), SamplingParams(max_tokens=8, ignore_eos=True, **how))
    for name, length, how in (
        ("greedy", 200, {"temperature": 0.0, "logprobs": 2}), ("sampled", 30, {"temperature": 1.0, "seed": 3}),
        ("edited", 70, {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 4}),
    )
}
answers = []
for eager in (False, True):
    with Rank(model, enforce_eager=eager, **options) as rank:
        found = dict(missed)
        answers.append(rank.run(requests)[0])
        if not eager:
            print(json.dumps({"before": found.get("before", 0), "captures": found.get("captures", 0)}))
assert answers[0] == answers[1]
"""


@pytest.mark.parametrize("case", CASES)
def test_captures_compile_nothing(case: str, tmp_path: Path) -> None:
    family, fields, options = CASES[case]
    model = DEMO
    if family != "demo":
        model = make_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16, **fields)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, str(model), json.dumps({"dtype": "bfloat16", **options})]
    found = []
    for _ in range(2):
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr[-3000:]
        found.append(json.loads(run.stdout.splitlines()[-1]))
    cold, warm = found
    assert cold["before"] > 20
    assert cold["captures"] == 0
    assert warm == {"before": 0, "captures": 0}
