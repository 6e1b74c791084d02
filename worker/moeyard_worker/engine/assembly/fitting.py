"""Values of memory flags that would fit, for the error if a plan does not. Pure.

Each suggested value is checked by a plan.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.engine.loop.faults import first_sentence
from moeyard_worker.engine.memory.plan import MemoryPlan

# `plan_memory` with all arguments but `config` and `available`. Raises ValueError if nothing fits.
Planner = Callable[..., MemoryPlan]
_UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"))
# KV memory is given in MiB, or KiB, if it has at least this many.
_MANY = 64


def plan_or_suggest(plan: Planner, config: EngineConfig, available: int) -> MemoryPlan:
    """Return `plan(config=config, available=available)`. Its ValueError also says which flags would fit, if any."""
    try:
        return plan(config=config, available=available)
    except ValueError as error:
        if found := what_fits(plan, config, available):
            raise ValueError(f"{error}; would fit: {found}") from None
        raise


def ran_out(
    error: BaseException, plan: Planner, config: EngineConfig, *, planned: MemoryPlan, doing: str, now: int
) -> str:
    """Return one line for memory that ran out although `planned` fitted: the plan, and flags that fit in less.

    `now`: bytes that this rank could take if it began now. The margin is used up, so no plan may count on it again.
    """
    found = what_fits(plan, config, min(now, planned.available - planned.reserve.margin))
    return (
        f"{config.device} ran out of memory while {doing}: {first_sentence(error)}; planned of {planned}; lower "
        "--kv-memory, --max-num-seqs or --max-batch-tokens, or end what else runs there"
        + (f"; would fit: {found}" if found else "")
    )


def what_fits(plan: Planner, config: EngineConfig, available: int) -> str:
    """Return flags by which a rank fits into `available` bytes, each with its largest value; "" for none.

    Pages without a given number grow into the free memory, and so do expert slots. Then both are suggested.
    """
    as_is = _tried(plan, config, available)
    found = [_kv_memory(plan, config, available, as_is)]
    if as_is is None:
        found += [_rows(plan, config, available, name) for name in ("max_batch_tokens", "max_num_seqs")]
    return " or ".join(filter(None, found))


def _kv_memory(plan: Planner, config: EngineConfig, available: int, as_is: MemoryPlan | None) -> str | None:
    """Return the largest `--kv-memory` that fits beside the expert slots of the default plan, or slots for all experts.

    If there is no room for these, it fits beside at least one slot.
    """
    given = config.kv_memory
    unit, name = next((each for each in _UNITS if (given or available) >= _MANY * each[0]), (1, ""))

    def most(enough: Callable[[MemoryPlan], bool]) -> tuple[int, MemoryPlan] | None:
        def tried(size: int) -> MemoryPlan | None:
            done = _tried(plan, config, available, kv_memory=size * unit)
            return done if done is not None and enough(done) else None

        return _most(tried, (given or available) // unit)

    if as_is is not None and given is None:
        least = as_is.expert_slots
        found = most(lambda done: done.expert_slots >= least)
    else:
        found = most(lambda done: not done.stream_slots) or most(lambda done: True)
    if found is None:
        return None
    size, done = found
    slots = _slots(config, done)
    return None if size * unit == given and not slots else f"--kv-memory {size}{name}{slots}"


def _rows(plan: Planner, config: EngineConfig, available: int, name: str) -> str | None:
    found = _most(lambda most: _tried(plan, config, available, **{name: most}), getattr(config, name))
    if found is None:
        return None
    return f"--{name.replace('_', '-')} {found[0]}{_slots(config, found[1])}"


def _slots(config: EngineConfig, done: MemoryPlan) -> str:
    given = config.expert_slots is not None or config.expert_memory is not None
    return "" if given or not done.stream_slots else f" --expert-slots {done.expert_slots}"


def _tried(plan: Planner, config: EngineConfig, available: int, **changes: Any) -> MemoryPlan | None:
    try:
        return plan(config=replace(config, **changes), available=available)
    except ValueError:
        return None


def _most(tried: Callable[[int], MemoryPlan | None], value: int) -> tuple[int, MemoryPlan] | None:
    """Return the largest number up to `value` that has a plan, and the plan.

    Small numbers may have no plan, either. The search finds none if the range of numbers with a plan is narrow.
    """
    low = high = value
    while (best := tried(low)) is None:
        if low <= 1:
            return None
        low, high = low * 7 // 8, low
    while high - low > 1:
        middle = (low + high) // 2
        done = tried(middle)
        low, high, best = (low, middle, best) if done is None else (middle, high, done)
    return low, best
