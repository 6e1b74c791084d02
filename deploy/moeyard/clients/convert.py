"""`moeyard dequantize` and `moeyard quantize`: write another form of a checkpoint."""

import argparse
from pathlib import Path

from moeyard.local.model_source import checkpoint, weights_source
from moeyard.local.startup import Progress
from moeyard_worker.checkpoint import converting
from moeyard_worker.checkpoint.writing import NewCheckpoint
from moeyard_worker.config.engine_config import format_size


def dequantize(args: argparse.Namespace) -> int:
    """Write the bfloat16 checkpoint that a quantised one stands for."""
    return _write(converting.dequantized(*weights_source(args)), args.out)


def quantize(args: argparse.Namespace) -> int:
    """Write a quantised form of a checkpoint."""
    return _write(converting.quantized(checkpoint(args), args.to), args.out)


def _write(new: NewCheckpoint, out: str) -> int:
    directory, total, done = Path(out).absolute(), new.num_bytes, 0
    shown = Progress(f"writing {directory.name}")

    def progress(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        shown.show(done, total)

    try:
        new.write(directory, progress)
    finally:
        shown.close()
    print(f"{directory}: {format_size(total)} of weights")
    return 0
