"""The gated delta rule over prompts: oracle and Triton kernels against float64, whatever the batch, tile and cut."""

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
FUSED, APART = ChunkConfig(fused=True), ChunkConfig(fused=False)
# Lengths, starts, slots: from position 0 and from what a slot holds.
PROMPTS = ([70, 1, 64], [64, 0, 64], [4, 0, 7])


def run_kernel(
    rows: Rows, chunks: PromptChunks, config: ChunkConfig | None = FUSED
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, the states behind it), of a copy of the states."""
    on_device, state = rows.to(DEVICE), rows.state.to(DEVICE, copy=True)
    op = triton_kernel.kda_chunk_prefill if rows.dt_bias.dim() == 2 else triton_kernel.gdn_chunk_prefill
    # Of products of whole blocks what lies above the diagonal may be beyond fp32: nothing reads it.
    with np.errstate(over="ignore", invalid="ignore"):
        out = op(*on_device.args[:-1], state, chunks=chunks, config=config)
    return out.cpu(), state.cpu()


def run_oracle(rows: Rows, chunks: PromptChunks) -> tuple[torch.Tensor, torch.Tensor]:
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
# The last is a shape whose tile is wider than the state, in both directions.
@pytest.mark.parametrize("heads", [(1, 2, 16, 32), (1, 3, 18, 10)], ids=str)
@pytest.mark.parametrize("run", [run_oracle, run_kernel], ids=["oracle", "kernel"])
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
def test_stages_together_are_stages_apart(by_row: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows, chunks = make_rows(70, (1, 2, 32, 16), by_row=by_row, dtype=dtype), plan([70], [0], [3])
        wanted = run_kernel(rows, chunks, FUSED)
        for got, same in zip(run_kernel(rows, chunks, APART), wanted, strict=True):
            assert torch.equal(got, same)


def test_the_default_goes_by_the_shape() -> None:
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
def test_bits_depend_neither_on_the_batch_nor_on_the_cut(by_row: bool) -> None:
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
    # What follows in later chunks does not show; within a chunk it may, where a gate is of each row (`delta_scores`).
    seen = 64 if by_row else 70
    assert torch.equal(run_kernel(rows.at(slice(0, 70)), plan([70], [0], [5]))[0][:seen], whole[:seen])


@pytest.mark.sampled(0)
# Of log2, of a position: sums of 32 and of 8 are within the limit, of 8 only, and neither; around both limits too.
@pytest.mark.parametrize("most", [0.3, 2.95, 3.05, 11.7, 12.3, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_of_any_strength(most: float, dtype: torch.dtype) -> None:
    """One product of a whole chunk, of blocks of 16, and none: values that each leaves to the next included."""
    rows = make_rows(140, (1, 1, 32, 16), by_row=True, dtype=dtype)
    rows.qkv[:, :64] *= torch.tensor([1e-3, 1.0, 1e3], dtype=dtype)[torch.randint(3, (140, 1))]
    rows.a_log[:], rows.dt_bias[:] = 0.0, 0.0
    # Half of the columns forget as much as that in all positions, the rest anything less.
    gate = torch.rand(140, 32) * most * 0.6931
    gate[:, ::2] = most * 0.6931
    rows.a[:] = gate.double().expm1().log().to(dtype)
    out, state = run_kernel(rows, plan([140], [64], [2]))
    wanted, left = exact_rule(rows, rows.state[2])
    bound = 1e-5 if dtype == torch.float32 else 5e-3
    assert relative(out, wanted) < bound
    assert relative(state[2], left) < bound


# Behind a chunk, behind the last row, behind another's first chunk; and a prompt that leaves none.
TAKING = ([192, 5, 70], [64, 0, 0], [4, 0, 7], [[(128, 1), (256, 3)], [], [(64, 8)]])


@BY_ROW
@pytest.mark.parametrize("run", [run_oracle, run_kernel], ids=["oracle", "kernel"])
def test_a_snapshot_is_what_a_prompt_that_ends_there_leaves(run, by_row: bool) -> None:  # type: ignore[no-untyped-def]
    """And nothing else changes by a bit."""
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
def test_a_table_with_room_touches_what_there_is(by_row: bool) -> None:
    """As in a captured step, snapshots too."""
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
def test_gates_at_the_ends(by_row: bool) -> None:
    """Rows that forget at once beside rows that forget nothing: no exponential leaves fp32."""
    rows = make_rows(70, (1, 1, 16, 16), by_row=by_row)
    rows.a[:] = torch.tensor([-30.0, -14.0, 0.5, 40.0, 120.0])[torch.randint(5, rows.a.shape)]
    rows.a_log[:], rows.dt_bias[:] = 2.0, 0.0
    out, state = run_kernel(rows, plan([70], [64], [2]))
    wanted, left = exact_rule(rows, rows.state[2])
    assert relative(out, wanted) < 1e-5
    assert relative(state[2], left) < 1e-5


@BY_ROW
def test_keys_that_are_alike(by_row: bool) -> None:
    """With rates of one and nothing forgotten: powers of the system would be beyond any precision."""
    rows = make_rows(64, (1, 1, 16, 16), by_row=by_row)
    rows.qkv[:, 16:32] = rows.qkv[:1, 16:32]
    rows.b[:], rows.a[:] = 20.0, -20.0
    out, state = run_kernel(rows, plan([64], [64], [2]))
    wanted, left = exact_rule(rows, rows.state[2])
    assert relative(out, wanted) < 1e-5
    assert relative(state[2], left) < 1e-5


@BY_ROW
def test_bf16_keeps_its_bound(by_row: bool) -> None:
    """Relative 5e-3 of the outputs, at the width of the models."""
    rows = make_rows(256, (1, 1, 128, 128), by_row=by_row, dtype=torch.bfloat16)
    out, _ = run_kernel(rows, plan([256], [0], [0]))
    assert out.dtype == torch.bfloat16
    assert relative(out, exact_rule(rows, torch.zeros_like(rows.state[0]))[0]) < 5e-3


@pytest.mark.gpu
@BY_ROW
def test_the_kernel_of_hopper_gives_the_same_bits(by_row: bool) -> None:
    """Whatever the lengths, snapshots included; rows of padding touch nothing, and a prompt's rows no other's."""
    lengths, starts, slots = [192, 5, 70, 64, 1, 449], [64, 0, 0, 128, 64, 0], [4, 0, 7, 2, 6, 5]
    snapshots = [[(128, 1), (256, 3)], [], [(64, 8)], [], [], []]
    rows = make_rows(sum(lengths), (2, 4, 128, 128), by_row=by_row, dtype=torch.bfloat16)
    # Rows that bulk copies take: from a multiple of 16 bytes to the next.
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


def test_no_rows_are_no_launch() -> None:
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
