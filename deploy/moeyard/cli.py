"""Command line: `moeyard serve | demo | verify | cache-sim`. Errors of use are one line on stderr and exit code 2."""

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from moeyard import __version__
from moeyard.lazy import load
from moeyard_worker.config.cpu_config import set_cpu_environment
from moeyard_worker.config.engine_config import (
    DEVICE_DEFAULTS,
    DTYPE_BYTES,
    DTYPES,
    EXCHANGES,
    EXPERT_POLICIES,
    EngineConfig,
    parse_size,
)
from moeyard_worker.experts.sim import belady, format_table, simulate

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {f.name: None if f.default is MISSING else f.default for f in fields(EngineConfig)}
)
# Flags whose names differ from the field they set.
FLAGS = MappingProxyType({"num_workers": "--workers", "prefix_caching": "--no-prefix-caching"})
DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo"


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and where to read on, and exit with code 2."""
        fail(f"{message}; see `{self.prog} --help`")


def port(text: str) -> int:
    """argparse type of a TCP port, 0 included."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; ports go from 0 to 65535")
    return int(text)


def size(text: str) -> int:
    """argparse type of a size in bytes."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def expert_memory(text: str) -> int | None:
    """argparse type of --expert-memory: a size, or auto for as much as fits."""
    return None if text == "auto" else size(text)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of every command that starts a fleet; defaults are EngineConfig's."""
    add = parser.add_argument
    add(
        "--workers",
        type=int,
        default=DEFAULTS["num_workers"],
        metavar="N",
        help="expert-parallel ranks, one Ray actor each (default %(default)s)",
    )
    add("--device", default=DEFAULTS["device"], metavar="NAME", help="cpu, cuda or cuda:N (default %(default)s)")
    add("--host", default="127.0.0.1", help="address of the API (default %(default)s)")
    add("--port", type=port, default=8000, help="port of the API, 0 picks one (default %(default)s)")
    add("--served-model-name", metavar="NAME", help="model name of the API (default: name of the directory)")
    add(
        "--exchange",
        choices=EXCHANGES,
        default=DEFAULTS["exchange"],
        help="zmq: shared memory on one host, TCP between hosts; zmq-tcp: always TCP (default %(default)s)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default=DEFAULTS["dtype"],
        help="of weights and activations (default: the checkpoint's)",
    )
    add("--expert-slots", type=int, metavar="N", help="expert-cache slots of each rank (default: as many as fit)")
    add(
        "--expert-memory",
        type=expert_memory,
        metavar="SIZE",
        help="expert-cache memory of each rank, e.g. 2GiB, or auto (default)",
    )
    add(
        "--expert-policy",
        choices=EXPERT_POLICIES,
        default=DEFAULTS["expert_policy"],
        help="residency policy (default %(default)s)",
    )
    add("--record-routing", metavar="FILE", help="record the experts each step needs, for cache-sim")
    add(
        "--kv-memory",
        type=size,
        metavar="SIZE",
        help="KV pages of each rank, e.g. 1GiB (default: from the limits below and free memory)",
    )
    add(
        "--max-model-len",
        type=int,
        metavar="N",
        help="longest prompt + output (default: the model's, or what the KV pages hold)",
    )
    add(
        "--max-batch-tokens",
        type=int,
        metavar="N",
        help=f"rows of one step on a rank (default {both('max_batch_tokens')})",
    )
    add(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help=f"sequences running at once on a rank (default {DEFAULTS['max_num_seqs']}, or --max-batch-tokens if less)",
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
            "prompt rows of a step that has output rows too (default: as many as fit; on a GPU "
            f"{DEVICE_DEFAULTS['cuda']['mixed_prefill_tokens']})"
        ),
    )
    add(
        "--max-waiting",
        type=int,
        default=DEFAULTS["max_waiting"],
        metavar="N",
        help="queued requests of a rank before 429 (default %(default)s)",
    )
    add("--no-prefix-caching", action="store_true", help="compute every prompt from its first token")
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="plan a step while the one before runs (default: on a GPU)",
    )
    add("--enforce-eager", action="store_true", help="capture no step in a CUDA graph")
    add(
        "--step-deadline",
        type=float,
        default=DEFAULTS["step_deadline"],
        metavar="S",
        help="seconds a step may wait for a peer (default %(default)s)",
    )
    add(
        "--threads",
        type=int,
        default=DEFAULTS["threads"],
        metavar="N",
        help="OpenMP threads of a worker, 1 or 2 (default %(default)s)",
    )
    add("--ray-address", metavar="HOST:PORT", help="a running Ray cluster; without it a private one is started here")
    add(
        "--worker-host",
        metavar="ADDR",
        help="address workers bind (default: 127.0.0.1, or each node's own in a cluster)",
    )
    add(
        "--metrics-port-base",
        type=port,
        default=0,
        metavar="P",
        help="worker r exports metrics at P + r (default: any free port each)",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The EngineConfig that the flags describe; raises ValueError naming the flag at fault."""
    try:
        return _engine_config(args)
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
        model_path=str(Path(args.model or bundled_model()).resolve()),
        num_workers=args.workers,
        exchange=args.exchange,
        dtype=args.dtype,
        expert_slots=args.expert_slots,
        expert_memory=args.expert_memory,
        expert_policy=args.expert_policy,
        record_routing=None if args.record_routing is None else str(Path(args.record_routing).resolve()),
        kv_memory=args.kv_memory,
        max_model_len=args.max_model_len,
        device=args.device,
        page_size=usual["page_size"],
        max_batch_tokens=rows,
        # Only a default may be lowered without a word.
        max_num_seqs=args.max_num_seqs or min(DEFAULTS["max_num_seqs"], rows),
        prefill_chunk=args.prefill_chunk or usual["prefill_chunk"],
        mixed_prefill_tokens=args.mixed_prefill_tokens or usual["mixed_prefill_tokens"],
        max_waiting=args.max_waiting,
        prefix_caching=not args.no_prefix_caching,
        async_scheduling=asynchronous,
        enforce_eager=args.enforce_eager,
        step_deadline=args.step_deadline,
        threads=args.threads,
    )


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(prog="moeyard", description="Serve Mixture-of-Experts language models.")
    parser.add_argument("--version", action="version", version=f"moeyard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a checkpoint behind an OpenAI-compatible API")
    serve.add_argument("model", nargs="?", help="local Hugging Face directory (default: the bundled demo)")
    add_engine_arguments(serve)
    serve.set_defaults(run=run_serve)

    demo = commands.add_parser("demo", help="serve the bundled checkpoint, stream one chat completion and show figures")
    demo.add_argument("--once", action="store_true", help="exit after the figures")
    add_engine_arguments(demo)
    demo.set_defaults(run=run_demo, model=None, workers=2)

    verify = commands.add_parser("verify", help="compare a checkpoint's logits and greedy tokens with transformers")
    verify.add_argument("model", help="local Hugging Face directory")
    verify.add_argument(
        "--dtype", choices=tuple(DTYPE_BYTES), default="float32", help="to compute in (default %(default)s)"
    )
    verify.set_defaults(run=run_verify)

    sim = commands.add_parser("cache-sim", help="replay recorded routing through an expert-cache policy")
    sim.add_argument("file", help="what --record-routing wrote")
    sim.add_argument("--policy", choices=EXPERT_POLICIES, help="residency policy (default: as recorded)")
    sim.add_argument(
        "--slots", type=int, nargs="+", metavar="N", help="slots per rank; several compare (default: as recorded)"
    )
    sim.set_defaults(run=run_cache_sim)
    return parser


def bundled_model() -> str:
    """Directory of the demo checkpoint, which only a checkout of the project has; raises ValueError elsewhere."""
    if not DEMO_MODEL.is_dir():
        raise ValueError("the demo checkpoint is not part of an installed package; name a MODEL or use a checkout")
    return str(DEMO_MODEL)


def run_serve(args: argparse.Namespace) -> int:
    """`moeyard serve`."""
    return int(load("moeyard.serve").serve(args, engine_config(args)))


def run_demo(args: argparse.Namespace) -> int:
    """`moeyard demo`."""
    return int(load("moeyard.demo").demo(args, engine_config(args)))


def run_verify(args: argparse.Namespace) -> int:
    """`moeyard verify`."""
    if find_spec("transformers") is None:
        raise ValueError("verify needs transformers: pip install 'moeyard[verify]'")
    set_cpu_environment()
    return int(load("moeyard_worker.engine.verify").verify(args.model, dtype=args.dtype))


def run_cache_sim(args: argparse.Namespace) -> int:
    """`moeyard cache-sim`."""
    path = Path(args.file)
    for slots in args.slots or [None]:
        result = simulate(path, args.policy, slots)
        optima = belady(path, slots)
        print(format_table(result, optima))
    return 0


def fail(message: str) -> NoReturn:
    """Print one line on stderr and exit with code 2."""
    print(f"moeyard: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except ValueError as error:
        fail(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
