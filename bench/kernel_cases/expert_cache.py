"""The expert cache on a GPU: a kernel decides a layer's visit, and gathers experts from host memory."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kernel_cases.case import Case, Target, assert_bits
from moeyard_kernels import ops
from moeyard_kernels.experts import cache_access, gather_experts
from moeyard_kernels.types.expert_residency import NUM_COUNTS, ResidencyState, start_residency

OPS = ("cache_access", "gather_experts")
# Name, layers, experts, experts per token, hidden size, intermediate size of an expert.
MODELS = (("Qwen3-30B-A3B", 48, 128, 8, 2048, 768), ("Kimi-K2", 60, 384, 8, 7168, 2048))


class Pinned:
    """Host memory that is not copied, because a copy would not be pinned."""

    def __init__(self, *shape: int) -> None:
        self.memory = torch.empty(shape, dtype=torch.bfloat16).fill_(1.5).pin_memory()

    def __deepcopy__(self, memo: Any) -> "Pinned":
        return self


def cases() -> Iterator[Case]:
    """Yield a visit whose experts all have slots, and gathers of none, one, eight, and eight in every other way."""
    for name, num_layers, num_experts, top_k, _, _ in MODELS:
        for share in (0.1, 0.5):
            for num_tokens in (1, 8):
                yield _access_case(
                    f"{name} T={num_tokens} {share:.0%}", num_layers, num_experts, top_k, share, num_tokens
                )
    for name, _, _, _, hidden, inner in MODELS:
        for count in (0, 1, 8):
            yield _gather_case(f"{name} {count} experts", hidden, inner, count, gather_experts.CONFIGS[0])
        for config in gather_experts.CONFIGS[1:]:
            yield _gather_case(f"{name} 8 experts, {config.PROGRAMS} x {config.BYTES}", hidden, inner, 8, config)
        for config in gather_experts.CONFIGS:
            shape = f"{name} 8 experts exchanged, {config.PROGRAMS} x {config.BYTES}"
            yield _gather_case(shape, hidden, inner, 8, config, exchanged=True)


def _access(ids: torch.Tensor, state: ResidencyState, *, layer: int) -> torch.Tensor:
    return cache_access.cache_access(ids, state, layer=layer)


def _access_case(shape: str, num_layers: int, num_experts: int, top_k: int, share: float, num_tokens: int) -> Case:
    """Repeat a visit of one layer. After the first launch all experts hit, which is the cost of every step."""
    num_slots = int(share * num_layers * num_experts)
    sizes: dict[str, Any] = {"num_layers": num_layers, "num_experts": num_experts, "num_slots": num_slots}
    ids = torch.rand(num_tokens, num_experts, device="cuda").argsort(1)[:, :top_k].contiguous()

    def prove() -> None:
        ours, theirs = (start_residency("slru", **sizes, device=torch.device(d)) for d in ("cuda", "cpu"))
        for layer in (0, 1, 0):
            got = cache_access.cache_access(ids, ours, layer=layer)
            assert_bits("tables", got.cpu(), ops.cache_access(ids.cpu(), theirs, layer=layer))
        assert_bits("ranks", ours.ranks.cpu(), theirs.ranks)

    return Case(
        op="cache_access",
        shape=f"{shape}, {num_slots} slots",
        run=partial(_access, ids, start_residency("slru", **sizes, device=torch.device("cuda")), layer=0),
        prove=prove,
        num_bytes=num_experts * 24,
        target=Target("us", 10),
        early=False,
    )


def _gather(
    pinned: Pinned,
    table: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    counts: torch.Tensor,
    config: gather_experts.GatherConfig,
    places: torch.Tensor | None,
) -> None:
    given: Any = {"counts": counts, "places": places, "config": config}
    gather_experts.gather_experts(pinned.memory, table, gate_up, down, layer=0, **given)


def _gather_case(
    shape: str, hidden: int, inner: int, count: int, config: gather_experts.GatherConfig, *, exchanged: bool = False
) -> Case:
    """Copy `count` experts into slots. exchanged: experts that the slots held go to host memory."""
    pinned = Pinned(16, 3 * inner * hidden)
    gate_up = torch.zeros(16, 2 * inner, hidden, dtype=torch.bfloat16, device="cuda")
    down = torch.zeros(16, hidden, inner, dtype=torch.bfloat16, device="cuda")
    table = torch.full((16,), -1, dtype=torch.int32)
    table[:count] = torch.arange(count, dtype=torch.int32) + 3
    table = table.to("cuda")
    counts = torch.zeros(NUM_COUNTS, dtype=torch.int64, device="cuda")
    places = torch.arange(16, dtype=torch.int32, device="cuda") if exchanged else None

    def prove() -> None:
        pinned.memory.fill_(1.5)
        _gather(pinned, table, gate_up.zero_(), down.zero_(), counts, config, places)
        torch.cuda.synchronize()
        for place in range(16):
            kept = 0.0 if exchanged and place < count else 1.5
            assert bool((pinned.memory[place] == kept).all()), (config, place)
        for slot in range(16):
            filled = 1.5 if 3 <= slot < 3 + count else 0.0
            assert bool((gate_up[slot] == filled).all() & (down[slot] == filled).all()), (config, slot)

    num_bytes = count * 3 * inner * hidden * 2
    default = config is gather_experts.CONFIGS[0] and not exchanged
    return Case(
        op="gather_experts",
        shape=shape,
        run=partial(_gather, pinned, table, gate_up, down, counts, config, places),
        prove=prove,
        num_bytes=num_bytes,
        # 48 GB/s, or little more than a launch if there is nothing to do.
        target=Target("us", num_bytes / 48e3 if count else 4) if default else None,
        early=False,
    )
