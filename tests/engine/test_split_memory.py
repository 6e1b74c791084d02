"""The plan has memory for the partial sums of decode attention, for every step that can run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.checkpoints import DEMO
from tests.engine.captured_on_cpu import PLACE, gpu_steps
from tests.rank import Rank

from moeyard_kernels import ops
from moeyard_kernels.attention.attn_combine import new_partials
from moeyard_kernels.cpu import footprint as cpu_footprint
from moeyard_kernels.cuda import footprint
from moeyard_kernels.types.decode_tables import DecodeTables
from moeyard_kernels.types.footprint import CAPTURED, LAUNCHED, SplitSums, mla_split
from moeyard_worker.config.engine_config import DEVICE_DEFAULTS, EngineConfig, format_size
from moeyard_worker.engine.assembly.fitting import plan_or_suggest
from moeyard_worker.engine.memory.plan import MemoryPlan, plan_memory, sums_bytes
from moeyard_worker.engine.steps.sizes import DECODING, DRAFTING, decode_sizes, prompt_sizes
from moeyard_worker.models.shapes import SHAPES, served_model
from moeyard_worker.models.spec import model_spec
from moeyard_worker.protocol import SamplingParams

ON_GPUS = sorted(name for name, shape in SHAPES.items() if shape["model_type"] != "deepseek_v4")

MIB, GIB = 1 << 20, 1 << 30


def serving(shape: str, **options: Any) -> EngineConfig:
    """Return the config of a shape on a GPU with the defaults of a GPU."""
    named = {**DEVICE_DEFAULTS["cuda"], **options}
    return EngineConfig(model_path=None, load_format="dummy", shape=shape, device="cuda", **named)


def planned(config: EngineConfig, available: int) -> MemoryPlan:
    model = served_model(config)
    return plan_memory(
        config=config,
        model=model,
        dtype="bfloat16",
        resident_bytes=model_spec(model, ()).resident_bytes("bfloat16", footprint),
        num_local_experts=len(model.moe_layers) * model.num_experts,
        available=available,
        footprints=footprint,
    )


def bytes_of(sums: SplitSums, *, sequences: int, queries: int, pages: int, most: int = CAPTURED) -> int:
    """Return the most bytes that one launch of a step allocates, as the launch computes it, or 0 with one split."""
    like = torch.empty(1, dtype=torch.bfloat16, device="meta")
    with torch.device("meta"):
        tables = DecodeTables(
            page_table=torch.empty(sequences, pages, dtype=torch.int32),
            kv_lens=torch.empty(sequences, queries, dtype=torch.int32),
            page_size=64,
            most=most,
        )
    if tables.max_splits(sums.split) == 1:
        return 0
    return max(
        sum(x.untyped_storage().nbytes() for x in new_partials(like, tables=part, sums=sums))
        for _, part in tables.turns(sums)
    )


@pytest.mark.parametrize("card", [78, 139], ids=["80GB", "141GB"])
@pytest.mark.parametrize("name", ON_GPUS)
def test_plan_covers_every_captured_step_and_one_eager_step(name: str, card: int) -> None:
    config = serving(name)
    model, plan = served_model(config), planned(config, card * GIB)
    pages = -(-plan.max_model_len // 64)
    most = {"max_sequences": config.max_num_seqs, "max_pages": pages}
    sizes = [*decode_sizes(DECODING, **most), *prompt_sizes(**most, max_prompt=8192, flat=True)]
    found = [sums for kind in model.attention_kinds() if (sums := kind.footprint(footprint).sums) is not None]
    assert found, "every model has attention in some layer"
    captured = max(
        bytes_of(sums, sequences=size.decode, queries=1, pages=size.width)
        for sums in found
        for size in sizes
        if size.decode
    )
    launched = max(bytes_of(sums, sequences=8192, queries=1, pages=pages, most=LAUNCHED) for sums in found)
    assert captured + launched <= plan.reserve.sums / footprint.ALLOCATED <= (CAPTURED + LAUNCHED) * 1.005
    assert captured + launched >= 0.6 * plan.reserve.sums / footprint.ALLOCATED, "the plan is not much larger"


def test_plan_covers_the_rows_of_drafts() -> None:
    """DeepSeek-V3's 64 sequences of four rows would need 10 GiB."""
    config = serving("DeepSeek-V3", speculate="mtp", max_num_seqs=4)
    model = served_model(config)
    [sums] = {kind.footprint(footprint).sums for kind in model.attention_kinds()}
    assert sums is not None
    sizes = decode_sizes(DRAFTING, max_sequences=4, max_pages=2560, queries=(1, 2, 3, 4))
    most = max(bytes_of(sums, sequences=size.sequences, queries=size.queries, pages=size.width) for size in sizes)
    assert most == 4 * 4 * 160 * 128 * 513 * 4
    one = bytes_of(sums, sequences=8192, queries=1, pages=2560, most=LAUNCHED)
    assert most + one <= sums_bytes(config, model, 2, footprint) / footprint.ALLOCATED <= most + LAUNCHED * 1.002
    wide = sums_bytes(replace(config, max_num_seqs=64), model, 2, footprint) / footprint.ALLOCATED
    assert wide <= (CAPTURED + LAUNCHED) * 1.002


def test_pages_and_slots_get_the_remaining_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V2-Lite: 64 rows x 320 splits x 16 heads x 513 numbers, and one launch. All experts have slots."""
    config = serving("DeepSeek-V2-Lite")
    done = planned(config, 78 * GIB)
    assert done.reserve.sums == int((64 * 320 * 16 * 513 * 4 + LAUNCHED // 512 * 513) * footprint.ALLOCATED)
    assert f", sums of split keys {format_size(done.reserve.sums)}, grammars" in str(done)
    page = 64 * served_model(config).state_spec(2).bytes_per_token
    monkeypatch.setattr("moeyard_worker.engine.memory.plan.sums_bytes", lambda *_: 0)
    before = planned(config, 78 * GIB)
    assert before.expert_slots == done.expert_slots
    # KV gets a quarter of free memory, or less if all experts then fit.
    assert 0.24 * done.reserve.sums < (before.num_pages - done.num_pages) * page < done.reserve.sums + page
    assert "sums of split keys" not in str(before)


@pytest.mark.parametrize(
    ("options", "longest", "sequences"),
    [
        ({}, 163840, 64),
        ({"max_num_seqs": 8}, 163840, 8),
        ({"max_model_len": 10000}, 10048, 64),
        # This KV memory has fewer tokens: 27 layers x 576 values of 2 bytes each.
        ({"kv_memory": GIB}, GIB // (27 * 576 * 2), 64),
        ({"enforce_eager": True}, 163840, 0),
    ],
    ids=["default", "fewer", "shorter", "kv", "eager"],
)
def test_options_that_change_the_sums(options: dict[str, Any], longest: int, sequences: int) -> None:
    config = serving("DeepSeek-V2-Lite", **options)
    sums = SplitSums(heads=16, dim=512, split=mla_split(16))
    pages = -(-longest // 64)
    captured = bytes_of(sums, sequences=sequences, queries=1, pages=pages) if sequences else 0
    found = sums_bytes(config, served_model(config), 2, footprint) / footprint.ALLOCATED - LAUNCHED // 512 * 513
    assert abs(found - captured) <= 1


def test_cpu_steps_need_no_sums() -> None:
    config = serving("DeepSeek-V2-Lite")
    assert sums_bytes(config, served_model(config), 2, cpu_footprint) == 0


def test_error_names_the_sums_and_suggests_fewer_sequences() -> None:
    """The error lists the sums. One of its suggestions is fewer sequences, which need less of them."""
    config = serving("DeepSeek-V2-Lite", max_num_seqs=512)
    model = served_model(config)
    rest = {
        "model": model,
        "dtype": "bfloat16",
        "resident_bytes": GIB,
        "num_local_experts": 1,
        "footprints": footprint,
    }
    reserve = plan_memory(config=config, available=64 * GIB, **rest).reserve  # type: ignore[arg-type]
    available = int((GIB + reserve.total - reserve.margin - 600 * MIB) / 0.95)

    def plan(*, config: EngineConfig, available: int) -> MemoryPlan:
        return plan_memory(config=config, available=available, **rest)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=f"sums of split keys {format_size(reserve.sums)}, grammars") as caught:
        plan_or_suggest(plan, config, available)
    assert "--max-num-seqs " in str(caught.value).partition("would fit: ")[2]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("drafts", [{}, {"speculate": "mtp", "draft_tokens": 2}], ids=["plain", "drafts"])
def test_steps_stay_within_the_planned_sums(drafts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch the tables of all attention calls of the demo model, captured and eager."""
    seen: set[tuple[int, int, int, int]] = set()
    attend = ops.mla_decode

    def watched(*args: Any, tables: DecodeTables, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.add((tables.num_sequences, tables.num_queries, tables.page_table.shape[1], tables.most))
        return attend(*args, tables=tables, **named)

    monkeypatch.setattr(ops, "mla_decode", watched)
    options = {"max_num_seqs": 3, "max_batch_tokens": 64, "page_size": 64, **drafts, **PLACE}
    with gpu_steps(), Rank(DEMO, **options) as rank:
        config = rank.worker._spec.config
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        rank.run({name: (list(range(9, 700)), params) for name in ("a", "b", "c")})
    model = served_model(config)
    [sums] = {kind.footprint(footprint).sums for kind in model.attention_kinds()}
    assert sums is not None
    most = {
        room: max(
            (bytes_of(sums, sequences=b, queries=q, pages=width, most=m) for b, q, width, m in seen if m == room),
            default=0,
        )
        for room in (CAPTURED, LAUNCHED)
    }
    budget = sums_bytes(config, model, 4, footprint) / footprint.ALLOCATED
    assert sum(most.values()) <= budget
    # The widest graph has two splits and three sequences with every draft. At most 64 rows run eager.
    assert most[CAPTURED] == 3 * (1 + config.num_drafts) * 2 * 6 * 65 * 4
    assert budget - most[CAPTURED] == pytest.approx(64 * 2 * 6 * 65 * 4, abs=1)
