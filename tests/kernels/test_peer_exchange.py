"""Rows to the ranks of their experts and back through shared memory: kernel and reference, rank by rank.

Without a GPU the ranks of one process send one after the other, then wait one after the other. `bench/nvlink.py`
compares with the same reference on real GPUs, one process each.
"""

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kernel_cases.case import assert_bits
from tests.kernels.peer_ranks import DEVICE, in_turn, open_ranks, random_ids, random_rows

from moeyard_kernels import ops
from moeyard_kernels.experts import peer_exchange as triton_kernel
from moeyard_kernels.types.peer_shape import NUM_TIMES, RECEIVED, SENT, TIMES
from moeyard_kernels.types.peer_window import (
    COMBINE,
    DISPATCH,
    EPOCH,
    FAILED,
    LAYER,
    PHASE,
    POISONED,
    RANKS,
    REASON,
    SILENT,
    TIMED_ONE_IN,
    TOO_MANY,
    PeerShape,
    PeerWindow,
    open_window,
)


def one_exchange(
    kernels: ModuleType,
    windows: Sequence[PeerWindow],
    xs: Sequence[torch.Tensor],
    ids: Sequence[torch.Tensor],
    *,
    layer: int,
    max_rows: int,
) -> tuple[list, list]:
    """Return the rows that each rank received and the results that came back. Missing rows and results are zero."""
    received = in_turn(kernels.dispatch_rows, windows, list(zip(xs, ids, strict=True)), layer=layer, max_rows=max_rows)
    sent = [rows.clone().masked_fill_((here < 0).all(1)[:, None], 0) for rows, here in received]
    outs = [
        answers(rows, here, rank) for rank, (rows, here) in enumerate(zip(sent, (r[1] for r in received), strict=True))
    ]
    for window, out, of_rank in zip(windows, outs, ids, strict=True):
        kernels.combine_rows(out, window, layer=layer, num_tokens=len(of_rank), send=True, wait=False)
    home = [
        kernels.combine_rows(out, window, layer=layer, num_tokens=len(of_rank), send=False, wait=True)
        .clone()
        .masked_fill_((of_rank < 0)[:, :, None], 0)
        for window, out, of_rank in zip(windows, outs, ids, strict=True)
    ]
    return [(rows, here.clone()) for rows, (_, here) in zip(sent, received, strict=True)], home


def fault_of(window: PeerWindow) -> list[int]:
    """Return the record of a failure in host memory, which is valid once the device has ended."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return window.fault[[FAILED, PHASE, LAYER, RANKS, EPOCH, REASON]].tolist()


def answers(rows: torch.Tensor, here: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a result [R * K, H] per (row, k) that depends on its row, expert and place. All bits occur."""
    words = rows.contiguous().view(torch.int16)[:, None, :].repeat(1, here.shape[1], 1)
    words ^= (here * 37 + rank * 11 + 5).to(torch.int16)[:, :, None]
    words ^= torch.arange(here.shape[1], dtype=torch.int16, device=here.device)[:, None] * 301
    return words.view(rows.dtype).flatten(0, 1)


REFERENCE = SimpleNamespace(dispatch_rows=ops.dispatch_rows.reference, combine_rows=ops.combine_rows.reference)
COUNTS = [(1, 1), (0, 3), (5, 2, 0), (0, 0, 0, 0), (1, 0, 4, 6), (6, 6, 6, 6), (2, 0, 5, 1, 6, 0, 0, 3)]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=("bf16", "fp32"))
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_kernel_and_reference_write_the_same(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    ours, theirs = (open_ranks(len(counts), dtype=dtype) for _ in range(2))
    for layer in range(3):
        # Ranks have different rows in each layer, and older content must not matter.
        turned = counts[layer % len(counts) :] + counts[: layer % len(counts)]
        xs = [random_rows(dtype, n + layer, 40) for n in turned]
        ids = [random_ids(n, 3, 10) for n in turned]
        most = max(1, *turned, 6 if layer == 1 else 0)
        got = one_exchange(triton_kernel, ours, xs, ids, layer=layer, max_rows=most)
        wanted = one_exchange(REFERENCE, theirs, xs, ids, layer=layer, max_rows=most)
        assert_bits(f"received in layer {layer}", got[0], wanted[0])
        assert_bits(f"home in layer {layer}", got[1], wanted[1])
        for rank, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            # Rows that were not sent stay unchanged too.
            assert_bits(f"memory of rank {rank}", a.memory[rank], b.memory[rank])
            assert a.state[:3].tolist() == b.state[:3].tolist() == [layer + 1, layer + 1, 0]
            assert fault_of(a)[0] == fault_of(b)[0] == 0


@pytest.mark.parametrize(("counts", "copied"), [((4, 0, 5), False), ((37, 0, 16), True)], ids=("owners", "copies"))
@pytest.mark.parametrize("kernels", [triton_kernel, REFERENCE], ids=("kernel", "reference"))
def test_every_result_returns_to_its_place(kernels: ModuleType, counts: tuple[int, ...], copied: bool) -> None:
    """Compare with plain loops that do not use the memory."""
    most = max(counts)
    windows = open_ranks(3, max_tokens=most, copied=copied)
    xs, ids = [random_rows(torch.bfloat16, n, 40) for n in counts], [random_ids(n, 3, 10) for n in counts]
    received, home = one_exchange(kernels, windows, xs, ids, layer=0, max_rows=most)
    owner, local = windows[0].owner.tolist(), windows[0].local.tolist()
    for source, chosen in enumerate(ids):
        for t, row in enumerate(chosen.tolist()):
            for rank, (rows, here) in enumerate(received):
                turn = t // 16 % 2
                wanted = [local[e][turn] if e >= 0 and owner[e][turn] == rank else -1 for e in row]
                assert here[t * 3 + source].tolist() == wanted
                if max(wanted) >= 0:
                    assert_bits("row", rows[t * 3 + source], xs[source][t])
                    by_k = answers(rows[t * 3 + source][None], here[t * 3 + source][None], rank)
                    for k, e in enumerate(wanted):
                        if e >= 0:
                            assert_bits("result", home[source][t, k], by_k[k])
    for rank, (_, here) in enumerate(received):
        theirs = here.view(most, 3, 3)
        for source, n in enumerate(counts):
            assert (theirs[n:, source] == -1).all(), f"rank {rank}: rows that rank {source} lacks"


@pytest.mark.parametrize("kernels", [triton_kernel, REFERENCE], ids=("kernel", "reference"))
def test_bytes_between_ranks_are_counted_on_both_sides(kernels: ModuleType) -> None:
    """Every peer gets ids, a row for each of its chosen experts, and a result for each. A rank sends itself nothing."""
    windows, counts, row = open_ranks(3), (4, 0, 5), 40 * 2
    sent, received = [0] * 3, [0] * 3
    for layer in range(2):
        xs, ids = [random_rows(torch.bfloat16, n, 40) for n in counts], [random_ids(n, 3, 10) for n in counts]
        one_exchange(kernels, windows, xs, ids, layer=layer, max_rows=5)
        owner = windows[0].owner[:, 0].tolist()
        for source, chosen in enumerate(ids):
            for token in chosen.tolist():
                owners = [owner[e] for e in token if e >= 0]
                for peer in {0, 1, 2} - {source}:
                    there, back = 3 * 4 + (row if peer in owners else 0), row * owners.count(peer)
                    sent[source], received[peer] = sent[source] + there, received[peer] + there
                    sent[peer], received[source] = sent[peer] + back, received[source] + back
        # Counting continues in another epoch.
        for window in windows:
            window.reset()
    of_ranks = [window.views(rank).counts for rank, window in enumerate(windows)]
    assert [int(each[SENT]) for each in of_ranks] == sent
    assert [int(each[RECEIVED]) for each in of_ranks] == received
    assert sum(sent) == sum(received) > 0


def test_reference_creates_no_tensor_on_another_device() -> None:
    """A tensor without a named device would be on the CPU when ranks have GPUs. Here it would be on meta."""
    windows, counts = open_ranks(3, copied=True), (4, 0, 5)
    xs, ids = [random_rows(torch.bfloat16, n, 40) for n in counts], [random_ids(n, 3, 10) for n in counts]
    with torch.device("meta"):
        one_exchange(REFERENCE, windows, xs, ids, layer=0, max_rows=5)
        in_turn(REFERENCE.dispatch_rows, windows, list(zip(xs, ids, strict=True)), layer=7, max_rows=4)
    assert all(fault_of(window) == [1, DISPATCH, 7, 0b100, 2, TOO_MANY] for window in windows)


@pytest.mark.gpu
def test_some_exchanges_are_timed() -> None:
    """The wait takes no time if all packets are there, but a launch does."""
    windows = open_ranks(2)
    xs, ids = [random_rows(torch.bfloat16, 1, 40) for _ in "ab"], [random_ids(1, 3, 10) for _ in "ab"]
    for _ in range(2 * TIMED_ONE_IN):
        one_exchange(triton_kernel, windows, xs, ids, layer=0, max_rows=1)
    for rank, window in enumerate(windows):
        counts = window.views(rank).counts.tolist()
        assert counts[NUM_TIMES : NUM_TIMES + 2] == [2, 2]
        assert all(0 <= spent < 1e8 for spent in counts[TIMES : TIMES + 2])


@pytest.mark.parametrize("programs", [1, 2, 8, 64])
def test_number_of_programs_does_not_change_packets(programs: int) -> None:
    """Ranks that run steps of different sizes understand each other."""
    ours, theirs = open_ranks(2), open_ranks(2)
    xs, ids = [random_rows(torch.bfloat16, 6, 40) for _ in "ab"], [random_ids(6, 3, 10) for _ in "ab"]
    inputs, config = list(zip(xs, ids, strict=True)), triton_kernel.PacketConfig(PROGRAMS=programs)
    for window, given in zip(ours, inputs, strict=True):
        triton_kernel.dispatch_rows(*given, window, layer=0, max_rows=6, send=True, wait=False, config=config)
    for window, given in zip(theirs, inputs, strict=True):
        REFERENCE.dispatch_rows(*given, window, layer=0, max_rows=6, send=True, wait=False)
    for rank in range(2):
        assert_bits("memory", ours[rank].memory[rank], theirs[rank].memory[rank])


@pytest.mark.parametrize("kernels", [triton_kernel, REFERENCE], ids=("kernel", "reference"))
def test_missing_rank_is_named_and_all_ranks_stop(kernels: ModuleType) -> None:
    if kernels is REFERENCE and DEVICE.type == "cuda":
        pytest.skip("the reference's record is the same on any device")
    windows = open_ranks(3)
    xs, ids = [random_rows(torch.bfloat16, 2, 40) for _ in "abc"], [random_ids(2, 3, 10) for _ in "abc"]
    one_exchange(kernels, windows, xs, ids, layer=0, max_rows=2)
    for rank in (0, 1):
        kernels.dispatch_rows(xs[rank], ids[rank], windows[rank], layer=17, max_rows=2, send=True, wait=False)
    waiting = windows[0]
    kernels.dispatch_rows(xs[0], ids[0], waiting, layer=17, max_rows=2, send=False, wait=True)
    assert fault_of(waiting) == [1, DISPATCH, 17, 0b100, 2, SILENT]
    assert int(waiting.state[POISONED]) == 1
    # From then on it sends nothing, so no rank gets its garbage.
    before = [window.memory[rank].clone() for rank, window in enumerate(windows)]
    kernels.combine_rows(xs[0].repeat(9, 1), waiting, layer=17, num_tokens=2, send=True, wait=True)
    kernels.dispatch_rows(xs[0], ids[0], waiting, layer=18, max_rows=2, send=True, wait=True)
    for rank, window in enumerate(windows):
        assert_bits(f"memory of rank {rank}", window.memory[rank], before[rank])
    for window in windows:
        window.reset()
    one_exchange(kernels, windows, xs, ids, layer=0, max_rows=2)
    assert [window.state[:3].tolist() for window in windows] == [[1, 1, 0]] * 3


@pytest.mark.parametrize("kernels", [triton_kernel, REFERENCE], ids=("kernel", "reference"))
def test_missing_combine(kernels: ModuleType) -> None:
    windows = open_ranks(2)
    xs, ids = [random_rows(torch.bfloat16, 1, 40) for _ in "ab"], [random_ids(1, 3, 10) for _ in "ab"]
    received = in_turn(kernels.dispatch_rows, windows, list(zip(xs, ids, strict=True)), layer=3, max_rows=1)
    out = answers(*received[1], 1)
    for step in (True, False):
        kernels.combine_rows(out, windows[1], layer=3, num_tokens=1, send=step, wait=not step)
    assert fault_of(windows[1])[:4] == [1, COMBINE, 3, 0b01]


@pytest.mark.parametrize("kernels", [triton_kernel, REFERENCE], ids=("kernel", "reference"))
def test_too_many_rows_for_a_step(kernels: ModuleType) -> None:
    windows = open_ranks(2)
    xs, ids = [random_rows(torch.bfloat16, n, 40) for n in (2, 5)], [random_ids(n, 3, 10) for n in (2, 5)]
    in_turn(kernels.dispatch_rows, windows, list(zip(xs, ids, strict=True)), layer=1, max_rows=4)
    for window in windows:
        assert fault_of(window) == [1, DISPATCH, 1, 0b10, 1, TOO_MANY]


def test_bad_arguments_are_named() -> None:
    window = open_ranks(2)[0]
    x, ids = random_rows(torch.bfloat16, 2, 40), random_ids(2, 3, 10)
    with pytest.raises(ValueError, match=r"x float32 \[2, 40\], expected bfloat16 \[N, 40\]"):
        ops.dispatch_rows(x.float(), ids, window, layer=0, max_rows=2)
    with pytest.raises(ValueError, match=r"topk_ids int64 \[2, 2\], expected int64 or int32 \[T, 3\]"):
        ops.dispatch_rows(x, ids[:, :2], window, layer=0, max_rows=2)
    with pytest.raises(ValueError, match=r"max_rows 7, window\.shape\.max_tokens 6"):
        ops.dispatch_rows(x, ids, window, layer=0, max_rows=7)
    with pytest.raises(
        ValueError, match=r"N 2 of out bfloat16 \[2, 40\], window\.shape\.world_size 2, window\.shape\.top_k 3"
    ):
        ops.combine_rows(x, window, layer=0, num_tokens=1)
    with pytest.raises(ValueError, match="a multiple of 16 bytes, got 74"):
        PeerShape(world_size=2, top_k=1, row_bytes=74, max_tokens=1)
    with pytest.raises(ValueError, match="expected uint8"):
        open_window(window.shape, window.memory[:1] * 2 + (x,), rank=0, dtype=x.dtype, owner=[0], local=[0], seconds=1)
