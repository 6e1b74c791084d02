"""Decides which sequence runs on which rank, and which events its client gets. A pure state machine.

With expert parallelism every token needs every rank. So nothing runs while a rank is missing, and nothing is lost. The
sequences of the missing rank wait with their output so far, and continue on any rank with room once every rank is
ready. A draining rank takes no new sequences but stays in lockstep, because the others need its experts.

Each event is a method; `now` is monotonic seconds. After each event the caller takes and carries out `deliveries`
(events for clients), then `instructions`, each in order.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count as counter
from typing import Any

from moeyard_router.config import RouterConfig, WorkerAddress, system_fingerprint
from moeyard_router.errors import ApiError
from moeyard_router.fleet.capacity import Capacity
from moeyard_router.fleet.flights import MOST_DEATHS, Flight, Flights
from moeyard_router.fleet.instructions import (
    Aborted,
    Answered,
    Began,
    Carried,
    Changed,
    Connect,
    Delivery,
    Disconnect,
    Ended,
    Instruction,
    Lost,
    ReportLost,
    Run,
    Stop,
    Waited,
    WakeAt,
)
from moeyard_router.fleet.orders import UNKNOWN, Cancel, Drain, Hold
from moeyard_router.fleet.placement import PromptPlacement
from moeyard_router.fleet.policy import Route
from moeyard_router.fleet.ranks import Ranks
from moeyard_router.fleet.records import Change, Incidents
from moeyard_router.fleet.waiters import Waiters
from moeyard_worker.protocol import (
    FIRST_VERSION,
    Done,
    ExpertLoads,
    Message,
    PromptExperts,
    PromptLogprobs,
    Rejected,
    SamplingParams,
    Snapshot,
    Tokens,
)

TICK_SECONDS = 0.005  # between checks of the queue, while it holds a request
# Pause of a sequence whose new rank has not yet confirmed an earlier abort of it.
SOON_SECONDS = 0.02
# Pause of a carried sequence that its new rank refused because its queue was full.
PAUSE_SECONDS = 0.25
# A sequence that one more lost worker would end runs only after the fleet has been whole for this long.
CALM_SECONDS = 3.0
_PAUSED = "an operator has paused the server; /resume ends this"
_ASLEEP = "the server sleeps at level {level} and holds little memory; /wake_up ends this"
# Versions of weights whose fingerprints are kept, for answers that began with them.
_MOST_VERSIONS = 256


class Admission:
    """Owner of all decisions about the sequences of one fleet.

    failure: why the fleet has failed, or None. `given_up`: whether it has failed permanently.
    stopping: why it accepts no more requests, or None.
    asleep: the level at which the server sleeps, 0 if it is awake.
    generation: number of replacements of workers.
    last_progress: time of the latest sign that a step ran, in monotonic seconds.
    """

    def __init__(self, now: float, config: RouterConfig) -> None:
        self.deliveries: list[Delivery] = []
        self.instructions: list[Instruction] = []
        self.failure: str | None = None
        self.stopping: str | None = None
        self.given_up = False
        self._held, self.asleep = config.held, config.asleep
        self.generation = 0
        # The fingerprints of the ranks, and that of all answers, by version of the weights.
        self._prints: dict[str, tuple[frozenset[str], str]] = {}
        self.last_progress: float | None = None
        self.ranks = Ranks(config)
        self.capacity = Capacity(now, config.most_inflight(len(config.workers)), config.max_waiting_tokens)
        self.flights = Flights(self.capacity, self.ranks)
        self.waiters = Waiters(now, config)
        self.placement = PromptPlacement(len(config.workers), prefix_caching=config.prefix_caching)
        self.incidents = Incidents()
        # Whether every rank is ready, and whether they ever were, perhaps before this router started.
        self.is_whole, self._was_whole = False, config.restarted
        self._config = config
        self._recovers = config.recovery_timeout > 0
        self._times_whole = 0
        self._late: tuple[float, str] | None = None  # when the open incident has lasted too long, and why
        # (time of the next try, order, sequence, times that the fleet had become whole). With the last, the sequence is
        # sent only if the fleet has stayed whole since.
        self._paused: list[tuple[float, int, Flight, int | None]] = []
        self._numbers = counter()
        self._tick: float | None = None  # time of the next check of the queue

    # Events: the life of the fleet.

    def start(self) -> None:
        """Connect to every worker."""
        self._connect(self.ranks.addresses)
        self._emit(Changed())

    def replace(self, now: float, addresses: tuple[WorkerAddress, ...], facts: Mapping[str, Any] | None) -> None:
        """Continue with these workers. `facts` are the launcher's facts about the incident. They have a
        `weight_version` if the weights have changed.

        Workers that keep their endpoint and are not lost keep their sequences. Other sequences continue once all
        workers are ready.
        """
        if self.given_up:
            return
        if not self._recovers:
            self.end_all(now, self.failure or "the workers were started again")
        self.failure = None
        updated = facts is not None and "weight_version" in facts
        new = self.ranks.changed_by(addresses)
        for number in range(len(self.ranks)):
            gone = number >= len(addresses)
            if gone or number in new:
                self.ranks[number].leaving |= gone  # regardless of earlier orders
                what = "has left" if gone else "is away" if addresses[number].away else "was replaced"
                self.lose(now, number, f"worker {number} {what}", replaced=True)
        self.ranks.replace(addresses, new)
        self._connect(addresses[number] for number in new)
        self.capacity.resize(self._config.most_inflight(len(addresses)))
        self.waiters.resize(len(addresses))
        if self._recovers and (new or not self.is_whole):
            self._wait(now, "workers were replaced")
        if updated:
            # Workers compute their own prompts again. Data of the old weights about the others are of no use.
            for flight in self.flights.by_name.values():
                if not flight.output and flight.rank is None:
                    flight.scored = flight.routed = 0
            self.placement.forget(range(len(addresses)))
        self.placement.forget(new)
        self.generation += 1
        if facts is not None:
            self.incidents.note(facts)
        self._settle(now)
        self._drain(now)
        self._emit(Changed())

    def stop(self, reason: str) -> None:
        """Accept no more requests. Those in flight continue."""
        if self.stopping is None:
            self.stopping = reason
            self._emit(Changed())

    def close(self, now: float, reason: str) -> None:
        """End everything permanently, without a failure."""
        self.stop(reason)
        self.given_up = True
        self._end_recovery(reason)
        self.end_all(now, reason)

    def end_all(self, now: float, reason: str) -> None:
        """End everything in flight with `reason` as the error, and abort it at the workers."""
        for flight in list(self.flights.by_name.values()):
            if flight.listener is not None:
                self._abort(flight)
                self.deliveries.append((now, flight.listener, flight.index, Lost(reason)))
        for flight in self.flights.clear():
            self.waiters.ended(now, flight, len(flight.output))

    def fail(self, now: float, reason: str) -> None:
        """Declare the fleet lost until it is whole again or its workers are replaced. The first reason remains."""
        if self.failure is None:
            self.failure = reason
            self._begin(now, reason)  # the launcher may give up because of a loss that this router has not seen
            self._end_recovery(reason)
            self.end_all(now, reason)
            self._emit(Changed())

    def give_up(self, now: float, reason: str) -> None:
        """Declare the fleet permanently lost."""
        self.given_up = True
        self.fail(now, reason)

    # Events: requests.

    def submit(
        self,
        now: float,
        request_id: str,
        sequences: Sequence[tuple[Sequence[int], SamplingParams]],
        *,
        listener: Any,
        client: str | None,
        key: str | None,
        rank: int | None,
        names: frozenset[str] = frozenset(),
    ) -> list[Flight]:
        """Accept sequences of (prompt ids, sampling) for ranks that the policy chooses, or all of them for `rank`.

        `names`: those by which clients may end the request (`Cancel`).

        They queue until a rank has room and the fleet is whole. API keys take turns by `key`. Sequences for a `rank`
        test it: they do not queue, need no room, and end if it is lost. Raises `ApiError` 503 if the fleet cannot run
        them and 429 if it is full. Then it has accepted none.
        """
        problem = self._refusal(rank)
        if problem is not None:
            reason = "fleet_failed" if self.failure is not None else "not_ready"
            raise ApiError(503, problem, reason=reason)
        if rank is None:
            count, tokens = len(sequences), sum(len(prompt) for prompt, _ in sequences)
            self.check(now, key, count)
            for flight, refusal in self.waiters.displace(
                now, key, lambda: self.capacity.refusal(now, count, tokens) is None
            ):
                self._end_here(now, flight, refusal)
            if (error := self.capacity.refusal(now, count, tokens)) is not None:
                raise error
        flights = [
            Flight(
                name=f"{request_id}-{index}",
                index=index,
                prompt=prompt,
                sampling=sampling,
                client=client,
                key=key,
                listener=listener,
                carried=rank is None,
                names=names,
            )
            for index, (prompt, sampling) in enumerate(sequences)
        ]
        for flight in flights:
            self.flights.enter(flight)
        if rank is None and (self.waiters.queue.num_sequences or not self.is_whole or not self._has_room()):
            self.waiters.push(now, flights)
            self._set_clock(now)
            if self._tick is None:
                self._tick = now + TICK_SECONDS
                self._emit(WakeAt(self._tick))
        else:
            for flight in flights:
                self.waiters.started(now, flight)
                self._send(now, flight, rank)
        return flights

    def check(self, now: float, key: str | None, count: int = 1) -> None:
        """Raise `ApiError` 429 if `count` sequences of `key` would wait too long. Cheap enough for an early check."""
        self.waiters.room.check(now, key, count)

    def abandon(self, now: float, name: str) -> None:
        """Abort a sequence whose client has left. Unknown names are ignored."""
        flight = self.flights.by_name.get(name)
        if flight is None or flight.listener is None:
            return
        flight.listener = None
        self._abort(flight)
        if flight.rank is None:
            self._leave(now, flight, ran=False)
            self._drain(now)

    def drain(self, now: float, order: Drain) -> int:
        """Carry out an order. Return how many sequences of clients `order.rank` has afterwards, or UNKNOWN."""
        self.ranks.drain(order.ranks)
        if order.carry:
            self._move_flights(now, order.rank)
        if order.size is not None:
            what = f"going on with {order.size} worker{'s'[: order.size > 1]}"
            self._pause(now, range(order.size, len(self.ranks)), what, "scale")
        elif order.leaves and order.rank < len(self.ranks):
            self._pause(now, (order.rank,), f"worker {order.rank} is being restarted", "restart")
        self._drain(now)
        self._emit(Changed())
        if not self.is_whole and not order.leaves and order.size is None:
            return UNKNOWN
        return len(self._client_flights(order.rank))

    def hold(self, now: float, order: Hold) -> int:
        """Carry out a pause, or end it. Return how many sequences have started and not ended, or UNKNOWN."""
        self._held = order.mode is not None
        self.asleep = self.asleep if order.asleep is None else order.asleep
        if order.mode == "abort":
            self._abort_all(now)
        if order.switches:
            if order.asleep is None:
                self._pause(now, (), "the weights are being updated", "update")
            else:
                self._pause(now, (), "the server changes between sleep and service", "sleep")
                self.forget()
        self._drain(now)
        self._emit(Changed())
        if not self.is_whole and not order.switches:
            return UNKNOWN
        return sum(flight.entry is None and flight.carried for flight in self.flights.by_name.values())

    def cancel(self, now: float, order: Cancel) -> int:
        """End requests. Return how many sequences of clients have not ended."""
        self._abort_all(now, order.names)
        self._drain(now)
        return sum(flight.carried for flight in self.flights.by_name.values())

    def forget(self) -> int:
        """Expect no cached prefixes at the workers."""
        self.placement.forget(range(len(self.ranks)))
        return 0

    def _abort_all(self, now: float, names: frozenset[str] | None = None) -> None:
        """End sequences of clients with their output so far: all, or those of requests with one of these names."""
        for flight in list(self.flights.by_name.values()):
            if flight.listener is None or not flight.carried or (names is not None and not names & flight.names):
                continue
            self.deliveries.append((now, flight.listener, flight.index, Aborted()))
            flight.listener = None
            self._abort(flight)
            if flight.rank is None:
                self._leave(now, flight, ran=False)

    # Events: ranks.

    def connected(self, number: int) -> None:
        """Note that the connection to a rank is up."""
        self.ranks[number].connected = True
        self._emit(Changed())

    def broke(self, now: float, number: int, reason: str) -> None:
        """Connect again after a connection broke. If it breaks twice within a step deadline, the worker is lost."""
        rank = self.ranks[number]
        if not self._recovers or now - rank.broke < self._config.step_deadline:
            self.lose(now, number, reason)
            return
        rank.reconnect(now)
        self._emit(Connect(self.ranks.addresses[number], reason))
        self._wait(now, reason)
        self._release(now, number, reason)
        self._emit(Changed())

    def lose(self, now: float, number: int, reason: str, *, replaced: bool = False) -> None:
        """Declare a worker lost. Report it, so that another takes its place, unless it is `replaced` already."""
        rank = self.ranks[number]
        if rank.lost:
            return
        died = rank.state != "stopping" and not rank.stopped and not rank.leaving
        replaced = replaced or rank.leaving
        rank.lost = True
        self._emit(Disconnect(number))
        known = replaced or (self.failure is not None and not self._recovers)
        if self._recovers or not replaced:
            self._wait(now, reason, number)
        self._release(now, number, reason)
        for flight in self.flights.died(number) if died else ():
            why = f"{flight.deaths} workers were lost while they ran this request: {reason}"
            self._end_here(now, flight, Lost(why))
        self._emit(Changed())
        if not known:
            self._emit(ReportLost(number, reason))

    def heard(self, now: float, number: int, messages: Sequence[Message]) -> None:
        """Handle messages of a rank, in order."""
        for message in messages:
            if isinstance(message, Tokens):
                self._tokens(now, number, message)
            elif isinstance(message, Done | Rejected):
                self._end(now, number, message)
            elif isinstance(message, PromptLogprobs | PromptExperts):
                self._of_prompt(now, number, message)
            elif isinstance(message, Snapshot):
                self._snapshot(now, number, message)
            elif isinstance(message, ExpertLoads) and message.rank == number:
                self._emit(Answered(message))
            else:
                self.lose(now, number, f"worker {number} broke the protocol: it sent a {message.type} message")
        if self.waiters.queue.num_sequences:
            self._drain(now)

    # Events: time.

    def time_passed(self, now: float) -> None:
        """Do everything that is due at `now`."""
        if self._late is not None and now >= self._late[0]:
            self.fail(now, self._late[1])
        due = []
        while self._paused and self._paused[0][0] <= now:
            due.append(heappop(self._paused))
        for _, _, flight, times_whole in due:
            self._resume_paused(now, flight, times_whole)
        if self._tick is not None and now >= self._tick:
            self._drain(now)
            for flight, refusal in self.waiters.late(now):
                self._end_here(now, flight, refusal)
            self._tick = now + TICK_SECONDS if self.waiters.queue.num_sequences else None
        times = [time for time in (self._tick, self._late and self._late[0]) if time is not None]
        times += [self._paused[0][0]] if self._paused else []
        if times:
            self._emit(WakeAt(min(times)))

    # Questions.

    @property
    def held(self) -> str | None:
        """The reason that no request starts (`Hold`), or None."""
        if self.asleep:
            return _ASLEEP.format(level=self.asleep)
        return _PAUSED if self._held else None

    def identified(self, version: str | None = None) -> dict[str, str]:
        """Return the field of answers that names the fingerprint with a version of the weights (None: the present one).

        Empty if there is none.
        """
        if version is None:
            version = next((each.snapshot.weight_version for each in self.ranks if each.snapshot is not None), "")
        fingerprint = self._config.fingerprint
        if version in self._prints and (version != FIRST_VERSION or fingerprint is None):
            fingerprint = self._prints[version][1]
        return {} if fingerprint is None else {"system_fingerprint": f"fp_{fingerprint}"}

    def unavailable(self) -> str | None:
        """Return why nothing runs now, or None."""
        if self.failure is not None:
            return f"the fleet has failed: {self.failure}"
        if self.stopping is not None:
            return self.stopping
        if self.incidents.open is not None:
            return f"recovering: {self.incidents.open.reason}"
        return self.ranks.unready()

    def describe(self) -> dict[str, Any]:
        """Return the state of the fleet and of each rank as JSON."""
        return {
            "failure": self.failure,
            "stopping": self.stopping,
            "recovering": None if self.incidents.open is None else self.incidents.open.reason,
            "inflight": len(self.flights.by_name),
            "waiting": len(self.flights.waiting()) + self.waiters.queue.num_sequences,
            "workers": [rank.describe() for rank in self.ranks],
        }

    def validate(self) -> None:
        """Assert all invariants. They hold after every event."""
        flights = self.flights.by_name.values()
        self.flights.validate()
        self.waiters.validate(flights)
        assert (self.incidents.open is None) == (self._late is None), "an open incident has a time limit"
        assert self.incidents.open is None or not self.is_whole, "a whole fleet has no open incident"
        assert self.failure is None or not flights, "a failed fleet has nothing in flight"
        pausing = {flight.name for _, _, flight, _ in self._paused}
        assert all(flight.name in pausing for flight in flights if flight.pauses), "a paused sequence has no timer"
        idle = any(not flight.pauses for flight in self.flights.waiting())
        idle = idle or (self.waiters.queue.num_sequences > 0 and not self.ranks.any_usable())
        begins = not self._times_whole  # a router that was started again connects to the workers first
        assert self.incidents.open is not None or not idle or begins, "nothing will run a waiting sequence"
        if self.waiters.queue.num_sequences:
            assert self._tick is not None, "no timer checks the queue"
            assert self.waiters.room.is_held != self._may_start, "the clock of waits runs while requests may start"
            assert not self.is_whole or not self._has_room(), "a request is queued while a rank has room"

    # The messages of ranks.

    def _tokens(self, now: float, number: int, message: Tokens) -> None:
        self.last_progress = now
        flight = self.flights.by_name.get(message.request_id)
        if flight is None or flight.rank != number or flight.listener is None or not message.token_ids:
            return  # late tokens of a sequence that has ended, or runs on another rank
        output = flight.output
        if message.start != len(output):
            reason = (
                f"worker {number} broke the protocol: request {message.request_id} has {len(output)} tokens, the next "
                f"ones start at {message.start}"
            )
            self.lose(now, number, reason)
            return
        if not output:
            self.capacity.read(now, len(flight.prompt))
            self.waiters.answered(now, flight)
        if flight.pending:
            self.flights.computed(flight)
        output.extend(message.token_ids)
        self.deliveries.append((now, flight.listener, flight.index, message))
        if self.incidents.silent is not None and flight.carried:
            self.incidents.output(now)

    def _of_prompt(self, now: float, number: int, message: PromptLogprobs | PromptExperts) -> None:
        self.last_progress = now
        flight = self.flights.by_name.get(message.request_id)
        if flight is not None and flight.rank == number and flight.listener is not None:
            if isinstance(message, PromptLogprobs):
                flight.scored = message.start - 1 + len(message.logprobs)
            else:
                flight.routed = message.start + message.count
            self.deliveries.append((now, flight.listener, flight.index, message))

    def _end(self, now: float, number: int, message: Done | Rejected) -> None:
        flight = self.flights.by_name.get(message.request_id)
        if flight is not None and number in flight.left:
            flight.left -= {number}
            return
        if flight is None or flight.rank != number or self._continues(now, number, flight, message):
            return
        if isinstance(message, Done):
            self._leave(now, flight, ran=True, output=message.completion_tokens)
            message = replace(message, queue_seconds=message.queue_seconds + flight.waited)
        else:
            self._leave(now, flight, ran=False)
            if message.reason in ("queue_full", "queue_timeout"):
                # A worker cannot know when the fleet will have room again.
                message = replace(message, retry_after=self.capacity.wait(now, 1))
        if flight.listener is not None:
            self.deliveries.append((now, flight.listener, flight.index, message))

    def _continues(self, now: float, number: int, flight: Flight, message: Done | Rejected) -> bool:
        """Return whether the worker's exit or lack of room caused the message. Then the sequence continues."""
        if not self._recovers or flight.listener is None or not flight.carried:
            return False
        stopping = self.ranks[number].state == "stopping"
        if isinstance(message, Done):
            continues = stopping and message.finish_reason == "abort"
        elif message.reason == "fleet_failed" and not stopping:
            self.lose(now, number, f"worker {number} failed: {message.message}")
            return True
        else:
            continues = stopping or (message.reason == "queue_full" and flight.began)
        if continues:
            self.flights.unplace(flight)
            if stopping:
                self._send(now, flight)
            else:
                self._pause_flight(now + PAUSE_SECONDS, flight)
        return continues

    def _snapshot(self, now: float, number: int, snapshot: Snapshot) -> None:
        rank = self.ranks[number]
        if not rank.lost:
            before, problem = rank.snapshot, self.ranks.mismatch(rank, snapshot)
            rank.take(snapshot)
            self._note_weights(snapshot.weight_version)
            if problem is not None:
                self.lose(now, number, problem)
                self.fail(now, problem)
            elif before is None and rank.epoch not in (None, snapshot.epoch):
                epochs = f"its epoch is {snapshot.epoch}, and was {rank.epoch} before its connection broke"
                self.lose(now, number, f"worker {number} at {rank.endpoint} is not the same as before: {epochs}")
            elif snapshot.state == "failed":
                self.lose(now, number, f"worker {number} failed: {snapshot.failure}")
            elif snapshot.state == "recovering" and (before is None or before.state != "recovering"):
                self._wait(now, f"worker {number} recovers: {snapshot.failure}")
            if before is None or before.state != snapshot.state:
                self._emit(Changed())
            if before is not None and snapshot.step > before.step:
                self.last_progress = now
        self._settle(now)

    def _note_weights(self, version: str) -> None:
        """Note the fingerprint of the weights that a rank reports. Ranks on different devices have different ones."""
        snapshots = [rank.snapshot for rank in self.ranks if rank.snapshot is not None]
        found = frozenset(each.fingerprint for each in snapshots if each.weight_version == version)
        if version and found != self._prints.get(version, (None, ""))[0]:
            self._prints[version] = found, system_fingerprint(found, self._config.kv_compression)
            if len(self._prints) > _MOST_VERSIONS:
                # Forget the oldest version, whose answers are long gone.
                del self._prints[next(iter(self._prints))]

    # Whether the fleet is whole.

    def _refusal(self, rank: int | None) -> str | None:
        """Return why a request cannot even queue, or None. `rank`: the rank that it must run on, if any."""
        if self.failure is None and self.stopping is None and self._recovers and self._was_whole:
            ready = rank is None or (rank < len(self.ranks) and self.ranks[rank].state == "ready")
            return None if ready else f"worker {rank} is not ready"
        return self.unavailable()

    def _wait(self, now: float, reason: str, lost: int | None = None) -> None:
        """Let requests wait until the fleet is whole. A fleet without recovery fails instead."""
        if not self._recovers:
            self.fail(now, reason)
        elif self.failure is None:
            self._begin(now, reason, lost)

    def _begin(
        self,
        now: float,
        reason: str,
        lost: int | None = None,
        *,
        planned: Iterable[int] | None = None,
        change: Change = "restart",
    ) -> None:
        """Open an incident, or add a report to the open one. `planned`, `change`: as in `IncidentRecord`."""
        incident = self.incidents.open
        if incident is None:
            self.is_whole = False
            incident = self.incidents.begin(now, reason)
            incident.planned = None if planned is None else frozenset(planned)
            incident.change = change
            seconds = self._config.recovery_timeout
            self._late = now + seconds, f"the fleet was not whole again within {seconds:g} s: {reason}"
            self._emit(Began(incident))
            self._emit(WakeAt(self._late[0]))
            self._set_clock(now)
        incident.report(now, reason, lost)

    def _end_recovery(self, reason: str) -> None:
        """End the open incident as failed."""
        self.is_whole, self._late = False, None
        self.incidents.fail(reason)

    def _settle(self, now: float) -> None:
        """Let all sequences continue if every rank is ready."""
        over = self.given_up or (self.failure is not None and not self._recovers)
        if over or self.is_whole or self.ranks.unready() is not None:
            return
        self.failure = None
        waiting = self.flights.waiting()
        self._times_whole += 1
        for flight in waiting:
            # A sequence that one more death would end waits for calm first. So unrelated losses of workers in quick
            # succession do not end it.
            if flight.deaths < MOST_DEATHS - 1:
                self._send(now, flight)
            else:
                self._pause_flight(now + CALM_SECONDS, flight, self._times_whole)
        self.is_whole = self._was_whole = True
        self._late = None
        expects_output = any(flight.carried for flight in self.flights.by_name.values())
        incident = self.incidents.whole(now, expects_output=expects_output)
        if incident is not None:
            for flight in waiting:
                if flight.began:
                    incident.carried += 1
                    incident.recomputed_tokens += flight.pending
            self._emit(Ended(incident))
            self._emit(Carried(incident.carried, incident.recomputed_tokens))
        self._drain(now)
        self._emit(Changed())

    def _pause(self, now: float, leaving: Sequence[int], reason: str, change: Change) -> None:
        """Run nothing until the ranks in `leaving` are replaced, or the fleet has another size or other weights."""
        self.ranks.pausing = reason
        for number in leaving:
            self.ranks[number].leaving = True
        self._begin(now, reason, planned=leaving, change=change)

    # Where sequences run.

    def _emit(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)

    def _connect(self, addresses: Iterable[WorkerAddress]) -> None:
        for address in addresses:
            if not address.away:
                self._emit(Connect(address))

    def _has_room(self) -> bool:
        return self.held is None and self.ranks.has_room(self.waiters.worker_places)

    @property
    def _may_start(self) -> bool:
        """Whether requests may start on a rank with room."""
        return self.is_whole and self.held is None and self.ranks.any_open()

    def _set_clock(self, now: float) -> None:
        """Let the clock of waits run while requests may start. The rest of a wait is for the fleet's own reasons."""
        (self.waiters.room.resume if self._may_start else self.waiters.room.hold)(now)

    def _drain(self, now: float) -> None:
        """Start queued requests while a rank has room for them."""
        self._set_clock(now)
        if not self.is_whole or not self.waiters.queue.num_sequences:
            return
        while self._has_room() and (flights := self.waiters.pop(now)):
            self._emit(Waited(flights[0].waited))
            for flight in flights:
                self._send(now, flight)
        if self.waiters.queue.num_sequences and not self.ranks.any_usable():
            self._wait(now, self.ranks.unready() or "no worker takes requests")

    def _send(self, now: float, flight: Flight, rank: int | None = None) -> None:
        """Send a sequence to the rank that the policy chooses, or to `rank`. It waits if none is usable."""
        if rank is None:
            loads = self.ranks.loads(self.waiters.worker_places)
            route = self.placement.choose(loads, flight.prompt, client=flight.client)
        else:
            route = Route(rank=rank, reason="asked")
        if route is None or route.rank is None:
            self._wait(now, self.ranks.unready() or "no worker takes requests")
            return
        if route.rank in flight.left:
            # The rank's next messages may be about the earlier run, until the rank confirms the abort.
            self._pause_flight(now + SOON_SECONDS, flight)
            return
        assert flight.listener is not None, "each waiting sequence has a client"
        self.flights.place(flight, route.rank, route.cached_tokens)
        self._emit(Run(flight.listener, flight.index, route, flight.submit()))

    def _pause_flight(self, until: float, flight: Flight, times_whole: int | None = None) -> None:
        flight.pauses = True
        heappush(self._paused, (until, next(self._numbers), flight, times_whole))
        self._emit(WakeAt(until))

    def _resume_paused(self, now: float, flight: Flight, times_whole: int | None) -> None:
        has_ended = self.flights.by_name.get(flight.name) is not flight
        if has_ended or flight.rank is not None or times_whole not in (None, self._times_whole):
            return
        if times_whole is None or self.ranks.unready() is None:
            flight.pauses = False
            self._send(now, flight)
        elif self.is_whole:
            self._pause_flight(now + CALM_SECONDS, flight, times_whole)
        else:
            flight.pauses = False  # `_settle` sends it, or lets it wait for calm again

    def _client_flights(self, number: int) -> list[Flight]:
        """Return a rank's sequences, without aborted ones and without tests of the rank itself."""
        return [f for f in self.flights.at(number) if f.carried and f.listener is not None]

    def _move_flights(self, now: float, number: int) -> None:
        """Move a rank's sequences to other ranks. They stay if no other rank takes sequences."""
        if not self.ranks.any_open():
            return
        flights, recomputed = self._client_flights(number), 0
        for flight in flights:
            self._abort(flight)
            flight.left |= {number}
            self.flights.unplace(flight)
            if self.is_whole:
                self._send(now, flight)
            recomputed += flight.pending
        if self.is_whole:  # otherwise `_settle` counts them
            self._emit(Carried(len(flights), recomputed))

    def _abort(self, flight: Flight) -> None:
        if flight.rank is not None:
            self._emit(Stop(flight.rank, flight.name))

    def _release(self, now: float, number: int, reason: str) -> None:
        """Let the sequences of an unreachable rank wait. Those without a listener, and tests of the rank, end."""
        for flight in self.flights.by_name.values():
            flight.left -= {number}
        there = self.flights.at(number)
        for flight in there:
            if flight.listener is None:
                self._leave(now, flight, ran=False)
            else:
                self.flights.unplace(flight)
        for flight in there:
            if flight.listener is not None and not flight.carried:
                self._end_here(now, flight, Lost(reason))

    def _end_here(self, now: float, flight: Flight, event: Lost | Rejected) -> None:
        """End a sequence for a reason of the router, not of its worker."""
        self._leave(now, flight, ran=False)
        if flight.listener is not None:
            self.deliveries.append((now, flight.listener, flight.index, event))

    def _leave(self, now: float, flight: Flight, *, ran: bool, output: int | None = None) -> None:
        """Forget an ended sequence. `output` is its number of tokens, if that exceeds the delivered ones."""
        self.flights.remove(now, flight, ran=ran)
        self.waiters.ended(now, flight, len(flight.output) if output is None else output)
