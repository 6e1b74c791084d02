"""The best depth of drafts: found, kept, and found again after a change, even on a busy machine."""

import random

import pytest

from moeyard_worker.scheduling.depth import Depth, Drafting
from moeyard_worker.scheduling.request import Accepted
from moeyard_worker.scheduling.step import Chunk, Step


def live(
    depth: Depth, chance: random.Random, *, right: float, seconds: dict[int, float], sequences: int, steps: int
) -> list[int]:
    """Run steps: drafts are right with probability `right`, `seconds` is by depth, every tenth step takes thrice."""
    chosen, before = [], 0
    for _ in range(steps):
        k = depth.choose(sequences)
        for _ in range(sequences if before else 0):
            accepted = next((j for j in range(before) if chance.random() > right), before)
            depth.verified(before, accepted)
        depth.took(sequences, k, seconds[k] * (3 if chance.random() < 0.1 else chance.uniform(0.95, 1.05)))
        chosen.append(k)
        before = k
    return chosen


CHEAP = {0: 1.0, 1: 1.2, 2: 1.4, 3: 1.6}
DEAR = {0: 1.0, 1: 1.9, 2: 2.8, 3: 3.7}


@pytest.mark.parametrize(
    ("right", "seconds", "best"),
    [
        (0.9, CHEAP, 3),
        (0.35, CHEAP, 1),
        (0.02, CHEAP, 0),
        (0.8, DEAR, 0),
        (0.8, {**DEAR, 1: 1.2}, 1),
    ],
)
def test_finds_the_fastest_depth(right: float, seconds: dict[int, float], best: int, seed: int) -> None:
    depth = Depth(3)
    chosen = live(depth, random.Random(seed), right=right, seconds=seconds, sequences=4, steps=1500)
    assert {0, 1, 2, 3}.intersection((best - 1, best, best + 1)) <= set(chosen[:60]), "must try neighbours"
    late = chosen[500:]
    assert late.count(best) > 0.9 * len(late)
    assert len(set(late)) > 1, "other depths must be tried again"


@pytest.mark.parametrize("begun", [False, True])
def test_search_is_cheap_if_drafts_never_pay(begun: bool, seed: int) -> None:
    """A burst of short answers starts with eight streams and shrinks, with or without a single stream before it."""
    depth, chance, plain = Depth(3), random.Random(seed), 0.0
    if begun:
        live(depth, chance, right=0.8, seconds=CHEAP, sequences=1, steps=100)
    tokens = seconds = 0.0
    before = 0
    for sequences in (8,) * 60 + (6,) * 20 + (4,) * 20:
        k = depth.choose(sequences)
        for _ in range(sequences):
            accepted = next((j for j in range(before) if chance.random() > 0.8), before)
            depth.verified(before, accepted)
            tokens += 1 + accepted
        depth.took(sequences, k, DEAR[k])
        seconds += DEAR[k]
        plain += sequences
        before = k
    assert tokens / seconds > 0.97 * plain / 100


def test_follows_changes(seed: int) -> None:
    depth, chance = Depth(3), random.Random(seed)
    live(depth, chance, right=0.9, seconds=CHEAP, sequences=1, steps=600)
    # Another text, whose tokens are never guessed.
    chosen = live(depth, chance, right=0.05, seconds=CHEAP, sequences=1, steps=600)
    assert chosen[300:].count(0) > 0.9 * 300
    # Drafts are made only in trials, which show that they are right again.
    chosen = live(depth, chance, right=0.95, seconds=CHEAP, sequences=1, steps=9000)
    assert chosen[-1000:].count(0) < 0.1 * 1000


def test_depth_depends_on_the_number_of_sequences(seed: int) -> None:
    depth, chance = Depth(2), random.Random(seed)
    for _ in range(3):
        one = live(depth, chance, right=0.8, seconds=CHEAP, sequences=1, steps=200)
        many = live(depth, chance, right=0.8, seconds=DEAR, sequences=16, steps=200)
    assert one[50:].count(2) > 0.9 * 150
    assert many[50:].count(0) > 0.9 * 150


def test_fixed_depth_is_the_maximum() -> None:
    drafting = Drafting(2, adaptive=False)
    assert [drafting.wish(n) for n in (0, 1, 9)] == [1, 2, 2]
    assert Drafting(0, adaptive=True).wish(3) == 0


def row(num_sampled: int) -> Chunk:
    return Chunk(
        key=(b"", ""), start=4, token_ids=(1,) * num_sampled, pages=(0,), prompt=False, num_sampled=num_sampled
    )


def test_steps_with_prompts_are_not_timed() -> None:
    """The step after it does not count either, because it verifies drafts of another depth."""
    drafting = Drafting(1, adaptive=True)
    result = [Accepted((7,), drafts=(8,))]
    decode, prompt = Step(decode=(row(1),)), Step(prefill=(row(1),))
    now = 0.0
    for step, seconds in ((prompt, 50.0), (decode, 60.0), (decode, 1.0), (prompt, 70.0), (decode, 80.0), (decode, 1.5)):
        now += seconds
        drafting.completed(step, result, now)
    depth = drafting._depth
    assert depth is not None
    assert {key: list(times) for key, times in depth._seconds.items()} == {(1, 1): [1.0, 1.5]}
