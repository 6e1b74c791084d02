"""One answer on a GPU: tokens, log-probabilities and experts of a request do not depend on how its steps are launched.

One rank runs {graphs, eager} x {one, two steps in flight} x {chunk sizes} x {ample, scarce pages}. Some cases also vary
the experts in slots {one, a quarter, all} and the policy {slru, lru}. Each case has requests alone and mixed, prefix
misses and hits, greedy and seeded requests. Models are small checkpoints of each kind of attention in both dtypes. The
demo model and a DeepSeek-V4 also run with {1 draft, 2, adaptive}, DSpark with {5, adaptive}, and all models with
prompts compressed to 40 tokens.
The reference is each request alone, eager, one step in flight, with all experts resident and no drafts. A quantised
checkpoint must give the answers of the bfloat16 checkpoint that it stands for.
"""

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import DEMO, MLA, V4_HEADS, WIDE, add_v4_drafts, make_checkpoint, publish_v4
from tests.e2e.test_one_answer import (
    KEPT,
    MORE_PAGES,
    SNAPSHOTS,
    VOCAB,
    bits,
    check_rows,
    requests,
    run_alone,
    run_mixed,
)
from tests.fleet import Fleet, ProcessPool, start_fleet
from tests.quantised import make_served

from moeyard_worker.config.engine_config import DTYPE_BYTES, EngineConfig
from moeyard_worker.experts.policies import POLICIES
from moeyard_worker.models.families import load_model_config

pytestmark = pytest.mark.gpu

# Positions per page, pages. Scarce pages are small, so that requests outgrow theirs.
PAGES = {"ample": (64, 64), "scarce": (16, 10)}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mla": ("deepseek_v3", MLA),
    "mla_v2": ("deepseek_v2", {**MLA, "q_lora_rank": None}),
    "gqa": ("qwen3_moe", {}),
    "late": ("qwen3_moe", WIDE),
    "window": ("mixtral", {"sliding_window": 40}),
    "wide_norm": ("olmoe", {}),
    "gdn": ("qwen3_next", {"head_dim": 32}),
    "kda": ("kimi_linear", MLA),
    "v4": ("deepseek_v4", V4_HEADS),
}

# Overrides of the models with codes, by their kind in SERVED.
CODES: dict[str, dict[str, Any]] = {"fp8": MLA, "int4": {}, "fp4": V4_HEADS}


@dataclass(frozen=True, slots=True)
class Case:
    """How one worker launches steps."""

    eager: bool
    deep: int
    chunk: int
    pages: str
    slots: str = "all"
    policy: str = "slru"
    drafts: str = "off"
    compressed: bool = False

    def __str__(self) -> str:
        launched = f"{'eager' if self.eager else 'graphs'}-{self.deep}deep-chunk{self.chunk}-{self.pages}"
        launched += "" if self.drafts == "off" else f"-drafts_{self.drafts}"
        launched += "-compressed" * self.compressed
        return launched if self.slots == "all" else f"{launched}-{self.slots}-{self.policy}"


CASES = [Case(*values) for values in itertools.product((False, True), (1, 2), (16, 2048), PAGES)]
CASES += [
    Case(*launched, slots, policy)
    for launched in ((False, 2, 16, "scarce"), (False, 1, 2048, "ample"), (True, 2, 16, "ample"))
    for slots, policy in itertools.product(("one", "quarter"), POLICIES)
]


SPECULATED = [
    Case(False, 2, 16, "scarce", drafts="1"),
    Case(False, 1, 2048, "ample", drafts="2"),
    Case(False, 2, 2048, "ample", drafts="auto"),
    Case(False, 2, 16, "ample", "quarter", "lru", drafts="2"),
    Case(True, 2, 16, "ample", drafts="auto"),
]


BLOCKS = [
    Case(False, 2, 16, "scarce", drafts="5"),
    Case(False, 1, 2048, "ample", drafts="auto"),
    Case(True, 2, 16, "ample", "quarter", "lru", drafts="5"),
]


QUANTISED = [
    Case(False, 2, 16, "scarce"),
    Case(False, 1, 2048, "ample", "quarter", "slru"),
    Case(True, 2, 16, "ample", "one", "lru"),
]


# Prompt compression: every kind of attention without drafts, the demo model with drafts.
COMPRESSED = [
    Case(False, 2, 16, "scarce", compressed=True),
    Case(False, 1, 2048, "ample", compressed=True),
    Case(True, 2, 64, "ample", compressed=True),
]
COMPRESSED_SPECULATED = [
    Case(False, 2, 16, "scarce", drafts="1", compressed=True),
    Case(False, 2, 2048, "ample", drafts="auto", compressed=True),
    Case(True, 1, 64, "ample", drafts="2", compressed=True),
]


def config(case: Case, model: Path) -> EngineConfig:
    read = load_model_config(model)
    read = read if case.drafts == "off" else read.with_drafts()
    page_size, num_pages = PAGES[case.pages]
    num_pages += MORE_PAGES * case.compressed
    total = read.num_experts * len(read.moe_layers)
    state = read.state_spec(DTYPE_BYTES[read.dtype])
    snapshots = SNAPSHOTS[case.pages] * state.bytes_per_sequence
    return EngineConfig(
        model_path=str(model),
        device="cuda",
        kv_memory=num_pages * page_size * state.bytes_per_token + snapshots,
        snapshot_memory=snapshots or None,
        page_size=page_size,
        # A model with state needs at least one aligned chunk. Compression needs its window in addition.
        prefill_chunk=max(case.chunk, state.chunk_alignment + (KEPT.window - 1) * case.compressed),
        max_batch_tokens=256,
        max_num_seqs=8,
        enforce_eager=case.eager,
        expert_slots=None if case.slots == "all" else 1 if case.slots == "one" else total // 4,
        expert_policy=case.policy,
        async_scheduling=case.deep == 2,
        enable_return_routed_experts=True,
        speculate=None if case.drafts == "off" else "mtp" if read.block_drafts is None else "dspark",
        draft_tokens=int(case.drafts) if case.drafts.isdigit() else None,
    )


def run_shared(fleet: Fleet, label: str) -> tuple[Any, ...]:
    """Answer a request that shares 70 tokens with "c". A model with state reuses the first 64."""
    asked = requests()
    fleet.client.submit(0, label, asked["c"][0][:70] + asked["d"][0][:60], **asked["d"][1])
    return bits(fleet.client.wait(label)[0])


@pytest.fixture(scope="module", params=[f"{kind}-{dtype}" for kind in MODELS for dtype in ("float32", "bfloat16")])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: ProcessPool
) -> tuple[Path, dict[str, tuple[Any, ...]]]:
    """A checkpoint and its answers to each request alone."""
    kind, dtype = request.param.split("-")
    family, overrides = MODELS[kind]
    model = make_checkpoint(tmp_path_factory.mktemp(kind), family, dtype=getattr(torch, dtype), **overrides)
    with start_fleet(pool, config(Case(True, 1, 2048, "ample"), model)) as fleet:
        shared = run_shared(fleet, "reference-shared")
    return model, alone(model, pool) | {"shared": shared}


def alone(model: Path, processes: ProcessPool, *, compressed: bool = False) -> dict[str, tuple[Any, ...]]:
    """Answer each request alone, eager."""
    with start_fleet(processes, config(Case(True, 1, 2048, "ample"), model)) as fleet:
        return {name: run_alone(fleet, "reference", name, 0, compressed=compressed) for name in requests()}


def check(case: Case, model: Path, expected: dict[str, Any], processes: ProcessPool) -> None:
    """Compare one request alone, all at once, and one whose prefix is a cache hit."""
    kept = case.compressed
    with start_fleet(processes, config(case, model)) as fleet:
        assert run_alone(fleet, "alone", "c", 0, compressed=kept) == expected["c"]
        answers = {"shared": run_shared(fleet, "shared")} if "shared" in expected else {}
        answers |= run_mixed(fleet, "mixed", dict.fromkeys(requests(), 0), compressed=kept)
        assert answers == expected
        assert run_alone(fleet, "again", "d", 0, compressed=kept) == expected["d"]
        scored = run_mixed(fleet, "scored", dict.fromkeys(requests(), 0), compressed=kept, scored=expected)
        assert scored == {name: expected[name] for name in requests()}
        stats = fleet.call("stats")[0]
        assert stats["prefix_hit_tokens"] > 0
        if kept:
            return
        if case.drafts != "off":
            assert stats["accepted"][0] > (0.25 if model == DEMO else 0.1) * stats["drafts"][0] > 0, stats
            return
        assert (stats["num_preemptions"] > 0) == (case.pages == "scarce"), stats
        check_rows(fleet, 10 + ("shared" in expected))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_answer(case: Case, served: tuple[Path, dict[str, Any]], pool: ProcessPool) -> None:
    check(case, *served, pool)


@pytest.mark.parametrize("kind", ["gqa", "mla", "kda"])
def test_prompts_of_several_splits(kind: str, tmp_path: Path, pool: ProcessPool) -> None:
    """Prompts longer than one split of attention: the split of the work depends on the other prompts in the batch."""
    family, overrides = MODELS[kind]
    model = make_checkpoint(tmp_path, family, dtype=torch.bfloat16, **{**overrides, "max_position_embeddings": 2048})
    rng = random.Random(3)
    prompts = {f"{size}": [rng.randrange(VOCAB) for _ in range(size)] for size in (20, 480, 700, 1000, 1400)}

    def answered(fleet: Fleet, label: str, *names: str) -> dict[str, tuple[Any, ...]]:
        for name in names:
            fleet.client.submit(
                0, f"{label}-{name}", prompts[name], max_tokens=40, ignore_eos=True, temperature=0.0, logprobs=2
            )
        return {name: bits(fleet.client.wait(f"{label}-{name}")[0]) for name in names}

    expected: dict[str, tuple[Any, ...]] = {}
    with start_fleet(pool, config(Case(True, 1, 2048, "ample"), model)) as fleet:
        for name in prompts:
            expected |= answered(fleet, "reference", name)
    for case in (Case(False, 2, 2048, "ample"), Case(False, 1, 64, "ample"), Case(True, 2, 2048, "ample")):
        with start_fleet(pool, config(case, model)) as fleet:
            assert answered(fleet, "mixed", *prompts) == expected, case
            assert answered(fleet, "alone", "1400", "700") == {name: expected[name] for name in ("1400", "700")}, case


@pytest.fixture(scope="module")
def kept(served: tuple[Path, dict[str, Any]], pool: ProcessPool) -> tuple[Path, dict[str, tuple[Any, ...]]]:
    """The same checkpoint and its answers to each request alone, with compressed prompts."""
    model, whole = served
    if not load_model_config(model).state_spec(4).compressible:
        pytest.skip("prompts of this model cannot be kept in part")
    found = alone(model, pool, compressed=True)
    assert found["a"] == whole["a"], "the prompt fits its budget"
    assert found["d"] != whole["d"]
    return model, found


@pytest.mark.parametrize("case", COMPRESSED, ids=str)
def test_compressed_prompts(case: Case, kept: tuple[Path, dict[str, Any]], pool: ProcessPool) -> None:
    check(case, *kept, pool)


@pytest.fixture(scope="module")
def demo_kept(pool: ProcessPool) -> dict[str, tuple[Any, ...]]:
    return alone(DEMO, pool, compressed=True)


@pytest.mark.parametrize("case", COMPRESSED_SPECULATED, ids=str)
def test_speculation_with_compressed_prompts(case: Case, demo_kept: dict[str, Any], pool: ProcessPool) -> None:
    check(case, DEMO, demo_kept, pool)


@pytest.fixture(scope="module")
def demo(pool: ProcessPool) -> dict[str, tuple[Any, ...]]:
    """The demo model's answers to each request alone, without drafts."""
    return alone(DEMO, pool)


@pytest.mark.parametrize("case", SPECULATED, ids=str)
def test_speculation(case: Case, demo: dict[str, Any], pool: ProcessPool) -> None:
    check(case, DEMO, demo, pool)


@pytest.fixture(scope="module")
def drafted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: ProcessPool
) -> tuple[Path, dict[str, tuple[Any, ...]]]:
    """A DeepSeek-V4 with DSpark or an MTP layer, and its answers to each request alone, without drafts."""
    model = make_checkpoint(tmp_path_factory.mktemp("drafted"), "deepseek_v4", dtype=torch.bfloat16, **V4_HEADS)
    add_v4_drafts(publish_v4(model), dspark=request.param == "dspark")
    return model, alone(model, pool)


@pytest.mark.parametrize(
    ("drafted", "case"),
    [*(("dspark", case) for case in BLOCKS), *(("mtp", case) for case in SPECULATED)],
    indirect=["drafted"],
    ids=str,
)
def test_drafts_of_deepseek_v4(case: Case, drafted: tuple[Path, dict[str, Any]], pool: ProcessPool) -> None:
    check(case, *drafted, pool)


@pytest.fixture(scope="module", params=CODES)
def codes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: ProcessPool
) -> tuple[Path, dict[str, tuple[Any, ...]]]:
    """A quantised checkpoint, and the answers of the bfloat16 checkpoint that it stands for to each request alone."""
    model, plain = make_served(request.param, tmp_path_factory.mktemp(request.param), **CODES[request.param])
    return model, alone(plain, pool)


@pytest.mark.parametrize("case", QUANTISED, ids=str)
def test_quantised(case: Case, codes: tuple[Path, dict[str, Any]], pool: ProcessPool) -> None:
    check(case, *codes, pool)


def test_missing_gpu_is_reported(pool: ProcessPool, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3_moe")
    refused = pytest.raises(RuntimeError, match=r"--device cuda:99: there are \d+ GPUs")
    with refused, start_fleet(pool, EngineConfig(model_path=str(model), device="cuda:99", page_size=64)):
        pass
