"""Scenarios of an engine benchmark: decoding streams, prompts alone, and prompts that arrive among streams."""

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from moeyard.clients.bench.drive import Run, Subject, replay_seconds
from moeyard.clients.bench.figures import (
    Course,
    beside_replay,
    floor_bytes,
    full_steps,
    missed,
    shares,
    summary,
)
from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.exchange.base import Dispatched
from moeyard_worker.experts.policy import RowKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Measured in the same run, bytes/s: `copy` in the device's memory (read + write), `link` from the host's."""

    copy: float
    link: float | None = None


class Misses:
    """Counts of the expert cache for one kind of rows, from here on."""

    def __init__(self, subject: Subject, phase: RowKind) -> None:
        self._subject, self._phase = subject, phase
        self._begun = self._totals()

    def _totals(self) -> tuple[int, int]:
        counters = self._subject.experts.look(wait=True).counters
        hits = sum(count for (_, phase), count in counters.hits.items() if phase == self._phase)
        return hits, counters.misses[self._phase]

    def row(self, times: int, link: float | None) -> dict[str, float]:
        """Return figures per step or prompt (`times` of them); none if all experts are resident."""
        if self._subject.experts.all_resident:
            return {}
        hits, misses = (now - then for now, then in zip(self._totals(), self._begun, strict=True))
        size = self._subject.spec.config.expert_form(self._subject.dtype).blob_bytes
        return missed(hits=hits, misses=misses, expert_bytes=size, times=times, link=link)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """`streams` concurrent requests with `output` tokens each. `budget`: prompt positions that compression keeps."""

    streams: int
    prompt: int
    output: int
    budget: int | None = None

    def requests(self, step_rows: int) -> tuple[int, int]:
        """(sequences, positions of the longest) if a step that decodes has room for `step_rows` prompt rows."""
        # The kept part of a prompt temporarily needs its own pages next to the prompt's.
        return self.streams, self.prompt + self._asked(step_rows) + (self.budget or 0)

    def _asked(self, step_rows: int) -> int:
        # The first streams decode while the last prompts are computed in the remaining rows of a step. All streams
        # decode a little longer.
        return self.output + -(-self.streams * self.prompt // max(1, step_rows - self.streams)) + 8

    def run(self, subject: Subject, ceilings: Ceilings) -> dict[str, Any]:
        """Latencies; the floor is what a step half-way through must read, at the copy bandwidth.

        Behind all of them the graph that decoded every stream last is replayed by itself, where there is one.
        """
        run = Run(subject, subject.scheduler())
        config = subject.config
        asked = self._asked(min(config.max_batch_tokens, config.mixed_prefill_tokens or config.max_batch_tokens))
        courses = [
            subject.submit(run, prompt=self.prompt, output=asked, budget=self.budget) for _ in range(self.streams)
        ]
        routing = RoutingWatch(subject, rows=self.streams)
        ends, pool, held = list[float](), run.scheduler.pool, 0
        before, counted = subject.counts(), dict[str, int]()
        graphs: tuple[torch.cuda.CUDAGraph, ...] = ()
        misses, missing = Misses(subject, "decode"), dict[str, float]()

        def after() -> None:
            nonlocal held, graphs
            if not ends and min(len(c.tokens) for c in courses) >= self.output:
                # The measurement is complete. A few more eager steps show the routing.
                ends.append(run.records[-1].at)
                held = pool.num_pages - pool.num_free
                counted.update(subject.counts())
                graphs = subject.replayed()
                decoding = sum(record.rows > record.prompt_rows for record in run.records)
                missing.update(misses.row(decoding, ceilings.link))
                routing.watch(True)

        try:
            run.go(after)
        finally:
            routing.watch(False)
        needed = floor_bytes(
            subject.spec,
            distinct=routing.distinct,
            rows=self.streams,
            context=min(self.prompt, self.budget or self.prompt) + self.output / 2,
            dtype=subject.dtype,
        )
        steps = [record for record in run.records if record.at <= ends[0]]
        counts = {name: counted[name] - before[name] for name in counted}
        times, found = summary(full_steps(steps, self.streams)), run.figures(ends[0])
        return {
            "case": f"decode {self.streams}x{self.prompt}+{self.output}"
            + (f" kept {self.budget}" if self.budget else ""),
            "kv_pages": held,
            "step_ms": times,
            "took_ms": times.get("p50"),
            "floor_ms": needed / ceilings.copy * 1e3,
            "distinct_experts": routing.distinct,
            **found,
            # The streams have ended, so these steps cannot disturb them.
            **beside_replay(found["tpot_ms"], replay_seconds(graphs)),
            **shares(counts),
            **missing,
        }


class RoutingWatch:
    """Records the experts that a step uses."""

    def __init__(self, subject: Subject, *, rows: int) -> None:
        self._subject, self._rows = subject, rows
        self._seen: dict[int, int] = {}

    @property
    def distinct(self) -> float:
        """Distinct experts per MoE layer in the last step of decode rows alone, as many as were to be watched."""
        assert len(self._seen) == len(self._subject.spec.config.moe_layers), "no step decoded every stream alone"
        return sum(self._seen.values()) / len(self._seen)

    def watch(self, on: bool) -> None:
        """Switch recording on or off. A graph replay runs no host code, so steps are launched eagerly meanwhile."""
        self._subject.experts.observer = self._observe if on else None
        if isinstance(self._subject.runner, GpuRunner):
            self._subject.runner.eager = on

    def _observe(self, layer: int, dispatched: Dispatched) -> None:
        ids = dispatched.experts
        if dispatched.prompt is None and int((ids[:, 0] >= 0).sum()) == self._rows:
            self._seen[layer] = int(torch.unique(ids[ids >= 0]).numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """`count` concurrent prompts of `length` tokens with one output token each."""

    count: int
    length: int
    rounds: int = 4

    def requests(self, step_rows: int) -> tuple[int, int]:
        return self.count, self.length + 1

    def run(self, subject: Subject, ceilings: Ceilings) -> dict[str, Any]:
        """Prompt tokens/s from the submission of all to the first token of the last; the first round warms up.

        Steps have as many rows as the engine's config says: with one, experts are asked for token by token.
        """
        rates, firsts = [], []
        for i in range(self.rounds):
            misses = Misses(subject, "prefill")
            run = Run(subject, subject.scheduler())
            courses = [subject.submit(run, prompt=self.length, output=1) for _ in range(self.count)]
            run.go()
            if i:
                end = max(c.tokens[0] for c in courses)
                rates.append(self.count * self.length / (end - courses[0].submitted))
                firsts += [c.first for c in courses]
        rate = statistics.median(rates)
        return {
            "case": f"prefill {self.count}x{self.length}",
            "prompt_tok_s": rate,
            "took_ms": self.count * self.length / rate * 1e3,
            "ttft_ms": summary(firsts),
            # The last round counts.
            "steps": len(run.records),
            **misses.row(1, ceilings.link),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """`streams` decode while `count` prompts of `length` arrive one after the other, `chunk` rows per step."""

    streams: int
    prompt: int
    length: int
    count: int
    chunk: int
    alone: int = 32

    def requests(self, step_rows: int) -> tuple[int, int]:
        return self.streams + 1, max(self.length + 1, self.prompt + self._asked)

    @property
    def _asked(self) -> int:
        # A prompt's step has a row for each stream. No stream may end before the last prompt has its token.
        return 2 * self.alone + self.count * (-(-self.length // self.chunk) + 3)

    def run(self, subject: Subject, ceilings: Ceilings) -> dict[str, Any]:
        """Return inter-token latencies of the streams: alone, and while prompts are computed."""
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
            "itl_ms": summary(gap for c in decoding for gap in c.until(ended).gaps(begun)),
            "itl_alone_ms": summary(gap for c in decoding for gap in c.until(begun).gaps(together)),
            "prompt_tok_s": self.count * self.length / (ended - begun),
            "ttft_ms": summary(c.first for c in arrived),
            "host_ms": summary(record.host for record in run.records),
        }


Scenario = Decode | Prefill | Mixed
