"""The number of slots from the user's flags."""

import pytest

from moeyard_worker.experts.slots import resolve_slots

MIB = 2**20


def resolve(*, slots: int | None = None, memory: int | None = None, available: int = 100 * MIB) -> int:
    return resolve_slots(
        slots=slots,
        memory_bytes=memory,
        expert_bytes=3 * MIB,
        num_experts=20,
        available_bytes=available,
        stream_slots=2,
    )


def test_slots_memory_and_auto() -> None:
    assert resolve(slots=7) == 7
    assert resolve(slots=50) == 20
    assert resolve() == 20
    assert resolve(available=31 * MIB) == 8
    assert resolve(memory=9 * MIB) == 1
    assert resolve(memory=59 * MIB) == 17
    assert resolve(memory=60 * MIB) == 20
    assert resolve(memory=90 * MIB) == 20
    # With slots for all experts no stream slots are needed.
    assert resolve(slots=20, available=60 * MIB) == 20
    assert resolve(slots=18, available=60 * MIB) == 18


@pytest.mark.parametrize(
    ("slots", "memory", "available", "numbers"),
    [
        (0, None, 100 * MIB, ("--expert-slots 0", "at least 1")),
        (5, None, 14 * MIB, ("5 expert slots and 2 more for prompts", "21", "14", "enough for 2")),
        (5, None, -1, ("5 expert slots", "21", "enough for 0")),
        (20, None, 59 * MIB, ("20 expert slots need", "60", "59", "enough for 17")),
        (5, MIB, 100 * MIB, ("--expert-slots 5", "--expert-memory 1")),
        (None, 8 * MIB, 100 * MIB, ("3 MiB and 2 more for prompts, 9", "--expert-memory gives it 8")),
        (None, 200 * MIB, 100 * MIB, ("--expert-memory 200", "more than the 100")),
        (None, None, 2 * MIB, ("9 MiB", "this worker has left 2")),
    ],
)
def test_refusals_name_both_numbers(
    slots: int | None, memory: int | None, available: int, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match="expert") as refusal:
        resolve(slots=slots, memory=memory, available=available)
    assert all(number in str(refusal.value) for number in numbers)
