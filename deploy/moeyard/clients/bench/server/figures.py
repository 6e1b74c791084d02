"""What the clock readings of a run come to. Pure: answers in, figures out; seconds in, milliseconds out."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moeyard.clients.bench.server.answer import Answer
from moeyard.clients.bench.server.drive import Course

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2e")
OBJECTIVES = ("ttft", "tpot", "e2e")
MAX_MESSAGE = 160
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}.items()
_IDS = re.compile(r"\b(?:chatcmpl|cmpl|req|resp)-[\w-]+")


def latencies(answer: Answer) -> dict[str, float | None]:
    """Seconds of one answer, from sending its request: to the first output (ttft), to the end of the stream (e2e), and
    from the first to the last output for each of the server's tokens but the first (tpot; None for less than two).
    """
    first = answer.times[0] - answer.sent if answer.times else None
    tokens = answer.output_tokens - 1
    per_token = (answer.times[-1] - answer.times[0]) / tokens if answer.times and tokens > 0 else None
    return {"ttft": first, "tpot": per_token, "e2e": answer.ended - answer.sent}


def summary(values: Iterable[float | None]) -> dict[str, float]:
    """Mean and percentiles of seconds, in ms; None is left out, of nothing there is {}.

    Percentiles interpolate between the two nearest ranks, as numpy and vLLM do (Hyndman and Fan 1996, type 7).
    """
    known = np.array([value for value in values if value is not None])
    if not known.size:
        return {}
    found = np.percentile(known, PERCENTILES)
    return {"mean": known.mean() * 1e3, **{f"p{p}": v * 1e3 for p, v in zip(PERCENTILES, found, strict=True)}}


def parse_slo(text: str) -> dict[str, float]:
    """ "ttft=500ms,tpot=30ms,e2e=5s" as seconds. Raises ValueError for anything else."""
    found = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(ttft|tpot|e2el?)\s*[=:]\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*", part)
        if match is None:
            raise ValueError(f"{part!r} is no objective; expected such as ttft=500ms,tpot=30ms,e2e=5s")
        found[match[1].removesuffix("l")] = float(match[2]) * dict(_UNITS)[match[3]]
    return found


def is_good(answer: Answer, slo: Mapping[str, float]) -> bool:
    """Whether an answer came whole and met every objective; one token has no tpot to miss."""
    found = latencies(answer)
    return answer.error is None and all((found[name] or 0.0) <= limit for name, limit in slo.items())


def errors(answers: Iterable[Answer]) -> list[dict[str, Any]]:
    """Failed requests by status (0: no answer) and message, most frequent first; ids of requests are no difference."""
    found = Counter(
        (answer.status, _IDS.sub("<id>", " ".join(answer.error.split()))[:MAX_MESSAGE])
        for answer in answers
        if answer.error is not None
    )
    return [{"status": s, "message": text, "count": count} for (s, text), count in found.most_common()]


def figures(course: Course, slo: Mapping[str, float]) -> dict[str, Any]:
    """All figures of a run: counts, rates per second of its length, latencies in ms, and what it cost the client."""
    good = [answer for answer in course.answers if answer.error is None]
    seconds = max(course.ended - course.begun, 1e-9)
    prompt = sum(answer.prompt_tokens for answer in good)
    output = sum(answer.output_tokens for answer in good)
    each = [latencies(answer) for answer in good]
    events = sum(len(answer.times) for answer in course.answers)
    found: dict[str, Any] = {
        "completed": len(good),
        "failed": len(course.answers) - len(good),
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
        "late_ms": summary(answer.sent - answer.due for answer in course.answers),
        "client_cpu_share": course.cpu_seconds / seconds,
        "client_us_per_token": course.cpu_seconds / output * 1e6 if output else None,
    }
    if slo:
        met = sum(is_good(answer, slo) for answer in course.answers)
        found["goodput"] = {
            "slo_s": dict(slo),
            "share": met / len(course.answers) if course.answers else 0.0,
            "requests_per_s": met / seconds,
        }
    return found


def request_rows(course: Course) -> list[dict[str, Any]]:
    """One row per request, as it ended: seconds since the start and of its latencies, tokens, error."""
    return [
        {
            "sent": answer.sent - course.begun,
            **latencies(answer),
            "prompt_tokens": answer.prompt_tokens,
            "output_tokens": answer.output_tokens,
            "status": answer.status,
            "error": answer.error,
        }
        for answer in course.answers
    ]


def per_second(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Output tokens in each second of a run: those of a request spread evenly from its first output to its end."""
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
