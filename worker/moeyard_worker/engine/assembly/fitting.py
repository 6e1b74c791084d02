"""Values of memory flags that would fit, for the error when a plan does not. Pure.

The plan is asked for each value that is named here, so it accepts them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.engine.loop.faults import first_sentence
from moeyard_worker.engine.memory.plan import MemoryPlan

# Bytes in, a plan out, or ValueError: `plan_memory` with all else given.
Planner = Callable[..., MemoryPlan]
_UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"))
# KV memory is named in MiB from this many on.
_MANY = 64


def plan_or_tell(plan: Planner, config: EngineConfig, available: int) -> MemoryPlan:
    """`plan(config=config, available=available)`; where it raises ValueError, that says what would fit, if anything."""
    try:
        return plan(config=config, available=available)
    except ValueError as error:
        if found := what_fits(plan, config, available):
            raise ValueError(f"{error}; would fit: {found}") from None
        raise


def ran_out(
    error: BaseException, plan: Planner, config: EngineConfig, *, planned: MemoryPlan, doing: str, now: int
) -> str:
    """One line for memory that ran out though `planned` fitted: what was planned, and what fits in less.

    `now`: bytes that this rank could take if it began now. The margin is gone, so no plan may count on that again.
    """
    found = what_fits(plan, config, min(now, planned.available - planned.reserve.margin))
    return (
        f"{config.device} ran out of memory while {doing}: {first_sentence(error)}; planned of {planned}; lower "
        "--kv-memory, --max-num-seqs or --max-batch-tokens, or end what else runs there"
        + (f"; would fit: {found}" if found else "")
    )


def what_fits(plan: Planner, config: EngineConfig, available: int) -> str:
    """Return flags by which a rank fits into `available` bytes, each the most beside all others; "" for none.

    Pages whose number is not given grow into what is free, and so do slots of experts: both are named then.
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
    """The largest up to `value` that has a plan, with it; there may be a lower end too, which must not be too near."""
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
