"""Residency decided by a kernel: victims, slots, ranks and counts equal those of the reference and the host policy."""

import random
from pathlib import Path

import pytest
import torch
from kernel_cases.case import assert_bits
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.experts import cache_access as triton_kernel
from moeyard_kernels.types.expert_ranks import LAST_VISIT, SUMS, UNIT, add_use, recent_rank
from moeyard_kernels.types.expert_residency import (
    EVICTED_PROBATION,
    EVICTED_PROTECTED,
    HITS_PROBATION,
    HITS_PROTECTED,
    MISSES,
    VISIT,
    PolicyName,
    ResidencyState,
    start_residency,
)
from moeyard_worker.experts.offline.trace import read_trace
from moeyard_worker.experts.policies import POLICIES, start_policy
from moeyard_worker.experts.policy import Counters

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRACES = Path(__file__).parents[1] / "experts" / "data"
NAMES: tuple[PolicyName, ...] = ("slru", "lru")


def fields(state: ResidencyState) -> tuple[torch.Tensor, ...]:
    places = () if state.place_of is None else (state.place_of,)
    live = (state.slot_of, state.keys, state.ranks, state.protected, state.uses, state.counts, *places)
    return tuple(x.cpu() for x in live)


def needs(rng: random.Random, num_layers: int, num_experts: int, top_k: int, num_visits: int) -> list[torch.Tensor]:
    """Return ids of each visit [T, K], skewed to low ids. Some ids, rows and whole visits are masked."""
    out = []
    for _ in range(num_visits):
        rows = rng.choice((1, 1, 2, 5))
        ids = torch.full((rows, top_k), -1)
        for row in range(rows if rng.random() < 0.9 else 0):
            chosen: set[int] = set()
            while len(chosen) < top_k:
                chosen.add(min(int(rng.expovariate(4 / num_experts)), num_experts - 1))
            ids[row] = torch.tensor(sorted(chosen, key=lambda _: rng.random()))
        ids[torch.rand(ids.shape, generator=torch.Generator().manual_seed(rng.randrange(99))) < 0.1] = -1
        out.append(ids)
    return out


SHAPES = [(3, 6, 2, 1), (3, 6, 2, 2), (3, 6, 2, 5), (2, 5, 3, 9), (4, 40, 6, 33), (3, 130, 8, 100), (5, 32, 4, 80)]
if DEVICE.type == "cuda":
    SHAPES += [(48, 128, 8, 3072), (61, 384, 8, 9000)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("one_copy", [False, True], ids=["all on host", "one copy"])
@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize(("num_layers", "num_experts", "top_k", "num_slots"), SHAPES, ids=str)
def test_kernel_reference_and_policy_agree(
    policy: PolicyName, num_layers: int, num_experts: int, top_k: int, num_slots: int, one_copy: bool
) -> None:
    """With one copy of each expert, no place is lost, and each missed expert is found where it was put."""
    rng = random.Random(num_slots)
    shape = {"num_layers": num_layers, "num_experts": num_experts, "num_slots": num_slots}
    ours, theirs = (
        start_residency(policy, **shape, device=device, one_copy=one_copy) for device in (DEVICE, torch.device("cpu"))
    )
    # The keys in places and in slots, moved as `gather_experts` moves them.
    stored = [key for key, slot in enumerate(theirs.slot_of.flatten().tolist()) if slot < 0]
    held = theirs.keys.tolist()
    # Layers and experts do not begin at 0.
    layers = [7 + 2 * i for i in range(num_layers)]
    pure = start_policy(policy, layers=layers, experts=range(50, 50 + num_experts), num_slots=num_slots)
    counters = Counters()
    missed = 0
    for visit, ids in enumerate(needs(rng, num_layers, num_experts, top_k, 60 if DEVICE.type == "cuda" else 30)):
        layer = visit % num_layers if visit % 3 else rng.randrange(num_layers)
        needed = sorted({int(e) + 50 for e in ids.flatten() if e >= 0})
        known = max(1, len(needed)) if visit % 2 else None
        got = triton_kernel.cache_access(ids.to(DEVICE), ours, layer=layer, num_needed=known)
        wanted = ops.cache_access(ids, theirs, layer=layer, num_needed=known)
        assert_bits(f"tables of visit {visit}", got.cpu(), wanted)
        assert_bits(f"state after visit {visit}", fields(ours), fields(theirs))
        if one_copy:
            waves, places = wanted[1:].chunk(2)
            wanted = wanted[: 1 + len(waves)]
            for slots_of_wave, of_wave in zip(waves.tolist(), places.tolist(), strict=True):
                for expert, (slot, place) in enumerate(zip(slots_of_wave, of_wave, strict=True)):
                    if slot >= 0:
                        held[slot], stored[place] = stored[place], held[slot]
                        assert held[slot] == layer * num_experts + expert
            assert held == theirs.keys.tolist()
            theirs.validate()
        tables = torch.full_like(wanted, -1)
        for row, wave in enumerate(pure.access(layers[layer], needed, []), 1):
            counters.count(wave)
            for placed in wave:
                tables[0 if placed.hit else row, placed.expert - 50] = placed.slot
                missed += placed.hit is None
        assert_bits(f"the policy's tables of visit {visit}", tables, wanted)
    pure.validate()
    assert missed > 0
    counts = ours.counts.tolist()
    assert [counts[i] for i in (HITS_PROBATION, HITS_PROTECTED, MISSES, EVICTED_PROBATION, EVICTED_PROTECTED)] == [
        *(counters.hits[segment, "decode"] for segment in ("probation", "protected")),
        counters.misses["decode"],
        *(counters.evictions[segment, "decode"] for segment in ("probation", "protected")),
    ]


@pytest.mark.parametrize("policy", NAMES)
def test_recorded_trace(policy: PolicyName) -> None:
    """With four streams of the demo model the kernel counts what the simulator counts, visit by visit."""
    [trace] = read_trace(TRACES / "demo-routing-4")
    header = trace.header
    index = {layer: i for i, layer in enumerate(header.layers)}
    num_slots = 48
    state = start_residency(
        policy, num_layers=len(index), num_experts=len(header.experts), num_slots=num_slots, device=DEVICE
    )
    pure = start_policy(policy, layers=header.layers, experts=header.experts, num_slots=num_slots)
    visits = [access for access in trace if access.decode][: 4000 if DEVICE.type == "cuda" else 50]
    for access in visits:
        ids = torch.tensor([access.decode], device=DEVICE) - header.experts_start
        tables = triton_kernel.cache_access(ids, state, layer=index[access.layer]).tolist()
        waves = pure.access(access.layer, access.decode, [])
        found = [(p.hit is None, i, p.expert, p.slot) for i, wave in enumerate(waves) for p in wave]
        first = header.experts_start
        assert found == [
            *((False, 0, first + e, slot) for e, slot in enumerate(tables[0]) if slot >= 0),
            *((True, w, first + e, s) for w, row in enumerate(tables[1:]) for e, s in enumerate(row) if s >= 0),
        ]
    assert int(state.counts[VISIT]) == len(visits)


def test_nothing_changes_without_decode_rows() -> None:
    state = start_residency("slru", num_layers=2, num_experts=4, num_slots=3, device=DEVICE)
    before = fields(state)
    for run in (triton_kernel.cache_access, ops.cache_access):
        tables = run(torch.full((3, 2), -1, device=DEVICE), state, layer=1)
        assert tables.tolist() == [[-1] * 4] * 5
        assert_bits("state", fields(state), before)


def test_ranks_stay_below_63_bits_for_years() -> None:
    uses, now = 0, 0
    for step in range(200):
        now = 16 * UNIT + step * 32
        uses = add_use(now, uses)
    assert recent_rank((1 << 20) - 1, uses=uses, now=now, visit=0) < 1 << 63
    late = [recent_rank(0, uses=uses, now=now, visit=visit) for visit in (LAST_VISIT, LAST_VISIT + 5)]
    assert late[0] == late[1] > 0
    assert list(SUMS) == sorted(SUMS, reverse=True)
    assert SUMS[0] == UNIT


def test_bad_arguments_are_named() -> None:
    state = start_residency("lru", num_layers=2, num_experts=4, num_slots=3, device=DEVICE)
    ids = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"ids float32 \[2, 2\], expected int64 or int32 \[T, K\]"):
        ops.cache_access(ids.float(), state, layer=0)
    with pytest.raises(ValueError, match=r"layer 2, L 2 of state\.slot_of int32 \[2, 4\], expected 0 <= layer < L"):
        ops.cache_access(ids, state, layer=2)
    with pytest.raises(ValueError, match="num_needed 0"):
        ops.cache_access(ids, state, layer=0, num_needed=0)
    with pytest.raises(ValueError, match=r"ids int64 \[0, 2\]"):
        ops.cache_access(ids[:0], state, layer=0)


def test_both_policies_are_known() -> None:
    assert set(NAMES) == set(POLICIES)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", NAMES)
def test_graph_replay(policy: PolicyName) -> None:
    state = start_residency(policy, num_layers=3, num_experts=64, num_slots=60, device=DEVICE)
    ids = torch.zeros(4, 8, dtype=torch.int64, device=DEVICE)
    start = [x.clone() for x in fields(state)]

    def step() -> tuple[torch.Tensor, ...]:
        # Each run starts from the same state, so a replay and an eager run see the same.
        live = (state.slot_of, state.keys, state.ranks, state.protected, state.uses, state.counts)
        for x, first in zip(live, firsts, strict=True):
            x.copy_(first)
        tables = [ops.cache_access(ids, state, layer=layer) for layer in (0, 1, 2, 0)]
        return (*tables, *(x.clone() for x in live))

    firsts = [x.to(DEVICE) for x in start]
    assert_replays(step, lambda: ids.copy_(torch.rand(4, 64).argsort(1)[:, :8]))
