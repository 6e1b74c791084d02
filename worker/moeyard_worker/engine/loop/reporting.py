"""Snapshots of a rank for its routers, and the times when they are due."""

import time

from moeyard_worker.engine.loop.metrics import WorkerMetrics
from moeyard_worker.engine.sampling.grammars import GrammarQueue
from moeyard_worker.experts.cache import ExpertCache
from moeyard_worker.protocol import ExpertLoads, Snapshot
from moeyard_worker.scheduling.scheduler import Scheduler

SNAPSHOT_SECONDS = 0.02  # how often a busy rank reports its load
# How often a rank without rows reports the counts of its peers' steps.
PEERS_SECONDS = 1.0


class Reporter:
    """Makes the snapshots of one rank.

    epoch, num_ranks: of the current mesh; the engine sets them.
    step: the step of the last snapshot.
    fingerprint: of the rank with the weights in use.
    inspectors: the clients that wait for the loads of the experts.
    """

    def __init__(
        self,
        *,
        rank: int,
        epoch: int,
        scheduler: Scheduler,
        grammars: GrammarQueue,
        experts: ExpertCache,
        metrics: WorkerMetrics,
    ) -> None:
        self.step = 0
        self.epoch = epoch
        self.num_ranks = 1
        self.fingerprint = ""
        self.inspectors: list[bytes] = []
        self._rank = rank
        self._scheduler = scheduler
        self._grammars = grammars
        self._experts = experts
        self._metrics = metrics
        self._load: tuple[object, ...] = ()
        self._reported_at = 0.0

    def due(self, step: int, failure: str | None, *, force: bool) -> Snapshot | None:
        """Return a snapshot if the load changed, or if a busy rank has run a step; at most one per 20 ms if busy.

        A rank that only takes part in its peers' steps reports its counts once a second, and when these steps end.
        """
        scheduler = self._scheduler
        own_step = step if scheduler.has_work() else None
        num_waiting = scheduler.num_waiting + len(self._grammars.waiting)
        load = (failure, own_step, scheduler.num_running, num_waiting, scheduler.pool.num_free)
        now = time.monotonic()
        busy = scheduler.has_work() and now - self._reported_at < SNAPSHOT_SECONDS
        due = step != self.step and now - self._reported_at >= PEERS_SECONDS
        if not force and (busy or (load == self._load and not due)):
            return None
        self._load, self._reported_at, self.step = load, now, step
        self._metrics.observe_load(scheduler)
        return self.snapshot(step, failure)

    def answers(self) -> list[tuple[bytes, ExpertLoads]]:
        """Return the expert loads for each inspector once the device has counted the steps in flight."""
        loads = self._experts.loads(self._rank) if self.inspectors else None
        if loads is None:
            return []
        clients, self.inspectors = self.inspectors, []
        return [(client, loads) for client in clients]

    def snapshot(self, step: int, failure: str | None) -> Snapshot:
        """Return the state of the rank in step `step`. `failure`: why it runs no steps, or None."""
        scheduler = self._scheduler
        stats, experts = scheduler.stats, self._experts.stats.counters
        num_compiling = self._grammars.num_tokens if self._grammars.waiting else 0
        # A device with every expert in a slot counts nothing for the host.
        counted = experts.num_hits + experts.num_misses > 0
        return Snapshot(
            rank=self._rank,
            world_size=self.num_ranks,
            epoch=self.epoch,
            step=step,
            state="ready" if failure is None else "recovering",
            failure=failure,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._grammars.waiting),
            num_waiting_tokens=scheduler.num_waiting_tokens + num_compiling,
            kv_pages_total=scheduler.config.num_pages,
            kv_pages_free=scheduler.pool.num_free,
            page_size=scheduler.config.page_size,
            max_model_len=scheduler.config.max_model_len,
            vocab_size=scheduler.config.vocab_size,
            weight_version=scheduler.weight_version or "",
            fingerprint=self.fingerprint,
            generation_tokens=stats.generation_tokens,
            prefill_tokens=stats.prefill_tokens,
            prefix_query_tokens=stats.prefix_query_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            preemptions=stats.num_preemptions,
            expert_hits=experts.num_hits if counted else None,
            expert_misses=experts.num_misses if counted else None,
            expert_evictions=experts.num_evictions if counted else None,
            expert_slots=self._experts.num_slots,
            draft_tokens=sum(stats.drafts) if stats.drafts else None,
            accepted_tokens=sum(stats.accepted) if stats.drafts else None,
            num_drafts=stats.drafts[0] if stats.drafts else None,
            accepted_by_place=tuple(stats.accepted),
            steps_by_rows=tuple(self._metrics.steps_by_rows),
            step_rows=self._metrics.step_rows,
        )
