"""Placements from recorded needs: their invariants, improvements and predictions."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.experts.offline.planning import (
    Needs,
    balanced,
    by_chance,
    compare,
    copied,
    format_plan,
    predict,
    read_needs,
    together,
)
from moeyard_worker.experts.recorder import RoutingRecorder, TraceHeader

ONE, FOUR = (Path(__file__).parent / "data" / name for name in ("demo-routing", "demo-routing-4"))


@st.composite
def needed(draw: st.DrawFn) -> Needs:
    """Return needs of two layers with up to 12 experts."""
    num_experts = draw(st.integers(2, 12))
    step = st.lists(st.integers(0, num_experts - 1), max_size=5).map(lambda ids: tuple(sorted(set(ids))))
    steps = draw(st.lists(st.tuples(step, step), min_size=2, max_size=12))
    return Needs((1, 2), num_experts, tuple(steps))


def fullest_of(needs: Needs, placement: Placement) -> float:
    """Compute `predict` by counting."""
    total = 0
    for step in needs.steps:
        for experts, owners in zip(step, placement.owners, strict=True):
            total += max(len([e for e in experts if owners[e] == rank]) for rank in placement.ranks)
    return total / len(needs.steps)


@given(needed(), st.integers(1, 4), st.integers(0, 99))
def test_all_placements_are_as_even_as_shards(needs: Needs, ranks: int, seed: int) -> None:
    if ranks > needs.num_experts:
        with pytest.raises(ValueError, match=f"{ranks} ranks for {needs.num_experts} experts"):
            together(needs, ranks)
        return
    sizes = [len(shard) for shard in partition(needs.num_experts, ranks)]
    for placement in (balanced(needs, ranks), by_chance(needs, ranks, seed), together(needs, ranks)):
        assert placement.layers == needs.layers
        assert all([row.count(rank) for rank in range(ranks)] == sizes for row in placement.owners)
        assert predict("", needs, placement).fullest == pytest.approx(fullest_of(needs, placement))


@given(needed(), st.integers(1, 3))
def test_swaps_never_worsen_known_needs(needs: Needs, ranks: int) -> None:
    if ranks <= needs.num_experts:
        before, after = balanced(needs, ranks), together(needs, ranks)
        assert fullest_of(needs, after) <= fullest_of(needs, before)
        assert after == together(needs, ranks), "the placement is deterministic"


def test_experts_needed_together_are_kept_apart() -> None:
    """Pairs are always needed together. Contiguous shards have both on one rank, and loads do not show it."""
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)]
    needs = Needs((0,), 8, tuple((pair,) for pair in pairs * 3))
    shards = Placement.of_shards((0,), partition(8, 2))
    assert predict("", needs, shards).fullest == 2
    assert predict("", needs, together(needs, 2)).fullest == 1


def test_loads_go_to_the_emptiest_rank() -> None:
    needs = Needs((0,), 4, tuple(((expert,),) for expert in (0, 0, 0, 0, 1, 1, 1, 2, 2, 3)))
    assert needs.loads() == ((4, 3, 2, 1),)
    assert balanced(needs, 2).owners == ((0, 1, 1, 0),)


def test_copies_are_on_other_ranks_and_take_half_of_many_rows() -> None:
    needs = Needs((0,), 4, (((0,),),) * 4)
    shards = Placement.of_shards((0,), partition(4, 2))
    both = copied(needs, shards, 1)
    assert both == Placement((0,), shards.owners, (((0, 1),),))
    assert (predict("", needs, shards).rows, predict("", needs, both).rows) == (2, 1)
    # With few rows the owner computes all.
    assert predict("", needs, shards).fullest == predict("", needs, both).fullest == 1
    assert copied(needs, shards, 0) == shards
    with pytest.raises(ValueError, match="5 copies per layer of 4 experts"):
        copied(needs, shards, 5)
    with pytest.raises(ValueError, match="second rank"):
        copied(needs, Placement.of_shards((0,), partition(4, 1)), 1)


@given(st.integers(2, 4), st.integers(0, 12), st.integers(0, 999))
def test_copies_balance_uneven_needs(ranks: int, count: int, seed: int) -> None:
    """Loads resemble a trained model: a few experts are needed in nearly every step, most in few steps."""
    chance = random.Random(seed)
    shares = [1 / (1 + expert) for expert in range(12)]
    chance.shuffle(shares)
    steps = tuple((tuple(e for e in range(12) if chance.random() < shares[e]),) for _ in range(40))
    needs = Needs((0,), 12, steps)
    start = balanced(needs, ranks)
    placement = copied(needs, start, count)
    assert placement.owners == start.owners
    assert len(placement.copies_of(0)) <= count
    found, before = predict("", needs, placement), predict("", needs, start)
    assert found.fullest == before.fullest
    assert found.rows <= before.rows
    counts = [sum(rank == each for _, rank in placement.copies_of(0)) for each in range(ranks)]
    assert max(counts) <= -(-count // ranks), "memory stays balanced"


def test_gain_of_copies() -> None:
    """The hottest experts (by Zipf) are all on one of eight ranks. As many copies elsewhere halve its rows."""
    chance = random.Random(3)
    shares = [min(1.0, 4 / (1 + expert)) for expert in range(64)]
    steps = tuple((tuple(e for e in range(64) if chance.random() < shares[e]),) for _ in range(200))
    needs = Needs((0,), 64, steps)
    shards = Placement.of_shards((0,), partition(64, 8))
    rows = {count: predict("", needs, copied(needs, shards, count)).rows for count in (0, 8, 16)}
    assert rows[0] > 3.5
    assert rows[0] / 2 <= rows[16] < rows[8] < 0.55 * rows[0]


@pytest.mark.parametrize(("trace", "share"), [(ONE, 0.70), (FOUR, 0.87)])
def test_plan_of_the_demo_model_holds_for_later_steps(trace: Path, share: float) -> None:
    """The fullest of four ranks has 0.68 and 0.86 of contiguous shards' needs, planned from the first half alone."""
    found = {each.name: each for each in compare(read_needs(trace), 4)}
    assert found["kept apart"].fullest < share * found["contiguous (linear)"].fullest
    assert found["kept apart"].fullest < 0.96 * found["balanced by load"].fullest
    assert len({each.mean for each in found.values()}) == 1, "the placement does not change the needs"


def test_traces_of_several_ranks_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for rank, shard in enumerate(partition(6, 2)):
        header = TraceHeader(
            rank=rank,
            world_size=2,
            layers=(1, 3),
            experts_start=shard.start,
            experts_stop=shard.stop,
            top_k=2,
            num_slots=6,
            policy="slru",
        )
        with RoutingRecorder(path, header) as recorder:
            for step in (4, 5):
                for layer in (1, 3):
                    mine = [e for e in ((0, 5) if layer == 1 else (2, 3)) if e in shard]
                    recorder.record(step=step, layer=layer, decode=mine, prefill=[])
            recorder.record(step=6, layer=3, decode=[], prefill=[shard.start])
    assert read_needs(path) == Needs((1, 3), 6, (((0, 5), (2, 3)),) * 2)


def test_trace_without_decode_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    header = TraceHeader(
        rank=0, world_size=1, layers=(0,), experts_start=0, experts_stop=4, top_k=1, num_slots=4, policy="lru"
    )
    with RoutingRecorder(path, header) as recorder:
        recorder.record(step=1, layer=0, decode=[], prefill=[1])
    with pytest.raises(ValueError, match="has 0 steps with decode rows"):
        read_needs(path)


def test_table_has_bytes_if_they_are_known() -> None:
    chance = random.Random(5)
    steps = tuple((tuple(sorted(chance.sample(range(8), 3))),) for _ in range(40))
    predictions = compare(Needs((0,), 8, steps), 2, num_copies=(1,))
    plain = format_plan(predictions, expert_bytes=None).splitlines()
    assert [line.split("  ")[0] for line in plain] == [
        "placement",
        "contiguous (linear)",
        "in turn (round_robin)",
        "by chance (mean of 16)",
        "balanced by load",
        "kept apart",
        "kept apart, 1 copied",
    ]
    assert "rows, fullest / mean" in plain[0]
    table = format_plan(predictions, expert_bytes=2_000_000).splitlines()
    assert "MB, fullest rank" in table[0]
    assert [float(line.split()[-1]) for line in table[1:]] == pytest.approx(
        [2 * float(line.split()[-4]) for line in plain[1:]], abs=0.02
    )
