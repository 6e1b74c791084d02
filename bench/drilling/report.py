"""Lines and tables of a drill, as text and JSON."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from drilling.drive import Outcome

COLUMNS = (
    f"{'#':>3} {'fault':<17} {'moment':<22} {'ranks':<6} {'in flight':>9} {'failed':>6} {'lost':>5} {'rep.':>5} "
    f"{'diff.':>5} {'output s':>8} {'ready s':>8}  cause"
)


def line(outcome: Outcome) -> str:
    """Format one fault."""
    ranks = ",".join(str(rank) for rank in outcome.ranks) or "-"
    cause = " ".join(part for part in (outcome.cause, f"[{outcome.note}]" if outcome.note else "") if part)
    return (
        f"{outcome.number:>3} {outcome.fault:<17} {outcome.moment:<22} {ranks:<6} {outcome.inflight:>9} "
        f"{outcome.failed:>6} {outcome.lost:>5} {outcome.repeated:>5} {outcome.different:>5} "
        f"{seconds(outcome.output_seconds):>8} {seconds(outcome.ready_seconds):>8}  {cause[:160]}"
    )


def seconds(value: float | None) -> str:
    """Format a time, or "never"."""
    return "never" if value is None else f"{value:.2f}"


def summary(outcomes: Sequence[Outcome], *, planned: int, requests: int, beyond: int, share: dict[str, float]) -> str:
    """Format the table below the lines."""
    rows = [
        ("faults", f"{len(outcomes)} of {planned}"),
        ("survived", str(sum(outcome.survived for outcome in outcomes))),
        ("requests in flight, all faults", str(sum(outcome.inflight for outcome in outcomes))),
        ("requests met by a fault", str(sum(outcome.affected for outcome in outcomes))),
        ("failed", str(sum(outcome.failed for outcome in outcomes))),
    ]
    for name in ("lost", "repeated", "different"):
        rows.append((f"tokens {name}", str(sum(getattr(outcome, name) for outcome in outcomes))))
    for name, text in (("output_seconds", "tokens again"), ("ready_seconds", "ready again")):
        known = [value for outcome in outcomes if (value := getattr(outcome, name)) is not None]
        shown = f"{statistics.median(known):.2f} / {max(known):.2f}" if known else "never"
        rows.append((f"{text}, s, median / max", shown))
    rows.append(("requests of the whole drill", f"{requests}, wrong without a fault {beyond}"))
    if share:
        shown = ", ".join(f"{phase} {100 * value:.0f} %" for phase, value in share.items())
        rows.append(("share of step time in exchanges", shown))
    return "\n".join(f"{name:<34} {value}" for name, value in rows)


def as_json(outcomes: Sequence[Outcome], **more: Any) -> dict[str, Any]:
    """Return all measurements."""
    return {**more, "outcomes": [{**asdict(outcome), "survived": outcome.survived} for outcome in outcomes]}
