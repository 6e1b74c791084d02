"""The flags of every command that starts an engine, and the EngineConfig that they describe."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moeyard.cli.door_flags import add_door_arguments, byte_size, count, duration
from moeyard.cli.expert_flags import add_expert_arguments
from moeyard.cli.parser import Arguments
from moeyard.cli.recovery_flags import add_recovery_arguments
from moeyard.cli.step_flags import add_step_arguments, default_seqs, speculation_fields
from moeyard.local.device_choice import choose_device
from moeyard.local.model_source import add_model_argument, described, hub_id, local_directory
from moeyard_router.config import METRIC_ALIASES
from moeyard_worker.config.engine_config import (
    DEVICE_DEFAULTS,
    DTYPES,
    EXCHANGES,
    LOAD_FORMATS,
    EngineConfig,
)
from moeyard_worker.models.shapes import SHAPES, shape_model

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {f.name: None if f.default is MISSING else f.default for f in fields(EngineConfig)}
)
# The flags that most starts need; `--help` explains these, `--help-all` all.
EVERYDAY = (
    *("--workers", "--device", "--host", "--port", "--api-key-file", "--served-model-name"),
    *("--max-model-len", "--max-num-seqs", "--kv-memory", "--expert-memory"),
)
# Flags whose names differ from the field they set.
FLAGS = MappingProxyType(
    {"num_workers": "--workers", "prefix_caching": "--no-prefix-caching", "num_layers": "--layers"}
)


def port(text: str) -> int:
    """argparse type of a TCP port, 0 included."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; ports go from 0 to 65535")
    return int(text)


def device(text: str) -> str:
    """argparse type of --device."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, cpu, cuda or cuda:N")
    return text


def add_source_arguments(parser: argparse.ArgumentParser, *, config_file: bool = False) -> None:
    """Add flags for the model: a checkpoint, or random weights for a shape. `config_file`: and for a file of flags."""
    group = parser.add_argument_group("the model")
    add_model_argument(parser, group, otherwise=" (default: the bundled demo)")
    if config_file:
        text = "flags out of a YAML file, keys without dashes; the command line goes first"
        group.add_argument("--config", metavar="FILE", help=text)
    group.add_argument(
        "--load-format",
        choices=LOAD_FORMATS,
        default=DEFAULTS["load_format"],
        help="dummy: no checkpoint, random weights for --shape (default %(default)s: safetensors)",
    )
    add_shape_arguments(group)


def add_shape_arguments(parser: Arguments) -> None:
    """A published architecture, whole or cut."""
    parser.add_argument("--shape", choices=tuple(SHAPES), metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, metavar="N", help="the shape's first N layers (default: all)")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of every command that starts a fleet, in groups; defaults are EngineConfig's."""
    _add_worker_arguments(parser.add_argument_group("workers"))
    _add_memory_arguments(parser.add_argument_group("memory"))
    _add_request_arguments(parser.add_argument_group("sequences and steps"))
    _add_http_arguments(parser.add_argument_group("HTTP"))
    limits = parser.add_argument_group("limits for clients")
    limits.add_argument(
        "--max-waiting",
        type=int,
        default=DEFAULTS["max_waiting"],
        metavar="N",
        help="requests of a rank that wait and cannot start yet before 429 (default %(default)s)",
    )
    add_door_arguments(limits)
    add_recovery_arguments(parser.add_argument_group("lost workers"))
    _add_cluster_arguments(parser.add_argument_group("a Ray cluster"))


def _add_worker_arguments(group: Arguments) -> None:
    add = group.add_argument
    add(
        "--workers",
        type=int,
        default=DEFAULTS["num_workers"],
        metavar="N",
        help="expert-parallel ranks, one Ray actor each (default %(default)s)",
    )
    add(
        "--device",
        type=device,
        default="auto",
        metavar="NAME",
        help="cpu, cuda (a GPU each) or cuda:N; auto: cuda where each worker has a GPU, else cpu (default %(default)s)",
    )
    add(
        "--exchange",
        choices=EXCHANGES,
        default=DEFAULTS["exchange"],
        help="nvlink: between GPUs of one host that reach each other, inside CUDA graphs; nccl: between any GPUs; zmq: "
        "shared memory on one host, TCP between hosts; zmq-tcp: always TCP (default %(default)s: nvlink where it can "
        "be, nccl between other GPUs of one host, else zmq)",
    )
    add(
        "--mesh-encryption",
        choices=("on", "off"),
        default="on",
        help="of activations over TCP; off: a password in clear still keeps strangers out, and what moves can be read "
        "(default %(default)s)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default=DEFAULTS["dtype"],
        help="of weights and activations (default: the checkpoint's)",
    )
    add(
        "--threads",
        type=int,
        default=DEFAULTS["threads"],
        metavar="N",
        help="OpenMP threads of a worker, 1 or 2 (default %(default)s)",
    )
    add(
        "--step-deadline",
        type=float,
        default=DEFAULTS["step_deadline"],
        metavar="S",
        help="seconds a step may wait for a peer (default %(default)s)",
    )
    add(
        "--expert-placement",
        default="linear",
        metavar="HOW",
        help="which rank computes which expert: linear (contiguous shards), round_robin (in turn, for routers that "
        'choose by groups), or a FILE, {"owners": [rank, ...]} for all MoE layers or by layer, and "copies" on second '
        "ranks: see `moeyard experts` (default %(default)s)",
    )


def _add_memory_arguments(group: Arguments) -> None:
    add = group.add_argument
    add_expert_arguments(group, DEFAULTS)
    text = "KV pages of each rank, e.g. 1GiB (default: from the limits below and free memory)"
    add("--kv-memory", type=byte_size, metavar="SIZE", help=text)
    text = "of it for snapshots of linear attention's state, behind which prompts are reused (default: half)"
    add("--snapshot-memory", type=byte_size, metavar="SIZE", help=text)


def _add_request_arguments(group: Arguments) -> None:
    add = group.add_argument
    add(
        "--max-model-len",
        type=int,
        metavar="N",
        help="longest prompt + output (default: the model's, or what the KV pages hold)",
    )
    add(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help=f"sequences running at once on a rank (default {DEFAULTS['max_num_seqs']}, or --max-batch-tokens if less)",
    )
    add(
        "--max-batch-tokens",
        type=int,
        metavar="N",
        help=f"rows of one step on a rank (default {both('max_batch_tokens')})",
    )
    add(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help=f"prompt rows of one sequence in a step (default {both('prefill_chunk')})",
    )
    add(
        "--mixed-prefill-tokens",
        type=int,
        metavar="N",
        help=(
            "prompt rows of a step in which any rank has output rows (default: as many as fit; on a GPU "
            f"{DEVICE_DEFAULTS['cuda']['mixed_prefill_tokens']})"
        ),
    )
    add("--no-prefix-caching", action="store_true", help="compute every prompt from its first token")
    add_step_arguments(group)


def _add_http_arguments(group: Arguments) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address of the API (default %(default)s)")
    add("--port", type=port, default=8000, help="port of the API, 0 picks one (default %(default)s)")
    add(
        "--routers",
        type=count,
        default=1,
        metavar="N",
        help="processes that share the API's port; one serves about 25,000 tokens/s (default %(default)s)",
    )
    add(
        "--metric-aliases",
        choices=METRIC_ALIASES,
        action="append",
        default=[],
        help="add this program's names of metrics to the router's /metrics",
    )
    add(
        "--shutdown-timeout",
        type=duration,
        default=3.0,
        metavar="S",
        help="seconds for open answers on SIGTERM or Ctrl-C; a second signal ends them at once (default %(default)g)",
    )


def _add_cluster_arguments(group: Arguments) -> None:
    add = group.add_argument
    add("--ray-address", metavar="HOST:PORT", help="a running Ray cluster; without it a private one is started here")
    add(
        "--wait-for-cluster",
        type=duration,
        default=0.0,
        metavar="S",
        help="seconds for a Ray cluster to have as many CPUs (and GPUs) as there are workers (default %(default)g)",
    )
    bound = "address workers bind (default: 127.0.0.1, or each node's own in a cluster)"
    add("--worker-host", metavar="ADDR", help=bound)
    add(
        "--metrics-port-base",
        type=port,
        default=0,
        metavar="P",
        help="worker r exports metrics at P + r (default: any free port each)",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The EngineConfig that the flags describe; raises ValueError naming the flag at fault.

    The description of a model of the hub is fetched after all flags are checked; its weights are not.
    """
    choose_device(args)
    try:
        config = _engine_config(args)
        if config.shape is not None:
            shape_model(config.shape, config.num_layers)
        # Nothing is fetched for flags that are wrong.
        return config if hub_id(args.model) is None else replace(config, model_path=described(args))
    except ValueError as error:
        raise ValueError(with_flags(str(error))) from error


def with_flags(message: str) -> str:
    """A message about fields of EngineConfig in words of the command line."""
    names = "|".join(f.name for f in fields(EngineConfig) if "_" in f.name)
    return re.sub(rf"\b({names})\b", lambda m: FLAGS.get(m[0], f"--{m[0].replace('_', '-')}"), message)


def both(name: str) -> str:
    """A field's default on a CPU and on a GPU, in words."""
    return f"{DEFAULTS[name]}; on a GPU {DEVICE_DEFAULTS['cuda'][name]}"


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    usual = {**DEFAULTS, **DEVICE_DEFAULTS["cpu" if args.device == "cpu" else "cuda"]}
    rows = args.max_batch_tokens or usual["max_batch_tokens"]
    asynchronous = usual["async_scheduling"] if args.async_scheduling is None else args.async_scheduling
    return EngineConfig(
        model_path=None
        if args.load_format == "dummy" and args.model is None
        else hub_id(args.model) or local_directory(args),
        load_format=args.load_format,
        shape=args.shape,
        num_layers=args.layers,
        num_workers=args.workers,
        exchange=args.exchange,
        mesh_encryption=args.mesh_encryption == "on",
        dtype=args.dtype,
        expert_slots=args.expert_slots,
        expert_memory=args.expert_memory,
        expert_policy=args.expert_policy,
        expert_fetch=args.expert_fetch,
        record_routing=None if args.record_routing is None else str(Path(args.record_routing).resolve()),
        kv_memory=args.kv_memory,
        snapshot_memory=args.snapshot_memory,
        max_model_len=args.max_model_len,
        device=args.device,
        page_size=usual["page_size"],
        max_batch_tokens=rows,
        # Only a default may be lowered without a word.
        max_num_seqs=args.max_num_seqs or default_seqs(args, rows),
        prefill_chunk=args.prefill_chunk or usual["prefill_chunk"],
        mixed_prefill_tokens=args.mixed_prefill_tokens or usual["mixed_prefill_tokens"],
        max_waiting=args.max_waiting,
        max_queue_seconds=args.max_queue_seconds,
        prefix_caching=not args.no_prefix_caching,
        async_scheduling=asynchronous,
        enforce_eager=args.enforce_eager,
        **speculation_fields(args),
        step_deadline=args.step_deadline,
        threads=args.threads,
    )
