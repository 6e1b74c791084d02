"""The recurrent gated delta rule over slots: reference and Triton kernel against float64, for every batch and tile."""

import pytest
import torch
from tests.kernels.graphs import assert_replays
from tests.kernels.linear_attention_cases import Heads, Rows, exact_rule, make_rows, relative, slots_of

from moeyard_kernels import ops
from moeyard_kernels.linear_attention import delta_recurrent as triton_kernel
from moeyard_kernels.linear_attention.delta_recurrent import RecurrentConfig
from moeyard_kernels.types.state_slots import StateSlots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BY_ROW = pytest.mark.parametrize("by_row", [False, True], ids=["gdn", "kda"])
# The last shape has a tile that is wider than the state in both directions.
HEADS = pytest.mark.parametrize("heads", [(1, 2, 16, 32), (2, 2, 64, 16), (1, 3, 18, 10)], ids=str)


def run_kernel(rows: Rows, slots: StateSlots, config: RecurrentConfig | None = None) -> tuple[torch.Tensor, ...]:
    """Return out and the new states, computed from a copy of the states."""
    on_device, state = rows.to(DEVICE), rows.state.to(DEVICE, copy=True)
    by_row = rows.dt_bias.dim() == 2
    op = triton_kernel.kda_recurrent if by_row else triton_kernel.gdn_recurrent
    where = StateSlots(read=slots.read.to(DEVICE), write=slots.write.to(DEVICE))
    out = op(*on_device.args[:-1], state, slots=where, config=config)
    return out.cpu(), state.cpu()


def run_reference(rows: Rows, slots: StateSlots) -> tuple[torch.Tensor, ...]:
    state = rows.state.clone()
    op = ops.kda_recurrent if rows.dt_bias.dim() == 2 else ops.gdn_recurrent
    return op(*rows.args[:-1], state, slots=slots), state


@BY_ROW
@HEADS
@pytest.mark.parametrize("run", [run_reference, run_kernel], ids=["reference", "kernel"])
def test_computes_the_rule(run, heads: Heads, by_row: bool) -> None:  # type: ignore[no-untyped-def]
    rows, read = make_rows(3, heads, by_row=by_row), [4, 0, 7]
    out, state = run(rows, StateSlots.in_place(torch.tensor(read)))
    assert out.dtype == torch.float32
    for i, slot in enumerate(read):
        wanted, left = exact_rule(rows.at(slice(i, i + 1)), rows.state[slot])
        assert relative(out[i : i + 1], wanted) < 1e-5
        assert relative(state[slot], left) < 1e-5
    others = [slot for slot in range(len(state)) if slot not in read]
    assert torch.equal(state[others], rows.state[others])


@BY_ROW
def test_bf16_rows_are_rounded_once(by_row: bool) -> None:
    rows, slots = make_rows(2, (1, 2, 16, 16), by_row=by_row, dtype=torch.bfloat16), slots_of([1, 2], [[1], [2]])
    out, state = run_kernel(rows, slots)
    wanted, left = run_reference(rows, slots)
    assert out.dtype == wanted.dtype == torch.bfloat16
    assert relative(out, wanted) < 4e-3
    assert relative(state, left) < 1e-6


@BY_ROW
@HEADS
def test_row_is_the_same_in_every_batch_and_tile(heads: Heads, by_row: bool) -> None:
    rows, read = make_rows(4, heads, by_row=by_row), [8, 1, 5, 2]
    out, state = run_kernel(rows, StateSlots.in_place(torch.tensor(read)))
    for i, config in zip((0, 2, 3), (None, triton_kernel.CONFIGS[0], triton_kernel.CONFIGS[-1]), strict=True):
        alone, left = run_kernel(rows.at(slice(i, i + 1)), StateSlots.in_place(torch.tensor(read[i : i + 1])), config)
        assert torch.equal(alone[0], out[i])
        assert torch.equal(left[read[i]], state[read[i]])


@pytest.mark.sampled(0)
@BY_ROW
@pytest.mark.parametrize("config", triton_kernel.CONFIGS, ids=str)
def test_every_config_gives_the_same_bits(config: RecurrentConfig, by_row: bool) -> None:
    rows, slots = make_rows(2, (1, 1, 128, 128), by_row=by_row), slots_of([3], [[-1, 3]])
    wanted = run_kernel(rows, slots, RecurrentConfig(BV=128))
    for got, same in zip(run_kernel(rows, slots, config), wanted, strict=True):
        assert torch.equal(got, same)


@BY_ROW
@pytest.mark.parametrize("read", [0, 1, 3])
def test_last_query_may_overwrite_the_state_of_the_first(by_row: bool, read: int) -> None:
    """In a ring of slots each query writes the next slot, and the last one overwrites the slot that was read."""
    rows, ring = make_rows(4, (1, 2, 16, 16), by_row=by_row), [(read + 1 + j) % 4 for j in range(4)]
    out, state = run_kernel(rows, slots_of([read], [ring]))
    here = rows.state.clone()
    for j, slot in enumerate(ring):
        one = rows.at(slice(j, j + 1))
        alone, here = run_kernel(Rows(*one.args[:-1], here), slots_of([read], [[read]]))
        assert torch.equal(alone[0], out[j])
        assert torch.equal(state[slot], here[read])
    assert torch.equal(state[4:], rows.state[4:])


@BY_ROW
def test_queries_together_equal_queries_one_by_one(by_row: bool) -> None:
    """Each query writes its state to its own slot, and sequences may have fewer queries."""
    rows = make_rows(6, (1, 2, 16, 16), by_row=by_row)
    out, state = run_kernel(rows, slots_of([4, 6], [[0, -1, 1], [7, 6, -1]]))
    for read, first, count, kept in ((4, 0, 3, {0: 0, 2: 1}), (6, 3, 2, {0: 7, 1: 6})):
        here = rows.state.clone()
        for j in range(count):
            one = rows.at(slice(first + j, first + j + 1))
            alone, here = run_kernel(Rows(*one.args[:-1], here), slots_of([read], [[read]]))
            assert torch.equal(alone[0], out[first + j])
            if j in kept:
                assert torch.equal(state[kept[j]], here[read])
    # The slots that were read stay unchanged unless a query wrote to them.
    assert torch.equal(state[[2, 3, 4, 5, 8]], rows.state[[2, 3, 4, 5, 8]])
    assert torch.equal(run_reference(rows, slots_of([4, 6], [[0, -1, 1], [7, 6, -1]]))[1][4], rows.state[4])


@BY_ROW
@pytest.mark.parametrize("run", [run_reference, run_kernel], ids=["reference", "kernel"])
def test_padding_is_zero_and_writes_nothing(run, by_row: bool) -> None:  # type: ignore[no-untyped-def]
    rows = make_rows(3, (1, 2, 16, 16), by_row=by_row)
    rows.qkv[1:] = float("nan")
    out, state = run(rows, slots_of([2, -1, -1], [[2], [-1], [-1]]))
    assert torch.equal(out[1:], torch.zeros_like(out[1:]))
    assert not state.isnan().any()
    assert torch.equal(state[[0, 1, 3, 4, 5, 6, 7, 8]], rows.state[[0, 1, 3, 4, 5, 6, 7, 8]])
    assert run_kernel(rows.at(slice(0, 0)), StateSlots.in_place(torch.zeros(0).long()))[0].shape[0] == 0


@BY_ROW
def test_extreme_gates(by_row: bool) -> None:
    """In fp32 1 + e^x loses e^x for one value, and e^x overflows for another."""
    rows = make_rows(4, (1, 1, 16, 16), by_row=by_row)
    for i, value in enumerate((-30.0, -14.0, 40.0, 120.0)):
        rows.a[i] = value
    rows.a_log[:], rows.dt_bias[:] = 2.0, 0.0
    out, state = run_kernel(rows, StateSlots.in_place(torch.arange(4)))
    for i in range(4):
        wanted, left = exact_rule(rows.at(slice(i, i + 1)), rows.state[i])
        assert relative(out[i : i + 1], wanted) < 1e-5
        assert relative(state[i], left) < 1e-5


@BY_ROW
def test_long_output_keeps_its_precision(by_row: bool) -> None:
    rows = make_rows(16, (1, 2, 32, 16), by_row=by_row)
    rows.a_log.fill_(-3.0)
    kept = rows.state[0].double()
    state, results, wanted = rows.state, [], []
    for _ in range(6):
        out, state = run_kernel(Rows(*rows.args[:-1], state), slots_of([0], [[-1] * 15 + [0]]))
        exact, kept = exact_rule(rows, kept)
        results.append(out)
        wanted.append(exact)
    assert relative(torch.cat(results), torch.cat(wanted)) < 1e-5
    assert relative(state[0], kept) < 1e-5


@pytest.mark.gpu
@BY_ROW
@pytest.mark.parametrize("batch", [1, 64])
def test_graph_replay(batch: int, by_row: bool) -> None:
    rows = make_rows(batch, (16, 32, 128, 128), by_row=by_row, dtype=torch.bfloat16).to(DEVICE)
    states = torch.randn(batch, 32, 128, 128, device=DEVICE)
    slots = StateSlots.in_place(torch.randperm(batch, device=DEVICE))
    op = ops.kda_recurrent if by_row else ops.gdn_recurrent

    def step() -> tuple[torch.Tensor, ...]:
        state = states.clone()
        return op(*rows.args[:-1], state, slots=slots), state

    assert_replays(step, lambda: (rows.qkv.normal_(), slots.read.copy_(slots.read.flip(0))))


def test_bad_arguments_are_named() -> None:
    rows = make_rows(2, (1, 2, 16, 16), by_row=False)
    slots = slots_of([0, 1], [[0], [1]])
    args = dict(zip(("qkv", "b", "a", "a_log", "dt_bias", "state"), rows.args, strict=True))
    for message, change in (
        (
            r"gdn_recurrent: state bfloat16 \[9, 2, 16, 16\], expected float32 \[num_slots, Hv, Dk, Dv\]",
            {"state": rows.state.bfloat16()},
        ),
        (
            r"gdn_recurrent: W 60 of qkv float32 \[2, 60\], Hv 2 of state float32 \[9, 2, 16, 16\], Dv 16 of state",
            {"qkv": rows.qkv[:, 4:]},
        ),
        (r"gdn_recurrent: a float32 \[2, 1\]", {"a": rows.a[:, :1]}),
        (r"gdn_recurrent: dt_bias bfloat16 \[2\], expected float32 \[2\]", {"dt_bias": rows.dt_bias.bfloat16()}),
    ):
        with pytest.raises(ValueError, match=message):
            ops.gdn_recurrent(**(args | change), slots=slots)
    with pytest.raises(ValueError, match=r"kda_recurrent: a float32 \[2, 2\]"):
        ops.kda_recurrent(**args, slots=slots)
    with pytest.raises(
        ValueError,
        match=r"gdn_recurrent: T 2 of qkv float32 \[2, 64\], slots\.num_rows 1, expected T == slots\.num_rows",
    ):
        ops.gdn_recurrent(**args, slots=slots_of([0], [[0]]))
    with pytest.raises(ValueError, match=r"gdn_recurrent: write int64 \[2, 1\] holds 0 to 9, outside -1 to 8"):
        ops.gdn_recurrent(**args, slots=slots_of([0, 1], [[0], [9]]))
    with pytest.raises(ValueError, match=r"write: \[1, 17\], expected \[1, queries\], 1 to 16 of them"):
        slots_of([0], [[0] * 17])
