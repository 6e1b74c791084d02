"""Make a checkpoint with one faulty token: its embedding is NaN, so a step that contains it has no valid logits."""

import json
import shutil
import struct
from pathlib import Path

# Quiet NaNs of the dtypes of checkpoints, little-endian.
NAN = {"BF16": b"\xc0\x7f", "F32": b"\x00\x00\xc0\x7f"}


def poison(source: Path, target: Path, *, token_id: int) -> None:
    """Copy the served files of checkpoint `source` to `target`, a new directory, and set the token's row to NaN."""
    target.mkdir(parents=True)
    for path in (*source.glob("*.json"), *source.glob("*.jinja"), *source.glob("*.safetensors")):
        shutil.copy(path, target)
    with (target / "model.safetensors").open("r+b") as file:
        # Format (https://huggingface.co/docs/safetensors): a 64-bit length, a JSON header, and the data.
        (length,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(length))["model.embed_tokens.weight"]
        value, columns = NAN[entry["dtype"]], entry["shape"][1]
        file.seek(8 + length + entry["data_offsets"][0] + token_id * columns * len(value))
        file.write(value * columns)
