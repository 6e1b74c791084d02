"""Results that the experts' second product writes to their source ranks itself leave the same memory as a combine.

Sums are exact (small integers, one value of h for each output), so the interpreter gives the same as a GPU.
"""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from kernel_cases.case import assert_bits
from tests.kernels.peer_ranks import DEVICE, in_turn, open_ranks, random_ids

from moeyard_kernels import ops
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.experts import grouped_gemm as triton_kernel
from moeyard_kernels.experts import peer_exchange as peer_kernel
from moeyard_kernels.types.expert_layout import ExpertLayout, ExpertPairs
from moeyard_kernels.types.peer_shape import SENT
from moeyard_kernels.types.peer_window import POISONED, PeerWindow

H, I, K, E = 40, 24, 3, 10  # noqa: E741
COUNTS = (5, 0, 7)


class Ranks:
    """Two sets of windows of three ranks with the same dispatched rows, and each rank's experts."""

    def __init__(self, dtype: torch.dtype, counts: tuple[int, ...] = COUNTS) -> None:
        self.counts, most = counts, max(counts)
        self.combined, self.written = (open_ranks(len(counts), dtype=dtype, max_tokens=most) for _ in range(2))
        given = [(torch.randint(-4, 5, (n, H)).to(dtype).to(DEVICE), random_ids(n, K, E)) for n in counts]
        self.received = [
            in_turn(ops.dispatch_rows, windows, given, layer=0, max_rows=most)
            for windows in (self.combined, self.written)
        ]
        num_slots = E // len(counts) + 2
        self.gate_up = (torch.randint(-4, 5, (num_slots, 2 * I, H)) / 64).to(dtype).to(DEVICE)
        down = torch.zeros(num_slots, H, I)
        self.down = down.scatter_(2, torch.randint(0, I, (num_slots, H, 1)), 0.5).to(dtype).to(DEVICE)
        self.slots = torch.randperm(num_slots).int().to(DEVICE)

    def layout(self, ids: torch.Tensor, block_rows: int, slots: torch.Tensor) -> ExpertLayout | ExpertPairs:
        if not block_rows:
            return ExpertPairs(topk_ids=ids, slot_of_expert=slots, num_slots=len(self.down))
        return ops.expert_layout(ids, slots, num_slots=len(self.down), block_rows=block_rows)

    def compute(
        self, kernels: ModuleType, *, block_rows: int, home: bool, config: Config | None = None, waves: int = 1
    ) -> None:
        """Compute every rank's results, and return them with `combine_rows` or write them to their source ranks."""
        most = max(self.counts)
        windows, received = (self.written, self.received[1]) if home else (self.combined, self.received[0])
        outs: list[torch.Tensor | None] = []
        for window, (rows, ids) in zip(windows, received, strict=True):
            options = {"home": window} if home else {"out": rows.new_full((ids.numel(), H), float("nan"))}
            if config is not None:
                options["configs"] = (None, config)
            out = None if home else options["out"]
            for wave in range(waves):
                slots = torch.where(torch.arange(len(self.slots), device=DEVICE) % waves == wave, self.slots, -1).int()
                layout = self.layout(ids, block_rows, slots)
                kernels.grouped_gemm(rows, self.gate_up, self.down, layout, top_k=K, **options)
            outs.append(out)
        for send in (True, False):
            for window, out, count in zip(windows, outs, self.counts, strict=True):
                # The kernel counts, and so does the reference.
                combine = (peer_kernel if kernels is triton_kernel else ops).combine_rows
                combine(out, window, layer=0, num_tokens=count, max_rows=most, send=send, wait=not send)

    def assert_same(self) -> None:
        """Compare all memory, the counters of transferred bytes included."""
        for rank, (a, b) in enumerate(zip(self.written, self.combined, strict=True)):
            assert_bits(f"memory of rank {rank}", a.memory[rank], b.memory[rank])
        assert any(bool(window.views(window.rank).home.any()) for window in self.written)


REFERENCE = SimpleNamespace(grouped_gemm=ops.grouped_gemm.reference)
KERNELS = [pytest.param(triton_kernel, id="kernel")]
if DEVICE.type == "cpu":
    # The reference makes tensors of ids on the CPU.
    KERNELS.append(pytest.param(REFERENCE, id="reference"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.mark.sampled(0)
@DTYPES
@pytest.mark.parametrize("block_rows", [0, 16, 32, 64, 128])
@pytest.mark.parametrize("kernels", KERNELS)
def test_written_results_equal_combined_results(kernels: ModuleType, block_rows: int, dtype: torch.dtype) -> None:
    ranks = Ranks(dtype)
    for home in (False, True):
        ranks.compute(kernels, block_rows=block_rows, home=home)
    ranks.assert_same()


@pytest.mark.sampled(0)
@pytest.mark.parametrize("block_rows", [16, 32, 64, 128])
def test_written_results_with_any_tile(block_rows: int) -> None:
    for config in triton_kernel.candidates("down", block_rows, torch.bfloat16):
        ranks = Ranks(torch.bfloat16)
        ranks.compute(triton_kernel, block_rows=block_rows, home=False)
        ranks.compute(triton_kernel, block_rows=block_rows, home=True, config=config)
        ranks.assert_same()


def test_written_results_in_waves() -> None:
    """If some experts have no slot, each result is written once, by the wave with its expert."""
    ranks = Ranks(torch.bfloat16)
    ranks.compute(triton_kernel, block_rows=16, home=False)
    ranks.compute(triton_kernel, block_rows=16, home=True, waves=3)
    ranks.assert_same()


@pytest.mark.parametrize("kernels", KERNELS)
def test_poisoned_rank_writes_nothing(kernels: ModuleType) -> None:
    ranks = Ranks(torch.bfloat16)
    before = [window.memory[rank].clone() for rank, window in enumerate(ranks.written)]
    for window in ranks.written:
        window.state[POISONED] = 1
    for block_rows in (0, 16, 128):
        ranks.compute(kernels, block_rows=block_rows, home=True)
    for rank, window in enumerate(ranks.written):
        assert_bits(f"memory of rank {rank}", window.memory[rank], before[rank])


def test_several_programs_count_transferred_bytes() -> None:
    ranks = Ranks(torch.bfloat16, (800, 1, 700))
    windows, received = ranks.written, ranks.received[1]
    for window, count in zip(windows, ranks.counts, strict=True):
        config = peer_kernel.PacketConfig(PROGRAMS=2)
        peer_kernel.combine_rows(None, window, layer=0, num_tokens=count, send=True, wait=False, config=config)
    for rank, window in enumerate(windows):
        # The counters include results for each other rank's rows, and the rows of the dispatch before.
        ids = received[rank][1].view(-1, len(windows), K)
        back = sum(int((ids[:n, peer] >= 0).sum()) for peer, n in enumerate(ranks.counts) if peer != rank) * H * 2
        there = int(ranks.combined[rank].views(rank).counts[SENT])
        assert int(window.views(rank).counts[SENT]) == there + back > there


def test_more_rows_than_the_memory_has_are_refused() -> None:
    ranks = Ranks(torch.bfloat16, (2, 2))
    window: PeerWindow = ranks.written[0]
    rows, ids = ranks.received[1][0]
    layout = ranks.layout(ids, 16, ranks.slots)
    with pytest.raises(ValueError, match=r"rows bfloat16 \[5, 40\] of 2 ranks, at most 4"):
        ops.grouped_gemm(
            rows.new_zeros(5, H),
            ranks.gate_up,
            ranks.down,
            ranks.layout(ids.new_zeros(5, K), 16, ranks.slots),
            top_k=K,
            home=window,
        )
    for options in ({"home": window, "out": rows.new_empty(ids.numel(), H)}, {"home": open_ranks(2, hidden=48)[0]}):
        with pytest.raises(ValueError, match=r"grouped_gemm: rows bfloat16 \[4, 40\], top_k 3 for peers'"):
            ops.grouped_gemm(rows, ranks.gate_up, ranks.down, layout, top_k=K, **options)
