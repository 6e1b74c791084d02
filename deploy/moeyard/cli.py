"""Command line: `moeyard serve | demo | verify | bench | cache-sim`. Errors of use: one line on stderr, exit code 2."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from moeyard import __version__
from moeyard.api_flags import add_api_arguments
from moeyard.door_config import add_door_arguments, door_config, log_config
from moeyard.flags import add_bench_arguments, add_engine_arguments, add_source_arguments, engine_config
from moeyard.lazy import load
from moeyard.model_source import add_model_argument, checkpoint
from moeyard_worker.config.cpu_config import set_cpu_environment
from moeyard_worker.config.engine_config import DTYPE_BYTES, EXPERT_POLICIES
from moeyard_worker.experts.sim import belady, format_table, simulate


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line. `origin` is what to say before one: where the flags come from."""

    origin = ""

    def error(self, message: str) -> NoReturn:
        """Print the message and where to read on, and exit with code 2."""
        fail(f"{self.origin}{message}; see `{self.prog} --help`")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(prog="moeyard", description="Serve Mixture-of-Experts language models.")
    parser.add_argument("--version", action="version", version=f"moeyard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a checkpoint behind an OpenAI-compatible API")
    add_source_arguments(serve)
    serve.add_argument(
        "--config", metavar="FILE", help="flags out of a YAML file, keys without dashes; the command line goes first"
    )
    add_engine_arguments(serve)
    add_door_arguments(serve)
    add_api_arguments(serve)
    serve.set_defaults(run=run_serve, parser=serve)

    demo = commands.add_parser("demo", help="serve the bundled checkpoint, stream one chat completion and show figures")
    demo.add_argument("--once", action="store_true", help="exit after the figures")
    add_engine_arguments(demo)
    add_api_arguments(demo)
    demo.set_defaults(run=run_demo, model=None, workers=2, load_format="auto", shape=None, layers=None)

    verify = commands.add_parser("verify", help="compare a checkpoint's logits and greedy tokens with transformers")
    add_model_argument(verify, nargs=None)
    verify.add_argument(
        "--dtype", choices=tuple(DTYPE_BYTES), default="float32", help="to compute in (default %(default)s)"
    )
    verify.set_defaults(run=run_verify)

    bench = commands.add_parser("bench", help="measure; `moeyard bench engine` measures one worker's engine in process")
    subjects = bench.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    engine = subjects.add_parser("engine", help="latencies and rates of one engine, without router, sockets and peers")
    add_bench_arguments(engine)
    engine.set_defaults(run=run_bench_engine)

    sim = commands.add_parser("cache-sim", help="replay recorded routing through an expert-cache policy")
    sim.add_argument("file", help="what --record-routing wrote")
    sim.add_argument("--policy", choices=EXPERT_POLICIES, help="residency policy (default: as recorded)")
    sim.add_argument(
        "--slots", type=int, nargs="+", metavar="N", help="slots per rank; several compare (default: as recorded)"
    )
    sim.set_defaults(run=run_cache_sim)
    return parser


def run_serve(args: argparse.Namespace) -> int:
    """`moeyard serve`."""
    door, log = door_config(args), log_config(args)
    return int(load("moeyard.serve").serve(args, engine_config(args), door=door, log=log))


def run_demo(args: argparse.Namespace) -> int:
    """`moeyard demo`."""
    return int(load("moeyard.demo").demo(args, engine_config(args)))


def run_verify(args: argparse.Namespace) -> int:
    """`moeyard verify`."""
    if find_spec("transformers") is None:
        raise ValueError("verify needs transformers: pip install 'moeyard[verify]'")
    set_cpu_environment()
    return int(load("moeyard_worker.engine.verify").verify(checkpoint(args), dtype=args.dtype))


def run_bench_engine(args: argparse.Namespace) -> int:
    """`moeyard bench engine`."""
    set_cpu_environment()
    return int(load("moeyard.bench.engine").bench_engine(args))


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
    words = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(words)
    try:
        if getattr(args, "config", None) is not None:
            # The command is the first word: before it stands nothing that lets a command run.
            args = load("moeyard.config_file").with_config_file(args, words[1:])
        return int(args.run(args))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except ValueError as error:
        fail(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
