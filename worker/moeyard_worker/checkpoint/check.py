"""Proof that a checkpoint is complete: every tensor in it is used, or named as skipped with the reason. Pure.

Weights of chance stand in for a checkpoint in the same form: there is nothing to prove of them, only sizes to tell.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moeyard_kernels.types.footprint import Footprints
from moeyard_worker.checkpoint.formats.format import StoredTensor
from moeyard_worker.checkpoint.identity import identity
from moeyard_worker.checkpoint.index import INDEX_NAME, SINGLE_NAME, CheckpointIndex, open_index
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.models.family import Names
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.spec import ModelSpec, model_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCheckpoint:
    """An index that holds exactly what `spec` needs. `skipped` maps the other keys to why they are not loaded.

    `identity` tells it from others (`identity.py`).
    """

    index: CheckpointIndex
    spec: ModelSpec
    skipped: Mapping[str, str]
    identity: Mapping[str, tuple[str, str]]

    def dense_bytes(self) -> int:
        """Bytes of the stored tensors that every rank reads: everything but experts. `progress` adds up to it."""
        parts = (part for each in self.spec.dense() for part in each.parts)
        return sum(self.index.entries[key].num_bytes for key in self.spec.stored(parts))

    def resident_bytes(self, dtype: str, footprints: Footprints) -> int:
        """Bytes that the same weights take in memory, served in `dtype`."""
        return self.spec.resident_bytes(dtype, footprints)


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyCheckpoint:
    """Random weights in place of a checkpoint, served in `dtype`."""

    spec: ModelSpec
    dtype: str

    identity = skipped = MappingProxyType[str, Any]({})  # nothing is read

    def dense_bytes(self) -> int:
        """Bytes of the weights that every rank draws. `progress` adds up to it."""
        return self.spec.dense_bytes(self.dtype)

    def resident_bytes(self, dtype: str, footprints: Footprints) -> int:
        """Bytes that they take in memory, with the one expert that is drawn before it is put into its slot."""
        return self.spec.resident_bytes(dtype, footprints) + self.spec.config.expert_form(dtype).blob_bytes


def check_weights(config: EngineConfig, model: ModelConfig) -> CheckedCheckpoint | DummyCheckpoint:
    """Where the weights of `model` come from, proven complete. Raises CheckpointError; nothing is loaded."""
    if config.load_format == "dummy":
        return DummyCheckpoint(spec=model_spec(model, ()), dtype=model.served_dtype(config.dtype))
    assert config.model_path is not None, "EngineConfig demands it of every other format"
    return check_checkpoint(open_index(config.model_path), model)


def check_checkpoint(index: CheckpointIndex, config: ModelConfig) -> CheckedCheckpoint:
    """Compare the stored tensors with what the model needs; one CheckpointError says the first problem and how many."""
    spec = model_spec(config, index.entries)
    expected = spec.expected()
    skipped: dict[str, str] = {}
    for key in index.entries:
        reason = None if key in expected else _skip_reason(index, config, key, spec.names)
        if reason is not None:
            skipped[key] = reason
    drafts = spec.names.draft_layer.format(i=spec.names.first_draft(config.num_layers))
    if config.drafts and not any(key.startswith(drafts) for key in index.entries):
        raise CheckpointError(
            f"{index.directory}: no layer for multi-token prediction, whose tensors would begin with {drafts}; serve "
            "it without --speculate"
        )
    problems = list(_problems(index, expected, skipped))
    if problems:
        more = f" (and {len(problems) - 1} more like this)" if len(problems) > 1 else ""
        raise CheckpointError(problems[0] + more)
    return CheckedCheckpoint(index=index, spec=spec, skipped=MappingProxyType(skipped), identity=identity(index))


def _skip_reason(index: CheckpointIndex, config: ModelConfig, key: str, names: Names) -> str | None:
    layer = re.match(names.draft_layer.partition("{i}")[0] + r"(\d+)\.", key, re.ASCII)
    first = names.first_draft(config.num_layers)
    if layer and first + config.drafts <= int(layer[1]) < first + config.num_mtp_layers:
        return "multi-token prediction layer"
    if names.drafts_apart and not config.drafts and key.startswith(names.draft_parts):
        return "multi-token prediction layer"
    if config.drafts and key in (names.layer.format(i=config.num_layers) + copy for copy in names.copies):
        return "the model's own embedding or head once more"
    for beginning, reason in names.skipped:
        if key.startswith(beginning):
            return reason
    if config.shared_gate and not config.shared_intermediate_size and key.endswith(names.shared_gate):
        return "the gate of a shared expert that holds nothing"
    if key.endswith("rotary_emb.inv_freq"):
        return "computed from config.json"
    if key == names.lm_head and config.tie_word_embeddings:
        return "tied to the embedding"
    if 0 in index.entries[key].shape:
        return "holds no elements"
    return None


def _problems(
    index: CheckpointIndex, expected: Mapping[str, StoredTensor], skipped: Mapping[str, str]
) -> Iterator[str]:
    files = {entry.file for entry in index.entries.values()}
    where = next(iter(files)) if len(files) == 1 else index.directory / INDEX_NAME
    if not files:
        where = index.directory / SINGLE_NAME
    for key, wanted in expected.items():
        if key not in index.entries:
            yield f"{where}: no tensor {key} of shape {list(wanted.shape)}, which config.json calls for"
    for key, entry in index.entries.items():
        if key in skipped:
            continue
        if key not in expected:
            yield f"{entry.file}: unexpected tensor {key} of shape {list(entry.shape)}"
        elif entry.shape != expected[key].shape:
            wanted = expected[key]
            yield f"{entry.file}: {key} has shape {list(entry.shape)}, config.json calls for {list(wanted.shape)}"
        elif entry.dtype not in expected[key].dtypes:
            supported = ", ".join(expected[key].dtypes)
            yield f"{entry.file}: {key} is {entry.dtype}, which is not supported (supported: {supported})"
