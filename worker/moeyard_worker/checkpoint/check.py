"""Check that a checkpoint is complete: every tensor is used, or skipped for a named reason. Pure."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moeyard_kernels.types.footprint import Footprints
from moeyard_kernels.types.weight_form import plain_expert
from moeyard_worker.checkpoint.formats.format import StoredTensor
from moeyard_worker.checkpoint.gguf_index import open_gguf
from moeyard_worker.checkpoint.identity import identity
from moeyard_worker.checkpoint.index import INDEX_NAME, SINGLE_NAME, CheckpointIndex, join_files, open_index
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.worker_spec import AS_STARTED, ServedWeights
from moeyard_worker.models.family import Names
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.spec import ModelSpec, model_spec

DRAFT_LAYER = "multi-token prediction layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCheckpoint:
    """An index that holds all tensors that `spec` needs. `skipped` maps each other key to the reason.

    `identity` distinguishes the checkpoint from others (`identity.py`).
    """

    index: CheckpointIndex
    spec: ModelSpec
    skipped: Mapping[str, str]
    identity: Mapping[str, tuple[str, str]]

    def dense_bytes(self) -> int:
        """Return the stored bytes that every rank reads, all but experts. The sum of `progress` reaches it."""
        parts = (part for each in self.spec.dense() for part in each.parts)
        return sum(self.index.entries[key].num_bytes for key in self.spec.stored(parts))

    def resident_bytes(self, dtype: str, footprints: Footprints) -> int:
        """Return the bytes that the same weights take in memory, served in `dtype`."""
        return self.spec.resident_bytes(dtype, footprints)


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyCheckpoint:
    """Random weights in place of a checkpoint, served in `dtype`. No file is read, so nothing is checked."""

    spec: ModelSpec
    dtype: str

    identity = skipped = MappingProxyType[str, Any]({})

    def dense_bytes(self) -> int:
        """Return the bytes of the weights that every rank draws. The sum of `progress` reaches it."""
        return self.spec.dense_bytes(self.dtype)

    def resident_bytes(self, dtype: str, footprints: Footprints) -> int:
        """Return their bytes in memory, and those of one expert that is drawn outside its slot."""
        model = self.spec.config
        sizes = {"hidden": model.hidden_size, "intermediate": model.moe_intermediate_size}
        return self.spec.resident_bytes(dtype, footprints) + plain_expert(**sizes, dtype=dtype).blob_bytes


def check_weights(
    config: EngineConfig, model: ModelConfig, weights: ServedWeights = AS_STARTED
) -> CheckedCheckpoint | DummyCheckpoint:
    """Return the checked source of the weights of `model`. Raises CheckpointError; nothing is loaded."""
    if weights.files:
        return check_checkpoint(join_files(weights.files), model)
    if weights.directory is not None:
        new = Path(weights.directory)
        if config.gguf is not None and new.is_file():
            return check_checkpoint(find_tensors(str(config.model_path), model, str(new)), model)
        return check_checkpoint(open_index(new), model)
    if config.load_format == "dummy":
        return DummyCheckpoint(spec=model_spec(model, ()), dtype=model.served_dtype(config.dtype))
    assert config.model_path is not None, "EngineConfig requires it for every other format"
    return check_checkpoint(find_tensors(config.model_path, model, config.gguf), model)


def find_tensors(directory: Path | str, model: ModelConfig, gguf: str | None = None) -> CheckpointIndex:
    """Return the index of the checkpoint, or with `gguf` that of the GGUF file whose model `directory` describes."""
    return open_index(directory) if gguf is None else open_gguf(gguf, directory, model)


def check_checkpoint(index: CheckpointIndex, config: ModelConfig) -> CheckedCheckpoint:
    """Compare the stored tensors with the model's. Raises CheckpointError with the first problem and their number."""
    spec = model_spec(config, index.entries)
    expected = spec.expected()
    reasons = {key: _skip_reason(index, config, key, spec.names) for key in index.entries if key not in expected}
    skipped = {key: reason for key, reason in reasons.items() if reason is not None}
    drafts = spec.names.draft_layer.format(i=spec.names.first_draft(config.num_layers))
    if config.drafts and not any(key.startswith(drafts) for key in index.entries):
        raise CheckpointError(
            f"{index.directory}: no layer for multi-token prediction (no tensor begins with {drafts}); serve the "
            "checkpoint without --speculate"
        )
    problems = list(_problems(index, expected, skipped, config))
    if problems:
        more = f" (and {len(problems) - 1} more like this)" if len(problems) > 1 else ""
        raise CheckpointError(problems[0] + more)
    return CheckedCheckpoint(index=index, spec=spec, skipped=MappingProxyType(skipped), identity=identity(index))


def _skip_reason(index: CheckpointIndex, config: ModelConfig, key: str, names: Names) -> str | None:
    layer = re.match(names.draft_layer.partition("{i}")[0] + r"(\d+)\.", key, re.ASCII)
    first = names.first_draft(config.num_layers)
    if layer and first + config.num_draft_layers <= int(layer[1]) < first + config.num_mtp_layers:
        return DRAFT_LAYER
    if names.drafts_apart and not config.drafts and key.startswith(names.draft_parts):
        return DRAFT_LAYER
    if config.drafts and key in (names.layer.format(i=config.num_layers) + copy for copy in names.copies):
        return "a copy of the model's own embedding or head"
    for prefix, reason in names.skipped:
        if key.startswith(prefix):
            return reason
    if (skipped := config.weights.skips(key)) is not None:
        return skipped
    if config.shared_gate and not config.shared_intermediate_size and key.endswith(names.shared_gate):
        return "the gate of an empty shared expert"
    if key.endswith("rotary_emb.inv_freq"):
        return "computed from config.json"
    if key == names.lm_head and config.tie_word_embeddings:
        return "tied to the embedding"
    if 0 in index.entries[key].shape:
        return "holds no elements"
    return None


def _problems(
    index: CheckpointIndex, expected: Mapping[str, StoredTensor], skipped: Mapping[str, str], config: ModelConfig
) -> Iterator[str]:
    files = {entry.file for entry in index.entries.values()} or {index.directory / SINGLE_NAME}
    where = next(iter(files)) if len(files) == 1 else index.directory / INDEX_NAME
    unexpected = [key for key in index.entries if key not in expected and key not in skipped]
    contradictions = {key: config.weights.contradicts(key, index.entries) for key in unexpected}
    # They explain other problems, so they come first.
    for key, why in contradictions.items():
        if why is not None:
            yield f"{index.entries[key].file}: unexpected tensor {key}: {why}"
    for key, wanted in expected.items():
        if key not in index.entries:
            yield f"{where}: no tensor {key} of shape {list(wanted.shape)}, which config.json calls for{_why(wanted)}"
    for key, entry in index.entries.items():
        found = expected.get(key)
        if found is None:
            if contradictions.get(key, "") is None:
                yield f"{entry.file}: unexpected tensor {key} of shape {list(entry.shape)}"
        elif entry.shape not in (found.shape, *found.other_shapes):
            shapes = f"has shape {list(entry.shape)}, config.json calls for {list(found.shape)}{_why(found)}"
            yield f"{entry.file}: {key} {shapes}"
        elif entry.dtype not in found.dtypes:
            supported = ", ".join(found.dtypes)
            yield f"{entry.file}: {key} is {entry.dtype}, which is not supported (supported: {supported})"


def _why(tensor: StoredTensor) -> str:
    return f" ({tensor.why})" if tensor.why else ""
