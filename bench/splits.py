"""Decode attention with other split lengths: few sequences favour short splits, many favour long ones.

    python bench/splits.py [--sequences 1 8 64] [--lengths 256 512 1024 2048 8192 32768]

A line for each shape has microseconds by the length of a split in positions, merge included. A star marks the served
length. The length is part of the answer (`types/decode_tables.py`), so one is chosen for all batches. Nothing is proven
here: `kernel_times.py` does that.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases import gqa_decode, mla_decode
from kernel_cases.timing import Timer

from moeyard_kernels.types.decode_tables import GQA_SPLIT, mla_split

SPLITS = (128, 256, 512, 1024)
# Heads of DeepSeek-V2-Lite, Kimi-K2 and DeepSeek-V3; query and key heads of Qwen3-30B-A3B, Qwen3-235B-A22B and Mixtral.
LATENT, GROUPED = (16, 64, 128), ((32, 4), (64, 4), (32, 8))


def runs(sequences: int, length: int) -> Iterator[tuple[str, partial[Any], int, int]]:
    """Yield (name, launches, bytes, served split) of each model's attention of one row per sequence."""
    for heads in LATENT:
        case = mla_decode.decode_case(heads, sequences, 1, length, None)
        yield f"mla_decode {case.shape}", case.run, case.num_bytes, mla_split(heads)
    for pair in GROUPED:
        case = gqa_decode.decode_case(*pair, sequences, 1, length, None)
        yield f"gqa_decode {case.shape}", case.run, case.num_bytes, GQA_SPLIT


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 8192, 32768])
    args = parser.parse_args()
    timer = Timer()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {timer.copy_bandwidth / 1e12:.2f} TB/s")
    print("split", *SPLITS, sep="\t")
    for length in args.lengths:
        for sequences in args.sequences:
            for name, run, num_bytes, now in runs(sequences, length):
                took = [
                    f"{timer.seconds(partial(run, split=split), num_bytes) * 1e6:.1f}{'*' * (split == now)}"
                    for split in SPLITS
                ]
                print(name, *took, sep="\t", flush=True)


if __name__ == "__main__":
    main()
