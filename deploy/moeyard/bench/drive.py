"""One worker driven in process: its scheduler and its runner as the engine's loop has them, without sockets and peers.

The functions here measure and return plain figures; what to measure and how to show it is `moeyard.bench.engine`.
"""

import math
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from moeyard import __version__
from moeyard.bench.figures import Course, StepRecord, floor_bytes, full_steps, milliseconds, percentiles, shares
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.device import LaunchedStep
from moeyard_worker.engine.graph_runner import GraphRunner
from moeyard_worker.engine.worker import Worker
from moeyard_worker.exchange.base import Dispatched
from moeyard_worker.models.spec import ModelSpec
from moeyard_worker.protocol import SamplingParams, Submit, Tokens
from moeyard_worker.scheduling.scheduler import Scheduler

_CLIENT = b"bench"


class Subject:
    """A worker that serves nobody else, loaded as `moeyard serve` would load it; its requests are sampled alike.

    `close` it.
    """

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

    def close(self) -> None:
        """Free its sockets."""
        self._worker.stop()

    @property
    def itemsize(self) -> int:
        """Bytes of a served value."""
        return 2 if self.report["dtype"] == "bfloat16" else 4

    def counts(self) -> dict[str, int]:
        """What the graph runner has counted; nothing on a device without graphs."""
        runner = self.runner
        if not isinstance(runner, GraphRunner):
            return {}
        return {name: getattr(runner, name) for name in ("num_replayed", "num_eager", "num_rows", "num_padded_rows")}

    def scheduler(self, chunk: int | None = None) -> Scheduler:
        """An empty one over all pages; with `chunk` a step that decodes too has at most so many prompt rows."""
        config = self._worker.scheduler.config
        return Scheduler(config if chunk is None else replace(config, mixed_prefill_tokens=chunk))

    def submit(self, run: "Run", *, prompt: int, output: int) -> Course:
        """Queue a request with a prompt of its own, and a seed of its own where tokens are sampled."""
        self._names += 1
        name = str(self._names)
        ids = tuple(self._random.randrange(self.spec.config.vocab_size) for _ in range(prompt))
        params = replace(self._sampling, max_tokens=output, seed=self._names)
        course = run.courses[name] = Course(time.perf_counter())
        submit = Submit(request_id=name, prompt_token_ids=ids, sampling=params)
        rejected = run.scheduler.add(submit, _CLIENT, course.submitted)
        assert rejected is None, rejected
        return course


class Run:
    """One course of steps over one scheduler: everything that was observed of it."""

    def __init__(self, subject: Subject, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.courses: dict[str, Course] = {}
        self.records: list[StepRecord] = []
        self._subject = subject

    def go(self, after: Callable[[], None] = lambda: None) -> None:
        """Step until nothing is left, as `Engine._advance` does; `after` is called behind each completed step."""
        scheduler, runner, experts = self.scheduler, self._subject.runner, self._subject.experts
        flights: deque[tuple[LaunchedStep, float]] = deque()
        while scheduler.has_work() or flights:
            begun = time.perf_counter()
            step = scheduler.schedule(begun)
            if step.chunks:
                experts.begin_step(len(self.records) + len(flights) + 1)
                before = flights[-1][0] if flights else None
                launched = runner.launch(step, scheduler.requests(step), before=before)
                flights.append((launched, time.perf_counter() - begun))
                if len(flights) < scheduler.config.max_in_flight:
                    continue
            self._complete(*flights.popleft())
            after()

    def _complete(self, launched: LaunchedStep, busy: float) -> None:
        step, results = launched.step, launched.results
        at = time.perf_counter()
        assert not launched.unsound, f"logits of {step.num_tokens} rows are not finite"
        for reply in self.scheduler.complete(step, results, at):
            if isinstance(reply.message, Tokens):
                self.courses[reply.message.request_id].tokens.extend([at] * len(reply.message.token_ids))
        host = busy + time.perf_counter() - at
        self.records.append(StepRecord(at=at, host=host, rows=step.num_tokens, prompt_rows=step.num_prefill_tokens))

    def figures(self, end: float = math.inf) -> dict[str, Any]:
        """Latencies as a client would see them, and what the steps took and were, up to `end`."""
        courses = [course.until(end) for course in self.courses.values()]
        records = [record for record in self.records if record.at <= end]
        return {
            "ttft_ms": milliseconds(c.first for c in courses),
            "tpot_ms": milliseconds(c.per_token for c in courses),
            "itl_ms": milliseconds(gap for c in courses for gap in c.gaps()),
            "host_ms": milliseconds(record.host for record in records),
            "steps": len(records),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """`streams` requests at once that answer `output` tokens each."""

    streams: int
    prompt: int
    output: int

    def requests(self, step_rows: int) -> tuple[int, int]:
        """(sequences, positions of the longest) where a step has so many rows."""
        return self.streams, self.prompt + self._asked(step_rows)

    def _asked(self, step_rows: int) -> int:
        # The first prompts' streams answer while the last prompts are computed, and all of them a little longer.
        return self.output + -(-self.streams * self.prompt // step_rows) + 8

    def run(self, subject: Subject, bandwidth: float) -> dict[str, Any]:
        """Latencies; the floor is what a step must read at `bandwidth` bytes/s, half-way through."""
        run = Run(subject, subject.scheduler())
        asked = self._asked(subject.config.max_batch_tokens)
        courses = [subject.submit(run, prompt=self.prompt, output=asked) for _ in range(self.streams)]
        routing = Routing(subject, rows=self.streams)
        ends: list[float] = []
        before, counted = subject.counts(), dict[str, int]()

        def after() -> None:
            if not ends and min(len(c.tokens) for c in courses) >= self.output:
                # What was asked for is measured; now a few steps more to look at, launched kernel by kernel.
                ends.append(run.records[-1].at)
                counted.update(subject.counts())
                routing.watch(True)

        try:
            run.go(after)
        finally:
            routing.watch(False)
        needed = floor_bytes(
            subject.spec, distinct=routing.distinct, rows=self.streams, context=self.prompt + self.output / 2,
            itemsize=subject.itemsize,
        )  # fmt: skip
        steps = [record for record in run.records if record.at <= ends[0]]
        counts = {name: counted[name] - before[name] for name in counted}
        return {
            "case": f"decode {self.streams}x{self.prompt}+{self.output}",
            "step_ms": milliseconds(full_steps(steps, self.streams)),
            "floor_ms": needed / bandwidth * 1e3,
            "distinct_experts": routing.distinct,
            **run.figures(ends[0]),
            **shares(counts),
        }


class Routing:
    """Watches which experts a step asks for."""

    def __init__(self, subject: Subject, *, rows: int) -> None:
        self._subject, self._rows = subject, rows
        self._seen: dict[int, int] = {}

    @property
    def distinct(self) -> float:
        """Distinct experts per MoE layer in the last step of decode rows alone, as many as were to be watched."""
        assert len(self._seen) == len(self._subject.spec.config.moe_layers), "no step decoded every stream alone"
        return sum(self._seen.values()) / len(self._seen)

    def watch(self, on: bool) -> None:
        """Look, or stop looking. A replay runs none of the host's code, so steps are launched eagerly meanwhile."""
        self._subject.experts.observer = self._observe if on else None
        if isinstance(self._subject.runner, GraphRunner):
            self._subject.runner.eager = on

    def _observe(self, layer: int, dispatched: Dispatched) -> None:
        ids = dispatched.experts
        if dispatched.prompt is None and int((ids[:, 0] >= 0).sum()) == self._rows:
            self._seen[layer] = int(torch.unique(ids[ids >= 0]).numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """`count` prompts of `length` at once, a token answered to each."""

    count: int
    length: int
    rounds: int = 4

    def requests(self, step_rows: int) -> tuple[int, int]:
        """See `Decode.requests`."""
        return self.count, self.length + 1

    def run(self, subject: Subject, bandwidth: float) -> dict[str, Any]:
        """Prompt tokens/s from the submission of all to the first token of the last; the first round warms up."""
        rates, firsts = [], []
        for i in range(self.rounds):
            run = Run(subject, subject.scheduler())
            courses = [subject.submit(run, prompt=self.length, output=1) for _ in range(self.count)]
            run.go()
            if i:
                end = max(c.tokens[0] for c in courses)
                rates.append(self.count * self.length / (end - courses[0].submitted))
                firsts += [c.first for c in courses]
        return {
            "case": f"prefill {self.count}x{self.length}",
            "prompt_tok_s": percentiles(rates)["p50"],
            "ttft_ms": milliseconds(firsts),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """`streams` decode; then `count` prompts of `length` arrive one behind the other, `chunk` rows in a step."""

    streams: int
    prompt: int
    length: int
    count: int
    chunk: int
    alone: int = 32

    def requests(self, step_rows: int) -> tuple[int, int]:
        """See `Decode.requests`."""
        return self.streams + 1, max(self.length + 1, self.prompt + self._asked)

    @property
    def _asked(self) -> int:
        # A prompt's step has a row for each stream; none of these may end before the last prompt has its token.
        return 2 * self.alone + self.count * (-(-self.length // self.chunk) + 3)

    def run(self, subject: Subject, bandwidth: float) -> dict[str, Any]:
        """Latencies between the streams' tokens: alone, and from the first prompt's arrival to the last's token."""
        run = Run(subject, subject.scheduler(self.chunk))
        decoding = [subject.submit(run, prompt=self.prompt, output=self._asked) for _ in range(self.streams)]
        arrived: list[Course] = []

        def after() -> None:
            settled = min(len(c.tokens) for c in decoding) >= self.alone
            if settled and len(arrived) < self.count and (not arrived or arrived[-1].tokens):
                arrived.append(subject.submit(run, prompt=self.length, output=1))

        run.go(after)
        begun, ended = arrived[0].submitted, arrived[-1].tokens[0]
        assert all(c.tokens[-1] > ended for c in decoding), "a stream ended before the prompts did"
        together = max(c.tokens[0] for c in decoding)
        return {
            "case": f"mixed {self.streams} + {self.count}x{self.length} by {self.chunk}",
            "itl_ms": milliseconds(gap for c in decoding for gap in c.until(ended).gaps(begun)),
            "itl_alone_ms": milliseconds(gap for c in decoding for gap in c.until(begun).gaps(together)),
            "prompt_tok_s": self.count * self.length / (ended - begun),
            "ttft_ms": milliseconds(c.first for c in arrived),
            "host_ms": milliseconds(record.host for record in run.records),
        }


Scenario = Decode | Prefill | Mixed
