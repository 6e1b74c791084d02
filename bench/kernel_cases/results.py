"""Results of the bench as a file per device. Later runs add rows, and are compared with it.

A file contains runs in sequence, each with its facts and its table. A row is in the run that measured it last.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

HEADS = ("op", "shape", "us", "GB/s", "TFLOP/s", "copy %", "baseline", "us there", "speedup", "target", "met")
# Time ratios from which a row is named, and from which the comparison fails.
SLOWER, TOO_SLOW = 1.05, 1.10
# Rounding of a time's digits, in us.
_DIGIT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The conditions of a run, as lines "# name: value" before the table."""

    device: str
    date: str
    python: str
    torch: str
    triton: str
    copy_tb_per_s: str

    def __str__(self) -> str:
        return (
            f"{self.device}, {self.date}, Python {self.python}, torch {self.torch}, triton {self.triton}, copy "
            f"{self.copy_tb_per_s} TB/s"
        )


@dataclass(frozen=True, slots=True)
class Results:
    """A run: its facts, and its rows of `HEADS` in order."""

    facts: Facts
    rows: Sequence[Mapping[str, str]]

    def times(self) -> dict[tuple[str, str], float]:
        """Times by row, as {(op, shape): us}."""
        return {(row["op"], row["shape"]): float(row["us"]) for row in self.rows}


def write(path: Path, runs: Iterable[Results]) -> None:
    """Write the file that `read` reads, completely or not at all."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w", newline="") as file:
        for run in runs:
            file.writelines(f"# {name}: {getattr(run.facts, name)}\n" for name in Facts.__slots__)
            writer = csv.DictWriter(file, HEADS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(run.rows)
    part.replace(path)


def read(path: Path) -> list[Results]:
    """Read a file of the bench. Raises ValueError, naming the file, if a fact or a column is missing."""
    found = []
    parts = groupby(path.read_text().splitlines(), key=lambda line: line.startswith("#"))
    notes: dict[str, str] = {}
    for is_fact, lines in parts:
        if is_fact:
            notes = {name.strip(): value.strip() for name, _, value in (line[1:].partition(":") for line in lines)}
            continue
        if missing := [name for name in Facts.__slots__ if name not in notes]:
            raise ValueError(f"{path}: no line '# {missing[0]}: ...' as the bench writes it")
        rows = list(csv.DictReader(lines))
        if rows and tuple(rows[0]) != HEADS:
            raise ValueError(f"{path}: columns {', '.join(rows[0])}, expected {', '.join(HEADS)}")
        found.append(Results(Facts(**{name: notes[name] for name in Facts.__slots__}), rows))
    return found


def merged(earlier: Iterable[Results], now: Results) -> list[Results]:
    """Append `now` to earlier runs. Drop earlier rows that it repeats, and runs without other rows.

    Raises ValueError for runs of another device.
    """
    measured, kept = now.times(), []
    for run in earlier:
        check_device(now.facts.device, run.facts)
        if rows := [row for row in run.rows if (row["op"], row["shape"]) not in measured]:
            kept.append(Results(run.facts, rows))
    return [*kept, now] if now.rows else kept


def check_device(device: str, earlier: Facts) -> None:
    """Raise ValueError unless an earlier run is of that device."""
    if device != earlier.device:
        raise ValueError(f"this is a {device}, the earlier run is of a {earlier.device}")


def compare(
    now: Results, earlier: Sequence[Results], ops: Sequence[str] = (), *, whole: bool = True
) -> tuple[list[str], bool]:
    """Compare rows of the named ops (default: all) with earlier runs. Return (lines, whether no row is too slow).

    A row is slower if its time is more than 5 % longer, and by more than the digits of the file. Unless `whole`, rows
    that were not run are not missed. Raises ValueError for a run of another device.
    """
    before: dict[tuple[str, str], float] = {}
    for run in earlier:
        check_device(now.facts.device, run.facts)
        before |= {key: us for key, us in run.times().items() if not ops or key[0] in ops}
    lines, ratios, good = [f"against {run.facts}" for run in earlier], [], True
    for (op, shape), us in now.times().items():
        old = before.pop((op, shape), None)
        if old is None:
            lines.append(f"new      {op} {shape}: {us:g} us")
            continue
        ratio = us / old if old else 1.0
        ratios.append(ratio)
        word = "slower" if ratio > SLOWER and us - old > _DIGIT else "faster" if ratio < 1 / SLOWER else ""
        good &= not (word == "slower" and ratio > TOO_SLOW)
        lines.append(f"{word:8} {op} {shape}: {us:g} us, {old:g} before, ratio {ratio:.2f}")
    before = before if whole else {}
    lines += [f"missing  {op} {shape}: {us:g} us before" for (op, shape), us in before.items()]
    ratios.sort()
    spread = f", ratios {ratios[0]:.2f} to {ratios[-1]:.2f}, median {ratios[len(ratios) // 2]:.2f}" if ratios else ""
    slower = sum(line.startswith("slower") for line in lines)
    lines.append(f"{len(ratios)} compared{spread}; {slower} slower by more than 5 %, {len(before)} missing")
    return lines, good
