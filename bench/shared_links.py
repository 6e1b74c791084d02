"""The gain if missed experts come over the links of all ranks, and not only over the owner's link.

    python bench/shared_links.py [--trace tests/experts/data/demo-routing-4] [--ranks 2 4 8] [--share 0.25]

Below full residency a step waits, in each layer, for the rank with the most misses. If every rank's link to the host
helps, it waits for the mean. Each rank's misses are those of the engine's own policy over its shard. Decode rows come
from uniform routing (`--shape`: experts, experts per token, layers) at 1, 8 and 64 rows per rank. They also come from a
recorded trace of one rank, whose needs are dealt to shards. The output has misses of the fullest and of the mean rank
per layer and step. Their ratio is the upper bound of faster copies. Sharing also moves bytes between GPUs, and the
experts' own time remains, so tokens/s gain less.
"""

import argparse
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "worker"), str(ROOT / "kernels")]

from moeyard_worker.config.placement import partition  # noqa: E402
from moeyard_worker.experts.offline.trace import read_trace  # noqa: E402
from moeyard_worker.experts.policies import start_policy  # noqa: E402

# For one rank, in one layer of a step: the experts that decode rows need, ascending.
Needs = tuple[int, Sequence[int]]


def uniform(experts: int, top_k: int, layers: int, rows: int, steps: int) -> Iterator[list[Needs]]:
    """Yield steps of `rows` rows, each with top_k random experts in every layer."""
    rng = random.Random(rows)
    for _ in range(steps):
        yield [
            (layer, sorted({e for _ in range(rows) for e in rng.sample(range(experts), top_k)}))
            for layer in range(layers)
        ]


def recorded(path: Path) -> Iterator[list[Needs]]:
    """Yield the decode rows of a trace of one rank."""
    [trace] = read_trace(path)
    for _, accesses in groupby(trace, key=lambda access: access.step):
        yield [(access.layer, access.decode) for access in accesses]


def misses(
    steps: Iterable[list[Needs]], *, layers: Sequence[int], experts: int, ranks: int, share: float
) -> list[list[int]]:
    """Return [misses of each rank] for every layer of every step, with slots for `share` of each shard's experts."""
    shards = partition(experts, ranks)
    policies = [
        start_policy("slru", layers=layers, experts=shard, num_slots=max(1, int(share * len(shard) * len(layers))))
        for shard in shards
    ]
    found = []
    for step in steps:
        for layer, needed in step:
            counts = []
            for policy, shard in zip(policies, shards, strict=True):
                waves = policy.access(layer, [e for e in needed if e in shard], [])
                counts.append(sum(placed.hit is None for wave in waves for placed in wave))
            found.append(counts)
    return found


def line(name: str, found: list[list[int]]) -> None:
    """Print one row. The first third of a run fills the caches."""
    found = found[len(found) // 3 :]
    fullest, mean = sum(map(max, found)) / len(found), sum(map(sum, found)) / len(found) / len(found[0])
    print(f"{name:42}{fullest:10.2f}{mean:8.2f}{fullest / mean:8.2f}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=ROOT / "tests/experts/data/demo-routing-4")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--shape", type=int, nargs=3, default=[128, 8, 8], help="experts, top k, layers")
    parser.add_argument("--steps", type=int, default=90)
    args = parser.parse_args()
    experts, top_k, num_layers = args.shape
    print(f"{'misses of a layer and step':42}{'fullest':>10}{'mean':>8}{'ratio':>8}")
    for ranks in args.ranks:
        for rows in (1, 8, 64):
            steps = uniform(experts, top_k, num_layers, rows * ranks, args.steps)
            found = misses(steps, layers=range(num_layers), experts=experts, ranks=ranks, share=args.share)
            line(f"uniform, {ranks} ranks, {rows} rows of each", found)
        [trace] = read_trace(args.trace)
        header = trace.header
        count = header.experts_stop - header.experts_start
        found = misses(recorded(args.trace), layers=header.layers, experts=count, ranks=ranks, share=args.share)
        line(f"{args.trace.name}, {ranks} ranks", found)


if __name__ == "__main__":
    main()
