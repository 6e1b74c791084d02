"""`python -m moeyard_kernels.bench`: prove every op equal on this GPU, then time it beside its unfused or torch chain.

    python -m moeyard_kernels.bench [--op NAME ...] [--csv FILE]        the table
    python -m moeyard_kernels.bench --against FILE [--op NAME ...]      the table, row by row beside an earlier one
    python -m moeyard_kernels.bench --tune [--op NAME ...]              choose configs and store them for this device

No speed is reported for an op whose proof of equality fails, and the exit status is then 1, as it is where --against
finds a row more than 10 % slower. Times are medians of graph
replays whose launches find their inputs outside the L2; "copy" is the share of the copy bandwidth (read + write)
measured in the same run.
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
from pathlib import Path

import torch
import triton

from moeyard_kernels.bench.case import Case, Target, assert_bits, with_own_tensors
from moeyard_kernels.bench.results import HEADS, Facts, Results, check_device, compare, read
from moeyard_kernels.bench.timing import Timer
from moeyard_kernels.common import tuning

# Each has `cases() -> Iterator[Case]`; inputs live only while their case is at hand.
MODULES = (
    *("elementwise", "rope", "reduce", "linear", "head_linear", "topk_gate", "moe", "expert_cache"),
    *("peer_exchange", "expert_fetch"),
    *(
        "mla_decode",
        "gqa_decode",
        "rope_gqa_decode",
        "attn_prefill_varlen",
        "snapkv_scores",
        "linear_attention",
        "delta_step",
        "sample",
    ),
)

# What one process takes of a GPU: the largest case's tensors, and torch.
CASE_BYTES = 6 << 30


def all_cases(ops: Sequence[str]) -> Iterator[Case]:
    """Cases of the named ops (all when none is named), made one after the other."""
    for name in MODULES:
        module = importlib.import_module(f"moeyard_kernels.bench.{name}")
        if ops and not set(ops) & set(module.OPS):
            continue
        for case in module.cases():
            if not ops or case.op in ops:
                yield case
            torch.cuda.empty_cache()


def describe(target: Target | None) -> str:
    """The target in words for the table."""
    if target is None:
        return ""
    words = {"copy": "{:.0%} of copy", "us": "<= {:g} us", "tflops": ">= {:g} TFLOP/s", "speedup": ">= {:g}x"}
    return words[target.kind].format(target.bound)


def _microseconds(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.2f}" if us < 10 else f"{us:.1f}"


def row_of(case: Case, timer: Timer) -> list[str]:
    """Prove, time and judge one case. Raises AssertionError where the proof fails."""
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


def report(ops: Sequence[str], csv_file: Path | None, earlier: Results | None) -> int:
    """Print the table as it grows, write it to `csv_file`, hold it against an earlier one. Returns the exit status."""
    timer = Timer()
    facts = Facts(
        device=torch.cuda.get_device_name(),
        date=str(datetime.date.today()),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=triton.__version__,
        copy_tb_per_s=f"{timer.copy_bandwidth * 1e-12:.2f}",
    )
    if earlier:
        check_device(facts, earlier.facts)
    print(f"{facts}\n| " + " | ".join(HEADS) + " |\n|" + "---|" * len(HEADS))
    rows, red = [], 0
    for case in all_cases(ops):
        try:
            rows.append(row_of(case, timer))
        except AssertionError as error:
            red += 1
            print(f"RED {case.op} {case.shape}: {error}", flush=True)
            continue
        print("| " + " | ".join(rows[-1]) + " |", flush=True)
    results = Results(facts, [dict(zip(HEADS, row, strict=True)) for row in rows])
    if csv_file:
        results.write(csv_file)
    print(f"{len(rows)} timed, {sum(row[-1] == 'no' for row in rows)} short of their target, {red} red")
    good = True
    if earlier:
        lines, good = compare(results, earlier, ops)
        print("\n".join(lines))
    return 0 if good and not red else 1


def tune(ops: Sequence[str]) -> int:
    """Time every variant that gives the default's bits, and store the fastest of each shape class."""
    compile_all(ops)
    timer = Timer()
    name = torch.cuda.get_device_name()
    path = tuning.device_file(name)
    table = {op: dict(classes) for op, classes in tuning.stored(name).items()}
    red = 0
    for case in all_cases(ops):
        if not case.variants or case.tune_key is None:
            continue
        # Over copies: what an op writes in place is as it was for the next.
        wanted = with_own_tensors(case.run)()
        timed = []
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
        best = min(timed, key=lambda pair: pair[0])
        op, shape_class = case.tune_key
        table.setdefault(op, {})[shape_class] = best[1].as_dict()
        ranking = ", ".join(f"{s * 1e6:.1f} {c}" for s, c in sorted(timed, key=lambda pair: pair[0])[:4])
        print(f"{op} {case.shape} [{shape_class}]: {ranking}; slowest {max(s for s, _ in timed) * 1e6:.1f}", flush=True)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    return 1 if red else 0


def compile_all(ops: Sequence[str]) -> None:
    """Fill Triton's cache with every variant from several processes at once: one at a time takes minutes."""
    count = max(1, min((os.cpu_count() or 1) - 1, torch.cuda.mem_get_info()[0] // CASE_BYTES))
    command = [sys.executable, "-m", "moeyard_kernels.bench", *(f"--op={op}" for op in ops)]
    workers = [subprocess.Popen([*command, f"--compile={i}/{count}"]) for i in range(count)]
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise SystemExit(f"compiling the variants failed: exit codes {codes}")


def compile_part(ops: Sequence[str], part: str) -> int:
    """Run every `count`-th variant once, beginning with the `index`-th (part: "index/count")."""
    index, count = map(int, part.split("/"))
    n = 0
    for case in all_cases(ops):
        for _, run in case.variants:
            if n % count == index:
                run()
            n += 1
    torch.cuda.synchronize()
    return 0


def main() -> int:
    """Command line of the bench."""
    parser = argparse.ArgumentParser(prog="python -m moeyard_kernels.bench", description="time the kernels on this GPU")
    parser.add_argument("--op", action="append", default=[], help="only this op (may be repeated)")
    parser.add_argument("--csv", type=Path, help="write the table there too")
    parser.add_argument("--against", type=Path, help="compare with what --csv wrote earlier on this device")
    parser.add_argument("--tune", action="store_true", help="choose and store configs for this device")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "moeyard_kernels.bench: no CUDA device: nothing to time here\n")
    known = {op for name in MODULES for op in importlib.import_module(f"moeyard_kernels.bench.{name}").OPS}
    if unknown := sorted(set(args.op) - known):
        parser.exit(2, f"moeyard_kernels.bench: no op {', '.join(unknown)}: choose of {', '.join(sorted(known))}\n")
    if args.compile:
        return compile_part(args.op, args.compile)
    if args.tune:
        return tune(args.op)
    return report(args.op, args.csv, read(args.against) if args.against else None)


if __name__ == "__main__":
    sys.exit(main())
