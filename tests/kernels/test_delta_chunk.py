"""The gated delta rule over prompts: reference and kernels against float64, for every batch, tile and chunking."""

import numpy as np
import pytest
import torch
from tests.kernels.linear_attention_cases import Heads, Rows, exact_rule, make_rows, relative

from moeyard_kernels import ops
from moeyard_kernels.linear_attention import delta_chunk as triton_kernel
from moeyard_kernels.linear_attention.delta_chunk import ChunkConfig
from moeyard_kernels.types.state_slots import PADDING, PromptChunks, chunks_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BY_ROW = pytest.mark.parametrize("by_row", [False, True], ids=["gdn", "kda"])
FUSED, SEPARATE = ChunkConfig(fused=True), ChunkConfig(fused=False)
# Lengths, starts, slots: from position 0 and from the content of a slot.
PROMPTS = ([70, 1, 64], [64, 0, 64], [4, 0, 7])


def run_kernel(
    rows: Rows, chunks: PromptChunks, config: ChunkConfig | None = FUSED
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and the new states, computed from a copy of the states."""
    on_device, state = rows.to(DEVICE), rows.state.to(DEVICE, copy=True)
    op = triton_kernel.kda_chunk_prefill if rows.dt_bias.dim() == 2 else triton_kernel.gdn_chunk_prefill
    # Products of whole blocks may overflow fp32 above the diagonal, which is never read.
    with np.errstate(over="ignore", invalid="ignore"):
        out = op(*on_device.args[:-1], state, chunks=chunks, config=config)
    return out.cpu(), state.cpu()


def run_reference(rows: Rows, chunks: PromptChunks) -> tuple[torch.Tensor, torch.Tensor]:
    state = rows.state.clone()
    op = ops.kda_chunk_prefill if rows.dt_bias.dim() == 2 else ops.gdn_chunk_prefill
    on_cpu = PromptChunks(
        table=chunks.table.cpu(),
        fresh=chunks.fresh.cpu(),
        heads=chunks.heads.cpu(),
        planned=chunks.planned,
        num_rows=chunks.num_rows,
    )
    return op(*rows.args[:-1], state, chunks=on_cpu), state


def plan(lengths: list[int], starts: list[int], slots: list[int]) -> PromptChunks:
    return PromptChunks.plan(lengths, starts, slots, device=DEVICE)


@pytest.mark.sampled(0)
@BY_ROW
# The last shape has a tile that is wider than the state in both directions.
@pytest.mark.parametrize("heads", [(1, 2, 16, 32), (1, 3, 18, 10)], ids=str)
@pytest.mark.parametrize("run", [run_reference, run_kernel], ids=["reference", "kernel"])
def test_computes_the_rule(run, heads: Heads, by_row: bool) -> None:  # type: ignore[no-untyped-def]
    rows = make_rows(sum(PROMPTS[0]), heads, by_row=by_row)
    out, state = run(rows, plan(*PROMPTS))
    assert out.dtype == torch.float32
    begin = 0
    for length, start, slot in zip(*PROMPTS, strict=True):
        here = slice(begin, begin := begin + length)
        wanted, left = exact_rule(rows.at(here), rows.state[slot] * (start > 0))
        assert relative(out[here], wanted) < 1e-5
        assert relative(state[slot], left) < 1e-5
    others = [slot for slot in range(len(state)) if slot not in PROMPTS[2]]
    assert torch.equal(state[others], rows.state[others])


@BY_ROW
def test_fused_stages_equal_separate_stages(by_row: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows, chunks = make_rows(70, (1, 2, 32, 16), by_row=by_row, dtype=dtype), plan([70], [0], [3])
        wanted = run_kernel(rows, chunks, FUSED)
        for got, same in zip(run_kernel(rows, chunks, SEPARATE), wanted, strict=True):
            assert torch.equal(got, same)


def test_default_config_depends_on_the_shape() -> None:
    assert [triton_kernel.default_config(count).fused for count in (1, 256, 257, 8192)] == [True, True, False, False]
    classes = [triton_kernel.shape_class(chunks, 1, 32, 128, 128) for chunks in (1, 16, 17, 64, 257, 5000)]
    assert [name.split()[0] for name in classes] == ["4", "16", "64", "64", "1024", "1024"]
    assert triton_kernel.shape_class(9, 2, 32, 128, 64) == "16 several H32 128x64"


@BY_ROW
@pytest.mark.parametrize("columns", [16, 32, 128])
def test_every_tile_gives_the_same_bits(columns: int, by_row: bool) -> None:
    rows, chunks = make_rows(65, (1, 1, 16, 128), by_row=by_row), plan([65], [64], [3])
    wanted = run_kernel(rows, chunks, FUSED)
    for got, same in zip(run_kernel(rows, chunks, ChunkConfig(BV=columns, fused=True)), wanted, strict=True):
        assert torch.equal(got, same)


@BY_ROW
def test_batch_and_chunking_change_no_bit(by_row: bool) -> None:
    rows = make_rows(140, (1, 1, 16, 16), by_row=by_row)
    whole, state = run_kernel(rows, plan([140], [0], [5]))
    both = Rows(*(torch.cat((x[:9], x)) for x in rows.args[:3]), *rows.args[3:])
    out, left = run_kernel(both, plan([9, 140], [64, 0], [1, 5]))
    assert torch.equal(out[9:], whole)
    assert torch.equal(left[5], state[5])
    kept, parts = rows.state, []
    for begin, end in ((0, 64), (64, 140)):
        part = rows.at(slice(begin, end))
        out, kept = run_kernel(Rows(*part.args[:-1], kept), plan([end - begin], [begin], [5]))
        parts.append(out)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(kept[5], state[5])
    # Later chunks have no effect. Within a chunk later rows may, if each row has its own gate (`delta_scores`).
    seen = 64 if by_row else 70
    assert torch.equal(run_kernel(rows.at(slice(0, 70)), plan([70], [0], [5]))[0][:seen], whole[:seen])


@pytest.mark.sampled(0)
# Gates as log2 per position: sums of 32 and of 8 are within the limit, only of 8, and neither, and around both limits.
@pytest.mark.parametrize("most", [0.3, 2.95, 3.05, 11.7, 12.3, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_of_any_strength(most: float, dtype: torch.dtype) -> None:
    """A whole chunk is one product, or blocks of 16 are, or none. The states passed on are compared too."""
    rows = make_rows(140, (1, 1, 32, 16), by_row=True, dtype=dtype)
    rows.qkv[:, :64] *= torch.tensor([1e-3, 1.0, 1e3], dtype=dtype)[torch.randint(3, (140, 1))]
    rows.a_log[:], rows.dt_bias[:] = 0.0, 0.0
    # Half of the columns forget that much in all positions, the rest any amount below it.
    gate = torch.rand(140, 32) * most * 0.6931
    gate[:, ::2] = most * 0.6931
    rows.a[:] = gate.double().expm1().log().to(dtype)
    out, state = run_kernel(rows, plan([140], [64], [2]))
    wanted, left = exact_rule(rows, rows.state[2])
    bound = 1e-5 if dtype == torch.float32 else 5e-3
    assert relative(out, wanted) < bound
    assert relative(state[2], left) < bound


# Snapshots after a chunk, after the last row, and after another prompt's first chunk. One prompt leaves none.
TAKING = ([192, 5, 70], [64, 0, 0], [4, 0, 7], [[(128, 1), (256, 3)], [], [(64, 8)]])


@BY_ROW
@pytest.mark.parametrize("run", [run_reference, run_kernel], ids=["reference", "kernel"])
def test_snapshot_equals_the_state_of_a_shorter_prompt(run, by_row: bool) -> None:  # type: ignore[no-untyped-def]
    """No other bit changes."""
    rows = make_rows(sum(TAKING[0]), (1, 1, 16, 16), by_row=by_row)
    out, state = run(rows, PromptChunks.plan(*TAKING, device=DEVICE))
    whole, left = run(rows, plan(*TAKING[:3]))
    assert torch.equal(out, whole)
    others = [slot for slot in range(len(state)) if slot not in (1, 3, 8)]
    assert torch.equal(state[others], left[others])
    assert torch.equal(state[3], left[4])
    for begin, start, slot, taken in ((0, 64, 4, 1), (197, 0, 7, 8)):
        _, first = run(rows.at(slice(begin, begin + 64)), plan([64], [start], [slot]))
        assert torch.equal(state[taken], first[slot])


@BY_ROW
def test_table_with_spare_rows_touches_only_used_slots(by_row: bool) -> None:
    """As in a captured step, with snapshots too."""
    rows = make_rows(192, (1, 1, 16, 16), by_row=by_row)
    prompts = ([86, 33], [64, 0], [3, 1], [[(128, 5)], []])
    wanted, left = run_kernel(rows.at(slice(0, 119)), PromptChunks.plan(*prompts, device=DEVICE))
    _, table, fresh, heads = chunks_of(*prompts)
    chunks = PromptChunks(
        table=torch.tensor([*table, *[PADDING] * 3], device=DEVICE),
        fresh=torch.tensor([*fresh, *[True] * 3], device=DEVICE),
        heads=torch.tensor([*heads, 5, 5], device=DEVICE),
        planned=None,
        num_rows=192,
    )
    got, state = run_kernel(rows, chunks)
    assert torch.equal(got[:119], wanted)
    assert torch.equal(state, left)
    assert not torch.equal(state[5], rows.state[5])
    assert torch.equal(state[[0, 2, 4, 6, 7, 8]], rows.state[[0, 2, 4, 6, 7, 8]])


@BY_ROW
def test_extreme_gates(by_row: bool) -> None:
    """Rows that forget all beside rows that forget nothing: no exponential overflows fp32."""
    rows = make_rows(70, (1, 1, 16, 16), by_row=by_row)
    rows.a[:] = torch.tensor([-30.0, -14.0, 0.5, 40.0, 120.0])[torch.randint(5, rows.a.shape)]
    rows.a_log[:], rows.dt_bias[:] = 2.0, 0.0
    out, state = run_kernel(rows, plan([70], [64], [2]))
    wanted, left = exact_rule(rows, rows.state[2])
    assert relative(out, wanted) < 1e-5
    assert relative(state[2], left) < 1e-5


@BY_ROW
def test_equal_keys(by_row: bool) -> None:
    """With rates of one and nothing forgotten, powers of the system would lose all precision."""
    rows = make_rows(64, (1, 1, 16, 16), by_row=by_row)
    rows.qkv[:, 16:32] = rows.qkv[:1, 16:32]
    rows.b[:], rows.a[:] = 20.0, -20.0
    out, state = run_kernel(rows, plan([64], [64], [2]))
    wanted, left = exact_rule(rows, rows.state[2])
    assert relative(out, wanted) < 1e-5
    assert relative(state[2], left) < 1e-5


@BY_ROW
def test_bf16_keeps_its_bound(by_row: bool) -> None:
    """The outputs' relative error is at most 5e-3 at the width of the models."""
    rows = make_rows(256, (1, 1, 128, 128), by_row=by_row, dtype=torch.bfloat16)
    out, _ = run_kernel(rows, plan([256], [0], [0]))
    assert out.dtype == torch.bfloat16
    assert relative(out, exact_rule(rows, torch.zeros_like(rows.state[0]))[0]) < 5e-3


@pytest.mark.gpu
@BY_ROW
def test_hopper_kernel_gives_the_same_bits(by_row: bool) -> None:
    """Any lengths and snapshots work. Padding rows change nothing, and prompts do not affect each other."""
    lengths, starts, slots = [192, 5, 70, 64, 1, 449], [64, 0, 0, 128, 64, 0], [4, 0, 7, 2, 6, 5]
    snapshots = [[(128, 1), (256, 3)], [], [(64, 8)], [], [], []]
    rows = make_rows(sum(lengths), (2, 4, 128, 128), by_row=by_row, dtype=torch.bfloat16)
    # Bulk copies need rows from one multiple of 16 bytes to the next.
    wide = torch.empty(len(rows.qkv), rows.qkv.shape[1] + 8, dtype=torch.bfloat16)
    rows = Rows(wide[:, :-8].copy_(rows.qkv), *rows.args[1:])
    _, table, fresh, heads = chunks_of(lengths, starts, slots, snapshots)
    room = PromptChunks(
        table=torch.tensor([*table, *[PADDING] * 3], device=DEVICE),
        fresh=torch.tensor([*fresh, *[True] * 3], device=DEVICE),
        heads=torch.tensor([*heads, len(table), len(table)], device=DEVICE),
        planned=None,
        num_rows=len(rows.qkv),
    )
    config = ChunkConfig(kernel="state", fused=False)
    for chunks in (PromptChunks.plan(lengths, starts, slots, snapshots, device=DEVICE), room):
        wanted = run_kernel(rows, chunks, ChunkConfig(fused=False))
        for got, same in zip(run_kernel(rows, chunks, config), wanted, strict=True):
            assert torch.equal(got, same)
    first = run_kernel(rows, chunks, config)[0][: lengths[0] + lengths[1]]
    rows.qkv[lengths[0] + lengths[1] :] = float("nan")
    assert torch.equal(run_kernel(rows, chunks, config)[0][: len(first)], first)


def test_no_rows_launch_no_kernel() -> None:
    rows = make_rows(0, (1, 1, 16, 16), by_row=True)
    assert run_kernel(rows, plan([], [], []))[0].shape == (0, 1, 16)


def test_bad_arguments_are_named() -> None:
    rows = make_rows(3, (1, 2, 16, 16), by_row=False)
    chunks = PromptChunks.plan([3], [0], [9], device="cpu")
    with pytest.raises(
        ValueError, match=r"gdn_chunk_prefill: chunks\.last_slot 9, num_slots 9 of state float32 \[9, 2, 16, 16\]"
    ):
        ops.gdn_chunk_prefill(*rows.args, chunks=chunks)
    taking = PromptChunks.plan([64], [0], [3], [[(64, 9)]], device="cpu")
    with pytest.raises(
        ValueError, match=r"gdn_chunk_prefill: chunks\.last_slot 9, num_slots 9 of state float32 \[9, 2, 16, 16\]"
    ):
        ops.gdn_chunk_prefill(*make_rows(64, (1, 2, 16, 16), by_row=False).args, chunks=taking)
    with pytest.raises(
        ValueError,
        match=r"gdn_chunk_prefill: T 2 of qkv float32 \[2, 64\], chunks\.num_rows 3, expected T == chunks\.num_rows",
    ):
        ops.gdn_chunk_prefill(*rows.at(slice(0, 2)).args, chunks=chunks)
    with pytest.raises(ValueError, match=r"kda_chunk_prefill: a float32 \[3, 2\]"):
        ops.kda_chunk_prefill(*rows.args, chunks=chunks)
