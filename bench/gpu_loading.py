"""How fast weights come from safetensors into a GPU, beside the disk alone: a checkpoint of a published shape, cut.

    python bench/gpu_loading.py --directory /tmp/loading [--shape Qwen3-30B-A3B] [--layers 6] [--device cuda]

The files are written first (random values, one file per layer), then dropped from the page cache; read once by plain
large reads, dropped again; loaded as `moeyard serve` loads them; and loaded once more with the files in memory.
"""

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.fields import Fields
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.assembly.worker import Worker
from moeyard_worker.models.families import parse_model_config
from moeyard_worker.models.shapes import SHAPES, shape_config
from moeyard_worker.models.spec import model_spec

_READ = 16 << 20


def write(directory: Path, shape: str, layers: int) -> int:
    """A checkpoint with weights of chance; its bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    config = shape_config(shape, layers)
    (directory / "config.json").write_text(json.dumps(config))
    expected = model_spec(parse_model_config(Fields(shape, config), Fields(shape, {})), ()).expected()
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, size in expected.items():
        part = key.split(".")[2] if ".layers." in key else "rest"
        files.setdefault(f"model-{part}.safetensors", {})[key] = size
    largest = max(torch.Size(size).numel() for size in expected.values())
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
    """Have the files read from the disk when they are next read."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(directory: Path) -> float:
    """Seconds that plain reads of all files take, one after the other."""
    buffer, begun = bytearray(_READ), time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begun


def load(directory: Path, device: str) -> tuple[float, float | None, int]:
    """Seconds of a worker's load, the bytes per second that it says the files gave, and the bytes."""
    config = EngineConfig(
        model_path=str(directory), device=device, page_size=64 if device != "cpu" else 16, kv_memory=1 << 28,
        max_model_len=1024, enforce_eager=device != "cpu",
    )  # fmt: skip
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
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--directory", type=Path, required=True, help="where to write; stays there")
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    begun = time.perf_counter()
    total = write(args.directory, args.shape, args.layers)
    print(f"wrote {total * 1e-9:.2f} GB in {time.perf_counter() - begun:.1f} s", flush=True)
    drop(args.directory)
    cold = read(args.directory)
    warm = read(args.directory)
    print(
        f"plain reads: {total / cold * 1e-9:.2f} GB/s from the disk, {total / warm * 1e-9:.2f} from memory", flush=True
    )
    for how in ("from the disk", "from memory"):
        if how == "from the disk":
            drop(args.directory)
        seconds, rate, loaded = load(args.directory, args.device)
        files = "" if rate is None else f", of which the files gave {rate * 1e-9:.2f} GB/s"
        print(
            f"loaded {how}: {loaded * 1e-9:.2f} GB in {seconds:.2f} s, {loaded / seconds * 1e-9:.2f} GB/s{files}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
