"""Agreement on the next step: every rank sends every other its plan frame and waits for theirs. No coordinator.

A rank with work starts a step by sending its plan; an idle rank joins when it sees one. Nothing spins: an idle engine
blocks on its own sockets and `Mesh.poll_sockets`.
"""

from time import perf_counter

from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.frames import FrameError, Phase, PlanFrame, decode_plan_frame, encode_plan_frame
from moeyard_worker.exchange.mesh import Mesh


class Lockstep:
    """Agrees on steps over a connected mesh (of one rank: with itself).

    wait_seconds: the wall time of each `agree` since the owner last cleared the list.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.wait_seconds: list[float] = []

    def agree(self, step: int, num_tokens: int) -> tuple[int, ...]:
        """Take part in `step` with `num_tokens` rows; returns every rank's number of rows, by rank (0: it is away).

        Raises ExchangeError when a peer is lost, silent beyond the deadline, or plans another step.
        """
        start = perf_counter()
        mesh = self.mesh
        mesh.step = step
        plan = encode_plan_frame(PlanFrame(epoch=mesh.epoch, step=step, source=mesh.rank, num_tokens=num_tokens))
        for peer in mesh.peers:
            mesh.send(peer, plan)
        frames = mesh.recv_all(Phase.PLAN, layer=None, since=start)
        counts = [0] * mesh.world_size
        counts[mesh.rank] = num_tokens
        for peer in mesh.peers:
            counts[peer] = self._num_tokens(peer, bytes(frames[peer]))
        self.wait_seconds.append(perf_counter() - start)
        return tuple(counts)

    def peer_started(self, step: int) -> bool:
        """Whether a peer's plan for `step` is here, so that this rank must join even without work. Never blocks.

        For use between steps. Raises ExchangeError when a peer is gone, told of a failure, or sent something else.
        """
        arrived = self.mesh.arrived()
        for peer, frame in arrived.items():
            try:
                plan = decode_plan_frame(bytes(frame))
            except FrameError as error:
                raise self._failed(f"rank {peer} sent the wrong frame between steps: {error}") from error
            if (plan.epoch, plan.step, plan.source) != (self.mesh.epoch, step, peer):
                raise self._failed(f"rank {peer} plans the wrong step: expected step {step}, got {plan}")
        return bool(arrived)

    def _num_tokens(self, peer: int, frame: bytes) -> int:
        try:
            return decode_plan_frame(frame).num_tokens
        except FrameError as error:
            raise self._failed(f"rank {peer} sent a bad plan: {error}") from error

    def _failed(self, reason: str) -> ExchangeError:
        return ExchangeError(self.mesh.fail(reason))
