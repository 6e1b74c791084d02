"""Whether a fleet can go on with more or fewer ranks, and who then has which experts in how many slots. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeyard.rank import FleetError
from moeyard.takeover import Room, decide
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement


class Impossible(FleetError):
    """A size that this fleet cannot have, however often it is asked for."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizePlan:
    """`size` ranks with experts as `placement` says. `slots`: how many more each of those that stay may take.

    `config` is that of ranks that come, `reports` what those that stay will be: what they said when they loaded, but
    for the slots that they have by then.
    """

    size: int
    placement: Placement
    slots: Mapping[int, int]
    config: EngineConfig
    reports: tuple[Mapping[str, Any], ...]


def placement_for(size: int, *, whole: Placement, config: EngineConfig) -> Placement:
    """Who has which experts among `size` ranks. Raises Impossible for a number that cannot be, of any ranks."""
    if size > 1 and config.num_workers == 1 and config.exchange in ("auto", "local"):
        raise Impossible(
            "a fleet that began with one worker has no exchange between workers; start it with --exchange zmq"
        )
    try:
        dataclasses.replace(config, num_workers=size)
        return whole.resized(size)
    except ValueError as error:
        raise Impossible(str(error)) from error


def plan_resize(
    size: int,
    *,
    whole: Placement,
    config: EngineConfig,
    rooms: Mapping[int, Room],
    nodes: Mapping[int, str],
    reports: Sequence[Mapping[str, Any]],
    mode: str,
) -> ResizePlan:
    """The way from `whole` to `size` ranks. `rooms`, `nodes` (hosts) and `reports` are of those that are there.

    `mode` is --expert-takeover: with "always" experts that find no slot are read on demand; otherwise who holds all
    its experts must have room for those that come, beside all that is there now. No rank takes more slots than
    --expert-slots or --expert-memory say. Raises FleetError where there is no room, Impossible where experts stay.
    """
    placement = placement_for(size, whole=whole, config=config)
    stay = range(min(size, len(reports)))
    if fixed := [rank for rank in stay if not rooms[rank].movable]:
        why = "--record-routing is of one shard" if config.record_routing else f"not on {config.device}"
        raise Impossible(f"the experts of rank {fixed[0]} cannot move: {why}")
    slots: dict[int, int] = {}
    if size < len(reports):
        decided = decide(
            "always" if mode == "always" else "auto", before=whole, after=placement, rooms=rooms, nodes=nodes,
            kept_free={}, read_rate=None, start_seconds=1.0,
        )  # fmt: skip
        if decided.slots is None:
            raise FleetError(decided.reason)
        slots = {r: min(decided.slots[r], _allowed(config, rooms[r], whole.num_owned(r))) for r in stay}
    return ResizePlan(
        size=size,
        placement=placement,
        slots=slots,
        # Sequences that routers promise must fit everywhere.
        config=dataclasses.replace(
            config, num_workers=size, max_model_len=min(report["max_model_len"] for report in reports)
        ),
        reports=tuple(
            _after(reports[r], rooms[r], whole.num_owned(r), placement.num_owned(r), slots.get(r, 0)) for r in stay
        ),
    )


def _allowed(config: EngineConfig, room: Room, now: int) -> int:
    """Slots that a rank which has all its `now` experts in slots may take beside them, by its flags."""
    most = config.expert_slots
    if most is None and config.expert_memory is not None:
        most = config.expert_memory // room.slot_bytes
    return 1 << 62 if most is None else max(0, most - now)


def _after(report: Mapping[str, Any], room: Room, owned: int, owns: int, gained: int) -> Mapping[str, Any]:
    """A rank's report once it has `owns` experts in place of `owned`, and may have `gained` more slots."""
    before = owned if room.all_resident else report["expert_slots"]
    slots = min(owns, before + (gained if room.all_resident else 0))
    return {**report, "expert_slots": slots, "held_bytes": report["held_bytes"] + (slots - before) * room.slot_bytes}
