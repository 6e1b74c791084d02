"""One worker driven in process: its scheduler and runner as in the engine's loop, without sockets and peers.

`moeyard.clients.bench.scenarios` decides what to measure, and `moeyard.clients.bench.engine` shows the figures.
"""

import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from moeyard import __version__
from moeyard.clients.bench.figures import Course, StepRecord, summary
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.assembly.worker import Worker
from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.engine.steps.in_flight import LaunchedStep
from moeyard_worker.models.spec import ModelSpec
from moeyard_worker.protocol import KvCompression, SamplingParams, Submit, Tokens
from moeyard_worker.scheduling.scheduler import Scheduler

_CLIENT = b"bench"
# Replays back to back per turn, and turns.
REPLAYS, TURNS = 60, 3


class Subject:
    """A worker in this process, loaded as by `moeyard serve`. All its requests use the same sampling. `close` it."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, sampling: SamplingParams) -> None:
        self.config, self.spec, self._sampling = config, spec, sampling
        begun = time.perf_counter()
        self._worker = Worker(WorkerSpec(config=config, rank=0, epoch=0, host="127.0.0.1", version=__version__))
        self._worker.connect([self._worker.endpoints()["mesh"]])
        self.report = self._worker.load(1)
        self.seconds_to_load = time.perf_counter() - begun
        self.runner, self.experts = self._worker.runner, self._worker.experts
        self._random = random.Random(7)
        self._names = 0
        # Off under a profiler, which would record these replays, too.
        self.times_replays = True

    def close(self) -> None:
        self._worker.stop()

    @property
    def dtype(self) -> str:
        """The served dtype, by torch's name."""
        return str(self.report["dtype"])

    def counts(self) -> dict[str, int]:
        """Counts of the graph runner; {} on a device without graphs."""
        runner = self.runner
        if not isinstance(runner, GpuRunner):
            return {}
        return {name: getattr(runner, name) for name in ("num_replayed", "num_eager", "num_rows", "num_padded_rows")}

    def replayed(self) -> tuple[torch.cuda.CUDAGraph, ...]:
        """Return the graphs of the last step; none if any part of it was launched eagerly.

        Nor where experts lack slots: once more the same step would find all that it needs.
        """
        resident = self.report["expert_slots"] >= self.report["num_experts"]
        return self.runner.replayed if isinstance(self.runner, GpuRunner) and self.times_replays and resident else ()

    def scheduler(self, chunk: int | None = None) -> Scheduler:
        """Return an empty scheduler over all pages. `chunk`: most prompt rows in a step that also decodes."""
        config = self._worker.scheduler.config
        return Scheduler(config if chunk is None else replace(config, mixed_prefill_tokens=chunk))

    def submit(self, run: "Run", *, prompt: int, output: int, budget: int | None = None) -> Course:
        """Queue a request with a unique prompt, and a unique seed if tokens are sampled.

        `budget`: how many tokens of the prompt are kept, None for all.
        """
        self._names += 1
        name = str(self._names)
        ids = tuple(self._random.randrange(self.spec.config.vocab_size) for _ in range(prompt))
        kept = None if budget is None else KvCompression(method="snapkv", budget=budget)
        params = replace(self._sampling, max_tokens=output, seed=self._names, kv_compression=kept)
        course = run.courses[name] = Course(time.perf_counter())
        submit = Submit(request_id=name, prompt_token_ids=ids, sampling=params)
        rejected = run.scheduler.add(submit, _CLIENT, course.submitted)
        assert rejected is None, rejected
        return course


class Run:
    """The observations of one sequence of steps over one scheduler."""

    def __init__(self, subject: Subject, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.courses: dict[str, Course] = {}
        self.records: list[StepRecord] = []
        self._subject = subject

    def go(self, after: Callable[[], None] = lambda: None) -> None:
        """Step until all requests have finished, as `Engine._advance` does. Call `after` after each completed step."""
        scheduler, runner, experts = self.scheduler, self._subject.runner, self._subject.experts
        flights: deque[tuple[LaunchedStep, float]] = deque()
        while scheduler.has_work() or flights:
            begun = time.perf_counter()
            step = scheduler.schedule(begun)
            if step.chunks:
                experts.begin_step(len(self.records) + len(flights) + 1)
                before = flights[-1][0] if flights else None
                launched = runner.launch(step, scheduler.requests(step), before=before, num_drafts=step.num_drafts)
                flights.append((launched, time.perf_counter() - begun))
                if len(flights) < scheduler.config.max_in_flight:
                    continue
            self._complete(*flights.popleft())
            after()

    def _complete(self, launched: LaunchedStep, busy: float) -> None:
        step, results = launched.step, launched.results
        at = time.perf_counter()
        assert not launched.unsound, f"logits of {step.num_tokens} rows are not finite"
        for reply in self.scheduler.complete(step, results, at, experts=launched.experts):
            if isinstance(reply.message, Tokens):
                self.courses[reply.message.request_id].tokens.extend([at] * len(reply.message.token_ids))
        host = busy + time.perf_counter() - at
        self.records.append(
            StepRecord(
                at=at,
                host=host,
                rows=step.num_tokens,
                prompt_rows=step.num_prefill_tokens,
                device=launched.device_seconds,
            )
        )

    def figures(self, end: float = math.inf) -> dict[str, Any]:
        """Return latencies from a client's view, and the times and kinds of steps up to `end`."""
        courses = [course.until(end) for course in self.courses.values()]
        records = [record for record in self.records if record.at <= end]
        return {
            "ttft_ms": summary(c.first for c in courses),
            "tpot_ms": summary(c.per_token for c in courses),
            "itl_ms": summary(gap for c in courses for gap in c.gaps()),
            "host_ms": summary(record.host for record in records),
            "device_ms": summary(record.device for record in records),
            "steps": len(records),
        }


@torch.inference_mode()
def replay_seconds(graphs: Sequence[torch.cuda.CUDAGraph]) -> float | None:
    """Return the seconds of a step that only replays its graphs: REPLAYS back to back, median of TURNS.

    None without graphs. A replay reads the inputs of the last step again, with its sampled tokens. It overwrites
    that step's pages and state slots, so no request may need them afterwards.
    """
    if not graphs:
        return None
    seconds = []
    # The first turn warms the device up.
    for _ in range(1 + TURNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            for graph in graphs:
                graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) * 1e-3 / REPLAYS)
    return statistics.median(seconds[1:])
