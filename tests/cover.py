"""Cases of a product of axes: the fast tier runs a pairwise cover, and by turns an eighth of the rest.

`--all` runs the whole product. The number of commits chooses the eighth, so that eight commits in a row run all of it;
the hash of a commit would choose some eighths twice and leave a third of them out. `--eighth N` chooses another one.
"""

import itertools
import subprocess
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from allpairspy import AllPairs

PARTS = 8


def part_of(nodeid: str) -> int:
    """The eighth that a rotating test belongs to, whatever else is collected."""
    return zlib.crc32(nodeid.encode()) % PARTS


@cache
def part_of_this_commit() -> int:
    """The number of commits modulo eight, or 0 without a git history."""
    log = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=Path(__file__).parent, capture_output=True)
    return int(log.stdout) % PARTS if log.returncode == 0 else 0


def pairwise(axes: Sequence[Sequence[Any]], valid: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """A few rows of the product, in which each value of an axis meets each value of every other axis."""
    rows = AllPairs(axes, filter_func=lambda row: len(row) < len(axes) or valid(*row))
    return [tuple(row) for row in rows]


def product(
    axes: Sequence[Sequence[Any]],
    *,
    valid: Callable[..., bool] = lambda *_: True,
    make: Callable[..., Any] = lambda *values: values,
) -> list[Any]:
    """The valid rows of the product, made into parameters by `make`; those outside the pairwise cover rotate."""
    always = set(pairwise(axes, valid))
    params = []
    for row in filter(lambda row: valid(*row), itertools.product(*axes)):
        value, marks = make(*row), () if row in always else (pytest.mark.rotating,)
        params.append(pytest.param(*value if isinstance(value, tuple) else (value,), marks=marks))
    return params
