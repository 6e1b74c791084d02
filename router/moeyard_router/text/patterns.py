"""Tests the regular expressions of a tokenizer.json for catastrophic backtracking, in a process that can be stopped.

The engine of tokenizers (Oniguruma) backtracks: an expression such as `(a+)+$` takes twice as long for every further
"a". It gives up a match after ten million steps, by a panic. But there are as many matches as characters, and they hold
the tokenizing thread. So before a checkpoint is served, its expressions are tried in a separate process, each for
CPU_SECONDS. The test finds careless expressions and simple attacks. It cannot try every text.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

CPU_SECONDS = 2.0  # for all texts of one expression; expressions of the supported families take less than 0.1
LENGTH = 1000  # characters of a text, so that quadratic time passes and exponential time does not
# The parts of tokenizer.json that have expressions. Its vocabulary is large and has none.
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from moeyard_router.text import patterns; "


def patterns_of(tokenizer: Any) -> list[str]:
    """Return the distinct expressions of a parsed tokenizer.json in their order."""

    def walk(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if isinstance(found := node.get("Regex"), str):
                yield found
            for value in node.values():
                yield from walk(value)
        elif isinstance(node, list):
            for value in node:
                yield from walk(value)

    return list(dict.fromkeys(found for part in _PARTS for found in walk(tokenizer.get(part))))


def texts_for(pattern: str) -> Iterator[str]:
    """Yield long runs of characters that an expression may repeat, with ends that prevent a match."""
    own = dict.fromkeys(c for c in pattern if c.isalnum())
    for unit in (*own, "a", "A", "1", " ", "\n", ".", "'", "é", "中", "aA", "a ", "1a", ". ", " \n")[:32]:
        run = unit * (LENGTH // len(unit))
        yield from (run, f"{run}!", f"{run}\0", f"!{run}a!")


def check_patterns(path: Path) -> None:
    """Raise `ValueError` naming the file and an expression that is invalid or takes too long."""
    try:
        tokenizer = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return
    patterns = patterns_of(tokenizer) if isinstance(tokenizer, dict) else []
    if not patterns:
        return
    command = [sys.executable, "-c", f"{_START}patterns.try_all()", json.dumps(sys.path)]
    done = subprocess.run(
        command, input=json.dumps(patterns).encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    started = done.stdout.split()
    if done.returncode == 0 and len(started) == len(patterns):
        return
    pattern = patterns[max(0, len(started) - 1)]
    if done.returncode == -signal.SIGPROF:
        what = f"backtracks for more than {CPU_SECONDS:g} s on texts of {LENGTH} characters"
    else:
        what = f"makes the tokenizer fail on texts of {LENGTH} characters (exit code {done.returncode})"
    raise ValueError(
        f"{path}: its regular expression {pattern[:200]!r} {what}, so a client could stop the server; fix it, or "
        "serve another checkpoint"
    )


def try_all() -> None:
    """Run in the process: read expressions as JSON from stdin, and print the number of each before its test."""
    for number, pattern in enumerate(json.loads(sys.stdin.buffer.read())):
        print(number, flush=True)
        split = Split(Regex(pattern), "isolated")
        # The default action of SIGPROF ends the process even inside C code.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        for text in texts_for(pattern):
            split.pre_tokenize_str(text)
        signal.setitimer(signal.ITIMER_PROF, 0)
