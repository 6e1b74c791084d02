"""Figures of a benchmark from its clock readings. Pure: seconds and counts in, figures out, latencies in ms."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moeyard.clients.api_client import StreamedAnswer
from moeyard_worker.config.engine_config import DTYPE_BYTES
from moeyard_worker.models.spec import ModelSpec

PERCENTILES = (50, 90, 95, 99)
MAX_MESSAGE = 160
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}.items()
_IDS = re.compile(r"\b(?:chatcmpl|cmpl|req|resp)-[\w-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A completed step: `at` is when its results were there, `host` what scheduling, launch and completion took.

    `rows` are all of it, `prompt_rows` those of prompts. `device` is what it took on the device, where that is known.
    """

    at: float
    host: float
    rows: int
    prompt_rows: int
    device: float | None = None


@dataclass(slots=True)
class LoadRun:
    """All answers of a run in the order of their end; `time.perf_counter` seconds, and CPU seconds of this process."""

    begun: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0
    interrupted: bool = False
    answers: list[StreamedAnswer] = field(default_factory=list)


@dataclass(slots=True)
class Course:
    """Times of one request: when it was submitted, and when each of its tokens was there."""

    submitted: float
    tokens: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.tokens[0] - self.submitted

    @property
    def per_token(self) -> float | None:
        """Time per output token after the first; None for a single one."""
        count = len(self.tokens) - 1
        return (self.tokens[-1] - self.tokens[0]) / count if count else None

    def until(self, end: float) -> "Course":
        """Return a copy without later tokens."""
        return Course(self.submitted, [t for t in self.tokens if t <= end])

    def gaps(self, since: float = -math.inf) -> list[float]:
        """Return the times between tokens that ended after `since`."""
        return [b - a for a, b in itertools.pairwise(self.tokens) if b > since]


def summary(values: Iterable[float | None]) -> dict[str, float]:
    """Mean and percentiles of seconds, in ms; None is left out, of nothing there is {}.

    Percentiles interpolate between the two nearest ranks, as numpy and vLLM do (Hyndman and Fan 1996, type 7).
    """
    known = np.array([value for value in values if value is not None])
    if not known.size:
        return {}
    found = np.percentile(known, PERCENTILES)
    return {"mean": known.mean() * 1e3, **{f"p{p}": v * 1e3 for p, v in zip(PERCENTILES, found, strict=True)}}


def full_steps(records: Sequence[StepRecord], streams: int) -> list[float]:
    """Return times from the end of one pure decode step of all streams to the end of the next such step."""
    return [
        b.at - a.at
        for a, b in itertools.pairwise(records)
        if not (a.prompt_rows or b.prompt_rows) and a.rows == b.rows == streams
    ]


def floor_bytes(spec: ModelSpec, *, distinct: float, rows: int, context: float, dtype: str) -> float:
    """Return the bytes that one decode step must read of a model with all experts resident.

    These are all dense weights except the embedding, and `distinct` experts per MoE layer. Each row adds the keys and
    values of `context` positions and its state slot, which is also written.
    """
    config = spec.config
    dense = spec.dense_bytes(dtype)
    if spec.lm_head is not None:
        dense -= spec.num_bytes(spec.embed, dtype)
    experts = distinct * len(config.moe_layers) * config.expert_form(dtype).blob_bytes
    state = config.state_spec(DTYPE_BYTES[dtype])
    return dense + experts + rows * (context * state.bytes_per_token + 2 * state.bytes_per_sequence)


def shares(counts: Mapping[str, int]) -> dict[str, float]:
    """Shares of steps that were replays, and of their rows that were padding, from a graph runner's counts."""
    found = {}
    if steps := counts.get("num_replayed", 0) + counts.get("num_eager", 0):
        found["replay_share"] = counts["num_replayed"] / steps
    if padded := counts.get("num_padded_rows", 0):
        found["padding_share"] = 1 - counts["num_rows"] / padded
    return found


def beside_replay(tpot: Mapping[str, float], replay: float | None) -> dict[str, float]:
    """`replay`, seconds of a step's graph alone, in ms, and how many times that the median TPOT [ms] is.

    {} where there is none.
    """
    if replay is None or "p50" not in tpot:
        return {}
    return {"replay_ms": replay * 1e3, "tpot_of_replay": tpot["p50"] / (replay * 1e3)}


def missed(*, hits: int, misses: int, expert_bytes: int, times: int, link: float | None) -> dict[str, float]:
    """Share of hits, bytes missed per step or prompt (of `times`), and their time on the link, from a cache's counts.

    `link`: bytes/s from the host to the device, None where there is no such link.
    """
    moved = misses * expert_bytes / times
    found = {"hit_rate": hits / max(1, hits + misses), "missed_mb": moved * 1e-6}
    return found if link is None else {**found, "link_ms": moved / link * 1e3}


def of_bound(row: Mapping[str, Any], resident: Mapping[str, Any]) -> float | None:
    """Compare a row with the slower of two bounds: all experts resident, and its misses over the link."""
    taken, least = row.get("took_ms"), resident.get("took_ms")
    if taken is None or least is None or "link_ms" not in row:
        return None
    return float(max(least, row["link_ms"]) / taken)


def latencies(answer: StreamedAnswer) -> dict[str, float | None]:
    """Return the latencies of one answer in seconds: ttft and e2e from the send, and tpot.

    tpot is the time from the first to the last output, per token after the first; None for fewer than two tokens.
    """
    first = answer.times[0] - answer.sent if answer.times else None
    tokens = answer.output_tokens - 1
    per_token = (answer.times[-1] - answer.times[0]) / tokens if answer.times and tokens > 0 else None
    return {"ttft": first, "tpot": per_token, "e2e": answer.ended - answer.sent}


def parse_slo(text: str) -> dict[str, float]:
    """ "ttft=500ms,tpot=30ms,e2e=5s" as seconds. Raises ValueError for anything else."""
    found = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(ttft|tpot|e2el?)\s*[=:]\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*", part)
        if match is None:
            raise ValueError(f"{part!r} is no objective; expected such as ttft=500ms,tpot=30ms,e2e=5s")
        found[match[1].removesuffix("l")] = float(match[2]) * dict(_UNITS)[match[3]]
    return found


def is_good(answer: StreamedAnswer, slo: Mapping[str, float]) -> bool:
    """Return whether an answer is complete and meets every objective. A single token has no tpot."""
    found = latencies(answer)
    return answer.error is None and all((found[name] or 0.0) <= limit for name, limit in slo.items())


def errors(answers: Iterable[StreamedAnswer]) -> list[dict[str, Any]]:
    """Count failed requests by status (0: no answer) and message without request ids, most frequent first."""
    found = Counter(
        (answer.status, _IDS.sub("<id>", " ".join(answer.error.split()))[:MAX_MESSAGE])
        for answer in answers
        if answer.error is not None
    )
    return [{"status": s, "message": text, "count": count} for (s, text), count in found.most_common()]


def figures(run: LoadRun, slo: Mapping[str, float]) -> dict[str, Any]:
    """Return all figures of a run: counts, rates per second, latencies in ms, and the client's CPU use."""
    good = [answer for answer in run.answers if answer.error is None]
    seconds = max(run.ended - run.begun, 1e-9)
    prompt = sum(answer.prompt_tokens for answer in good)
    output = sum(answer.output_tokens for answer in good)
    each = [latencies(answer) for answer in good]
    events = sum(len(answer.times) for answer in run.answers)
    found: dict[str, Any] = {
        "completed": len(good),
        "failed": len(run.answers) - len(good),
        "duration_s": seconds,
        "requests_per_s": len(good) / seconds,
        "prompt_tokens": prompt,
        "cached_tokens": sum(answer.cached_tokens for answer in good),
        "output_tokens": output,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (prompt + output) / seconds,
        "tokens_per_event": output / events if events else None,
        **{f"{name}_ms": summary(one[name] for one in each) for name in ("ttft", "tpot", "e2e")},
        "itl_ms": summary(b - a for answer in good for a, b in itertools.pairwise(answer.times)),
        "late_ms": summary(answer.sent - answer.due for answer in run.answers),
        "client_cpu_share": run.cpu_seconds / seconds,
        "client_us_per_token": run.cpu_seconds / output * 1e6 if output else None,
    }
    if slo:
        met = sum(is_good(answer, slo) for answer in run.answers)
        found["goodput"] = {
            "slo_s": dict(slo),
            "share": met / len(run.answers) if run.answers else 0.0,
            "requests_per_s": met / seconds,
        }
    return found


def request_rows(run: LoadRun) -> list[dict[str, Any]]:
    """Return one row per request in order of their end: seconds since the start, latencies, tokens, error."""
    return [
        {
            "sent": answer.sent - run.begun,
            **latencies(answer),
            "prompt_tokens": answer.prompt_tokens,
            "output_tokens": answer.output_tokens,
            "status": answer.status,
            "error": answer.error,
        }
        for answer in run.answers
    ]


def per_second(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return output tokens in each second of a run. Spread a request's tokens evenly over its time of output."""
    whole = [row for row in rows if row["error"] is None and row["ttft"] is not None]
    if not whole:
        return []
    last = max(row["sent"] + row["e2e"] for row in whole)
    buckets = np.zeros(int(last) + 1)
    edges = np.arange(len(buckets) + 1)
    for row in whole:
        begin, end = row["sent"] + row["ttft"], row["sent"] + row["e2e"]
        share = np.diff(np.clip(edges, begin, max(end, begin + 1e-6)))
        buckets += row["output_tokens"] * share / max(end - begin, 1e-6)
    return [float(value) for value in buckets]
