"""The actors of a fleet whose number changes: see `RayRanks` for their lives, and what becomes of lost ones."""

import dataclasses
from typing import Any

import ray
from ray.exceptions import RayError

from moeyard.rank import FleetError, RanksLost, Recovered
from moeyard.ray_errors import first_line
from moeyard.ray_member import Member, end_by_number, fence
from moeyard.ray_ranks import CALL_SECONDS, RayRanks
from moeyard.ray_resizing import Resizing, end
from moeyard.resize_plan import placement_for, plan_resize
from moeyard.takeover import Room


class ResizableRanks(RayRanks):
    """`begin_resize`, `resize_stage` until it says None, `resize`, `end_resize`; without `resize` all stays.

    While one is under way ranks may be lost and recover; then what was read for it has to be read again, which
    `begin_resize` does.
    """

    _resizing: Resizing | None = None
    _outside: tuple[Member, ...] = ()  # that have left, or were to come
    _reading: tuple[Any, ...] = ()  # calls of a resize that was given up

    @property
    def coming(self) -> list[int]:
        """Ranks that are on their way in."""
        return [] if self._resizing is None else list(self._resizing.members)

    def check_size(self, size: int) -> None:
        """Raise Impossible for a number of ranks that this fleet can never have."""
        placement_for(size, whole=self._whole, config=self._config)

    def may_resize(self) -> bool:
        """Whether nobody still reads experts for a resize that was given up."""
        self._reading = tuple(ray.wait(list(self._reading), timeout=0)[1]) if self._reading else ()
        return not self._reading

    def begin_resize(self, size: int) -> None:
        """Start ranks that come, beside the others; have those that stay read what comes to them.

        Raises FleetError if that cannot be, RanksLost naming a rank that does not answer.
        """
        rooms: dict[int, Room] = {}
        asked = {r: m.actor.room.remote() for r, m in enumerate(self._members)}
        self._call(asked, lambda rank, room: rooms.update({rank: Room(**room)}), timeout=CALL_SECONDS)
        plan = plan_resize(
            size, whole=self._whole, config=self._config, rooms=rooms, nodes=self._nodes, reports=self._reports,
            mode=self._takeover,
        )  # fmt: skip
        come = range(self.size, size)
        self._resizing = Resizing(
            plan,
            stay=dict(enumerate(self._members[:size])),
            actors={rank: self._make(rank) for rank in come},
            # The epoch of its mesh is not known yet: 0 is nobody's.
            spec=lambda rank: self._spec(plan.config, rank, 0, plan.placement),
            moves=size < self.size,
        )

    def resize_stage(self) -> str | None:
        """See `Resizing.stage`."""
        if self._resizing is None:
            raise FleetError("Ray has ended, and the ranks that were to come with it")
        stage = self._resizing.stage()
        for rank, member in self._resizing.members.items():
            if member.setup is not None:
                self.weights.check(rank, member.setup)
        return stage

    def resize(self) -> Recovered:
        """End the epoch between steps, and go on in another with as many ranks as was planned.

        Raises RanksLost with all as it was before, for `recover`: nobody has left, who was to come does not.
        """
        resizing, self._resizing = self._resizing, None
        assert resizing is not None, "it was begun, and is ready"
        plan, before = resizing.plan, (self._members, self._whole, self._config, self._reports)
        self._end_epoch(f"going on with {plan.size} ranks")
        come = list(resizing.members.values())
        self._outside = tuple(self._members[plan.size :])
        self._members = [*self._members[: plan.size], *come]
        self._whole, self._config = plan.placement, dataclasses.replace(self._config, num_workers=plan.size)
        self._reports = [*map(dict, plan.reports), *(dict(member.report or {}) for member in come)]
        try:
            recovered = self._go_on(lambda: (plan.placement, plan.slots), planned=True)
        except (RanksLost, RayError) as error:
            self._members, self._whole, self._config, self._reports = before
            self._outside = ()
            for member in come:
                # Some of them may serve by now.
                fence(member)
            lost = error.ranks.intersection(range(self.size)) if isinstance(error, RanksLost) else ()
            raise RanksLost(lost, first_line(error)) from error
        self.spares.forget_from(plan.size)
        return recovered

    def end_resize(self) -> None:
        """End ranks that have left; or give up, and end those that were to come."""
        if self._resizing is not None:
            self._outside = (*self._outside, *self._resizing.members.values())
            self._reading = (*self._reading, *self._resizing.reading)
            self._resizing = None
        for member in self._members:
            if member.read is not None:
                # Forget what was read: it has what it has.
                member.read, _ = None, member.actor.prepare.remote(self._now, 0)
        outside, self._outside = self._outside, ()
        end(list(outside))

    @property
    def starting(self) -> bool:
        """Whether a process is on its way into the fleet."""
        return not self._runs or self._resizing is not None or bool(self.spares.members) or bool(self._away())

    @property
    def serving(self) -> set[int]:
        """The pids of the ranks whose epoch runs."""
        return {m.pid for m in self._members if m.started and m.pid is not None} if self._runs else set()

    def forget(self) -> None:
        """End all processes without a word to Ray, which has ended; `recover` then makes all ranks again."""
        resizing = [] if self._resizing is None else list(self._resizing.members.values())
        spares, self.spares.members = list(self.spares.members.values()), {}
        members, self._members, self._runs = self._members, [], False
        outside, self._outside, self._resizing, self._reading = self._outside, (), None, ()
        end_by_number([*members, *spares, *outside, *resizing])

    def stop(self) -> None:
        """See `RayRanks.stop`; also of those that have left, or are on their way in."""
        resizing = [] if self._resizing is None else list(self._resizing.members.values())
        self._members = [*self._members, *self._outside, *resizing]
        self._resizing, self._outside = None, ()
        super().stop()
