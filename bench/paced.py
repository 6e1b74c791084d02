"""A rank that computes nothing: the real scheduler and frontend, with steps of a fixed duration.

It serves drills of the router on machines that are too small or too busy to compute. A step lasts `base` + `per_row`
for every row. Output token i of a request has the id 300 + i, modulo.
"""

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import zmq

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.engine.loop.frontend import Frontend, in_frames
from moeyard_worker.protocol import Abort, Hello, Snapshot, Submit
from moeyard_worker.scheduling.request import Accepted
from moeyard_worker.scheduling.scheduler import Scheduler

VOCAB_SIZE = 8192
MAX_MODEL_LEN = 4096
SNAPSHOT_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The pace of a rank: concurrent sequences, and seconds of a step and of each of its rows."""

    max_num_seqs: int = 32
    base: float = 0.010
    per_row: float = 0.0001


class PacedRank:
    """One rank of a fleet whose ranks do not wait for each other."""

    def __init__(self, rank: int, world_size: int, pace: Pace) -> None:
        self._pace = pace
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_pages=pace.max_num_seqs * 64,
                page_size=16,
                max_model_len=MAX_MODEL_LEN,
                vocab_size=VOCAB_SIZE,
                max_num_seqs=pace.max_num_seqs,
                prefix_caching=False,
            )
        )
        self._frontend = Frontend("127.0.0.1", deadline=30.0, max_model_len=MAX_MODEL_LEN)
        self.endpoint = self._frontend.endpoint
        self._identity = (rank, world_size)
        self._clients: set[bytes] = set()
        self._step = 0
        self._said: tuple[int, ...] = ()
        self._said_at = 0.0

    def run(self) -> None:
        """Run until the process ends."""
        scheduler = self._scheduler
        while True:
            if not scheduler.has_work():
                self._frontend.socket.poll(1000, zmq.POLLIN)
            self._take()
            if scheduler.has_work():
                began = time.monotonic()
                step = scheduler.schedule(began)
                self._step += 1
                due = began + self._pace.base + self._pace.per_row * step.num_tokens
                time.sleep(max(0.0, due - time.monotonic()))
                requests = scheduler.requests(step)
                results = [Accepted(token_ids=(300 + len(r.output) % 3000,)) for r in requests]
                for client, message in in_frames(scheduler.complete(step, results, time.monotonic())):
                    self._frontend.send(client, message)
            self._report()

    def _take(self) -> None:
        for client, message in self._frontend.receive():
            if isinstance(message, Hello):
                self._clients.add(client)
                self._frontend.send(client, self._snapshot())
            elif isinstance(message, Submit):
                rejected = self._scheduler.add(message, client, time.monotonic())
                if rejected is not None:
                    self._frontend.send(client, rejected)
            elif isinstance(message, Abort):
                done = self._scheduler.abort(client, message.request_id)
                if done is not None:
                    self._frontend.send(client, done)

    def _report(self) -> None:
        scheduler, now = self._scheduler, time.monotonic()
        load = (self._step, scheduler.num_running, scheduler.num_waiting)
        if load == self._said or (scheduler.has_work() and now - self._said_at < SNAPSHOT_SECONDS):
            return
        self._said, self._said_at = load, now
        for client in self._clients:
            self._frontend.send(client, self._snapshot())

    def _snapshot(self) -> Snapshot:
        rank, world_size = self._identity
        scheduler = self._scheduler
        return Snapshot(
            rank=rank,
            world_size=world_size,
            epoch=0,
            step=self._step,
            state="ready",
            failure=None,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            kv_pages_total=scheduler.pool.num_pages,
            kv_pages_free=scheduler.pool.num_free,
            page_size=16,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            generation_tokens=scheduler.stats.generation_tokens,
        )


def run_paced(rank: int, world_size: int, pace: Pace, pipe: Connection) -> None:
    """Run the process of one rank and send its endpoint."""
    each = PacedRank(rank, world_size, pace)
    pipe.send(each.endpoint)
    each.run()
