"""`moeyard dequantize` and `moeyard quantize`: write another form of a checkpoint."""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moeyard.entry import load
from moeyard.local.model_source import checkpoint, weights_source
from moeyard.local.startup import Progress
from moeyard_router.text.chat import template_sources
from moeyard_worker.checkpoint import converting
from moeyard_worker.config.engine_config import format_size
from moeyard_worker.tokenizer import read_tokenizer


def dequantize(args: argparse.Namespace) -> int:
    """Write the bfloat16 checkpoint that a quantised one stands for."""
    return _write(converting.dequantized(*weights_source(args)), args.out)


def quantize(args: argparse.Namespace) -> int:
    """Write a quantised form of a checkpoint."""
    if args.to != "q8_0":
        return _write(converting.quantized(checkpoint(args), args.to), args.out)
    if find_spec("gguf") is None:
        raise ValueError("quantize --to q8_0 needs the package gguf: pip install 'moeyard[gguf]'")
    directory = Path(checkpoint(args))
    files = read_tokenizer(directory)
    found = {} if files is None else template_sources(directory, files.config)
    templates = {name: text for name, (_, text) in found.items()}
    new = load("moeyard_worker.checkpoint.gguf_writing").q8_0(directory, files, templates)
    code = _write(new, args.out)
    if not new.has_tokenizer:
        print(f"the tokenizer has no GGUF form here, so the file has none: serve it with --tokenizer {directory}")
    return code


def _write(new: Any, out: str) -> int:
    """Write a `NewCheckpoint` or a `NewGguf`, and show how far it is."""
    directory, total, done = Path(out).absolute(), new.num_bytes, 0
    shown = Progress(f"writing {directory.name}")

    def progress(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        shown.show(done, total)

    try:
        written = new.write(directory, progress)
    finally:
        shown.close()
    print(f"{written}: {format_size(total)} of weights")
    return 0
