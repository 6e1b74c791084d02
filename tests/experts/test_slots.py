"""From the user's wish to a number of slots."""

import pytest

from moeyard_worker.experts.slots import resolve_slots

MIB = 2**20


def resolve(*, slots: int | None = None, memory: int | None = None, available: int = 100 * MIB) -> int:
    return resolve_slots(
        slots=slots, memory_bytes=memory, expert_bytes=3 * MIB, num_experts=20, available_bytes=available
    )


def test_slots_memory_and_auto() -> None:
    assert resolve(slots=7) == 7
    assert resolve(slots=50) == 20
    assert resolve() == 20
    assert resolve(available=31 * MIB) == 10
    assert resolve(memory=8 * MIB) == 2
    assert resolve(memory=90 * MIB) == 20


@pytest.mark.parametrize(
    ("slots", "memory", "available", "numbers"),
    [
        (0, None, 100 * MIB, ("--expert-slots 0", "at least 1")),
        (5, None, 14 * MIB, ("5 expert slots", "15", "14", "enough for 4")),
        (5, None, -1, ("5 expert slots", "15", "enough for 0")),
        (5, MIB, 100 * MIB, ("--expert-slots 5", "--expert-memory 1")),
        (None, 2 * MIB, 100 * MIB, ("3", "--expert-memory gives it 2")),
        (None, 200 * MIB, 100 * MIB, ("--expert-memory 200", "more than the 100")),
        (None, None, 2 * MIB, ("3", "this worker has left 2")),
    ],
)
def test_refusals_name_both_numbers(
    slots: int | None, memory: int | None, available: int, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match="expert") as refusal:
        resolve(slots=slots, memory=memory, available=available)
    assert all(number in str(refusal.value) for number in numbers)
