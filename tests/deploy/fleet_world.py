"""A fleet machine whose processes, routers, operators, Ray and clock are played by a test."""

from collections.abc import Callable
from typing import Any

from moeyard.fleet.machine import FleetMachine
from moeyard.fleet.messages import (
    Answered,
    Call,
    Command,
    End,
    Event,
    Examine,
    Failed,
    Fence,
    Finish,
    FleetFailed,
    HandOver,
    Instruction,
    Make,
    Missed,
    Order,
    RayEnded,
    RenewStandby,
    ReservePlaces,
    Returned,
    StartRay,
    Tell,
    Tick,
)
from moeyard_router.fleet.orders import UNKNOWN, Cancel, FleetOrder, Forget, Hold
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement, partition

EXPERTS = 12
REPORT = {"max_model_len": 64, "expert_slots": 8, "held_bytes": 10, "loaded_bytes": 10, "seconds": {"weights": 0.1}}


def whole(size: int) -> Placement:
    return Placement.of_shards((1, 2), partition(EXPERTS, size))


class World:
    """`turn` lets all calls return that are not held, and ticks once. `did` lists the machine's instructions.

    `held[rank, method]` (rank None: any) keeps a call open; `raises[rank, method]` makes it fail once with this text.
    `dead` are the numbers of processes that have ended. Routers have `sequences` of each rank, `whole` or not.
    """

    def __init__(self, size: int = 3, *, sequences: int = 0, launch: bool = True, **options: Any) -> None:
        self.now = 100.0
        config = EngineConfig(model_path="m", num_workers=size, **options.pop("config", {}))
        self.machine = FleetMachine(config, **{"placement": whole(size), "takeover": "always", **options})
        self.did: list[Any] = []
        self.made: list[tuple[int, int]] = []  # rank and process
        self.calls: dict[int, Call] = {}
        self.held: set[tuple[int | None, str]] = set()
        self.raises: dict[tuple[int, str], str] = {}
        self.dead: set[int] = set()
        self.began: set[int] = set()  # processes that have run steps
        self.fenced: set[int] = set()  # ranks whose peers will report them
        self.ends: dict[int, str] = {}
        self.seats: dict[int, tuple[str, int]] = {}
        self.facts: dict[int, dict[str, Any]] = {}  # extra results of a rank's setup
        self.sequences = dict.fromkeys(range(16), sequences)
        self.whole = True
        self.lacks: str | None = None
        self.ray_fails: str | None = None
        self.orders: list[FleetOrder] = []
        self.identities: dict[int, str] = {}  # what a rank reads in place of the version
        self.checksums: dict[str, str] = {}
        self.running = 0  # sequences that have started, while requests are held
        self.handed: list[HandOver] = []
        self.given_up: list[str] = []
        self.exit_codes: list[int] = []
        self.specs: list[dict[str, Any]] = []  # of all setups
        self.said: dict[int, list[str]] = {}
        self.ended: dict[int, Finish] = {}
        self.event(Tick())
        if launch:
            self.turn()
            self.did.clear()

    # Events.

    def event(self, event: Event) -> None:
        """Apply an event and everything that follows at once."""
        events = [event]
        while events:
            instructions = self.machine.handle(events.pop(0), self.now)
            self.machine.validate()
            events = [answer for each in instructions if (answer := self._carry_out(each)) is not None] + events

    def turn(self, *events: Event) -> None:
        """Apply these events, then let every call return that can, and tick once."""
        for event in events:
            self.event(event)
        self.settle()
        self.event(Tick())
        self.settle()

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def settle(self) -> None:
        while self.fenced:
            rank = self.fenced.pop()
            self.report((rank,), f"rank {rank} lost at step 9, plan")
        while (number := next((n for n, call in self.calls.items() if self.returns(call)), None)) is not None:
            self.end(number)
            if self.fenced:
                self.settle()

    def returns(self, call: Call) -> bool:
        rank = self.rank_of(call.process)
        return call.method != "wait" and not {(rank, call.method), (None, call.method)} & self.held

    def end(self, number: int) -> None:
        """End a call."""
        call = self.calls.pop(number)
        rank = self.rank_of(call.process)
        if (words := self.raises.pop((rank, call.method), None)) is not None:
            self.event(Failed(number, words, "raised"))
            return
        if call.method == "end_epoch":
            self.report((), call.args[0])
        self.event(Returned(number, self._value(call, rank)))

    def kill(self, *ranks: int, noticed: bool = True) -> None:
        """End the processes of these ranks; the other ranks report it if `noticed`."""
        self.kill_process(*map(self.process_of, ranks))
        if noticed:
            self.report(ranks, f"rank {ranks[0]} lost at step 9, plan")

    def kill_process(self, *processes: int) -> None:
        self.dead |= {*processes}
        for number, call in list(self.calls.items()):
            if call.process in processes and number in self.calls:
                del self.calls[number]
                self.event(Failed(number, "it died", "ended"))

    def report(self, ranks: tuple[int, ...], reason: str) -> None:
        """Let every rank that runs steps report a loss."""
        for number, call in list(self.calls.items()):
            if call.method == "wait" and number in self.calls and call.process not in self.dead:
                del self.calls[number]
                rank = self.rank_of(call.process)
                self.event(Returned(number, {"rank": rank, "ranks": ranks, "reason": reason, "steps": 9}))

    def misses(self, rank: int, reason: str = "its connection broke") -> None:
        self.event(Missed(rank, reason))

    def ask(self, name: Any, *ranks: int, seconds: float = 30.0, **fields: Any) -> int:
        """Send an operator's command."""
        number = len(self.said)
        self.said[number] = []
        self.event(Command(number=number, name=name, ranks=ranks, seconds=seconds, **fields))
        return number

    def finish(self, command: int, turns: int = 9) -> str:
        """Let time pass until a command ends; return its last text, after the exit code if it was refused."""
        for _ in range(turns):
            if command in self.ended:
                break
            self.turn()
        end = self.ended[command]
        return end.text if end.exit_code is None else f"{end.exit_code}: {end.text}"

    # State.

    def process_of(self, rank: int) -> int:
        """Return the process of a rank."""
        return self.machine.ranks.members[rank].number

    def rank_of(self, process: int) -> int:
        return next(rank for rank, each in self.made if each == process)

    def calls_of(self, rank: int) -> list[str]:
        """Return the methods called on the latest process of a rank."""
        return [each[2] for each in self.did if each[0] == "call" and each[1] == self.process_of(rank)]

    @property
    def serving(self) -> list[int]:
        """Ranks that routers use."""
        return [rank.rank for rank in self.handed[-1].ranks if rank.frontend]

    @property
    def steps(self) -> list[Any]:
        """Instructions except calls, without process numbers."""
        return [each for each in self.did if each[0] not in ("call", "order", "standby")]

    def _value(self, call: Call, rank: int) -> Any:
        addresses = {"frontend": f"tcp://{call.process}", "metrics_url": "", "mesh": {}}
        if call.method == "setup":
            spec = call.args[0]
            if spec["seat"] is not None and spec["peer_gpus"] and spec["seat"] != self.seats[rank]:
                return {"moved": str(self.seats[rank])}
            weights = self._identity(rank, spec["weights"].version) if spec["weights"].replaced else {}
            facts = {"node": "here", "seconds": {"imports": 0.1}, "weights": weights}
            return {**addresses, **facts, **self.facts.get(rank, {})}
        room = {"available": 10**9, "slot_bytes": 1, "all_resident": True, "movable": True}
        if call.method in ("stage_weights", "use_weights"):
            version = call.args[0].version
            return {"weights": self._identity(rank, version), "fingerprint": f"of {version}"}
        if call.method == "weight_checksums":
            return self.checksums
        if call.method in ("sleep", "wake"):
            return 1 << 20
        answers = {"rebind": addresses, "load": REPORT, "progress": (1, 1), "room": room, "seat": self.seats.get(rank)}
        return answers.get(call.method)

    def _identity(self, rank: int, version: str) -> dict[str, tuple[str, str]]:
        return {"w": (self.identities.get(rank, version), "")}

    def _carry_out(self, instruction: Instruction) -> Event | None:
        answers: dict[type, Callable[[Any], Any]] = {
            Examine: lambda it: self.ends.get(self.rank_of(it.process)),
            Order: lambda it: self._order(it.order),
            ReservePlaces: lambda it: self.did.append(("reserve", *it.ranks)) or self.lacks,
            StartRay: lambda it: self._start_ray(),
        }
        if (answer := answers.get(type(instruction))) is not None:
            found = answer(instruction)
            return Answered(found) if getattr(instruction, "answered", True) else None
        if isinstance(instruction, Make):
            self.made.append((instruction.rank, instruction.process))
            self.did.append(("make beside" if instruction.beside else "make", instruction.rank))
        elif isinstance(instruction, Call):
            self.did.append(("call", instruction.process, instruction.method))
            self.began |= {instruction.process} if instruction.method == "start" else set()
            self.specs += instruction.args if instruction.method == "setup" else ()
            if instruction.process in self.dead:
                return Failed(instruction.number, "it died", "ended")
            self.calls[instruction.number] = instruction
        elif isinstance(instruction, Fence | End):
            gone = {instruction.process} if isinstance(instruction, Fence) else {*instruction.processes}
            self.did.append((type(instruction).__name__.lower(), *sorted(map(self.rank_of, gone))))
            if isinstance(instruction, Fence):
                self.fenced |= {self.rank_of(process) for process in gone & self.began}
            self.calls = {number: call for number, call in self.calls.items() if call.process not in gone}
            self.dead |= gone
        elif isinstance(instruction, HandOver):
            self.handed.append(instruction)
            self.did.append(("serve", *(rank.rank for rank in instruction.ranks if rank.frontend)))
        elif isinstance(instruction, RenewStandby):
            self.did.append(("standby",))
        elif isinstance(instruction, Tell):
            self.said[instruction.command].append(instruction.text)
        elif isinstance(instruction, Finish):
            assert instruction.command not in self.ended, "a command must end once"
            self.ended[instruction.command] = instruction
        elif isinstance(instruction, FleetFailed):
            self.given_up.append(instruction.reason)
            self.exit_codes.append(instruction.exit_code)
        return None

    def _start_ray(self) -> str | None:
        self.did.append(("start ray",))
        self.dead |= {process for _, process in self.made}
        self.calls = {}
        return self.ray_fails

    def ray_ends(self, daemon: str) -> None:
        """End a daemon of Ray; the raylet takes all processes with it."""
        if daemon == "raylet":
            self.dead |= {process for _, process in self.made}
        self.event(RayEnded(daemon, daemon == "raylet"))

    def _order(self, drain: FleetOrder) -> int:
        self.orders.append(drain)
        if isinstance(drain, Cancel):
            self.did.append(("cancel", drain.names))
            return self.running
        if isinstance(drain, Forget):
            self.did.append(("forget",))
            return 0
        if isinstance(drain, Hold):
            self.did.append(("switch",) if drain.switches else ("hold", drain.mode))
            return self.running if self.whole or drain.switches else UNKNOWN
        if drain.size is not None:
            self.did.append(("pause", drain.size))
            return UNKNOWN
        if drain.leaves:
            self.did.append(("leaves", drain.rank))
        if not self.whole and not drain.leaves:
            return UNKNOWN
        if drain.carry:
            self.did.append(("carry", drain.rank))
            self.sequences[drain.rank] = 0
        return self.sequences[drain.rank]
