"""Time of each launch of an op, as CUPTI measured it (through torch's profiler).

    python bench/launches.py --op kda_chunk_prefill --variants

It runs cases of the kernel bench, with --variants under each of their configs. Launches are in order, with medians of
five calls whose inputs lie in the L2 if they fit. Nothing is proven here: `kernel_times.py` does that. `moeyard bench
engine --profile` has the same for whole models.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from kernel_cases.case import with_own_tensors
from kernel_times import Selection, all_cases
from torch.profiler import ProfilerActivity, profile

CALLS = 5


def launches(run: Callable[[], object]) -> list[tuple[str, float]]:
    """Return (kernel, microseconds) of all launches of CALLS calls, in order, after two calls that are not counted."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    events = [event for event in seen.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, event.time_range.elapsed_us()) for event in events]


def print_launches(ops: list[str], variants: bool) -> None:
    """Print a line for each case, and with `variants` for each of its configs."""
    for case in all_cases(Selection(ops=ops)):
        for config, run in [("", case.run), *(case.variants if variants else ())]:
            found = launches(with_own_tensors(run))
            each = len(found) // CALLS
            times = [statistics.median(us for _, us in found[i::each]) for i in range(each)]
            parts = ", ".join(f"{found[i][0]} {us:.1f}" for i, us in enumerate(times))
            print(f"{case.op} {case.shape} {config}: {sum(times):.1f} us: {parts}", flush=True)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--op", action="append", required=True, help="an op of the kernels' bench (may be repeated)")
    parser.add_argument("--variants", action="store_true", help="run each config of its cases")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    print_launches(args.op, args.variants)
    return 0


if __name__ == "__main__":
    sys.exit(main())
