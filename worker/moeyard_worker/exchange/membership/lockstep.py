"""Agreement on the next step: every rank sends every other its plan frame and waits for theirs. No coordinator.

A rank with work starts a step by sending its plan; an idle rank joins when it sees one. Nothing spins: an idle engine
blocks on its own sockets and `Mesh.poll_sockets`.
"""

from collections import Counter
from time import perf_counter
from typing import NamedTuple

from moeyard_worker.exchange.base import ExchangeError, PeerRows
from moeyard_worker.exchange.membership.frames import FrameError, Phase, PlanFrame, decode_plan_frame, encode_plan_frame
from moeyard_worker.exchange.membership.mesh import Mesh

# The plan of a rank that is no member of the epoch.
_ABSENT = PlanFrame(epoch=0, step=0, source=0, num_tokens=0)


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

    wait_seconds: the wall time of each `agree` since the owner last cleared the list.
    steps: counts of agreed steps by their passes of drafting, since the owner last cleared them.
    others_decode: whether another rank had rows of output in the last step.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.wait_seconds: list[float] = []
        self.steps: Counter[int] = Counter()
        self.others_decode = False

    def agree(
        self, step: int, num_tokens: int, num_drafts: int = 0, *, num_prompt: int = 0, num_rows: int | None = None
    ) -> Agreed:
        """Take part in `step` with `num_tokens` rows. The first `num_prompt` are prompt rows.

        num_drafts: passes of drafting that this rank wants. The step has as many as the rank that wants most.
        num_rows: rows that this rank brings to the exchanges, with padding (None: `num_tokens`).
        Raises ExchangeError when a peer is lost, silent beyond the deadline, or plans another step.
        """
        start = perf_counter()
        mesh = self.mesh
        mesh.step = step
        plans = {
            mesh.rank: PlanFrame(
                epoch=mesh.epoch,
                step=step,
                source=mesh.rank,
                num_tokens=num_tokens,
                num_prompt=num_prompt,
                num_rows=num_tokens if num_rows is None else num_rows,
                num_drafts=num_drafts,
            )
        }
        if mesh.peers:
            frame = encode_plan_frame(plans[mesh.rank])
            for peer in mesh.peers:
                mesh.send(peer, frame)
            frames = mesh.recv_all(Phase.PLAN, layer=None, since=start)
            plans |= {peer: self._plan(peer, bytes(frames[peer])) for peer in mesh.peers}
        self.others_decode = any(plans[peer].num_tokens > plans[peer].num_prompt for peer in mesh.peers)
        by_rank = [plans.get(rank, _ABSENT) for rank in range(mesh.world_size)]
        rows = tuple(plan.num_rows for plan in by_rank)
        num_drafts = max(plan.num_drafts for plan in by_rank)
        self.wait_seconds.append(perf_counter() - start)
        self.steps[num_drafts] += 1
        peers = PeerRows(max(rows), tuple(plan.num_prompt for plan in by_rank), rows)
        return Agreed(tuple(plan.num_tokens for plan in by_rank), num_drafts, peers)

    def peer_started(self, step: int) -> bool:
        """Whether a peer's plan for `step` is here, so that this rank must join even without work. Never blocks.

        Call it between steps, and while this rank waits for a step that it takes part in. Raises ExchangeError if a
        peer is gone, reports a failure, or sent something else. If a peer waits for rows, this rank answers that it
        waits, too: a third rank may delay a step for that peer that this rank has finished.
        """
        if not self.mesh.peers:
            return False
        arrived = self.mesh.arrived()
        if not arrived and self.mesh.signs.any_waiting():
            self.mesh.send_sign(Phase.WAITING)
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
