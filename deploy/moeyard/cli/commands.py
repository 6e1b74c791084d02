"""Command line: `moeyard serve | chat | bench | doctor | ...`. Errors of use: one line on stderr, exit code 2."""

import argparse
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

from moeyard import __version__
from moeyard.cli.api_flags import add_api_arguments
from moeyard.cli.control_flags import (
    add_drain_arguments,
    add_restart_arguments,
    add_scale_arguments,
    add_undrain_arguments,
)
from moeyard.cli.door_config import add_door_arguments, door_config, log_config
from moeyard.cli.expert_commands import add_experts_command
from moeyard.cli.flags import EVERYDAY, add_engine_arguments, add_source_arguments, engine_config
from moeyard.cli.parser import Parser, fail
from moeyard.clients.bench.engine_flags import add_bench_arguments
from moeyard.clients.bench.server.flags import add_server_arguments
from moeyard.clients.target import add_target_arguments
from moeyard.entry import INTERRUPTED, leave
from moeyard.lazy import load
from moeyard.local.full_disk import outlive_full_disk
from moeyard.local.model_source import add_model_argument, checkpoint
from moeyard_worker.config.cpu_config import set_cpu_environment
from moeyard_worker.config.engine_config import DTYPE_BYTES, EXPERT_POLICIES
from moeyard_worker.experts.sim import belady, format_table, simulate

BENCH_SUBJECTS = ("server", "engine")
SHELLS = ("bash", "zsh", "fish")
EXAMPLES = """\
examples:
  moeyard serve Qwen/Qwen3-30B-A3B                              a model of the Hugging Face hub
  moeyard serve /path/to/checkpoint --workers 4 --device cuda   a directory, on four GPUs
  moeyard serve MODEL --host 0.0.0.0 --api-key-file keys        for clients on other machines
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(prog="moeyard", description="Serve Mixture-of-Experts language models.")
    parser.add_argument("--version", action="version", version=f"moeyard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = add_server_parser(commands, "serve", "serve a checkpoint behind an OpenAI-compatible API")
    serve.epilog = EXAMPLES
    add_source_arguments(serve, config_file=True)
    add_engine_arguments(serve)
    add_door_arguments(serve.add_argument_group("keys, TLS and logs"))
    add_api_arguments(serve.add_argument_group("the model in the API"))
    serve.set_defaults(run=run_serve, parser=serve)

    text = "serve the bundled checkpoint, stream one chat completion and show figures"
    demo = add_server_parser(commands, "demo", text, without=("--api-key-file",))
    demo.add_argument("--once", action="store_true", help="exit after the figures")
    add_engine_arguments(demo)
    add_api_arguments(demo.add_argument_group("the model in the API"))
    demo.set_defaults(run=run_demo, model=None, workers=2, load_format="auto", shape=None, layers=None)

    verify = commands.add_parser("verify", help="compare a checkpoint's logits and greedy tokens with transformers")
    add_model_argument(verify, nargs=None)
    verify.add_argument(
        "--dtype", choices=tuple(DTYPE_BYTES), default="float32", help="to compute in (default %(default)s)"
    )
    verify.set_defaults(run=run_verify)

    bench = commands.add_parser(
        "bench", help="measure a running server (`moeyard bench URL`) or one engine (`moeyard bench engine`)"
    )
    subjects = bench.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    server = subjects.add_parser(
        "server", help="any OpenAI-compatible server, over HTTP; `moeyard bench URL` is short for `bench server URL`"
    )
    add_server_arguments(server)
    server.set_defaults(run=run_bench_server)
    engine = subjects.add_parser("engine", help="latencies and rates of one engine, without router, sockets and peers")
    add_bench_arguments(engine)
    engine.set_defaults(run=run_bench_engine)

    add_people_commands(commands)
    add_upkeep_commands(commands)

    sim = commands.add_parser("cache-sim", help="replay recorded routing through an expert-cache policy")
    sim.add_argument("file", help="what --record-routing wrote")
    sim.add_argument("--policy", choices=EXPERT_POLICIES, help="residency policy (default: as recorded)")
    sim.add_argument(
        "--slots", type=int, nargs="+", metavar="N", help="slots per rank; several compare (default: as recorded)"
    )
    sim.set_defaults(run=run_cache_sim)
    add_experts_command(commands.add_parser("experts", help="which rank ought to compute which expert"))
    return parser


def add_server_parser(
    commands: "argparse._SubParsersAction[Parser]", name: str, text: str, *, without: tuple[str, ...] = ()
) -> Parser:
    """A command that takes the flags of a server, in groups; the everyday ones are those that it has."""
    return commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        usage=f"moeyard {name} [MODEL] [flags]" if name != "demo" else "moeyard demo [flags]",
        everyday=[flag for flag in EVERYDAY if flag not in without],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_people_commands(commands: "argparse._SubParsersAction[Parser]") -> None:
    """What people use beside a server."""
    chat = commands.add_parser("chat", help="talk with a running server; in a pipe: answer what comes in")
    add_target_arguments(chat)
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a field of the requests, e.g. temperature=0.7"
    )
    chat.set_defaults(run=run_chat)

    text = "what this machine has, and what `serve` with these flags would fail at"
    doctor = add_server_parser(commands, "doctor", text, without=("--api-key-file",))
    add_source_arguments(doctor)
    add_engine_arguments(doctor)
    add_api_arguments(doctor.add_argument_group("the model in the API"))
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    doctor.set_defaults(run=run_doctor)

    completion = commands.add_parser("completion", help="print what makes a shell complete these commands")
    completion.add_argument("shell", choices=SHELLS, help='e.g. eval "$(moeyard completion bash)" in ~/.bashrc')
    completion.set_defaults(run=run_completion)


def add_upkeep_commands(commands: "argparse._SubParsersAction[Parser]") -> None:
    """What is done to ranks of a server that runs on this machine."""
    for name, add, text in (
        ("drain", add_drain_arguments, "take a rank's requests away; it computes its experts for the others"),
        ("undrain", add_undrain_arguments, "let a drained rank take requests again"),
        ("restart", add_restart_arguments, "drain ranks and give them new processes, one after the other"),
        ("scale", add_scale_arguments, "have more workers, or fewer, while requests run"),
    ):
        command = commands.add_parser(name, help=text)
        add(command)
        command.set_defaults(run=run_upkeep)


def run_upkeep(args: argparse.Namespace) -> int:
    """`moeyard drain`, `undrain`, `restart` and `scale`."""
    return int(getattr(load("moeyard.clients.control_client"), args.command)(args))


def run_serve(args: argparse.Namespace) -> int:
    """`moeyard serve`."""
    outlive_full_disk()
    door, log = door_config(args), log_config(args)
    return int(load("moeyard.local.serve").serve(args, engine_config(args), door=door, log=log))


def run_demo(args: argparse.Namespace) -> int:
    """`moeyard demo`."""
    return int(load("moeyard.clients.demo").demo(args, engine_config(args)))


def run_verify(args: argparse.Namespace) -> int:
    """`moeyard verify`."""
    if find_spec("transformers") is None:
        raise ValueError("verify needs transformers: pip install 'moeyard[verify]'")
    set_cpu_environment()
    return int(load("moeyard_worker.engine.assembly.verify").verify(checkpoint(args), dtype=args.dtype))


def run_bench_server(args: argparse.Namespace) -> int:
    """`moeyard bench URL`."""
    return int(load("moeyard.clients.bench.server.run").bench_server(args))


def run_bench_engine(args: argparse.Namespace) -> int:
    """`moeyard bench engine`."""
    set_cpu_environment()
    return int(load("moeyard.clients.bench.engine").bench_engine(args))


def run_chat(args: argparse.Namespace) -> int:
    """`moeyard chat`."""
    return int(load("moeyard.clients.chat").chat(args))


def run_doctor(args: argparse.Namespace) -> int:
    """`moeyard doctor`."""
    set_cpu_environment()
    return int(load("moeyard.clients.doctor.run").doctor(args, lambda: engine_config(args)))


def run_completion(args: argparse.Namespace) -> int:
    """`moeyard completion`."""
    print(load("shtab").complete(build_parser(), shell=args.shell))
    return 0


def run_cache_sim(args: argparse.Namespace) -> int:
    """`moeyard cache-sim`."""
    path = Path(args.file)
    for slots in args.slots or [None]:
        result = simulate(path, args.policy, slots)
        optima = belady(path, slots)
        print(format_table(result, optima))
    return 0


def with_subject(argv: list[str]) -> list[str]:
    """`bench URL` as `bench server URL`: whatever follows `bench` and is neither a subject nor a cry for help."""
    if argv[:1] == ["bench"] and len(argv) > 1 and argv[1] not in (*BENCH_SUBJECTS, "-h", "--help"):
        return ["bench", "server", *argv[1:]]
    return argv


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script."""
    try:
        if signal.getsignal(signal.SIGINT) is leave:
            # From here on it is an exception, which puts in order what has been begun.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        words = with_subject(sys.argv[1:] if argv is None else argv)
        args = build_parser().parse_args(words)
        if getattr(args, "config", None) is not None:
            # The command is the first word: before it stands nothing that lets a command run.
            args = load("moeyard.cli.config_file").with_config_file(args, words[1:])
        return int(args.run(args))
    except BrokenPipeError:
        # Who reads what is printed has left, as `head` does; Python would complain once more when it flushes.
        sys.stdout = None
        return 128 + signal.SIGPIPE
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except ValueError as error:
        fail(str(error), getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        # Whoever pressed it twice would otherwise end what is ending already, by the system's default.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
