"""What a bench of an engine computes from its clock readings. Pure: seconds and counts in, figures out."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeyard_worker.layers.weights import num_elements
from moeyard_worker.models.spec import ModelSpec

SHARES = (50, 90, 99)


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
class Course:
    """What happened to one request: when it was submitted, and when each of its tokens was there."""

    submitted: float
    tokens: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Time to first token."""
        return self.tokens[0] - self.submitted

    @property
    def per_token(self) -> float | None:
        """Time per output token after the first; None for a single one."""
        count = len(self.tokens) - 1
        return (self.tokens[-1] - self.tokens[0]) / count if count else None

    def until(self, end: float) -> "Course":
        """The same without what came later."""
        return Course(self.submitted, [t for t in self.tokens if t <= end])

    def gaps(self, since: float = -math.inf) -> list[float]:
        """Times between tokens, of those that ended after `since`."""
        return [b - a for a, b in itertools.pairwise(self.tokens) if b > since]


def percentiles(values: Iterable[float], shares: Sequence[int] = SHARES) -> dict[str, float]:
    """Nearest ranks: the least value that `share` percent of all do not exceed. {} of nothing."""
    ordered = sorted(values)
    return {f"p{s}": ordered[max(0, math.ceil(len(ordered) * s / 100) - 1)] for s in shares} if ordered else {}


def milliseconds(values: Iterable[float | None]) -> dict[str, float]:
    """Percentiles of seconds, in ms; what is None is left out."""
    found = percentiles(value for value in values if value is not None)
    return {name: value * 1e3 for name, value in found.items()}


def full_steps(records: Sequence[StepRecord], streams: int) -> list[float]:
    """Times of steps that decoded every stream and nothing else, from the end of such a step to the end of the next."""
    return [
        b.at - a.at
        for a, b in itertools.pairwise(records)
        if not (a.prompt_rows or b.prompt_rows) and a.rows == b.rows == streams
    ]


def floor_bytes(spec: ModelSpec, *, distinct: float, rows: int, context: float, itemsize: int) -> float:
    """What one decode step must read of a model with all experts resident.

    All dense weights but the rows of the embedding, `distinct` experts per MoE layer, and of every row the keys and
    values of `context` positions, and its slot of state, which is written too.
    """
    config = spec.config
    dense = sum(num_elements(each.shape) * (4 if each.fp32 else itemsize) for each in spec.dense())
    if spec.lm_head is not None:
        dense -= num_elements(spec.embed.shape) * itemsize
    experts = distinct * len(config.moe_layers) * config.expert_bytes(itemsize)
    state = config.state_spec(itemsize)
    return dense + experts + rows * (context * state.bytes_per_token + 2 * state.bytes_per_sequence)


def shares(counts: Mapping[str, int]) -> dict[str, float]:
    """Of what a graph runner counted: steps that were replays, and rows of these that were padding."""
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
    """What a cache counted over so many steps or prompts: share of hits, bytes missed by each, their time on the link.

    `link`: bytes/s from the host to the device, None where there is no such link.
    """
    moved = misses * expert_bytes / times
    found = {"hit_rate": hits / max(1, hits + misses), "missed_mb": moved * 1e-6}
    return found if link is None else {**found, "link_ms": moved / link * 1e3}


def of_bound(row: Mapping[str, Any], resident: Mapping[str, Any]) -> float | None:
    """How near a row comes to the slower of two: the same with all experts resident, and its misses over the link."""
    taken, least = row.get("took_ms"), resident.get("took_ms")
    if taken is None or least is None or "link_ms" not in row:
        return None
    return float(max(least, row["link_ms"]) / taken)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]]) -> str:
    """Rows as aligned text under the heads of `columns` (key of a row, head); a key may lead into a dict: "itl_ms.p99".

    A column that no row has is left out, a row that lacks one leaves it empty.
    """
    cells = [[_cell(_at(row, key)) for row in rows] for key, _ in columns]
    kept = [(head, column) for (_, head), column in zip(columns, cells, strict=True) if any(column)]
    widths = [max(len(text) for text in (head, *column)) for head, column in kept]
    lines = [[head for head, _ in kept], *([column[i] for _, column in kept] for i in range(len(rows)))]
    return "\n".join("  ".join(f"{text:>{w}}" for text, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _at(row: Mapping[str, Any], key: str) -> Any:
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 1 else f"{value:.2f}"
    return str(value)
