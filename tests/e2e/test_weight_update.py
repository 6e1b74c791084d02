"""Weights change between two steps, on all ranks, and nothing of the old ones remains.

The reference is a fresh fleet with the same weights. A request that runs during an update has output tokens of both:
those behind the change must be what a fresh fleet computes behind the tokens before it.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.checkpoints import VOCAB_SIZE, add_drafts, edit_config, edit_tensors, make_checkpoint
from tests.fleet import Answer, Fleet, ProcessPool, start_fleet

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.worker_spec import ServedWeights
from moeyard_worker.protocol import Done

# Latent attention with all experts in slots, grouped heads with few slots, layers with a state per sequence.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mla": ("deepseek_v3", {}),
    "gqa": ("qwen3_moe", {"expert_slots": 5}),
    "hybrid_drafts": ("qwen3_5_moe_text", {"speculate": "mtp", "draft_tokens": 2}),
    "compressed": ("deepseek_v4", {"prefill_chunk": 128}),
}
PROMPTS = [np.random.default_rng(seed).integers(2, VOCAB_SIZE, 40 + 31 * seed).tolist() for seed in range(4)]
SAMPLING = {"max_tokens": 24, "temperature": 0.9, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """Return the name of a case and two checkpoints of its family."""
    root = tmp_path_factory.mktemp(request.param)
    family, _ = CASES[request.param]
    found = [make_checkpoint(root / name, family, seed=seed) for seed, name in enumerate("ab")]
    if request.param == "hybrid_drafts":
        for each in found:
            add_drafts(each)
    return request.param, *found


def config_of(model: Path, case: str, **options: Any) -> EngineConfig:
    fields: dict[str, Any] = {"num_workers": 2, "kv_memory": 4 << 20, "prefill_chunk": 64, **CASES[case][1]}
    return EngineConfig(model_path=str(model), **{**fields, **options})


def ask(fleet: Fleet, name: str, **changes: Any) -> None:
    """Submit every prompt, in turn to both ranks."""
    for i, prompt in enumerate(PROMPTS):
        fleet.client.submit(i % 2, f"{name}-{i}", prompt, **{**SAMPLING, "seed": i, **changes})


def answers(fleet: Fleet, name: str) -> list[Answer]:
    return fleet.client.wait(*(f"{name}-{i}" for i in range(len(PROMPTS))))


def bits(answer: Answer) -> tuple[Any, ...]:
    return answer.token_ids, answer.logprobs, answer.prompt_logprobs


def fresh(
    processes: ProcessPool, model: Path, case: str, traces: list[tuple[int, ...]] | None = None, **options: Any
) -> list[Answer]:
    """Return the answers of a new fleet. `traces`: the output tokens with which each answer begins."""
    with start_fleet(processes, config_of(model, case, num_workers=1, **options)) as fleet:
        for i, prompt in enumerate(PROMPTS):
            forced = () if traces is None else traces[i]
            fleet.client.submit(0, f"f-{i}", prompt, **{**SAMPLING, "seed": i, "trace_decode_token_ids": forced})
        return answers(fleet, "f")


@pytest.mark.sampled(0)
def test_a_b_a(processes: ProcessPool, case: tuple[str, Path, Path]) -> None:
    name, a, b = case
    wanted = {path: [bits(each) for each in fresh(processes, path, name)] for path in (a, b)}
    assert wanted[a] != wanted[b], "both checkpoints answer alike, so this test would prove nothing"
    with start_fleet(processes, config_of(a, name)) as fleet:
        fingerprints = [{report["fingerprint"] for report in fleet.reports}]
        for turn, path in enumerate((a, b, a)):
            if turn:
                found = fleet.update(ServedWeights(version=f"v{turn}", directory=str(path)))
                fingerprints.append({each["fingerprint"] for each in found})
            # The second round finds its prompts in the cache.
            for again in range(2):
                ask(fleet, f"{turn}{again}")
                served = answers(fleet, f"{turn}{again}")
                assert [bits(each) for each in served] == wanted[path], f"turn {turn}, round {again}"
                version = f"v{turn}" if turn else "default"
                assert all(each.versions == [(version, 0)] for each in served)
        fleet.client.hello()
        fleet.client.wait_for(lambda: len(fleet.client.snapshots) == 2)
        assert {each.weight_version for each in fleet.client.snapshots.values()} == {"v2"}
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]


def test_gguf_file_replaces_a_gguf_file(processes: ProcessPool, tmp_path: Path) -> None:
    files = pytest.importorskip("tests.gguf_files")
    models = []
    for seed, name in enumerate("ab"):
        source = make_checkpoint(tmp_path / name, "qwen3_moe", seed=seed)
        file = files.write_gguf(source, tmp_path / f"plain-{name}", tmp_path / f"{name}.gguf", lambda _: "BF16")
        edit_config(source, dtype="bfloat16")
        (source / "model.safetensors").unlink()
        models.append((source, file))
    (source, a), (_, b) = models
    wanted = [bits(each) for each in fresh(processes, models[1][0], "gqa", gguf=str(b))]
    with start_fleet(processes, config_of(source, "gqa", gguf=str(a))) as fleet:
        ask(fleet, "a")
        assert [bits(each) for each in answers(fleet, "a")] != wanted, "this test would prove nothing"
        fleet.update(ServedWeights(version="b", directory=str(b)))
        ask(fleet, "b")
        assert [bits(each) for each in answers(fleet, "b")] == wanted


@pytest.mark.sampled(0)
def test_running_requests_go_on_with_the_new_weights(processes: ProcessPool, case: tuple[str, Path, Path]) -> None:
    """Prompts and outputs are under way. Tokens behind the change are those of a fresh fleet with that beginning."""
    name, a, b = case
    with start_fleet(processes, config_of(a, name)) as fleet:
        ask(fleet, "r")
        fleet.client.wait_for(lambda: sum(len(each.token_ids) for each in fleet.client.answers.values()) > 12)
        fleet.update(ServedWeights(version="b", directory=str(b)))
        found = answers(fleet, "r")
    starts = [each.versions[-1][1] if each.versions[-1][0] == "b" else len(each.token_ids) for each in found]
    assert any(0 < start < SAMPLING["max_tokens"] for start in starts), f"no answer has both weights: {starts}"
    before = fresh(processes, a, name)
    behind = fresh(
        processes, b, name, [tuple(each.token_ids[:start]) for each, start in zip(found, starts, strict=True)]
    )
    for i, (each, start) in enumerate(zip(found, starts, strict=True)):
        assert each.token_ids[:start] == before[i].token_ids[:start], f"request {i} before the change at {start}"
        assert each.logprobs[:start] == before[i].logprobs[:start], f"request {i} before the change at {start}"
        assert each.token_ids[start:] == behind[i].token_ids[start:], f"request {i} behind the change at {start}"
        assert each.logprobs[start:] == behind[i].logprobs[start:], f"request {i} behind the change at {start}"
        assert each.prompt_logprobs == (before if start else behind)[i].prompt_logprobs, f"prompt of request {i}"


def check_spans(processes: ProcessPool, case: str, models: dict[str, Path], found: list[Answer]) -> None:
    """Compare each span of the answers with a fresh fleet of its version, which begins with the tokens before it."""
    for version, model in models.items():
        spans = [spans_of(each).get(version, (0, 0)) for each in found]
        begun = [tuple(each.token_ids[:start]) for each, (start, _) in zip(found, spans, strict=True)]
        for each, other, (start, end) in zip(found, fresh(processes, model, case, begun), spans, strict=True):
            assert each.token_ids[start:end] == other.token_ids[start:end], f"{version}, {start} to {end}"
            assert each.logprobs[start:end] == other.logprobs[start:end], f"{version}, {start} to {end}"


def spans_of(answer: Answer) -> dict[str, tuple[int, int]]:
    """Return the span of each version."""
    starts = [(name, start) for i, (name, start) in enumerate(answer.versions) if name not in dict(answer.versions[:i])]
    ends = [*(start for _, start in starts[1:]), len(answer.token_ids)]
    return {name: (start, end) for (name, start), end in zip(starts, ends, strict=True)}


@pytest.mark.sampled(0)
def test_rank_killed_in_the_middle_of_a_change(processes: ProcessPool, case: tuple[str, Path, Path]) -> None:
    """One rank has changed, the other dies before it does. Its next process loads what the fleet changes to."""
    name, a, b = case
    weights = ServedWeights(version="b", directory=str(b))
    with start_fleet(processes, config_of(a, name)) as fleet:
        ask(fleet, "k", prompt_logprobs=None)
        fleet.client.wait_for(lambda: sum(len(each.token_ids) for each in fleet.client.answers.values()) > 12)
        for rank in fleet.ranks:
            rank.call("stage_weights", weights)
        fleet.ranks[0].call("end_epoch", "the test changes the weights")
        losses = [rank.call("wait") for rank in fleet.ranks]
        fleet.ranks[0].call("use_weights", weights)
        fleet.ranks[1].kill()
        fleet.recover([1], losses[:1], weights)
        fleet.client.carry_over([1], to=[1])
        found = answers(fleet, "k")
    assert any(len(spans_of(each)) == 2 for each in found), "no answer has tokens of both"
    check_spans(processes, name, {"default": a, "b": b}, found)


def test_pause(processes: ProcessPool, checkpoints: dict[str, Path]) -> None:
    """A paused rank computes its experts for its peers, and none of its own requests."""
    with start_fleet(processes, config_of(checkpoints["mla"], "mla")) as fleet:
        fleet.ranks[0].call("pause")
        ask(fleet, "p")
        first, paused = ["p-1", "p-3"], ["p-0", "p-2"]
        fleet.client.wait(*first)
        fleet.client.pump(0.2)
        assert [fleet.client.answers[each].token_ids for each in paused] == [[], []]
        fleet.ranks[0].call("resume")
        found = answers(fleet, "p")
    assert [bits(each) for each in found] == [bits(each) for each in fresh(processes, checkpoints["mla"], "mla")]


def test_refused_weights_leave_the_old_ones(
    processes: ProcessPool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Each rank checks everything before it changes a byte. Staged weights that are discarded change nothing."""
    model = checkpoints["mla"]
    cut = Path(shutil.copytree(model, tmp_path / "cut"))
    file = cut / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    other = make_checkpoint(tmp_path / "other", "deepseek_v3", num_hidden_layers=2)
    (gguf := tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused = {
        "truncated": str(cut),
        "describes another model: num_layers is 2": str(other),
        "no such directory": str(tmp_path / "nowhere"),
        "a file, and a checkpoint is a directory of safetensors files$": str(file),
        r"safetensors files; `moeyard dequantize` writes one from a GGUF file$": str(gguf),
    }
    good = ServedWeights(version="good", directory=str(make_checkpoint(tmp_path / "good", "deepseek_v3", seed=7)))
    with start_fleet(processes, config_of(model, "mla")) as fleet:
        ask(fleet, "before")
        wanted = [bits(each) for each in answers(fleet, "before")]
        for said, path in refused.items():
            with pytest.raises(RuntimeError, match=said):
                fleet.ranks[0].call("stage_weights", ServedWeights(version="x", directory=path))
        fleet.ranks[0].call("stage_weights", good)
        fleet.ranks[0].call("discard_weights")
        with pytest.raises(RuntimeError, match="rank 0 has not read version good"):
            fleet.ranks[0].call("use_weights", good)
        ask(fleet, "after")
        assert [bits(each) for each in answers(fleet, "after")] == wanted


EXPERT = "model.layers.1.mlp.experts.{}.down_proj.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("family", "options", "rank", "key"),
    [
        ("deepseek_v3", {}, 0, "model.norm.weight"),
        ("deepseek_v3", {}, 0, "lm_head.weight"),
        ("deepseek_v3", {}, 1, "model.layers.0.self_attn.kv_b_proj.weight"),
        ("deepseek_v3", {}, 0, EXPERT.format(0)),
        ("qwen3_moe", {"expert_slots": 5}, 1, EXPERT.format(7)),
    ],
    ids=["norm", "head", "attention", "expert", "expert_without_slot"],
)
def test_values_that_are_not_finite_are_refused(
    processes: ProcessPool, tmp_path: Path, family: str, options: dict[str, Any], rank: int, key: str, value: float
) -> None:
    """One value in one tensor. A rank checks also the experts that it reads from the files later."""
    good, bad = (make_checkpoint(tmp_path / name, family) for name in ("good", "bad"))
    tensor = load_file(bad / "model.safetensors")[key]
    tensor.view(-1)[-3] = value
    edit_tensors(bad, add={key: tensor})
    with start_fleet(processes, config_of(good, "mla", **options)) as fleet:
        ask(fleet, "before")
        wanted = [bits(each) for each in answers(fleet, "before")]
        said = rf"bad/model\.safetensors: {re.escape(key)} holds values that are not finite$"
        with pytest.raises(RuntimeError, match=said):
            fleet.ranks[rank].call("stage_weights", ServedWeights(version="x", directory=str(bad)))
        ask(fleet, "after")
        assert [bits(each) for each in answers(fleet, "after")] == wanted


def test_finite_weights_whose_logits_are_not_finite_are_named(processes: ProcessPool, tmp_path: Path) -> None:
    """The reader finds nothing, because only the sums overflow."""
    good, bad = (make_checkpoint(tmp_path / name, "deepseek_v3") for name in ("good", "bad"))
    head = load_file(bad / "model.safetensors")["lm_head.weight"]
    edit_tensors(bad, add={"lm_head.weight": head.sign() * 3e38})
    with start_fleet(processes, config_of(good, "mla", num_workers=1)) as fleet:
        ask_one = {**SAMPLING, "max_tokens": 2}
        fleet.client.submit(0, "sound", PROMPTS[0], **ask_one)
        fleet.client.wait("sound")
        fleet.update(ServedWeights(version="huge", directory=str(bad)))
        fleet.client.submit(0, "spoilt", PROMPTS[0], **ask_one)
        (spoilt,) = fleet.client.wait("spoilt")
        assert isinstance(spoilt.end, Done)
        said = r"rank 0: weights huge give logits that are not finite: request spoilt, step \d+"
        assert re.fullmatch(said, spoilt.end.error or "")


def test_ranks_with_other_weights_do_not_meet(
    processes: ProcessPool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A rank that missed an update is refused by name at the meeting, before a step."""
    other = make_checkpoint(tmp_path / "other", "deepseek_v3", seed=7)
    with start_fleet(processes, config_of(checkpoints["mla"], "mla")) as fleet:
        weights = ServedWeights(version="b", directory=str(other))
        fleet.ranks[0].call("stage_weights", weights)
        fleet.ranks[0].call("end_epoch", "the test changes the weights of one rank")
        for rank in fleet.ranks:
            rank.call("wait")
        fleet.ranks[0].call("use_weights", weights)
        met = [rank.call("rebind", 77) for rank in fleet.ranks]
        for rank in fleet.ranks:
            rank.send("connect", [each["mesh"] for each in met])
        for rank in fleet.ranks:
            with pytest.raises(RuntimeError, match=r"weights=(default|b)/"):
                rank.result()
        for rank in fleet.ranks:
            rank.kill()


def test_files_in_shared_memory(processes: ProcessPool, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "deepseek_v3", seed=3, max_shard_size="200KB")
    shards = sorted(other.glob("*.safetensors"))
    assert len(shards) > 1
    folder = Path("/dev/shm") / f"moeyard-test-{os.getpid()}"
    folder.mkdir()
    try:
        files = tuple(str(shutil.copy(shard, folder)) for shard in shards)
        wanted = [bits(each) for each in fresh(processes, other, "mla")]
        with start_fleet(processes, config_of(checkpoints["mla"], "mla")) as fleet:
            with pytest.raises(RuntimeError, match="no tensor"):
                fleet.ranks[0].call("stage_weights", ServedWeights(version="part", files=files[:1]))
            fleet.update(ServedWeights(version="memory", files=files))
            shutil.rmtree(folder)
            ask(fleet, "m")
            assert [bits(each) for each in answers(fleet, "m")] == wanted
    finally:
        shutil.rmtree(folder, ignore_errors=True)
