"""The fingerprint of a rank: one hash of everything that the bits of its answers may depend on.

The contract of one answer says what is absent here: batches, ranks, exchange, cache, chunks, drafts and graphs. The
code counts as a whole, because a change of any kernel may change bits.
"""

import hashlib
import importlib.metadata
import json
from functools import cache
from importlib.resources import files
from pathlib import Path

from moeyard_worker.checkpoint.check import CheckedCheckpoint, DummyCheckpoint
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.models.model_config import ModelConfig

# Digits of a fingerprint: two of a thousand agree by chance with a probability of 1e-13.
_DIGITS = 16


def fingerprint(
    config: EngineConfig,
    checkpoint: CheckedCheckpoint | DummyCheckpoint,
    model: ModelConfig,
    *,
    device: str,
) -> str:
    """Return the fingerprint of a rank, 16 hexadecimal digits.

    It covers samples of the weights (`checkpoint/identity.py`), the served dtype, rotary scaling that --max-model-len
    selects, the device, the code, and the versions of torch and, on a GPU, Triton.
    """
    on_cpu = config.device == "cpu"
    facts = {
        # The digests without the times of modification, which differ between hosts.
        "weights": {name: content for name, (content, _) in checkpoint.identity.items()},
        "random": [config.shape, config.num_layers, config.quantization],
        "dtype": model.served_dtype(config.dtype),
        # Not those of draft layers: drafts change no bits.
        "rotations": [repr(attention.rope) for attention in model.attention[: model.num_layers]],
        "device": device,
        "code": _code(),
        "versions": [importlib.metadata.version(name) for name in ("torch", "triton")[: 2 - on_cpu]],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:_DIGITS]


@cache
def _code() -> str:
    """Return a digest of the sources of kernels and worker. It takes about 10 ms."""
    found = hashlib.sha256()
    for package in ("moeyard_kernels", "moeyard_worker"):
        folder = Path(str(files(package)))
        for file in sorted(folder.rglob("*.py")):
            found.update(f"{file.relative_to(folder)}\0".encode())
            found.update(file.read_bytes())
    return found.hexdigest()
