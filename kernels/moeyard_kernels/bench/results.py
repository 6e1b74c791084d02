"""The bench's result as a file of a device, and a later run of the same device held against it."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HEADS = ("op", "shape", "us", "GB/s", "TFLOP/s", "copy %", "baseline", "us there", "speedup", "target", "met")
# Ratios of times from which on a row is named, and from which on the comparison fails.
SLOWER, TOO_SLOW = 1.05, 1.10
# What a time may be off by its digits alone, in us.
_DIGIT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a run depends on, as lines "# name: value" ahead of the table."""

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
        """{(op, shape): us}."""
        return {(row["op"], row["shape"]): float(row["us"]) for row in self.rows}

    def write(self, path: Path) -> None:
        """The file that `read` reads."""
        with path.open("w", newline="") as file:
            file.writelines(f"# {name}: {getattr(self.facts, name)}\n" for name in Facts.__slots__)
            writer = csv.DictWriter(file, HEADS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)


def read(path: Path) -> Results:
    """A file that the bench wrote. Raises ValueError, naming the file, for one that lacks a fact or a column."""
    lines = path.read_text().splitlines()
    notes = [line[1:].partition(":") for line in lines if line.startswith("#")]
    known = {name.strip(): value.strip() for name, _, value in notes}
    if missing := [name for name in Facts.__slots__ if name not in known]:
        raise ValueError(f"{path}: no line '# {missing[0]}: ...' as the bench writes it")
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    if rows and tuple(rows[0]) != HEADS:
        raise ValueError(f"{path}: columns {', '.join(rows[0])}, expected {', '.join(HEADS)}")
    return Results(Facts(**{name: known[name] for name in Facts.__slots__}), rows)


def check_device(now: Facts, earlier: Facts) -> None:
    """Raise ValueError unless both are of one device."""
    if now.device != earlier.device:
        raise ValueError(f"this is a {now.device}, the earlier run is of a {earlier.device}")


def compare(now: Results, earlier: Results, ops: Sequence[str] = ()) -> tuple[list[str], bool]:
    """(Lines for people, whether no row is too slow): rows of the named ops (all if none is) against an earlier run's.

    A row is slower if its time is more than 5 % longer, and by more than the digits of the file. Raises ValueError for
    a run of another device.
    """
    check_device(now.facts, earlier.facts)
    before = {key: us for key, us in earlier.times().items() if not ops or key[0] in ops}
    lines, ratios, good = [f"against {earlier.facts}"], [], True
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
    lines += [f"missing  {op} {shape}: {us:g} us before" for (op, shape), us in before.items()]
    ratios.sort()
    spread = f", ratios {ratios[0]:.2f} to {ratios[-1]:.2f}, median {ratios[len(ratios) // 2]:.2f}" if ratios else ""
    slower = sum(line.startswith("slower") for line in lines)
    lines.append(f"{len(ratios)} compared{spread}; {slower} slower by more than 5 %, {len(before)} missing")
    return lines, good
