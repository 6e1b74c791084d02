"""Agreement on the next step: every rank sends every other its plan frame and waits for theirs. No coordinator.

A rank with work starts a step by sending its plan; an idle rank joins when it sees one. Nothing spins: an idle engine
blocks on its own sockets and `Mesh.poll_sockets`.
"""

from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from moeyard_worker.exchange.base import ExchangeError, PeerRows
from moeyard_worker.exchange.membership.frames import FrameError, Phase, PlanFrame, decode_plan_frame, encode_plan_frame
from moeyard_worker.exchange.membership.mesh import Frame, Mesh


class Agreed(NamedTuple):
    """The agreed step.

    num_tokens: rows of each rank, by rank; 0 for an absent one.
    num_drafts: number of drafting passes.
    peers: rows that ranks bring to the step's exchanges.
    """

    num_tokens: tuple[int, ...]
    num_drafts: int
    peers: PeerRows


class Lockstep:
    """Agrees on steps over a connected mesh (of one rank: with itself).

    wait_seconds: the wall time of each `agree` since the owner last cleared the list. steps: how many steps were agreed
    on since then, by their passes of drafting. others_decode: whether another rank had rows of output in the last.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.wait_seconds: list[float] = []
        self.steps: Counter[int] = Counter()
        self.others_decode = False

    def agree(
        self, step: int, num_tokens: int, num_drafts: int = 0, *, num_prompt: int = 0, num_rows: int | None = None
    ) -> Agreed:
        """Take part in `step` with `num_tokens` rows and drafts behind them: as many as the rank that wants most.

        `num_prompt` of the rows are of prompts; `num_rows` are brought to the exchanges, with padding (None: as many).
        Raises ExchangeError when a peer is lost, silent beyond the deadline, or plans another step.
        """
        start = perf_counter()
        mesh = self.mesh
        mesh.step = step
        most = num_tokens if num_rows is None else num_rows
        own = PlanFrame(
            epoch=mesh.epoch,
            step=step,
            source=mesh.rank,
            num_tokens=num_tokens,
            num_prompt=num_prompt,
            num_rows=most,
            num_drafts=num_drafts,
        )
        frames = self._exchanged(own, start) if mesh.peers else []
        counts = [0] * mesh.world_size
        counts[mesh.rank] = num_tokens
        prompts, rows = [0] * mesh.world_size, [0] * mesh.world_size
        prompts[mesh.rank], rows[mesh.rank] = num_prompt, most
        self.others_decode = False
        for peer in mesh.peers:
            theirs = self._plan(peer, bytes(frames[peer]))
            counts[peer], prompts[peer], rows[peer] = theirs.num_tokens, theirs.num_prompt, theirs.num_rows
            self.others_decode |= theirs.num_tokens > theirs.num_prompt
            num_drafts, most = max(num_drafts, theirs.num_drafts), max(most, theirs.num_rows)
        self.wait_seconds.append(perf_counter() - start)
        self.steps[num_drafts] += 1
        return Agreed(tuple(counts), num_drafts, PeerRows(most, tuple(prompts), tuple(rows)))

    def _exchanged(self, own: PlanFrame, since: float) -> Sequence[Frame]:
        """The plans of the peers, to whom this rank's is sent."""
        plan = encode_plan_frame(own)
        for peer in self.mesh.peers:
            self.mesh.send(peer, plan)
        return self.mesh.recv_all(Phase.PLAN, layer=None, since=since)

    def peer_started(self, step: int) -> bool:
        """Whether a peer's plan for `step` is here, so that this rank must join even without work. Never blocks.

        Call it between steps, and while this rank waits for a step that it takes part in. Raises ExchangeError if a
        peer is gone, reports a failure, or sent something else. If a peer waits for rows, this rank answers that it
        waits, too, because it may have finished a step that a third rank delays for that peer.
        """
        if not self.mesh.peers:
            return False
        arrived = self.mesh.arrived()
        if not arrived and self.mesh.signs.somebody_waits():
            self.mesh.say(Phase.WAITING)
        for peer, frame in arrived.items():
            try:
                plan = decode_plan_frame(bytes(frame))
            except FrameError as error:
                raise self._failed(peer, f"rank {peer} sent the wrong frame between steps: {error}") from error
            if (plan.epoch, plan.step, plan.source) != (self.mesh.epoch, step, peer):
                raise self._failed(peer, f"rank {peer} plans the wrong step: expected step {step}, got {plan}")
        return bool(arrived)

    def _plan(self, peer: int, frame: bytes) -> PlanFrame:
        try:
            return decode_plan_frame(frame)
        except FrameError as error:
            raise self._failed(peer, f"rank {peer} sent a bad plan: {error}") from error

    def _failed(self, peer: int, reason: str) -> ExchangeError:
        return ExchangeError(self.mesh.fail(reason, ranks=[peer]))
