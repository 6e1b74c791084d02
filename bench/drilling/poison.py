"""A checkpoint in which one token is a fault: its embedding is NaN, so a step that has it cannot give logits."""

import json
import shutil
import struct
from pathlib import Path

# Quiet NaNs of the dtypes that checkpoints have, little-endian.
NAN = {"BF16": b"\xc0\x7f", "F32": b"\x00\x00\xc0\x7f"}


def poison(source: Path, target: Path, *, token_id: int) -> None:
    """Copy what is served of the checkpoint `source` to `target`, a new directory, with that token's row as NaN."""
    target.mkdir(parents=True)
    for path in (*source.glob("*.json"), *source.glob("*.jinja"), *source.glob("*.safetensors")):
        shutil.copy(path, target)
    with (target / "model.safetensors").open("r+b") as file:
        # https://huggingface.co/docs/safetensors: a 64-bit length, a header of JSON, and the bytes behind it.
        (length,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(length))["model.embed_tokens.weight"]
        value, columns = NAN[entry["dtype"]], entry["shape"][1]
        file.seek(8 + length + entry["data_offsets"][0] + token_id * columns * len(value))
        file.write(value * columns)
