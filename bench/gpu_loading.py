"""Time loads of safetensors of a published shape into a GPU, and plain reads of the same files.

    python bench/gpu_loading.py --directory /tmp/loading [--shape Qwen3-30B-A3B] [--layers 6] [--device cuda]
        [--quantization fp8 int4-g128] [--residency 1 0.25]

The script writes the files (random values, one file per layer) and drops them from the page cache. It reads them once
with plain large reads and drops them again. Then it loads them as `moeyard serve` does, and once more with the files in
memory. `--quantization` repeats this with the checkpoint that `moeyard quantize --to` makes of the files. `--residency`
lists the shares of experts in slots. Host memory keeps the others.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import save_file

from moeyard_worker.checkpoint import converting
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.fields import Fields
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.assembly.worker import Worker
from moeyard_worker.models.families import parse_model_config
from moeyard_worker.models.shapes import SHAPES, served_model, shape_config
from moeyard_worker.models.spec import model_spec

_READ = 16 << 20


def write(directory: Path, shape: str, layers: int) -> int:
    """Write a checkpoint with random weights and return its bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    config = shape_config(shape, layers)
    (directory / "config.json").write_text(json.dumps(config))
    expected = model_spec(parse_model_config(Fields(shape, config), Fields(shape, {})), ()).expected()
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, tensor in expected.items():
        part = key.split(".")[2] if ".layers." in key else "rest"
        files.setdefault(f"model-{part}.safetensors", {})[key] = tensor.shape
    largest = max(torch.Size(tensor.shape).numel() for tensor in expected.values())
    chance = torch.empty(largest, dtype=torch.bfloat16).normal_(0, 0.02)
    total, places = 0, {}
    for name, shapes in files.items():
        tensors = {key: chance[: torch.Size(size).numel()].view(size).clone() for key, size in shapes.items()}
        save_file(tensors, directory / name, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        places |= dict.fromkeys(shapes, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return total


def drop(directory: Path) -> None:
    """Drop the files from the page cache."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(directory: Path) -> float:
    """Return the seconds of plain reads of all files, in sequence."""
    buffer, begun = bytearray(_READ), time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begun


def load(directory: Path, device: str, residency: float) -> tuple[float, float | None, int]:
    """Return the seconds of a worker's load, its reported bytes per second from files, and the bytes."""
    config = EngineConfig(
        model_path=str(directory),
        device=device,
        page_size=64 if device != "cpu" else 16,
        kv_memory=1 << 28,
        max_model_len=1024,
        enforce_eager=device != "cpu",
    )
    model = served_model(config)
    slots = max(1, int(residency * model.num_experts * len(model.moe_layers)))
    config = replace(config, expert_slots=None if residency == 1 else slots)
    worker = Worker(WorkerSpec(config=config, rank=0, epoch=0, host="127.0.0.1", version="bench"))
    try:
        worker.connect([worker.endpoints()["mesh"]])
        report = worker.load(1)
        return report["seconds"]["weights"], report["read_rate"], report["loaded_bytes"]
    finally:
        worker.stop()
        del worker
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--directory", type=Path, required=True, help="folder of the files, which are kept")
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quantization", nargs="*", default=[], help="forms as of `moeyard quantize --to`")
    parser.add_argument("--residency", type=float, nargs="+", default=[1.0], help="shares of experts in slots")
    args = parser.parse_args()
    begun = time.perf_counter()
    total = write(args.directory, args.shape, args.layers)
    print(f"wrote {total * 1e-9:.2f} GB in {time.perf_counter() - begun:.1f} s", flush=True)
    report(args.directory, args.device, args.residency)
    for name in args.quantization:
        begun = time.perf_counter()
        converting.quantized(args.directory, name).write(args.directory / name, lambda num_bytes: None)
        print(f"wrote {name} in {time.perf_counter() - begun:.1f} s", flush=True)
        report(args.directory / name, args.device, args.residency)
    return 0


def report(directory: Path, device: str, residencies: Sequence[float]) -> None:
    """Measure one checkpoint and print its speeds."""
    total = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    drop(directory)
    cold = read(directory)
    warm = read(directory)
    print(
        f"plain reads of {total * 1e-9:.2f} GB: {total / cold * 1e-9:.2f} GB/s from the disk, "
        f"{total / warm * 1e-9:.2f} from memory",
        flush=True,
    )
    for residency, how in product(residencies, ("from the disk", "from memory")):
        if how == "from the disk":
            drop(directory)
        seconds, rate, loaded = load(directory, device, residency)
        files = "" if rate is None else f", of which the files gave {rate * 1e-9:.2f} GB/s"
        print(
            f"loaded {how}, {residency:.0%} in slots: {loaded * 1e-9:.2f} GB in {seconds:.2f} s, "
            f"{loaded / seconds * 1e-9:.2f} GB/s{files}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
