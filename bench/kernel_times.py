"""Prove every op equal on this GPU, then time it and its unfused chain or torch equivalent.

    python bench/kernel_times.py [--op NAME ...] [--csv FILE]        the table
    python bench/kernel_times.py --against FILE [--op NAME ...]      the table, compared with an earlier one row by row
    python bench/kernel_times.py --tune [--op NAME ...]              choose configs and store them for this device
    python bench/kernel_times.py --model NAME ... [--rows N ...]     the launches of models' steps, not the table
    python bench/kernel_times.py --csv FILE --merge FILE             add the rows of one file to another; needs no GPU

A model is one of `model_steps.MODELS`, or "all". Rows are those of a step: 1, 8 or 64 of output, or 256, 512, 1024 or
8192 of a prompt. `--csv` keeps the file's other rows under the device, date and versions that measured them. The file
is written after each row, so an interrupted run loses nothing.

An op whose proof of equality fails has no time, and the exit status is 1. It is also 1 if --against finds a row that is
more than 10 % slower. Times are medians of graph replays whose launches find their inputs outside the L2. "copy" is the
share of the copy bandwidth (read + write) measured in the same run.
"""

import argparse
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import triton
from kernel_cases.case import Case, Target, assert_bits, with_own_tensors
from kernel_cases.model_steps import MODELS, ROWS, ModelStep
from kernel_cases.results import HEADS, Facts, Results, check_device, compare, merged, read, write
from kernel_cases.timing import Timer
from triton.runtime.errors import OutOfResources

from moeyard_kernels.common import tuning

# Each module has `cases() -> Iterator[Case]`, and `model_cases(models, rows)` if steps of models launch its ops. Inputs
# live only while their case runs.
MODULES = (
    *("elementwise", "rope", "reduce", "hyper_connections", "linear", "head_linear", "topk_gate", "moe"),
    *("grouped_packed", "linear_packed", "expert_cache"),
    *("peer_exchange", "expert_fetch"),
    *(
        "mla_decode",
        "compressed_decode",
        "gqa_decode",
        "rope_gqa_decode",
        "attn_prefill_varlen",
        "snapkv_scores",
        "compressed_prompts",
        "linear_attention",
        "delta_step",
        "sample",
    ),
)

# GPU memory of one process, for the table and for models: the largest case's tensors, and torch.
CASE_BYTES, MODEL_BYTES = 6 << 30, 10 << 30
# A row with one of these errors is reported, and the others continue.
RED = (AssertionError, OutOfResources, torch.OutOfMemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The requested ops (all if `ops` is empty), of the table or of steps of `models` with `rows` rows."""

    ops: Sequence[str] = ()
    models: Sequence[str] = ()
    rows: Sequence[int] = ROWS

    def steps(self) -> tuple[ModelStep, ...]:
        """The models' sizes."""
        return tuple(model for name, model in MODELS.items() if {name, "all"} & set(self.models))

    def arguments(self) -> list[str]:
        """Return the command line of the same request."""
        named = {"op": self.ops, "model": self.models, "rows": self.rows if self.models else ()}
        return [f"--{name}={value}" for name, values in named.items() for value in values]


def all_cases(selection: Selection) -> Iterator[Case]:
    """Yield the requested cases, made one at a time. A launch that several models share comes once."""
    seen = set()
    for name in MODULES:
        module = importlib.import_module(f"kernel_cases.{name}")
        if selection.ops and not set(selection.ops) & set(module.OPS):
            continue
        if not selection.models:
            found = module.cases()
        elif hasattr(module, "model_cases"):
            found = module.model_cases(selection.steps(), selection.rows)
        else:
            continue
        for case in found:
            key = (case.op, case.shape)
            if (not selection.ops or case.op in selection.ops) and not (selection.models and key in seen):
                yield case
            seen.add(key)
            torch.cuda.empty_cache()


def describe(target: Target | None) -> str:
    """Describe the target for the table."""
    if target is None:
        return ""
    words = {"copy": "{:.0%} of copy", "us": "<= {:g} us", "tflops": ">= {:g} TFLOP/s", "speedup": ">= {:g}x"}
    return words[target.kind].format(target.bound)


def _microseconds(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.2f}" if us < 10 else f"{us:.1f}"


def row_of(case: Case, timer: Timer) -> list[str]:
    """Prove, time and judge one case. Raises AssertionError if the proof fails."""
    case.prove()
    seconds = timer.seconds(case.run, case.num_bytes, early=case.early)
    baseline = timer.seconds(case.baseline, case.num_bytes, early=False) if case.baseline else None
    bandwidth, rate = case.num_bytes / seconds, case.num_flops / seconds
    share = bandwidth / timer.copy_bandwidth
    met = ""
    if case.target:
        reached = {
            "copy": share,
            "us": -seconds * 1e6,
            "tflops": rate * 1e-12,
            "speedup": baseline / seconds if baseline else 0.0,
        }[case.target.kind]
        met = "yes" if reached >= (-case.target.bound if case.target.kind == "us" else case.target.bound) else "no"
    return [
        case.op,
        case.shape,
        _microseconds(seconds),
        f"{bandwidth * 1e-9:.0f}",
        f"{rate * 1e-12:.0f}" if case.num_flops else "",
        f"{share:.0%}",
        case.baseline_name,
        _microseconds(baseline) if baseline else "",
        f"{baseline / seconds:.2f}" if baseline else "",
        describe(case.target),
        met,
    ]


def report(selection: Selection, csv_file: Path | None, earlier: Sequence[Results]) -> int:
    """Print the table as it grows, merge it into `csv_file`, compare it with earlier runs. Return the exit status."""
    before = read(csv_file) if csv_file and csv_file.exists() else []
    for run in (*before, *earlier):
        check_device(torch.cuda.get_device_name(), run.facts)
    if selection.models:
        compile_all(selection)
    timer = Timer()
    facts = Facts(
        device=torch.cuda.get_device_name(),
        date=str(datetime.date.today()),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=triton.__version__,
        copy_tb_per_s=f"{timer.copy_bandwidth * 1e-12:.2f}",
    )
    print(f"{facts}\n| " + " | ".join(HEADS) + " |\n|" + "---|" * len(HEADS))
    rows: list[dict[str, str]] = []
    red = 0
    for case in all_cases(selection):
        try:
            rows.append(dict(zip(HEADS, row_of(case, timer), strict=True)))
        except RED as error:
            red += 1
            print(f"RED {case.op} {case.shape}: {error}", flush=True)
            continue
        print("| " + " | ".join(rows[-1].values()) + " |", flush=True)
        if csv_file:
            write(csv_file, merged(before, Results(facts, rows)))
    print(f"{len(rows)} timed, {sum(row['met'] == 'no' for row in rows)} short of their target, {red} red")
    good = True
    if earlier:
        lines, good = compare(Results(facts, rows), earlier, selection.ops, whole=not selection.models)
        print("\n".join(lines))
    return 0 if good and not red else 1


# A config replaces the served one if it takes at most this share of its time.
_WORTH = 0.98


def tune(selection: Selection) -> int:
    """Time all variants that give the default's bits. Store the fastest of each shape class if it is enough faster."""
    compile_all(selection, "--tune")
    timer = Timer()
    name = torch.cuda.get_device_name()
    path = tuning.device_file(name)
    table = tuning.stored_for(name)
    red = 0
    for case in all_cases(selection):
        if not case.variants or case.tune_key is None:
            continue
        # Run on copies, because an op that writes in place must not change the next run's inputs.
        wanted = with_own_tensors(case.run)()
        timed, now = [], timer.seconds(case.run, case.num_bytes)
        for config, run in case.variants:
            try:
                assert_bits(f"{case.op} {case.shape} {config}", with_own_tensors(run)(), wanted)
            except AssertionError as error:
                red += 1
                print(f"RED {error}", flush=True)
                continue
            timed.append((timer.seconds(run, case.num_bytes), config))
        if not timed:
            continue
        timed.sort(key=lambda pair: pair[0])
        op, shape_class = case.tune_key
        # Time it again, because a chip that gets hot makes later runs slower.
        now = min(now, timer.seconds(case.run, case.num_bytes))
        if timed[0][0] < _WORTH * now:
            table.setdefault(op, {})[shape_class] = timed[0][1].as_dict()
        ranking = ", ".join(f"{s * 1e6:.1f} {c}" for s, c in timed)
        print(f"{op} {case.shape} [{shape_class}]: now {now * 1e6:.1f}; {ranking}", flush=True)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    return 1 if red else 0


def compile_all(selection: Selection, *more: str) -> None:
    """Fill Triton's cache from several processes at once, because one at a time takes minutes."""
    room = torch.cuda.mem_get_info()[0] // (MODEL_BYTES if selection.models else CASE_BYTES)
    count = max(1, min((os.cpu_count() or 1) - 1, room))
    command = [sys.executable, __file__, *selection.arguments(), *more]
    workers = [subprocess.Popen([*command, f"--compile={i}/{count}"]) for i in range(count)]
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise SystemExit(f"compiling failed: exit codes {codes}")


def compile_part(selection: Selection, part: str, *, variants: bool) -> int:
    """Run every `count`-th variant, or the launches of a case, once, from the `index`-th on ("index/count")."""
    index, count = map(int, part.split("/"))
    n = 0
    for case in all_cases(selection):
        for run in [run for _, run in case.variants] if variants else [partial(_prove_and_run, case)]:
            if n % count == index:
                run()
            n += 1
    torch.cuda.synchronize()
    return 0


def _prove_and_run(case: Case) -> None:
    with suppress(*RED):  # boundary: this process only compiles; the timed run reports it
        case.prove()
        case.run()


def merge(parser: argparse.ArgumentParser, into: Path | None, source: Path) -> int:
    """Copy the rows of one file to another, which need not exist."""
    if into is None:
        parser.error("--merge copies rows to the file of --csv")
    runs = read(into) if into.exists() else []
    for run in read(source):
        runs = merged(runs, run)
    write(into, runs)
    print(f"{into}: {sum(len(run.rows) for run in runs)} rows of {len(runs)} runs")
    return 0


def main() -> int:
    """Run the command line of the bench."""
    parser = argparse.ArgumentParser(prog="python bench/kernel_times.py", description="time the kernels on this GPU")
    parser.add_argument("--op", action="append", default=[], help="only this op (may be repeated)")
    parser.add_argument(
        "--model", action="append", default=[], choices=[*MODELS, "all"], help="the launches of its steps"
    )
    parser.add_argument("--rows", action="append", type=int, default=[], choices=ROWS, help="rows of the steps")
    parser.add_argument("--csv", type=Path, help="write the table to this file, which keeps its other rows")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="copy the rows of this file to that of --csv")
    parser.add_argument("--against", type=Path, help="compare with an earlier --csv file of this device")
    parser.add_argument("--tune", action="store_true", help="choose and store configs for this device")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rows and not args.model:
        parser.error("--rows needs a --model")
    if args.merge:
        return merge(parser, args.csv, args.merge)
    if not torch.cuda.is_available():
        parser.exit(2, "kernel_times: no CUDA device: nothing to time here\n")
    known = {op for name in MODULES for op in importlib.import_module(f"kernel_cases.{name}").OPS}
    if unknown := sorted(set(args.op) - known):
        parser.exit(2, f"kernel_times: no op {', '.join(unknown)}: choose of {', '.join(sorted(known))}\n")
    selection = Selection(ops=args.op, models=args.model, rows=args.rows or ROWS)
    if args.compile:
        return compile_part(selection, args.compile, variants=args.tune)
    if args.tune:
        return tune(selection)
    return report(selection, args.csv, read(args.against) if args.against else ())


if __name__ == "__main__":
    sys.exit(main())
