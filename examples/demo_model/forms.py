"""Measure the demo model in each form that `moeyard quantize` writes: bits per byte, bytes and time per token.

    python -m examples.demo_model.forms [--json deploy/demo/forms.json] [--rounds 5]

Bits per byte are those of transformers in float32 over all held-out text, of what `moeyard dequantize` makes of a form.
Forms without the MTP layer get the original's, which bits per byte do not depend on. TPOT is that of one stream on a
CPU by `moeyard bench engine`, the median of rounds that take turns.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from examples.demo_model.measure import DemoModel, measure_heldout, read_documents
from safetensors.torch import load_file, save_file

MODEL = Path(__file__).resolve().parents[2] / "deploy" / "demo"
FORMS = ("fp8", "int4-g32", "q8_0")


def moeyard(*words: str | Path) -> None:
    """Run a command of moeyard. Raises CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", "moeyard", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def written(form: str, folder: Path) -> tuple[Path, Path]:
    """Write the model in a form, and the bfloat16 checkpoint of the same answers with an MTP layer. Return both."""
    out, plain = folder / form, folder / f"{form}-plain"
    moeyard("quantize", MODEL, "--to", form, "--out", out)
    quantised = next(out.glob("*.gguf"), out)
    moeyard("dequantize", quantised, "--out", plain)
    tensors = load_file(MODEL / "model.safetensors")
    for file in plain.glob("*.safetensors*"):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (plain / name).write_bytes((MODEL / name).read_bytes())
    return quantised, plain


def bits_per_byte(directory: Path) -> float:
    """Return the bits per byte of all held-out text."""
    model = DemoModel(directory)
    found = measure_heldout(model, read_documents(MODEL / "heldout.jsonl", model))
    return float(found["heldout"]["bits_per_byte"])


def tpot_ms(model: Path, folder: Path) -> float:
    """Return the milliseconds per output token of one stream."""
    moeyard("bench", "engine", model, "--streams", "1", "--prefill", "--device", "cpu", "--json", folder / "bench.json")
    rows = json.loads((folder / "bench.json").read_text())["rows"]
    return float(next(row["tpot_ms"]["p50"] for row in rows if row["case"].startswith("decode")))


def measure(rounds: int) -> dict[str, Any]:
    """Return a row per form, the original first, and where they were measured."""
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = {"bfloat16": (MODEL, MODEL), **{form: written(form, folder) for form in FORMS}}
        for form, (model, plain) in models.items():
            files = [model] if model.is_file() else model.glob("*.safetensors")
            rows[form] = {"bits_per_byte": bits_per_byte(plain), "bytes": sum(file.stat().st_size for file in files)}
            print(form, rows[form], flush=True)
        times: dict[str, list[float]] = {form: [] for form in models}
        for _ in range(rounds):
            for form, (model, plain) in models.items():
                # The bench reads no GGUF files. Their weights become bfloat16 when they are loaded.
                times[form].append(tpot_ms(plain if model.is_file() else model, folder))
        for form, found in times.items():
            rows[form]["tpot_ms"] = statistics.median(found)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"forms": rows, "versions": versions, "machine": platform.machine()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="measure the demo model in each quantised form")
    parser.add_argument("--json", type=Path, default=MODEL / "forms.json")
    parser.add_argument("--rounds", type=int, default=5, help="of the time per token")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.json.write_text(json.dumps(measure(args.rounds), indent=1) + "\n")


if __name__ == "__main__":
    main()
