"""Experts fetched by all ranks, as one GPU sees it, for itself and for a peer. `bench/gpu_ranks.py` has real links."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kernel_cases.case import Case, Target, assert_bits
from kernel_cases.expert_cache import MODELS, Pinned
from moeyard_kernels import ops
from moeyard_kernels.experts import fetch_experts
from moeyard_kernels.types.expert_residency import NUM_COUNTS
from moeyard_kernels.types.fetch_window import FetchWindow, open_fetch
from moeyard_kernels.types.peer_shape import FetchShape, PeerShape
from moeyard_kernels.types.peer_window import DISPATCHED, open_window

OPS = ("fetch_experts",)
_EXPERTS = 12


class Ranks:
    """Ranks of this device with one host store each. They hold addresses of their memory, so they are not copied."""

    def __init__(self, world: int, hidden: int, inner: int) -> None:
        rows = PeerShape(world_size=world, top_k=1, row_bytes=16, max_tokens=1)
        shape = FetchShape(world_size=world, up_bytes=4 * inner * hidden, down_bytes=2 * inner * hidden)
        of_rows, memory = (
            [torch.zeros(size.num_bytes, dtype=torch.uint8, device="cuda") for _ in range(world)]
            for size in (rows, shape)
        )
        self.windows: list[FetchWindow] = []
        self.pinned = [Pinned(_EXPERTS, 3 * inner * hidden) for _ in range(world)]
        self.gate_up = [torch.zeros(_EXPERTS, 2 * inner, hidden, dtype=torch.bfloat16, device="cuda") for _ in memory]
        self.down = [torch.zeros(_EXPERTS, hidden, inner, dtype=torch.bfloat16, device="cuda") for _ in memory]
        self.counts = torch.zeros(NUM_COUNTS, dtype=torch.int64, device="cuda")
        for rank in range(world):
            peer = open_window(rows, of_rows, rank=rank, dtype=torch.bfloat16, owner=[0], local=[0], seconds=5.0)
            peer.state[DISPATCHED] = 1
            window = open_fetch(shape, memory, peer)
            window.stores.copy_(torch.tensor([each.memory.data_ptr() for each in self.pinned]))
            window.share(True)
            self.windows.append(window)

    def __deepcopy__(self, memo: Any) -> "Ranks":
        return self

    def fetch(self, kernels: Any, rank: int, table: torch.Tensor, **how: Any) -> None:
        """Run the part of one rank."""
        kernels.fetch_experts(
            self.pinned[rank].memory,
            table,
            self.gate_up[rank],
            self.down[rank],
            self.windows[rank],
            layer=0,
            counts=self.counts,
            **{"tell": False, "read": False, "move": False, **how},
        )


def cases() -> Iterator[Case]:
    """Yield none, one and eight experts for a single rank, then eight of a peer, as its other reader."""
    for name, _, _, _, hidden, inner in MODELS:
        for config in fetch_experts.CONFIGS:
            default = config is fetch_experts.CONFIGS[0]
            how = "" if default else f", {config.READERS} + {config.MOVERS} x {config.BYTES}"
            for count in (0, 1, 8) if default else (8,):
                yield _case(f"{name} {count} experts{how}", hidden, inner, count, config, for_peer=False)
            yield _case(f"{name} 4 experts for a peer{how}", hidden, inner, 8, config, for_peer=True)


def _run(ranks: Ranks, table: torch.Tensor, rank: int, config: fetch_experts.FetchConfig) -> None:
    ranks.fetch(fetch_experts, rank, table, tell=True, read=True, move=True, config=config)


def _case(
    shape: str, hidden: int, inner: int, count: int, config: fetch_experts.FetchConfig, *, for_peer: bool
) -> Case:
    ranks = Ranks(2 if for_peer else 1, hidden, inner)
    table = torch.full((_EXPERTS,), -1, dtype=torch.int32)
    table[:count] = torch.arange(count, dtype=torch.int32) + 3
    table, nothing = table.to("cuda"), torch.full((_EXPERTS,), -1, dtype=torch.int32, device="cuda")
    if for_peer:
        ranks.fetch(fetch_experts, 0, table, tell=True)
    num_bytes = (count // 2 if for_peer else count) * 6 * inner * hidden
    return Case(
        op="fetch_experts",
        shape=shape,
        run=partial(_run, ranks, nothing if for_peer else table, len(ranks.windows) - 1, config),
        prove=partial(_prove, count, config),
        num_bytes=num_bytes,
        # As `gather_experts`, plus the time to learn that no rank misses an expert.
        target=Target("us", num_bytes / 46e3 if count else 6) if config is fetch_experts.CONFIGS[0] else None,
        early=False,
    )


def _prove(count: int, config: fetch_experts.FetchConfig) -> None:
    """Prove that two ranks of this device, one without misses, leave slots and reads in flight as the oracle does.

    It uses the smaller experts, because four stores of the larger ones would be pinned at once.
    """
    _, _, _, _, hidden, inner = MODELS[0]
    table = torch.full((_EXPERTS,), -1, dtype=torch.int32, device="cuda")
    table[:count] = torch.arange(count, dtype=torch.int32, device="cuda") + 3
    tables = (table, torch.full_like(table, -1))
    ours, theirs = (Ranks(2, hidden, inner) for _ in range(2))
    reference = SimpleNamespace(fetch_experts=ops.fetch_experts.reference)
    for kernels, ranks in ((fetch_experts, ours), (reference, theirs)):
        how = {"config": config} if kernels is fetch_experts else {}
        for part in ("tell", "read", "move"):
            for rank, each in enumerate(tables):
                ranks.fetch(kernels, rank, each, **{part: True}, **how)
        torch.cuda.synchronize()
    for rank in range(2):
        for name in ("gate_up", "down"):
            assert_bits(f"{name} of rank {rank}", getattr(ours, name)[rank], getattr(theirs, name)[rank])
        memory = (each.windows[rank].memory[rank] for each in (ours, theirs))
        assert_bits(f"memory of rank {rank}", *memory)
