"""Agreeing over the wires: the end of every mesh that fails (agreement.py says how and why)."""

from time import perf_counter

from moeyard_worker.exchange.agreement import Agreement
from moeyard_worker.exchange.finding import Finding
from moeyard_worker.exchange.frames import SETTLED, PoisonFrame, Tag, encode_poison
from moeyard_worker.exchange.naming import told_by
from moeyard_worker.exchange.wires import LAST_LOOK_S, Wires


def tell(wires: Wires, tag: Tag, poison: PoisonFrame) -> None:
    """Send one poison frame to every peer that still takes frames."""
    frame = encode_poison(tag, poison)
    for peer in wires.peers:
        wires.send(peer, frame)


def tell_settled(wires: Wires, tag: Tag, finding: Finding) -> None:
    """Name a failure without asking anybody: ranks that are still connecting have nobody to agree with."""
    tell(wires, tag, PoisonFrame(round=SETTLED, finding=finding))


def agree_on_finding(wires: Wires, tag: Tag, finding: Finding, *, patience: float) -> Finding:
    """The finding that all ranks name, this rank's own or a smaller one of a peer. `tag` is this rank's, of poison.

    `patience` (seconds) bounds the wait of each round: a rank that neither speaks nor loses its connection costs this
    once. Frames that are no poison of this epoch are dropped, the step they belong to is lost.
    """
    agreement = Agreement(wires.peers, finding)
    wires.drain()
    limit = perf_counter() + patience
    while True:
        for peer, inbox in wires.inbox.items():
            while inbox:
                told = told_by(inbox.popleft(), peer, tag.epoch)
                if told is not None:
                    agreement.hear(peer, told)
        for peer in wires.lost:
            agreement.leave(peer)
        for poison in agreement.advance():
            tell(wires, tag, poison)
            limit = perf_counter() + patience
        if agreement.settled is not None:
            return agreement.settled
        late = perf_counter() >= limit
        happened = wires.poll(LAST_LOOK_S if late else limit - perf_counter())
        if late and not happened:
            agreement.give_up()
