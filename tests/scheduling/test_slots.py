"""Slots of state per sequence."""

import pytest

from moeyard_worker.state.slots import SlotPool


def test_each_slot_has_one_owner() -> None:
    pool = SlotPool(3)
    held = [pool.allocate() for _ in range(3)]
    assert sorted(held) == [0, 1, 2]
    pool.validate(held)
    with pytest.raises(ValueError, match="all 3 state slots are taken"):
        pool.allocate()
    pool.release(held[1])
    assert pool.num_free == 1
    assert pool.allocate() == held[1]


def test_wrong_releases_and_holders_are_detected() -> None:
    pool = SlotPool(2)
    slot = pool.allocate()
    for held in ([], [1 - slot], [slot, slot]):
        with pytest.raises(AssertionError, match="lost or has two owners"):
            pool.validate(held)
    pool.release(slot)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(slot)
    with pytest.raises(AssertionError, match="is none of 2"):
        pool.release(-1)


def test_model_without_such_state_has_no_slots() -> None:
    pool = SlotPool(0)
    assert pool.num_free == 0
    pool.validate([])
