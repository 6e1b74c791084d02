"""Checks of `moeyard serve` before any download or start. `moeyard doctor` runs the same ones."""

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moeyard.entry import load
from moeyard.fleet.placing import placement_of
from moeyard.local.settings import ApiSettings, answer_formats_of, check_compression
from moeyard_kernels.cpu import footprint
from moeyard_router.text.answer_formats import AnswerFormats
from moeyard_router.text.chat import open_codec
from moeyard_router.text.patterns import check_patterns
from moeyard_worker.checkpoint.check import CheckedCheckpoint, DummyCheckpoint, check_weights
from moeyard_worker.config.engine_config import EngineConfig, format_size
from moeyard_worker.config.placement import Placement
from moeyard_worker.engine.assembly.fitting import plan_or_suggest
from moeyard_worker.engine.memory.host_memory import available_memory
from moeyard_worker.engine.memory.plan import MemoryPlan, plan_memory
from moeyard_worker.experts.recorder import rank_path
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.spec import ModelSpec, model_spec

if TYPE_CHECKING:  # huggingface_hub takes half a second to load
    from moeyard.local.hub import Download


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Facts that are known before the start.

    `formats`: parsers of answers. `plan`: a worker's memory plan, None if only the worker can make it. `download`:
    weights that are missing from the cache (`hub.Download`), or None.
    """

    formats: AnswerFormats
    plan: MemoryPlan | None
    download: "Download | None" = None


def check_before_start(
    config: EngineConfig,
    model: ModelConfig,
    *,
    api: ApiSettings,
    local: bool,
    placement: Placement | None = None,
    hub_model: str | None = None,
) -> Checked:
    """Run all checks that need no worker: files, shards and (on this machine) memory. Raises ValueError.

    `hub_model`: the hub id of `config.model_path`. For weights not downloaded yet, check their names only.
    """
    check_compression(api, config, model)
    download: Download | None = None
    if hub_model is not None and config.model_path is not None:
        download = load("moeyard.local.hub").missing_weights(hub_model, Path(config.model_path))
    checkpoint: CheckedCheckpoint | DummyCheckpoint | ModelSpec
    checkpoint = check_weights(config, model) if download is None else check_names(download, model)
    codec = open_codec(None if config.model_path is None else Path(config.model_path), api.chat_template)
    if config.model_path is not None:
        check_patterns(Path(config.model_path) / "tokenizer.json")
    formats = answer_formats_of(codec, api)
    placement = placement or placement_of("linear", model, config.num_workers)
    if local:
        check_trace(config)
    elif ":" in config.device:
        raise ValueError(f"--device {config.device}: a Ray cluster gives out its GPUs; use --device cuda")
    plan = None
    # Only a process with torch knows a GPU's memory, so a GPU worker makes its own plan.
    if local and config.device == "cpu":
        dtype = model.served_dtype(config.dtype)
        planner = partial(
            plan_memory,
            model=model,
            dtype=dtype,
            resident_bytes=checkpoint.resident_bytes(dtype, footprint),
            footprints=footprint,
            num_local_experts=max(placement.num_owned(rank) for rank in placement.ranks),
        )
        plan = plan_or_suggest(planner, config, available_memory() // config.num_workers)
    if download is not None:
        download.check_room()
    return Checked(formats=formats, plan=plan, download=download)


def check_names(download: "Download", model: ModelConfig) -> ModelSpec:
    """Return the spec of `model`. Raises ValueError if the index of a download lacks a tensor."""
    spec = model_spec(model, download.keys)
    absent = [key for key in spec.expected() if key not in download.keys] if download.keys else []
    if absent:
        more = f" (and {len(absent) - 1} more like this)" if len(absent) > 1 else ""
        raise ValueError(
            f"{download.model}: its index names no tensor {absent[0]}, which config.json calls for{more}; nothing was "
            "downloaded"
        )
    return spec


def fetch_missing(checked: Checked, config: EngineConfig, model: ModelConfig) -> None:
    """Download missing weights. First print their size and the memory that serving needs."""
    if checked.download is None:
        return
    print(f"{checked.download.model}: {checked.download}; {needs(checked, config, model)}", file=sys.stderr, flush=True)
    load("moeyard.local.hub").download(checked.download)
    check_weights(config, model)


def needs(checked: Checked, config: EngineConfig, model: ModelConfig) -> str:
    """Describe the weights' memory over all workers, and a worker's plan if known."""
    dtype = model.served_dtype(config.dtype)
    experts = len(model.moe_layers) * model.num_experts * model.expert_form(dtype).blob_bytes
    dense = model_spec(model, ()).resident_bytes(dtype, footprint)
    whole = f"in memory the experts take {format_size(experts)} in all, other weights {format_size(dense)} per worker"
    return whole if checked.plan is None else f"{whole}; a worker has {checked.plan}"


def check_trace(config: EngineConfig) -> None:
    """Raise ValueError if a rank cannot write its --record-routing file."""
    if config.record_routing is None:
        return
    for rank in range(config.num_workers):
        path = rank_path(Path(config.record_routing), rank=rank, world_size=config.num_workers)
        if path.is_dir():
            raise ValueError(f"--record-routing {path} is a directory; name a file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            what = "it" if path.exists() else "its directory"
            raise ValueError(f"--record-routing {path}: {what} cannot be written; name another one")
