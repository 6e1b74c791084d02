"""A GPU's rank overwrites its weights where captured steps read them, and then answers as a fresh rank does.

Graphs are played on a CPU (`captured_on_cpu.py`), so the addresses are compared too.
"""

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints import MLA, VOCAB_SIZE, add_drafts, add_v4_drafts, edit_tensors, make_checkpoint, publish_v4
from tests.engine.captured_on_cpu import PLACE, gpu_steps
from tests.engine.test_speculation_cuda import runner, same
from tests.rank import Rank, Reply

from moeyard_worker.config.worker_spec import ServedWeights
from moeyard_worker.layers.overwriting import overwrite, tensors
from moeyard_worker.protocol import SamplingParams

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mla": ("deepseek_v3", MLA, {}),
    "gqa_few_slots": ("qwen3_moe", {}, {"expert_slots": 6}),
    "gqa_files": ("qwen3_moe", {}, {"expert_slots": 6, "expert_host_store": "none"}),
    "gqa_one_copy": ("qwen3_moe", {}, {"expert_slots": 6, "expert_host_store": "missing"}),
    "hybrid_drafts": ("qwen3_5_moe_text", {}, {"speculate": "mtp", "draft_tokens": 2}),
    "kda": ("kimi_linear", MLA, {}),
    "v4": ("deepseek_v4", {}, {}),
    "v4_blocks": ("deepseek_v4", {}, {"speculate": "dspark", "draft_tokens": 5}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Path]]:
    return CASES[request.param][2], checkpoints(tmp_path_factory.mktemp(request.param), request.param)


def checkpoints(root: Path, name: str) -> list[Path]:
    """Write two checkpoints of a case that differ in their weights."""
    family, overrides, options = CASES[name]
    found = [make_checkpoint(root / each, family, seed=seed, **overrides) for seed, each in enumerate("ab")]
    for each in found:
        if options.get("speculate") == "mtp":
            add_drafts(each)
        elif options.get("speculate") == "dspark":
            add_v4_drafts(publish_v4(each), dspark=True)
    return found


def addresses(rank: Rank) -> list[tuple[str, int]]:
    """Return the name and address of each tensor that a captured step may read.

    The source of experts is left out, because its host buffers serve loading only.
    """
    found, experts = runner(rank)._runner, rank.worker.experts
    holders = (found.model, found.speculation, experts)
    return [(name, each.data_ptr()) for name, each in tensors(holders, "rank", without=[id(experts._source)])]


def answers(rank: Rank) -> dict[str, Reply]:
    sampling = {"max_tokens": 12, "temperature": 0.8, "ignore_eos": True, "logprobs": 2}
    prompts = [torch.randint(VOCAB_SIZE, (20 + 30 * i,), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    return rank.run({str(i): (ids.tolist(), SamplingParams(**sampling, seed=i)) for i, ids in enumerate(prompts)})[0]


def load(model: Path, **options: Any) -> Rank:
    return Rank(model, **{**PLACE, **options}, max_num_seqs=4, max_batch_tokens=128, max_model_len=128)


def change(rank: Rank, model: Path) -> None:
    """Stage the weights of a checkpoint, and put them into use as an engine does between two epochs."""
    rank.worker.stage_weights(ServedWeights(version=str(model), directory=str(model)))
    staged = rank.worker._staged
    assert staged is not None
    staged.change()


def test_captured_steps_see_the_new_weights(case: tuple[dict[str, Any], list[Path]]) -> None:
    options, (a, b) = case
    with gpu_steps():
        with load(b, **options) as fresh:
            wanted = answers(fresh)
        with load(a, **options) as rank:
            first, places = answers(rank), addresses(rank)
            assert first != wanted, "both checkpoints answer alike, so this test would prove nothing"
            for model, expected in ((b, wanted), (a, first)):
                change(rank, model)
                moved = {name for name, _ in set(addresses(rank)) ^ set(places)}
                assert not moved, "a captured step would read the old memory"
                same(answers(rank), expected)
                rank.worker.experts.validate()
            assert len(places) > 20, "the model's tensors were not found"


def test_another_form_is_refused_before_a_copy() -> None:
    """Two objects of one structure with one tensor of another dtype: nothing is copied."""
    old = {"one": torch.zeros(3), "two": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=r"dict\.two cannot be overwritten in place: torch.float32 \[2, 2\]"):
        overwrite(old, {"one": torch.ones(3), "two": torch.ones(2, 2, dtype=torch.bfloat16)})
    assert not old["one"].any()
    with pytest.raises(ValueError, match="another structure"):
        overwrite(old, {"one": torch.ones(3)})
    overwrite(old, {"one": torch.ones(3), "two": torch.ones(2, 2)})
    assert old["one"].all()
    assert old["two"].all()


def answers_before_a_refusal(rank: Rank, other: Path, message: str, *, asleep: int) -> dict[str, Reply]:
    """Return the answers of a rank, let it sleep, and check that it refuses other weights with this message."""
    first = answers(rank)
    if asleep:
        rank.worker.sleep(asleep)
    with pytest.raises(ValueError, match=message):
        rank.worker.stage_weights(ServedWeights(version="2", directory=str(other)))
    assert rank.worker._staged is None
    return first


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asleep", [0, 1, 2])
@pytest.mark.parametrize("family", ["v4", "mla"])
def test_weights_of_another_form_are_refused_before_a_change(tmp_path: Path, family: str, asleep: int) -> None:
    """A GPU keeps fp32 matrices in bf16 if that holds their values, and captured steps are made for one of both."""
    name, overrides, _ = CASES[family]
    a, b = (
        make_checkpoint(tmp_path / str(dtype), name, dtype=dtype, **overrides)
        for dtype in (torch.bfloat16, torch.float32)
    )
    shutil.copy(a / "config.json", b)  # it names the dtype of most weights
    with gpu_steps():
        for served, other in ((a, b), (b, a)):
            with load(served, dtype="bfloat16") as rank:
                message = r"_(weight|compress) cannot be overwritten in place: torch\."
                first = answers_before_a_refusal(rank, other, message, asleep=asleep)
                rank.worker.stage_weights(ServedWeights(version="3", directory=str(served)))
                rank.worker.wake()
                same(answers(rank), first)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asleep", [0, 1, 2])
@pytest.mark.parametrize("key", ["model.norm.weight", "model.layers.1.mlp.experts.5.down_proj.weight"])
def test_values_that_are_not_finite_are_refused_before_a_change(tmp_path: Path, key: str, asleep: int) -> None:
    """A GPU has no second copy to go back to, so the first read of the files must find them."""
    good, bad = (make_checkpoint(tmp_path / name, "qwen3_moe", dtype=torch.bfloat16) for name in ("good", "bad"))
    tensor = load_file(bad / "model.safetensors")[key]
    tensor.view(-1)[-1] = float("nan")
    edit_tensors(bad, add={key: tensor})
    with gpu_steps(), load(good, dtype="bfloat16") as rank:
        message = rf"bad/model\.safetensors: {key} holds values that are not finite$"
        first = answers_before_a_refusal(rank, bad, message, asleep=asleep)
        rank.worker.wake()
        same(answers(rank), first)


def test_old_weights_are_freed_at_once(tmp_path: Path) -> None:
    """A CPU's rank holds both weights only until the change. It must not wait for Python's garbage collector."""
    a, b = (make_checkpoint(tmp_path / name, "qwen3_moe", seed=seed) for seed, name in enumerate("ab"))
    gc.disable()
    try:
        with Rank(a) as rank:
            old = weakref.ref(rank.worker.runner.model)  # type: ignore[union-attr]
            slots = weakref.ref(rank.worker.experts._source)
            rank.worker.stage_weights(ServedWeights(version="b", directory=str(b)))
            rank.worker.use_weights(ServedWeights(version="b", directory=str(b)))
            assert (old(), slots()) == (None, None)
    finally:
        gc.enable()
