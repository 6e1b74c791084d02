"""The memory plan of a rank: what it refuses and why, and that the parts never exceed the whole."""

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoints import make_checkpoint

from moeyard_kernels.cpu import footprint
from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.cuda import footprint as cuda_footprint
from moeyard_kernels.types.footprint import Footprints
from moeyard_kernels.types.gate import GateRule
from moeyard_kernels.types.matrix import Matrix
from moeyard_worker.checkpoint.formats.plain import PlainFormat
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_checkpoint
from moeyard_worker.config.engine_config import DTYPE_BYTES, EngineConfig, format_size, parse_size
from moeyard_worker.config.rope_config import RopeConfig
from moeyard_worker.engine.assembly.fitting import Planner, plan_or_suggest, ran_out
from moeyard_worker.engine.memory.host_memory import available_memory, cgroup_available
from moeyard_worker.engine.memory.plan import (
    AUTO_KV_SHARE,
    LEAST_KV_SHARE,
    NCCL_BYTES,
    NCCL_PEER_BYTES,
    MemoryPlan,
    exchange_bytes,
    exchange_shape,
    plan_memory,
    plan_with_fetch,
    prefix_bytes,
    step_bytes,
    sums_bytes,
)
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.exchange.shape import ExchangeShape
from moeyard_worker.exchange.transports.local import LocalExchange
from moeyard_worker.layers.gdn import Gdn
from moeyard_worker.layers.gqa import Gqa
from moeyard_worker.layers.mla import Mla
from moeyard_worker.models.families import load_model_config
from moeyard_worker.models.model_config import GateConfig, ModelConfig
from moeyard_worker.models.shapes import shape_model

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ROPE = RopeConfig(kind="default", dim=64, theta=1e4, interleaved=False)
GQA = Gqa(
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    scale=1.0,
    bias=False,
    qk_norm=None,
    norm_eps=1e-6,
    sliding_window=None,
    rope=ROPE,
)
MLA = Mla(
    num_heads=8, q_lora_rank=None, kv_lora_rank=64, nope_dim=32, rope_dim=16, v_dim=32, scale=1, bias=False, rope=ROPE
)
MODEL = ModelConfig(
    weights=PlainFormat(),
    family="qwen3_moe",
    hidden_size=512,
    num_layers=4,
    vocab_size=1000,
    max_position=4096,
    rms_eps=1e-6,
    tie_word_embeddings=False,
    attention=(GQA,) * 4,
    intermediate_size=1024,
    moe_layers=(0, 1, 2, 3),
    gate=GateConfig(rule=GateRule(top_k=2, scoring="softmax", renormalize=True)),
    num_experts=8,
    moe_intermediate_size=256,
    shared_intermediate_size=0,
    bos_token_id=None,
    eos_token_ids=(),
    dtype="float32",
    num_mtp_layers=0,
)
PAGE_BYTES = 16 * 2 * 2 * 64 * 4 * 4
EXPERT_BYTES = 3 * 512 * 256 * 4


def plan(
    available: int, *, dense: int = 10 * MIB, model: ModelConfig = MODEL, model_path: str = "", **options: Any
) -> MemoryPlan:
    config = EngineConfig(model_path=model_path, **options)
    return planner(resident_bytes=dense)(config=config, model=model, available=available)


def refused(available: int, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is what the tests look at
        plan(available, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_everything_fits() -> None:
    done = plan(8 * GIB)
    assert done.expert_slots == 32
    assert done.num_pages == 64 * 4096 // 16, "64 sequences of full length"
    assert done.max_model_len == 4096
    assert done.reserve.margin == 8 * GIB // 20
    assert done.reserve.exchange == 0, "a single worker exchanges nothing"


def test_slots_and_length_shrink_to_fit() -> None:
    done = plan(120 * MIB)
    assert 0 < done.expert_slots < 32
    assert done.max_model_len == done.num_pages * 16 < 4096


def planner(**given: Any) -> Planner:
    """Return `plan_memory` with the arguments that describe the model."""
    usual = {"model": MODEL, "footprints": footprint, "resident_bytes": 10 * MIB, "dtype": "float32"}
    return partial(plan_memory, **{**usual, "num_local_experts": 32, **given})


def refused_with_ways(plan: Planner, config: EngineConfig, available: int) -> tuple[str, list[dict[str, int]]]:
    """Return the error, and the changes of the config that would fit according to it."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is what the tests look at
        plan_or_suggest(plan, config, available)
    text = str(caught.value)
    assert "\n" not in text
    return text, changes(text)


def changes(text: str) -> list[dict[str, int]]:
    """Parse "..; would fit: --kv-memory 3MiB --expert-slots 4 or --max-num-seqs 5"."""
    _, found, said = text.partition("; would fit: ")
    ways = [way.split() for way in said.split(" or ")] if found else []
    return [
        {
            flag.removeprefix("--").replace("-", "_"): parse_size(value)
            for flag, value in zip(way[::2], way[1::2], strict=True)
        }
        for way in ways
    ]


def test_error_of_dense_weights_suggests_a_smaller_step() -> None:
    """The suggestion is the largest step, not a row less. Logits of fewer sequences would not free enough."""
    config, available = EngineConfig(model_path="", max_batch_tokens=4096), 200 * MIB
    text, found = refused_with_ways(planner(resident_bytes=120 * MIB), config, available)
    assert text.startswith("the dense weights need 120 MiB beside a reserve of")
    [way] = found
    rows = way["max_batch_tokens"]
    assert 64 <= rows < 4096
    plan = partial(planner(resident_bytes=120 * MIB), available=available)
    plan(config=replace(config, **way))
    more = {**way, "max_batch_tokens": rows + 1}
    with pytest.raises(ValueError, match="need"):
        plan(config=replace(config, **more))


def test_error_of_logits_suggests_fewer_sequences() -> None:
    model = replace(MODEL, vocab_size=200_000)
    config, available = EngineConfig(model_path="", max_num_seqs=256), 700 * MIB
    plan = partial(planner(), model=model)
    _, found = refused_with_ways(plan, config, available)
    [way] = [way for way in found if "max_num_seqs" in way]
    assert 1 <= way["max_num_seqs"] < 256
    done = plan(config=replace(config, **way), available=available)
    assert done.expert_slots == way.get("expert_slots", 32)
    with pytest.raises(ValueError, match="need"):
        plan(config=replace(config, max_num_seqs=way["max_num_seqs"] + 1), available=available)


def test_error_of_kv_memory_suggests_a_size_that_fits() -> None:
    config = EngineConfig(model_path="", kv_memory=2 * GIB)
    text, found = refused_with_ways(planner(), config, GIB)
    assert text.startswith("--kv-memory 2 GiB does not fit")
    [way] = [way for way in found if "kv_memory" in way]
    done = planner()(config=replace(config, **way), available=GIB)
    assert (done.expert_slots, done.stream_slots, len(way)) == (32, 0, 1), "all experts have slots"
    more = replace(config, kv_memory=way["kv_memory"] + 2 * MIB)
    assert planner()(config=more, available=GIB).expert_slots < 32
    # 1000 experts do not all fit.
    plan = planner(num_local_experts=1000)
    _, found = refused_with_ways(plan, config, GIB)
    [way] = [way for way in found if "kv_memory" in way]
    done = plan(config=replace(config, **way), available=GIB)
    assert (done.expert_slots, done.stream_slots) == (way["expert_slots"], 1)
    with pytest.raises(ValueError, match="expert"):
        plan(config=replace(config, kv_memory=way["kv_memory"] + 2 * MIB), available=GIB)


def test_errors_that_no_flag_can_fix_have_no_suggestion() -> None:
    """Dense weights too large by themselves, and errors that are not about memory, have no suggestion."""
    assert refused_with_ways(planner(resident_bytes=2 * GIB), EngineConfig(model_path=""), GIB)[1] == []
    text, found = refused_with_ways(planner(), EngineConfig(model_path="", max_model_len=5000), GIB)
    assert (text, found) == ("--max-model-len 5000 exceeds the model's 4096", [])


def test_small_kv_memory_is_suggested_in_kib() -> None:
    reserve = planner()(config=EngineConfig(model_path=""), available=GIB).reserve.total
    small = planner(resident_bytes=GIB - reserve - 8 * MIB)
    _, [way, *_] = refused_with_ways(small, EngineConfig(model_path="", kv_memory=16 * MIB), GIB)
    assert way["kv_memory"] % KIB == 0
    assert 2 * PAGE_BYTES <= way["kv_memory"] < 8 * MIB


@pytest.mark.parametrize("kv_memory", [None, 256 * MIB])
@pytest.mark.parametrize("taken", [0, 300 * MIB])
def test_out_of_memory_error_suggests_a_smaller_plan(kv_memory: int | None, taken: int) -> None:
    """The error names pages and slots, because both grow into free memory. The suggestion leaves the margin."""
    config, available = EngineConfig(model_path="", kv_memory=kv_memory), GIB
    planned = planner(num_local_experts=1000)(config=config, available=available)
    text = ran_out(
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors ..."),
        planner(num_local_experts=1000),
        config,
        planned=planned,
        doing="capturing steps",
        now=available - taken,
    )
    assert text.startswith("cpu ran out of memory while capturing steps: CUDA error: out of memory; planned of 1 GiB")
    assert "\n" not in text
    [way, *_] = changes(text)
    assert set(way) == {"kv_memory", "expert_slots"}
    again = planner(num_local_experts=1000)(config=replace(config, **way), available=available)
    sizes = {"page_bytes": PAGE_BYTES, "expert_bytes": EXPERT_BYTES}
    least = max(taken, planned.reserve.margin)
    held = again.held_bytes(**sizes) - again.reserve.margin + again.prefix_bytes
    assert held <= available - least - int((available - least) * 0.05)
    assert held > 0.95 * (available - least) - int((available - least) * 0.05) - 64 * MIB, "little memory stays unused"


def test_weights_must_leave_room_for_the_reserve() -> None:
    reserve = plan(GIB, dense=MIB).reserve
    plan(GIB, dense=GIB - reserve.total - 64 * MIB)
    assert str(reserve) in refused(GIB, dense=GIB - reserve.total)


def test_kv_memory_does_not_fit() -> None:
    text = refused(GIB, kv_memory=2 * GIB)
    free = GIB - 10 * MIB - plan(GIB).reserve.total
    assert text.startswith(f"--kv-memory 2 GiB does not fit: this worker has {format_size(free)} of free memory")
    assert "a reserve of" in text
    assert text.endswith("lower --kv-memory")


def test_kv_memory_leaves_no_room_for_its_longest_sequence() -> None:
    """The pages fit without the attention's workspace."""
    free = GIB - 10 * MIB - plan(GIB).reserve.total
    needed = 4096 * prefix_bytes(MODEL, 4, footprint)
    kv = (free - needed) // PAGE_BYTES * PAGE_BYTES
    text = refused(GIB, kv_memory=kv + PAGE_BYTES)
    assert f"attention over 4096 tokens takes {format_size(needed)}" in text
    assert "expert" in refused(GIB, kv_memory=kv)
    assert plan(GIB, kv_memory=kv - 2 * EXPERT_BYTES).expert_slots == 1


def test_too_few_pages() -> None:
    text = refused(8 * GIB, kv_memory=2 * PAGE_BYTES - 1)
    assert "holds 1 pages of 64 KiB, at least 2" in text
    assert "raise --kv-memory" in text
    assert plan(8 * GIB, kv_memory=2 * PAGE_BYTES).num_pages == 2
    assert plan(8 * GIB, kv_memory=2 * PAGE_BYTES).max_model_len == 32


def test_max_model_len_needs_more_pages() -> None:
    text = refused(8 * GIB, max_model_len=100, kv_memory=6 * PAGE_BYTES)
    assert "--max-model-len 100 needs 7 KV pages, memory holds 6" in text
    assert plan(8 * GIB, max_model_len=100, kv_memory=7 * PAGE_BYTES).max_model_len == 100


def test_nccl_memory_is_reserved() -> None:
    """NCCL needs its own memory and tensors for results. A single rank has no peer channels."""
    gpus: dict[str, Any] = {"device": "cuda", "num_workers": 4}
    nccl, nvlink = (plan(64 * GIB, exchange=kind, **gpus).reserve for kind in ("nccl", "nvlink"))
    assert nccl.exchange == NCCL_BYTES + 3 * NCCL_PEER_BYTES
    results = EngineConfig(model_path="").max_batch_tokens * 4 * MODEL.top_k * MODEL.hidden_size
    assert nccl.workspace - nvlink.workspace > 4 * results, "fp32 results in addition"
    assert plan(64 * GIB, exchange="nccl", device="cuda").reserve.exchange == 0


def test_expert_memory_does_not_fit() -> None:
    text = refused(GIB, expert_memory=GIB)
    assert text.startswith("--expert-memory 1 GiB is more than the ")
    assert f"{plan(GIB).reserve})" in text


def test_expert_memory_below_one_expert() -> None:
    text = refused(GIB, expert_memory=2 * EXPERT_BYTES - 1)
    assert "needs at least one expert of 1.5 MiB and 1 more for prompts, 3 MiB, but --expert-memory gives it" in text
    assert "reserve" not in text, "the reserve is not the reason"
    assert plan(GIB, expert_memory=2 * EXPERT_BYTES).expert_slots == 1


def test_expert_slots_do_not_fit() -> None:
    text = refused(120 * MIB, expert_slots=32, kv_memory=PAGE_BYTES * 256)
    assert text.startswith("32 expert slots need 48 MiB, but this worker has ")
    assert "lower --expert-slots" in text
    assert "beside 16 MiB of KV and a reserve of" in text


def test_no_room_for_one_expert() -> None:
    reserve = plan(GIB).reserve.total
    text = refused(GIB, dense=GIB - reserve - 300 * KIB, kv_memory=2 * PAGE_BYTES)
    assert "needs at least one expert of 1.5 MiB and 1 more for prompts, 3 MiB, but this worker has left " in text
    assert "a reserve of" in text


def test_kv_of_a_gpu_gets_what_is_left_beside_all_experts() -> None:
    """Nothing else on the device could use it. On a CPU other processes can."""
    config = EngineConfig(model_path="")
    of_cpu, of_gpu = (
        planner(footprints=backend)(config=config, available=available)
        for backend, available in ((footprint, GIB), (cuda_footprint, 2 * GIB))
    )
    assert of_cpu.expert_slots == of_gpu.expert_slots == 32
    for done, backend in ((of_cpu, footprint), (of_gpu, cuda_footprint)):
        free = done.available - done.reserve.total - 10 * MIB
        kv = done.num_pages * PAGE_BYTES + done.max_model_len * prefix_bytes(MODEL, 4, backend)
        most = free - 32 * EXPERT_BYTES if backend is cuda_footprint else free * AUTO_KV_SHARE
        assert most - 2 * PAGE_BYTES <= kv <= most


def test_kv_shrinks_if_all_experts_then_fit() -> None:
    """KV gets a quarter of free memory, or the rest beside all experts if that is at least a sixteenth."""
    overhead = GIB - sum(free_of(GIB))
    all_experts = 32 * EXPERT_BYTES
    found = {}
    for spare in (0.5, 0.3, 0.2, 0.1, 0.05, 0.01):
        available = int((all_experts / (1 - spare) + overhead - GIB * 0.05) / 0.95)
        done = plan(available)
        found[spare] = done.expert_slots
        [free] = free_of(available)
        kv = done.num_pages * PAGE_BYTES + done.max_model_len * prefix_bytes(MODEL, 4, footprint)
        fits = free - all_experts >= free * LEAST_KV_SHARE
        assert kv <= (max(0, free - all_experts) if fits and free - all_experts < free / 4 else free * AUTO_KV_SHARE)
        assert (done.expert_slots == 32) == fits, (spare, done)
        assert any(("all experts fit beside it" if spare > 0.25 else "all experts") in each for each in done.reasons)
    assert found[0.1] == 32 > found[0.05] > 16
    # The user's number of experts does not change KV.
    assert "as their flag says" in plan(GIB, expert_slots=3).reasons[0]


def free_of(available: int) -> tuple[int]:
    """Return the bytes that `plan` divides."""
    return (available - 10 * MIB - plan(4 * GIB).reserve.workspace - int(available * 0.05),)


LINEAR = Gdn(num_k_heads=2, num_v_heads=4, k_dim=64, v_dim=64, conv_size=4, norm_eps=1e-6, by_key_head=True)
HYBRID = replace(MODEL, attention=(LINEAR, LINEAR, LINEAR, GQA))
STATE_BYTES = 3 * (4 * 64 * 64 * 4 + 3 * 512 * 4)


def test_state_per_sequence_is_counted_first() -> None:
    """State slots of all sequences and snapshots are resident like dense weights, and the log has their size."""
    slots = STATE_BYTES
    done = plan(8 * GIB, model=HYBRID, max_num_seqs=16)
    assert done.num_snapshots == 4 * 16, "more would have no use"
    assert done.resident_bytes == 10 * MIB + (16 + 64) * slots
    assert f"state of 16 sequences, {format_size(16 * slots)}; 64 snapshots of it" in str(done)
    off = plan(8 * GIB, model=HYBRID, prefix_caching=False)
    assert off.num_snapshots == 0
    assert "snapshots" not in str(off)
    assert "state of" not in str(plan(8 * GIB))
    text = refused(120 * MIB, model=HYBRID, max_num_seqs=500)
    assert f"the state of 500 sequences {format_size(500 * slots)} beside" in text
    assert "lower --max-num-seqs or --max-batch-tokens" in text


def test_state_of_drafts_is_counted() -> None:
    """Each row of a sequence that a step may verify has a slot. A snapshot is one state."""
    drafting: dict[str, Any] = {"model": HYBRID, "speculate": "mtp", "draft_tokens": 2}
    done = plan(8 * GIB, max_num_seqs=16, **drafting)
    assert done.resident_bytes == 10 * MIB + (3 * 16 + 64) * STATE_BYTES
    assert f"state of 16 sequences, behind each of 3 rows, {format_size(48 * STATE_BYTES)}; 64 snapshots" in str(done)
    text = refused(120 * MIB, max_num_seqs=150, **drafting)
    assert "lower --max-num-seqs, --draft-tokens or --max-batch-tokens" in text


def test_blocks_of_drafts_are_counted() -> None:
    """Partial sums of a block's five rows, if fewer rows verify. Drafts have logits beside those of verified rows."""
    model = shape_model("DeepSeek-V4-Flash-0731", 6).with_drafts()
    fields: dict[str, Any] = {"device": "cuda", "max_num_seqs": 2, "max_model_len": 4096, "speculate": "dspark"}
    configs = [EngineConfig(model_path="", **fields, draft_tokens=drafts) for drafts in range(1, 6)]
    sums = [sums_bytes(each, model, 2, cuda_footprint) for each in configs]
    assert sums[0] == sums[3] < sums[4]
    steps = [step_bytes(each, model, cuda_footprint) for each in configs]
    logits = 2 * model.vocab_size * 4 * (2 + 2 + 2) * cuda_footprint.ALLOCATED
    assert [b - a for a, b in itertools.pairwise(steps)] == [pytest.approx(logits, rel=1e-6)] * 4


def test_snapshots_are_part_of_kv_memory() -> None:
    page, kv = PAGE_BYTES // 4, 64 * MIB
    done = plan(8 * GIB, model=HYBRID, kv_memory=kv)
    assert done.num_snapshots == 32 * MIB // STATE_BYTES
    assert done.num_pages == (kv - done.num_snapshots * STATE_BYTES) // page
    asked = plan(8 * GIB, model=HYBRID, kv_memory=kv, snapshot_memory=STATE_BYTES * 3 + 1)
    assert (asked.num_snapshots, asked.num_pages) == (3, (kv - 3 * STATE_BYTES) // page)
    # A requested length has priority over the default share of snapshots.
    room = 4096 // 16 * page + 2 * STATE_BYTES
    long = plan(8 * GIB, model=HYBRID, kv_memory=room, max_model_len=4096)
    assert long.max_model_len == 4096
    assert long.num_snapshots == 2, "attention uses other memory"
    none = plan(8 * GIB, model=HYBRID, kv_memory=STATE_BYTES)
    assert none.num_snapshots == 0
    assert "prefixes are not reused: there is no snapshot" in str(none)


def test_snapshot_memory_that_does_not_fit() -> None:
    assert "here no state is kept per sequence" in refused(8 * GIB, snapshot_memory=MIB)
    for kv_memory in (None, 64 * MIB):
        text = refused(8 * GIB, model=HYBRID, kv_memory=kv_memory, snapshot_memory=64 * GIB)
        taken = format_size(64 * GIB // STATE_BYTES * STATE_BYTES)
        assert f"KV memory holds 0 pages of {format_size(PAGE_BYTES // 4)} beside {taken} of snapshots" in text
        assert "raise --kv-memory or lower --snapshot-memory" in text
    text = refused(8 * GIB, model=HYBRID, snapshot_memory=STATE_BYTES - 1)
    assert f"holds no snapshot: each takes {format_size(STATE_BYTES)}" in text
    # The message names the flag, because the field's name means its opposite.
    with pytest.raises(ValueError, match="snapshot_memory has no use with --no-prefix-caching") as caught:
        EngineConfig(model_path="", snapshot_memory=MIB, prefix_caching=False)
    assert "prefix_caching" not in str(caught.value)


def test_error_of_kv_memory_includes_snapshots() -> None:
    """Snapshots are part of the KV memory, so the free memory in the error is for both."""
    asked: dict[str, Any] = {"model": HYBRID, "kv_memory": 100 * GIB, "max_num_seqs": 512}
    texts = [refused(8 * GIB, prefix_caching=on, **asked).partition(" of free memory")[0] for on in (True, False)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("--kv-memory 100 GiB does not fit: this worker has ")


def test_experts_without_slots_are_in_host_memory() -> None:
    """A GPU reads experts without a slot from pinned host memory, and prompts stream through their own slots."""
    model = replace(MODEL, num_experts=64)
    sizes: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "resident_bytes": MIB,
        "footprints": cuda_footprint,
        "num_local_experts": 256,
        "available": 8 * GIB,
    }
    whole = plan_memory(config=EngineConfig(model_path=""), **sizes, host_available=MIB)
    assert (whole.expert_slots, whole.stream_slots, whole.host_bytes) == (256, 0, 0)
    config = EngineConfig(model_path="", expert_slots=100)
    done = plan_memory(config=config, **sizes, host_available=GIB)
    assert (done.expert_slots, done.stream_slots) == (100, cuda_footprint.STREAM_SLOTS)
    assert (done.host_bytes, done.host_store) == (256 * EXPERT_BYTES, "all")
    assert "100 of 256 experts in slots, 222 MiB, and all in 384 MiB of pinned host memory" in done.reasons
    # Without memory for all, host memory holds one copy of each expert that has no slot.
    few = plan_memory(config=config, **sizes, host_available=390 * MIB)
    assert (few.host_bytes, few.host_store) == (156 * EXPERT_BYTES, "missing")
    assert "100 of 256 experts in slots, 222 MiB, and the others in 234 MiB of pinned host memory" in few.reasons
    asked = replace(config, expert_host_store="missing")
    assert plan_memory(config=asked, **sizes, host_available=GIB).host_bytes == 156 * EXPERT_BYTES
    # Without memory for these, a rank alone reads them from the files. Several ranks need the flag.
    for options in ({}, {"expert_host_store": "none", "num_workers": 2}):
        none = plan_memory(config=replace(config, **cast(Any, options)), **sizes, host_available=240 * MIB)
        assert (none.host_bytes, none.host_store) == (0, "none")
        assert "100 of 256 experts in slots, 222 MiB, and the others in the checkpoint's files" in none.reasons
    for options in ({"expert_host_store": "missing"}, {"num_workers": 2}):
        with pytest.raises(ValueError, match=r"100 of 256 .* the others need 234 MiB .*, but this host has 240 .*none"):
            plan_memory(config=replace(config, **cast(Any, options)), **sizes, host_available=240 * MIB)
    for more in ({"expert_host_store": "all"}, {"expert_fetch": "shared"}):
        with pytest.raises(ValueError, match=r"100 of 256 experts .* all need 384 MiB .*, but this host has 390 MiB"):
            plan_memory(config=replace(config, **cast(Any, more)), **sizes, host_available=390 * MIB)
    memory = EngineConfig(model_path="", expert_memory=(100 + cuda_footprint.STREAM_SLOTS) * EXPERT_BYTES)
    assert plan_memory(config=memory, **sizes, host_available=GIB).expert_slots == 100


def test_shared_fetch_reserves_its_buffer_only_if_ranks_miss() -> None:
    """The buffer has 8 experts and one flag per 128 KiB. Without misses or shared reads there is none."""
    model = replace(MODEL, num_experts=64)
    sizes: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "resident_bytes": MIB,
        "footprints": cuda_footprint,
        "num_local_experts": 128,
        "available": 8 * GIB,
        "host_available": GIB,
    }
    config = EngineConfig(model_path="", device="cuda", num_workers=2, exchange="nvlink", dtype="float32")
    few = replace(config, expert_slots=60)
    rows = plan_memory(config=few, **sizes).reserve.exchange
    assert rows == exchange_bytes(config, model)
    assert plan_with_fetch(config=config, **sizes).reserve.exchange == rows
    assert plan_with_fetch(config=replace(few, expert_fetch="alone"), **sizes) == plan_memory(config=few, **sizes)
    for fetch in ("auto", "shared"):
        done = plan_with_fetch(config=replace(few, expert_fetch=fetch), **sizes)
        assert done.expert_slots == 60
        assert 0 <= done.reserve.exchange - rows - 8 * EXPERT_BYTES <= 2048


def test_tokenizer_of_grammars_is_reserved_on_its_device() -> None:
    assert plan(GIB).reserve.grammars == 0, "a random model reads no tokenizer"
    assert plan(GIB, model_path="/a/checkpoint").reserve.grammars == 1000 * KIB
    sizes: dict[str, Any] = {
        "model": replace(MODEL, vocab_size=151_936),
        "dtype": "float32",
        "resident_bytes": MIB,
        "footprints": cuda_footprint,
        "num_local_experts": 32,
        "available": 8 * GIB,
        "host_available": 150 * MIB,
    }
    options: dict[str, Any] = {"expert_slots": 8, "expert_host_store": "all"}
    assert plan_memory(config=EngineConfig(model_path="", **options), **sizes).reserve.grammars == 0
    with pytest.raises(ValueError, match=r"8 of 32 experts .* 150 MiB for this worker"):
        plan_memory(config=EngineConfig(model_path="/a/checkpoint", **options), **sizes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exchange_slab_is_reserved_once_for_several_ranks(dtype: str) -> None:
    config = EngineConfig(model_path="", num_workers=2, max_batch_tokens=100, dtype=dtype)
    shape = ExchangeShape(num_experts=8, top_k=2, hidden=512, dtype=dtype, max_tokens=100)
    assert exchange_shape(config, MODEL) == shape
    plan = partial(planner(num_local_experts=16), available=GIB)
    reserved = {
        (ranks, exchange): plan(config=replace(config, num_workers=ranks, exchange=exchange)).reserve
        for ranks, exchange in ((1, "auto"), (1, "local"), (1, "zmq"), (2, "auto"))
    }
    assert [r.exchange for r in reserved.values()] == [0, 0, shape.slab_bytes, shape.slab_bytes]
    after = plan(config=config, slab_allocated=True)
    assert after.reserve == replace(reserved[2, "auto"], exchange=0)


@given(
    config=st.builds(
        EngineConfig,
        model_path=st.just(""),
        num_workers=st.integers(1, 4),
        max_batch_tokens=st.integers(64, 2048),
        max_model_len=st.none() | st.integers(1, 4096),
        kv_memory=st.none() | st.integers(1, GIB),
        expert_slots=st.none() | st.integers(1, 64),
        page_size=st.sampled_from((1, 16, 64)),
    ),
    attention=st.sampled_from((GQA, MLA)),
    dtype=st.sampled_from(("bfloat16", "float32")),
    dense=st.integers(1, GIB),
    num_experts=st.integers(1, 64),
    available=st.integers(1, 4 * GIB) | st.integers(60 * GIB, 140 * GIB),
    backend=st.sampled_from((footprint, cuda_footprint)),
)
def test_parts_never_exceed_available_memory(
    config: EngineConfig,
    attention: Gqa | Mla,
    dtype: str,
    dense: int,
    num_experts: int,
    available: int,
    backend: Footprints,
) -> None:
    model = replace(MODEL, attention=(attention,) * 4)
    plan = planner(resident_bytes=dense, dtype=dtype, num_local_experts=num_experts, footprints=backend)
    try:
        done = plan(config=config, model=model, available=available)
    except ValueError:
        return
    free = available - dense - done.reserve.total
    kv = done.num_pages * config.page_size * model.state_spec(DTYPE_BYTES[dtype]).bytes_per_token
    prefix = done.max_model_len * prefix_bytes(model, DTYPE_BYTES[dtype], backend)
    slots = done.expert_slots + done.stream_slots
    assert done.stream_slots == (backend.STREAM_SLOTS if done.expert_slots < num_experts else 0)
    assert kv + prefix + slots * model.expert_form(dtype).blob_bytes <= free
    assert done.reserve.workspace == step_bytes(config, model, backend)
    most = 3 * GIB if backend.HOST_EXPERTS else available
    assert done.reserve.margin == min(int(available * 0.05), most)
    assert 1 <= done.expert_slots <= num_experts
    assert done.max_model_len <= done.num_pages * config.page_size
    if config.kv_memory is None:
        rest = free - num_experts * model.expert_form(dtype).blob_bytes
        fills = backend.HOST_EXPERTS and config.expert_slots is None
        assert kv + prefix <= max(rest if fills else 0, free * AUTO_KV_SHARE)
    else:
        assert kv <= config.kv_memory


def held_bytes(root: object) -> int:
    """Return the bytes of all tensors that are reachable from our objects. Shared storage counts once."""
    storages: dict[object, int] = {}
    seen: set[int] = set()
    stack = [root]
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            # Weights packed for the kernels have no storage to inspect.
            key = id(each) if each.is_mkldnn else each.untyped_storage().data_ptr()
            storages[key] = each.numel() * each.dtype.itemsize if each.is_mkldnn else each.untyped_storage().nbytes()
        elif isinstance(each, dict):
            stack.extend(each.values())
        elif isinstance(each, list | tuple):
            stack.extend(each)
        elif isinstance(each, Matrix):
            stack.extend(each.arrays)
        elif type(each).__module__.startswith(("moeyard_worker", "moeyard_kernels")):
            stack.extend(vars(each).values() if hasattr(each, "__dict__") else ())
            names = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
            stack.extend(getattr(each, name, None) for name in names)
    return sum(storages.values())


class NoExperts:
    """The experts of a runner that only loads."""

    defers_choices = joins_shared = all_resident = False

    def run(self, layer: int, dispatched: object) -> torch.Tensor:
        raise AssertionError


ODD = {"kv_lora_rank": 40, "qk_nope_head_dim": 20, "v_head_dim": 24}
PARTLY_ODD = {"kv_lora_rank": 40, "qk_nope_head_dim": 16, "v_head_dim": 16}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v3", {"attention_bias": True, "q_lora_rank": None}),
        ("deepseek_v2", ODD),
        ("deepseek_v2", PARTLY_ODD),
        ("qwen3_moe", {"attention_bias": True}),
        ("qwen3_next", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
        ("kimi_linear", {}),
        ("mixtral", {"tie_word_embeddings": True}),
        ("olmoe", {}),
        ("deepseek_v4", {}),
    ],
    ids=["deepseek_v3", "bias", "odd", "partly_odd", "qwen3_moe", "qwen3_next", "kimi", "mixtral_tied", "olmoe", "v4"],
)
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["from_fp32", "from_bf16"])
def test_resident_bytes_equal_those_of_a_runner(
    tmp_path: Path, family: str, overrides: dict[str, Any], served: torch.dtype, stored: torch.dtype
) -> None:
    make_checkpoint(tmp_path, family, dtype=stored, **overrides)
    model = load_model_config(tmp_path)
    checkpoint = open_checkpoint(tmp_path, model)
    backend = CpuBackend(page_size=16)
    runner = Runner(
        checkpoint.spec,
        load=CheckpointWeights(checkpoint, backend=backend, dtype=served).load,
        backend=backend,
        exchange=LocalExchange(),
        experts=NoExperts(),
        dtype=served,
        num_pages=2,
        num_state_slots=3,
    )
    state = model.state_spec(served.itemsize)
    pool = 2 * 16 * state.bytes_per_token + 3 * state.bytes_per_sequence
    assert held_bytes(runner) == checkpoint.resident_bytes(str(served).removeprefix("torch."), footprint) + pool


# The peak of one step, measured in its own process after a first step that warms up all libraries.
_PEAK = """
import re, sys
from pathlib import Path
from moeyard_worker.config.cpu_config import set_cpu_environment
set_cpu_environment()
import torch
from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_checkpoint
from moeyard_worker.exchange.transports.local import LocalExchange
from moeyard_worker.experts.cache import ExpertCache
from moeyard_worker.models.families import load_model_config
from moeyard_worker.scheduling.step import Chunk, Step
from moeyard_worker.engine.steps.runner import Runner
torch.set_num_threads(1)
directory, dtype = sys.argv[1], getattr(torch, sys.argv[2])
model = load_model_config(directory)
checkpoint = open_checkpoint(directory, model)
backend = CpuBackend(page_size=16)
weights = CheckpointWeights(checkpoint, backend=backend, dtype=dtype)
experts = ExpertCache(
    backend=backend, source=weights, layers=model.moe_layers, experts=range(8), form=model.expert_form(sys.argv[2]),
    num_slots=99,
)
experts.preload()
runner = Runner(
    checkpoint.spec, load=weights.load, backend=backend,
    exchange=LocalExchange(), experts=experts, dtype=dtype, num_pages=256, num_state_slots=1,
)
def step(start, count):
    tokens = tuple(i % 1000 for i in range(count))
    pages = tuple(range(256))
    chunk = Chunk(
        key=(b"", "a"), start=start, token_ids=tokens, pages=pages, state_slot=0, prompt=True, num_sampled=1
    )
    return runner.forward(Step(prefill=(chunk,)))
def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
step(0, 16)
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = status("VmRSS")
step(4096 - 512, 512)
print(status("VmHWM") - before)
"""


@pytest.mark.sampled(0)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4", "qwen3_moe", "qwen3_next", "olmoe"])
def test_step_stays_within_its_estimate(tmp_path: Path, family: str, dtype: str) -> None:
    """A chunk of 512 rows at the end of 4096 positions. The estimate is less than three times the peak.

    It counts fp32, so in bf16 it is less than four times the peak. Without AVX-512 it is 3.1 to 3.5 times.
    """
    sizes = {
        "deepseek_v3": {
            **{"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256},
            **{"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
        },
        "deepseek_v4": {
            **{"hidden_size": 512, "moe_intermediate_size": 256, "head_dim": 128, "num_key_value_heads": 1},
            **{"o_lora_rank": 128, "q_lora_rank": 128, "num_attention_heads": 32, "index_n_heads": 16},
            **{"index_head_dim": 64, "mlp_layer_types": None},
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "rope_scaling": None,
        },
        "qwen3_moe": {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256, "head_dim": 128},
        # Narrow heads keep the prefix of full attention smaller than the memory of linear attention.
        "qwen3_next": {
            **{"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256, "head_dim": 16},
            **{"linear_num_key_heads": 16, "linear_num_value_heads": 64, "linear_key_head_dim": 128},
            **{"linear_value_head_dim": 128, "layer_types": ["linear_attention", "full_attention"]},
        },
        "olmoe": {"hidden_size": 1024, "intermediate_size": 256},
    }[family]
    common = {"vocab_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16}
    make_checkpoint(tmp_path, family, **{**common, "max_position_embeddings": 4096, **sizes})
    model = load_model_config(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path), dtype],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    peak = int(run.stdout)
    config = EngineConfig(model_path="", max_batch_tokens=512)
    estimate = step_bytes(config, model, footprint) + 4096 * prefix_bytes(
        model, 4 if dtype == "float32" else 2, footprint
    )
    assert estimate / (3 if dtype == "float32" else 4) < peak < estimate, (peak / MIB, estimate / MIB)


def group(root: Path, path: str, *, limit: str, current: int = 0, inactive: int = 0, active: int = 0) -> None:
    directory = root / path
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{current}\n")
    stat = f"anon 1\nfile {inactive + active}\ninactive_file {inactive}\nactive_file {active}\n"
    (directory / "memory.stat").write_text(stat)


def test_no_control_group(tmp_path: Path) -> None:
    assert cgroup_available(tmp_path / "none", "") is None
    assert cgroup_available(tmp_path, "4:memory:/a\n0::/\n") is None


def test_group_of_a_container(tmp_path: Path) -> None:
    """A container sees its own group as the root."""
    group(tmp_path, "", limit="1000", current=300)
    assert cgroup_available(tmp_path, "0::/\n") == 700
    assert cgroup_available(tmp_path, "0::/../other\n") == 700
    group(tmp_path, "", limit="max", current=300)
    assert cgroup_available(tmp_path, "0::/\n") is None


def test_tightest_group_counts(tmp_path: Path) -> None:
    group(tmp_path, "a.slice", limit="1000", current=600)
    group(tmp_path, "a.slice/b.scope", limit="max", current=100)
    group(tmp_path, "c.slice", limit="10", current=0)
    assert cgroup_available(tmp_path, "1:cpu:/x\n0::/a.slice/b.scope\n") == 400
    group(tmp_path, "a.slice/b.scope", limit="350", current=100)
    assert cgroup_available(tmp_path, "0::/a.slice/b.scope\n") == 250


def test_page_cache_is_available(tmp_path: Path) -> None:
    group(tmp_path, "", limit="1000", current=990, inactive=500, active=200)
    assert cgroup_available(tmp_path, "0::/\n") == 710


def test_group_over_its_limit(tmp_path: Path) -> None:
    group(tmp_path, "", limit="1000", current=1200)
    assert cgroup_available(tmp_path, "0::/\n") == 0


def test_available_memory_is_at_most_the_hosts() -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total


def test_error_lists_the_parts_of_the_reserve() -> None:
    config = {"num_workers": 2, "max_batch_tokens": 1024, "model_path": "/a/checkpoint"}
    text = refused(GIB, dense=2 * GIB, model=replace(MODEL, vocab_size=4096), **config)
    named = r"a reserve of (.*) MiB \(exchange (.*) MiB, one step (.*) MiB, grammars (.*) MiB, margin (.*) MiB\)"
    sizes = re.search(named, text)
    assert sizes is not None
    total, *parts = (float(size) for size in sizes.groups())
    assert total == pytest.approx(sum(parts), abs=0.3)
    assert min(parts) > 0
