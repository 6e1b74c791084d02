"""The loop of one rank: messages in, lockstep steps, messages out.

With `max_in_flight` 2, a step is planned, agreed on and launched while the previous one runs. Then the results of the
previous one are taken, one step late. With 1 they are taken at once, through the same code.

A rank with work sends its plan and waits for the others'. An idle rank blocks on its sockets until a request or a
peer's plan arrives, so nothing spins and there is no coordinator. A peer that is lost or late ends the epoch. The steps
in flight are rolled back. The rank keeps its requests and takes more, and waits for the mesh of the next epoch.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import zmq

from moeyard_worker.config.placement import Placement
from moeyard_worker.engine.loop.faults import RankFault, describe_fault, not_finite
from moeyard_worker.engine.loop.frontend import Frontend, in_frames
from moeyard_worker.engine.loop.loss import Loss, make_loss
from moeyard_worker.engine.loop.metrics import WorkerMetrics
from moeyard_worker.engine.loop.pacing import Pacing
from moeyard_worker.engine.loop.reporting import Reporter
from moeyard_worker.engine.sampling.forced_output import forced_output
from moeyard_worker.engine.sampling.grammars import GrammarQueue, Grammars
from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.engine.steps.in_flight import LaunchedStep
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.exchange.base import Exchange, ExchangeError
from moeyard_worker.exchange.membership.lockstep import Lockstep
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.experts.cache import ExpertCache
from moeyard_worker.protocol import Abort, Hello, Inspect, Message, Rejected, Submit
from moeyard_worker.scheduling.admission import refusal
from moeyard_worker.scheduling.request import Constraint, Waits
from moeyard_worker.scheduling.scheduler import Scheduler
from moeyard_worker.scheduling.step import Step

log = logging.getLogger(__name__)

IDLE_CHECK_SECONDS = 1.0  # an idle rank checks its invariants after this time


class Polled(NamedTuple):
    """Whether anything has arrived, and whether from peers. Messages and frames remain in their sockets."""

    anything: bool
    peers: bool


class Poller:
    """Waits for messages of routers (`sources`), frames of peers (from `watch` to `unwatch`) and calls of `wake`."""

    def __init__(self, *sources: Any) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = threading.Lock()
        self._closed = False
        self._poller = zmq.Poller()
        for source in (self._wake, *sources):
            self._poller.register(source, zmq.POLLIN)
        # Registered when an epoch begins, because the rank is built before it meets its peers.
        self._peers: list[zmq.Socket[bytes]] = []

    def wake(self) -> None:
        """Wake the thread that waits. Safe from any thread, at any time."""
        with self._closing:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the event; `wake` does nothing from then on."""
        with self._closing:
            self._closed = True
            os.close(self._wake)

    def watch(self, peers: "Iterable[zmq.Socket[bytes]]") -> None:
        """Wait for these sockets of peers, too."""
        for socket in peers:
            self._peers.append(socket)
            self._poller.register(socket, zmq.POLLIN)

    def unwatch(self) -> None:
        """Wait for no peer any more."""
        while self._peers:
            self._poller.unregister(self._peers.pop())

    def wait(self, milliseconds: int | None) -> Polled:
        """Wait for any event, at most this long (None: without a limit)."""
        ready = dict(self._poller.poll(milliseconds))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return Polled(bool(ready), any(socket in ready for socket in self._peers))


class Engine:
    """The loop over the parts of a rank. `run` is called in one thread, `rejoin` and `stop` from any thread.

    on_loss: called in the loop with the loss that ended an epoch. Then the loop waits for `rejoin`.
    mesh: the mesh of the epoch.
    """

    def __init__(
        self,
        *,
        rank: int,
        epoch: int,
        scheduler: Scheduler,
        runner: Runner | GpuRunner,
        experts: ExpertCache,
        exchange: Exchange,
        mesh: Mesh,
        frontend: Frontend,
        metrics: WorkerMetrics,
        on_loss: Callable[[Loss], None] = lambda loss: None,
        grammars: Grammars | None = None,
    ) -> None:
        self.rank, self.epoch, self.step = rank, epoch, 0
        self.failure: str | None = None
        self._scheduler = scheduler
        self._runner = runner
        self._experts = experts
        self._exchange = exchange
        self.mesh = mesh
        self._lockstep = Lockstep(mesh)
        self._frontend = frontend
        self._metrics = metrics
        # Steps in flight, oldest first, each with its number and when it was planned (monotonic seconds).
        self._launched: deque[tuple[LaunchedStep, int, float]] = deque()
        self._completed_at = 0.0
        self._lockstep_seconds = 0.0
        scheduler.stats.waits = Waits(self._lockstep_seconds, experts.fetch_seconds)
        # If steps overlap, the next one is planned when it is due.
        self._pacing = Pacing() if scheduler.config.max_in_flight > 1 else None
        self._clients: set[bytes] = set()
        self._poller = Poller(frontend.socket, frontend.monitor)
        self._grammars = GrammarQueue(grammars, self._poller.wake)
        self._reporter = Reporter(
            rank=rank, epoch=epoch, scheduler=scheduler, grammars=self._grammars, experts=experts, metrics=metrics
        )
        self._on_loss = on_loss
        self._next: tuple[Mesh, int, Placement] | None = None  # the arguments of `rejoin`
        self._ending: tuple[int, str] | None = None  # the epoch to end, and why
        self._weights: tuple[str, str] | None = None  # the arguments of `change_weights`
        self._unproven: str | None = None  # the version of weights that have given no logits yet
        self._paused = self._forgets = self._asleep = False
        self._stopping = False

    def stop(self) -> None:
        """Ask the loop to end after its current step. Safe from any thread, and to call twice."""
        self._stopping = True
        self._poller.wake()

    def rejoin(self, mesh: Mesh, step: int, placement: Placement) -> None:
        """Continue after step `step` with the peers of a connected mesh. The first call comes before `run`."""
        self._next = (mesh, step, placement)
        self._poller.wake()

    def end_epoch(self, reason: str) -> None:
        """End the epoch, also one just given to `rejoin`, on all ranks between steps, without a loss. Any thread."""
        # `_begin_epoch` sets `epoch` before it clears `_next`, so one of them names the latest epoch.
        coming = self._next
        self._ending = (self.epoch if coming is None else coming[0].epoch, reason)
        self._poller.wake()

    def change_weights(self, version: str, fingerprint: str) -> None:
        """Drop what was computed with other weights when the next epoch begins. Call it before the first one, too.

        The caller has changed the weights between two epochs. `fingerprint`: hash of all that may change bits of
        answers with them.
        """
        self._weights = version, fingerprint

    def pause(self, *, paused: bool) -> None:
        """Plan no more steps of this rank's own, or plan them again. It takes part in its peers' steps. Any thread."""
        self._paused = paused
        self._poller.wake()

    def sleep(self, *, asleep: bool) -> None:
        """Run no steps until the memory is back. Call it between two epochs."""
        self._asleep = asleep

    def use_runner(self, runner: Runner | GpuRunner) -> None:
        """Launch steps by another runner from the next epoch on. Call it between two epochs."""
        self._runner = runner

    def forget_prefixes(self) -> None:
        """Drop the cached prefixes between two steps. Any thread."""
        self._forgets = True
        self._poller.wake()

    def close(self) -> None:
        """Close the exchange and the poller after `run` has returned. Later calls of `stop` do nothing."""
        self._exchange.close()
        self._poller.close()

    def run(self) -> None:
        """Serve until `stop`. Raises RankFault for a fault or a broken invariant.

        Routers get no reply for the requests of a failing rank, because these continue elsewhere. Only requests that
        are known to have caused the fault end here, with its text.
        """
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:  # boundary: raised again as a RankFault
            text = describe_fault(error, rank=self.rank, step=self.step)
            self.failure = self.failure or self.mesh.fail(text)
            log.error("%s", text)
            if isinstance(error, RankFault):
                for reply in self._scheduler.fail(error.requests, text):
                    self._send(reply.client, reply.message)
            raise RankFault(text) from error

    def _turn(self) -> None:
        if self._next is not None:
            self._begin_epoch(*self._next)
        if self._ending is not None and self._ending[0] == self.epoch and not self.failure:
            self._lose(ExchangeError(self.mesh.fail(self._ending[1], planned=True)))
        if self._forgets:
            self._forgets = False
            self._scheduler.forget_prefixes()
        self._take_messages()
        if self._paused or self._asleep:
            self._scheduler.hold(time.monotonic())
        for reply in self._scheduler.expire(time.monotonic()):
            self._send(reply.client, reply.message)
        try:
            if self.failure is None and (self._has_work() or self._launched or self._peer_started()):
                self._advance()
                return
        except ExchangeError as error:
            self._lose(error)
            return
        self._report(force=False)
        self._block()

    def _has_work(self) -> bool:
        return not (self._paused or self._asleep) and self._scheduler.has_work()

    def _peer_started(self) -> bool:
        return self._lockstep.peer_started(self.step + 1)

    def _block(self) -> None:
        """Wait for a message, a peer or `stop`. Check the invariants once if the wait is long."""
        # With nothing in flight a device returns its expert loads within microseconds.
        polled = self._poller.wait(1 if self._reporter.inspectors else int(IDLE_CHECK_SECONDS * 1000))
        if not polled.anything and not self._reporter.inspectors:
            self._scheduler.validate()
            self._report(force=self.step != self._reporter.step)
            # No event reports a grammar that takes too long.
            polled = self._poller.wait(int(IDLE_CHECK_SECONDS * 1000) if self._grammars.waiting else None)
        if self.failure is None and polled.peers:
            try:
                self.mesh.check_peers()
            except ExchangeError as error:
                self._lose(error)

    def _take_messages(self) -> None:
        for client, message in self._frontend.receive():
            if isinstance(message, Submit):
                self._submit(client, message)
            elif isinstance(message, Abort):
                done = self._scheduler.abort(client, message.request_id)
                done = done or self._grammars.abort(client, message.request_id)
                if done is not None:
                    self._send(client, done)
            elif isinstance(message, Hello):
                self._clients.add(client)
                self._send(client, self._reporter.snapshot(self.step, self.failure))
            elif isinstance(message, Inspect):
                self._reporter.inspectors.append(client)
            else:
                self._frontend.refusals.add("message", f"a router sent a {message.type}, which only workers send")
        for each, made in self._grammars.ready(time.monotonic()) if self._grammars.waiting else ():
            if isinstance(made, Rejected):
                self._send(each.client, made)
            else:
                self._add(each.client, each.submit, each.arrived, made)

    def _submit(self, client: bytes, message: Submit) -> None:
        now = time.monotonic()
        if message.sampling.grammar is None:
            vocab_size = self._scheduler.config.vocab_size
            self._add(client, message, now, forced_output(message.sampling, vocab_size=vocab_size))
            return
        # A request that can never run needs no grammar.
        rejected = refusal(message, self._scheduler.config) or self._grammars.add(client, message, now)
        if rejected is not None:
            self._send(client, rejected)

    def _add(self, client: bytes, message: Submit, arrived: float, constraint: Constraint | None = None) -> None:
        reply = self._scheduler.add(message, client, arrived, constraint)
        if reply is not None:
            self._send(client, reply)

    def _advance(self) -> None:
        """Launch a step if there is one to run. Take the results of the oldest one if no more may be in flight."""
        if self._pacing is not None and self._launched and self._has_work():
            has_run = self._launched[-1][0].has_run
            if self._pacing.too_early(lambda: has_run() or self._peer_started(), self._pause):
                return
        started = time.monotonic()
        others = self._lockstep.others_decode
        step = self._scheduler.schedule(started, beside_output=others) if self._has_work() else Step.empty()
        # A rank without rows takes part in its peers' steps only.
        if step.chunks or self._peer_started():
            self._launch(step, started)
            if len(self._launched) < self._scheduler.config.max_in_flight:
                return
        elif self._listens and self._pause(self._launched[0][0].has_run):
            return  # A peer that plans the next step would wait as long as this one takes.
        self._complete(*self._launched.popleft())

    @property
    def _listens(self) -> bool:
        # Whether the exchange waits for the device, and checks the mesh meanwhile.
        return bool(self.mesh.peers) and self._exchange.traits.capturable

    def _pause(self, over: Callable[[], bool]) -> bool:
        """Wait until it is `over` and return False. Return True if a message arrives first.

        If no device waits for peers, wait for 1 ms at most.
        """
        if self._listens:
            # The exchange checks the mesh meanwhile, which reads a plan from its socket.
            self._exchange.steps.drain(lambda: over() or self._poller.wait(0).anything or self._peer_started())
            return not over()
        return self._poller.wait(1).anything

    def _launch(self, step: Step, started: float) -> None:
        """Agree on a lockstep step and launch it. An idle rank takes part without rows."""
        agreed = self._lockstep.agree(
            self.step + 1,
            step.num_tokens,
            step.num_drafts,
            num_prompt=step.num_prefill_tokens,
            num_rows=self._runner.rows_of(step),
        )
        self.step += 1
        self._lockstep_seconds += self._lockstep.wait_seconds[-1]
        self._exchange.steps.begin(self.step)
        self._experts.begin_step(self.step)
        before = self._launched[-1][0] if self._launched else None
        requests, depth = self._scheduler.requests(step), agreed.num_drafts
        launched = self._runner.launch(step, requests, before=before, num_drafts=depth, peers=agreed.peers)
        self._launched.append((launched, self.step, started))
        if self._pacing is not None:
            waited = self._lockstep.wait_seconds[-1] + (0.0 if before is None else before.waited)
            now = time.monotonic()
            own = 0.0 if launched.has_run() else now - started - waited
            self._pacing.launched(agreed.peers, seconds=own, now=now)

    def _complete(self, launched: LaunchedStep, number: int, started: float) -> None:
        """Take the results of the oldest step in flight."""
        step = launched.step
        self._exchange.steps.finish(number, launched.has_run)
        if unsound := launched.unsound:
            # Wrong values are in the pages by now, which other requests may share.
            raise not_finite(unsound, step=number, weights=self._unproven)
        if self._unproven is not None and (step.sampled or step.scored):
            self._unproven = None
        results = launched.results
        now = time.monotonic()
        if self._pacing is not None:
            self._pacing.completed(launched.device_seconds, now=now)
        chosen = launched.experts
        if self._experts.wants_choices:
            self._experts.record(number, chosen, num_rows=step.num_tokens, num_prompt=step.num_prefill_tokens)
        if not self._scheduler.config.routing_bytes:
            chosen = b""
        self._scheduler.stats.waits = Waits(self._lockstep_seconds, self._experts.fetch_seconds)
        replies = self._scheduler.complete(step, results, now, launched.scores, chosen)
        for client, message in in_frames(replies):
            self._send(client, message)
        # If steps overlap, the time of one begins when the previous one is done.
        seconds, self._completed_at = now - max(started, self._completed_at), now
        self._metrics.observe_step(
            num_tokens=step.num_tokens,
            seconds=seconds,
            device_seconds=launched.device_seconds,
            scheduler=self._scheduler,
            exchange=self._exchange,
            experts=self._experts,
            lockstep=self._lockstep,
        )
        self._report(force=False)

    def _send(self, client: bytes, message: Message) -> None:
        if not self._frontend.send(client, message):
            self._clients.discard(client)
            self._scheduler.abort_client(client)
            self._grammars.abort_client(client)

    def _lose(self, error: ExchangeError) -> None:
        """End the epoch: roll requests back to finished steps, tell routers and launcher, wait for the next epoch."""
        self._poller.unwatch()
        self._exchange.steps.abort()
        # A peer may have found the cause of this error; all ranks agree on one.
        self.failure = self.mesh.fail(str(error))
        finding = self.mesh.finding
        assert finding is not None, "a mesh that failed knows why"
        self._exchange.steps.abort(finding.ranks)
        self._launched.clear()
        if self._pacing is not None:
            self._pacing.clear()
        loss = make_loss(
            error,
            finding,
            rank=self.rank,
            epoch=self.epoch,
            steps=self.step,
            running=self._scheduler.running(),
            waiting=self._scheduler.num_waiting,
        )
        log.log(logging.ERROR if loss.ranks else logging.INFO, "%s", loss)
        self._scheduler.roll_back(time.monotonic())
        self._report(force=True)
        self._on_loss(loss)

    def _begin_epoch(self, mesh: Mesh, step: int, placement: Placement) -> None:
        """Continue from the state in which the previous epoch left this rank."""
        self.mesh, self._lockstep = mesh, Lockstep(mesh)
        if self._weights is not None:
            (version, self._reporter.fingerprint), self._weights = self._weights, None
            self._scheduler.renew(version)
            self._unproven = version
        self._experts.adopt(placement.experts(self.rank))
        self.epoch = self._reporter.epoch = mesh.epoch
        self._reporter.num_ranks = len(mesh.members)
        self.step, self.failure, self._next = step, None, None
        self._poller.watch(self.mesh.poll_sockets())
        try:
            self._exchange.attach(mesh, placement)
        except ExchangeError as error:
            self._lose(error)
            return
        log.info("epoch %d begins after step %d", self.epoch, step)
        self._report(force=True)

    def _report(self, *, force: bool) -> None:
        """Send routers a snapshot if one is due, and expert loads to the clients that asked."""
        if (snapshot := self._reporter.due(self.step, self.failure, force=force)) is not None:
            for client in list(self._clients):
                self._send(client, snapshot)
        for client, loads in self._reporter.answers():
            self._send(client, loads)
