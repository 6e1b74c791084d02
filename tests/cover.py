"""Choose the cases of a test for the fast tier: a small cover of its parameters, and in turn a part of the rest.

The marker `sampled(strength)` chooses the cover: the first case (0), every value of each parameter (1), or every pair
of values of two parameters (2). A parameter that is a dataclass counts as one parameter per compared field. The part is
an eighth, or a 32nd for costly cases with strength 0. The number of commits chooses it: 32 commits in a row run every
case, while hashes would leave out a third.
"""

import dataclasses
import itertools
import subprocess
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

PARTS = 32


@cache
def part_of_this_commit() -> int:
    """The number of commits modulo 32, or 0 without a git history."""
    log = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=Path(__file__).parent, capture_output=True)
    return int(log.stdout) % PARTS if log.returncode == 0 else 0


def values(item: pytest.Item) -> Iterator[tuple[str, ...]]:
    """Return (parameter, value) of a test, both as text; a value without a short text counts by its identity.

    Its index would not do: if decorators are stacked, pytest counts the cases of their product.
    """
    callspec = getattr(item, "callspec", None)
    for name, value in callspec.params.items() if callspec else ():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from (
                (name, field.name, repr(getattr(value, field.name)))
                for field in dataclasses.fields(value)
                if field.compare
            )
        else:
            short = value is None or isinstance(value, bool | int | float | str | torch.dtype)
            yield name, repr(value) if short else f"#{id(value)}"


def chosen(items: Iterable[pytest.Item], part: int) -> set[pytest.Item]:
    """Return the cover of each test's cases, and the other cases of this part."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    kept = set()
    for cases in functions.values():
        (strength,) = next(cases[0].iter_markers("sampled")).args
        parts = PARTS // 4 if strength else PARTS
        kept |= cover(cases, strength)
        kept |= {item for item in cases if zlib.crc32(item.nodeid.encode()) % parts == part % parts}
    return kept


def cover(cases: list[pytest.Item], strength: int) -> set[pytest.Item]:
    """Choose cases greedily, in their order, until they meet every combination of `strength` values."""
    if strength == 0:
        return {cases[0]}
    combinations = {case: set(itertools.combinations(sorted(values(case)), strength)) for case in cases}
    left, kept = set().union(*combinations.values()), set()
    while left:
        best = max(cases, key=lambda case: len(combinations[case] & left))
        kept.add(best)
        left -= combinations[best]
    # A test with too few parameters for the strength has no combination.
    return kept or {cases[0]}
