"""Changes of owned experts: bits equal those of a cache that always had them, without unneeded reads."""

import random
from functools import partial

import pytest
import torch
from tests.experts.accesses import RandomExperts

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.types.weight_form import plain_expert
from moeyard_worker.exchange.base import Dispatched
from moeyard_worker.experts.cache import ExpertCache
from moeyard_worker.experts.owned import Owned, first_residents, local_keys, of_layers

LAYERS, NUM_EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = (1, 2, 4), 7, 16, 12, 3
HALF: Owned = ((0, 1, 2),) * 3
MORE: Owned = ((0, 1, 2, 5), (0, 1, 2, 6), (0, 1, 2, 3, 4))
OTHER: Owned = ((2, 6), (), (1, 3, 4))


Weights = partial(RandomExperts, LAYERS, range(NUM_EXPERTS), hidden=HIDDEN, intermediate=INTERMEDIATE)


def make_cache(source: RandomExperts, owned: Owned, num_slots: int) -> ExpertCache:
    cache = ExpertCache(
        backend=CpuBackend(page_size=16),
        source=source,
        layers=LAYERS,
        experts=owned,
        form=plain_expert(hidden=HIDDEN, intermediate=INTERMEDIATE, dtype="bfloat16"),
        num_slots=num_slots,
    )
    cache.preload()
    return cache


def run(cache: ExpertCache, owned: Owned, seed: int) -> list[torch.Tensor]:
    """Run every layer once, with decode and prompt rows. Holes are zero."""
    chance, out = random.Random(seed), []
    for layer, experts in zip(LAYERS, owned, strict=True):
        rows = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        ids = torch.full((9, TOP_K), -1)
        for row in range(9):
            chosen = chance.sample(range(len(experts)), min(len(experts), TOP_K))
            ids[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        prompt = torch.arange(9) < 4
        got = cache.run(layer, Dispatched(rows=rows, experts=ids, prompt=prompt, handle=None))
        out.append(got.masked_fill((ids < 0)[..., None], 0))
    cache.validate()
    return out


@pytest.mark.parametrize("num_slots", [1, 4, 9])
@pytest.mark.parametrize("room", [0, 2, 99])
def test_bits_equal_a_cache_that_always_had_the_experts(num_slots: int, room: int) -> None:
    cache = make_cache(Weights(), HALF, num_slots)
    for step, owned in enumerate((HALF, MORE, OTHER, MORE, HALF)):
        cache.prepare(owned, room=room)
        cache.adopt(owned)
        assert cache.num_experts == sum(map(len, owned))
        expected = make_cache(Weights(), owned, 99)
        for seed in range(2):
            for got, want in zip(run(cache, owned, seed), run(expected, owned, seed), strict=True):
                assert torch.equal(got.view(torch.int16), want.view(torch.int16)), (step, seed)


def test_only_new_experts_are_read_before_adoption() -> None:
    source = Weights()
    cache = make_cache(source, HALF, 99)
    source.reads.clear()
    written = cache.prepare(MORE, room=4)
    assert sorted(source.reads) == [(1, 5), (2, 6), (4, 3), (4, 4)]
    assert written == 4 * 3 * HIDDEN * INTERMEDIATE * 2
    source.reads.clear()
    cache.adopt(MORE)
    assert cache.all_resident
    assert cache.num_slots == 13
    # Going back reads nothing for experts that stay.
    cache.prepare(HALF)
    cache.adopt(HALF)
    assert (cache.num_slots, source.reads) == (9, [])


def test_without_room_experts_are_read_on_demand() -> None:
    source = Weights()
    cache = make_cache(source, HALF, 99)
    source.reads.clear()
    cache.prepare(MORE, room=1)
    cache.adopt(MORE)
    assert (cache.all_resident, cache.num_slots, source.reads) == (False, 10, [(1, 5)])
    run(cache, MORE, 0)
    assert (2, 6) in source.reads
    # It has few slots now, and more are useless before all experts are its own again.
    cache.prepare(MORE, room=99)
    cache.adopt(HALF)
    assert (cache.all_resident, cache.num_slots) == (True, 9)


def test_preparation_for_another_placement_is_dropped() -> None:
    source = Weights()
    cache = make_cache(source, HALF, 99)
    cache.prepare(MORE, room=99)
    cache.adopt(HALF)
    assert cache.num_experts == 9
    cache.prepare(MORE, room=99)
    cache.adopt(OTHER)
    assert cache.num_experts == 5
    run(cache, OTHER, 3)


def test_counts_of_remaining_experts_continue() -> None:
    cache = make_cache(Weights(), HALF, 99)
    run(cache, HALF, 1)
    before = cache.loads(0)
    cache.prepare(MORE, room=99)
    cache.adopt(MORE)
    after = cache.loads(0)
    assert (before.experts, after.experts) == ((0, 1, 2), tuple(range(7)))
    for layer in range(3):
        assert after.rows[7 * layer : 7 * layer + 3] == before.rows[3 * layer : 3 * layer + 3]


def test_first_residents_of_uneven_layers() -> None:
    assert len(first_residents(LAYERS, OTHER, 3)) == 3
    assert set(first_residents(LAYERS, OTHER, 5)) == set(local_keys(LAYERS, OTHER))
    assert first_residents(LAYERS, HALF, 4) == [(1, 0), (1, 1), (2, 0), (4, 0)]


@pytest.mark.parametrize("owned", [((0, 1),), ((1, 0), (1,), ()), ((), (), ()), ((0, 0), (), ())])
def test_invalid_owned_experts_are_refused(owned: Owned) -> None:
    with pytest.raises(ValueError, match="are not a rank's experts of 3 layers"):
        of_layers(owned, 3)
