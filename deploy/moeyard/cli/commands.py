"""Command line: `moeyard serve | chat | bench | doctor | ...`. Errors of use: one line on stderr, exit code 2."""

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NoReturn, cast

from moeyard import __version__
from moeyard.cli.parser import Parser, fail
from moeyard.clients.bench.bench_config import ENGINE_OPTIONS, EngineBenchConfig, ServerBenchConfig
from moeyard.clients.target_config import add_target_arguments
from moeyard.entry import INTERRUPTED, leave, load
from moeyard.local.model_source import weights_source
from moeyard.local.serve_config import ServeConfig
from moeyard.logs import LogConfig
from moeyard.options import CHANGEABLE, add_options, count, duration, port, rank, read_with
from moeyard_router.config import KEY_VARIABLE, AccessConfig, RouterConfig
from moeyard_router.text.reasoning import REASONING_FORMATS
from moeyard_router.text.tool_formats import TOOL_FORMATS
from moeyard_worker.config.cpu_config import set_cpu_environment
from moeyard_worker.config.engine_config import DTYPE_BYTES, EXPERT_POLICIES, EngineConfig
from moeyard_worker.models.shapes import SHAPES, WRITTEN

BENCH_SUBJECTS = ("server", "engine")
SHELLS = ("bash", "zsh", "fish")
MODEL = "local Hugging Face directory, or an id of the hub"
# Flags that say where the description of MODEL is.
DESCRIPTION = ("revision", "hf_config_path", "tokenizer")
# The flags that most starts need; `--help` explains these, `--help-all` all.
EVERYDAY = (
    *("--workers", "--device", "--host", "--port", "--api-key-file", "--served-model-name"),
    *("--max-model-len", "--max-num-seqs", "--kv-memory", "--expert-memory"),
)
# Groups of flags in the help of a command that serves, in their order.
ENGINE_GROUPS = (
    *("workers", "memory", "sequences and steps", "HTTP", "limits for clients", "lost workers", "a Ray cluster"),
)
EXAMPLES = """\
examples:
  moeyard serve Qwen/Qwen3-30B-A3B                              a model of the Hugging Face hub
  moeyard serve /path/to/checkpoint --workers 4 --device cuda   a directory, on four GPUs
  moeyard serve MODEL --host 0.0.0.0 --api-key-file keys        for clients on other machines
"""
Commands = argparse._SubParsersAction


@dataclass(frozen=True, slots=True)
class Late:
    """A command whose module is imported when it runs. `on_cpu`: torch finds its settings for a CPU."""

    module: str
    function: str
    on_cpu: bool = False

    def __call__(self, args: argparse.Namespace) -> int:
        if self.on_cpu:
            set_cpu_environment()
        return int(getattr(load(self.module), self.function)(args))


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(prog="moeyard", description="Serve Mixture-of-Experts language models.")
    parser.add_argument("--version", action="version", version=f"moeyard {__version__}")
    commands: Commands[Parser] = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_serving_commands(commands)

    verify = commands.add_parser("verify", help="compare a checkpoint's logits and greedy tokens with transformers")
    verify.add_argument("model", metavar="MODEL", help=MODEL)
    add_options(verify, ServeConfig, only=DESCRIPTION)
    verify.add_argument(
        "--dtype", choices=tuple(DTYPE_BYTES), default="float32", help="to compute in (default %(default)s)"
    )
    verify.set_defaults(run=run_verify)

    add_conversion_commands(commands)

    bench = commands.add_parser(
        "bench", help="measure a running server (`moeyard bench URL`) or one engine (`moeyard bench engine`)"
    )
    subjects = bench.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    server = subjects.add_parser(
        "server", help="any OpenAI-compatible server, over HTTP; `moeyard bench URL` is short for `bench server URL`"
    )
    add_target_arguments(server)
    add_options(server, ServerBenchConfig)
    server.set_defaults(run=Late("moeyard.clients.bench.server", "bench_server"))
    engine = subjects.add_parser("engine", help="latencies and rates of one engine, without router, sockets and peers")
    engine.add_argument("model", metavar="MODEL", nargs="?", help=f"{MODEL} (or --shape)")
    add_options(engine, ServeConfig, only=("revision",))
    add_options(engine, EngineConfig, only=ENGINE_OPTIONS, choices={"shape": tuple(SHAPES)})
    add_options(engine, EngineBenchConfig)
    engine.set_defaults(run=Late("moeyard.clients.bench.engine", "bench_engine", on_cpu=True))

    chat = commands.add_parser("chat", help="talk with a running server; in a pipe: answer what comes in")
    add_target_arguments(chat)
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a field of the requests, e.g. temperature=0.7"
    )
    chat.set_defaults(run=Late("moeyard.clients.chat", "chat"))
    replay = commands.add_parser("replay", help="run logged requests again and compare the answers bit by bit")
    replay.add_argument("log", metavar="LOG", help="what `serve --log-requests LOG --log-prompts` wrote")
    add_target_arguments(replay, url="--url")
    text = "requests at once, which cannot change an answer (default %(default)d)"
    replay.add_argument("--concurrency", type=read_with(count), default=8, metavar="N", help=text)
    replay.set_defaults(run=Late("moeyard.clients.replay", "replay"))
    completion = commands.add_parser("completion", help="print what makes a shell complete these commands")
    completion.add_argument("shell", choices=SHELLS, help='e.g. eval "$(moeyard completion bash)" in ~/.bashrc')
    completion.set_defaults(run=run_completion)

    add_control_commands(commands)
    add_expert_commands(commands)
    return parser


def add_serving_commands(commands: "Commands[Parser]") -> None:
    """`serve`, `demo` and `doctor`, which take the flags of a server."""
    model, api = "the model", "the model in the API"
    text = "serve a checkpoint behind an OpenAI-compatible API"
    groups = (model, *ENGINE_GROUPS, "keys, TLS and logs", api)
    serve = add_server_command(commands, "serve", text, groups=groups)
    serve.epilog = EXAMPLES
    serve.add_argument("--api-key", nargs="?", action=_NoKeyHere, help=argparse.SUPPRESS)
    serve.set_defaults(run=Late("moeyard.local.serve", "run"))

    text = "serve the bundled checkpoint, stream one chat completion and show figures"
    demo = add_server_command(commands, "demo", text, groups=(*ENGINE_GROUPS, api))
    demo.add_argument("--once", action="store_true", help="exit after the figures")
    run = Late("moeyard.clients.demo", "demo")
    demo.set_defaults(run=run, model=None, workers=2, load_format="auto", shape=None, layers=None)

    text = "what this machine has, and what `serve` with these flags would fail at"
    doctor = add_server_command(commands, "doctor", text, groups=(model, *ENGINE_GROUPS, api))
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    doctor.set_defaults(run=Late("moeyard.clients.doctor", "doctor", on_cpu=True))


def add_server_command(commands: "Commands[Parser]", name: str, text: str, *, groups: Sequence[str]) -> Parser:
    """A command that takes the flags of a server, in groups; the everyday ones are those that it has."""
    with_keys = "keys, TLS and logs" in groups
    parser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        usage=f"moeyard {name} [MODEL] [flags]" if "the model" in groups else f"moeyard {name} [flags]",
        everyday=[flag for flag in EVERYDAY if with_keys or flag != "--api-key-file"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if "the model" in groups:
        parser.add_argument("model", metavar="MODEL", nargs="?", help=f"{MODEL} (default: the bundled demo)")
    formats = {"tool_call_parser": TOOL_FORMATS, "reasoning_parser": REASONING_FORMATS}
    add_options(
        parser,
        *(EngineConfig, ServeConfig, RouterConfig, AccessConfig, LogConfig),
        groups=groups,
        choices={"shape": tuple(SHAPES), **{name: ("auto", "none", *known) for name, known in formats.items()}},
        without=() if name == "serve" else ("config",),
    )
    return parser


def add_conversion_commands(commands: "Commands[Parser]") -> None:
    """Commands that write another form of a checkpoint."""
    for name, text in (
        ("quantize", "write a checkpoint in fp8, its experts in int4, or a GGUF file of Q8_0, rounded to nearest"),
        ("dequantize", "write the bfloat16 checkpoint that a quantised one stands for"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("model", metavar="MODEL", help=MODEL)
        if name == "quantize":
            command.add_argument(
                "--to", required=True, choices=(*WRITTEN, "q8_0"), help="form of the quantised matrices"
            )
        command.add_argument("--out", required=True, metavar="DIR", help="directory to write, which must not exist")
        add_options(command, ServeConfig, only=DESCRIPTION if name == "dequantize" else ("revision",))
        command.set_defaults(run=Late("moeyard.clients.convert", name, on_cpu=True))


class _NoKeyHere(argparse.Action):
    """vLLM's --api-key, refused with the reason."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        parser.error(
            f"--api-key would show the key to everybody on this machine; use --api-key-file FILE or {KEY_VARIABLE}"
        )


def add_control_commands(commands: "Commands[Parser]") -> None:
    """Commands to the ranks of a server that runs on this machine."""
    timeout = "seconds for what runs there, which then goes on at other ranks (default %(default)g)"
    for name, text in (
        ("drain", "take a rank's requests away; it computes its experts for the others"),
        ("undrain", "let a drained rank take requests again"),
        ("restart", "drain ranks and give them new processes, one after the other"),
        ("scale", "have more workers, or fewer, while requests run"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=Late("moeyard.clients.control_client", "send"))
        add = command.add_argument
        if name == "scale":
            add("size", type=read_with(count), metavar="N", help="how many workers there are to be")
        elif name == "restart":
            text = "the rank (default: all, one after the other)"
            add("--worker", type=read_with(lambda said: None if said == "all" else rank(said)), metavar="N", help=text)
        else:
            add("--worker", type=read_with(rank), required=True, metavar="N", help="the rank")
        if name != "undrain":
            add("--drain-timeout", type=read_with(duration), default=30.0, metavar="S", help=timeout)
        text = "port of the server's API (default: of the only one that runs here)"
        add("--port", type=read_with(port), metavar="P", help=text)
        if name == "restart":
            changes = command.add_argument_group("flags of `moeyard serve` that the new processes are to have")
            add_options(changes, EngineConfig, only=CHANGEABLE, unset=True)


def add_expert_commands(commands: "Commands[Parser]") -> None:
    """Commands that read recorded routing."""
    sim = commands.add_parser("cache-sim", help="replay recorded routing through an expert-cache policy")
    sim.add_argument("file", help="what --record-routing wrote")
    sim.add_argument("--policy", choices=EXPERT_POLICIES, help="residency policy (default: as recorded)")
    sim.add_argument(
        "--slots", type=int, nargs="+", metavar="N", help="slots per rank; several compare (default: as recorded)"
    )
    sim.set_defaults(run=Late("moeyard.clients.offline", "cache_sim"))
    experts = commands.add_parser("experts", help="which rank ought to compute which expert")
    subjects = experts.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    plan = subjects.add_parser("plan", help="compare placements of experts over ranks by recorded routing")
    plan.add_argument("file", help="what --record-routing wrote, or a file with a reply of /v1/fleet/experts")
    plan.add_argument("--workers", type=read_with(count), required=True, metavar="N", help="ranks to place experts on")
    text = "also with second copies, on other ranks, of the R most needed experts of a layer"
    plan.add_argument("--copies", type=read_with(count), nargs="+", default=[], metavar="R", help=text)
    plan.add_argument("--model", metavar="MODEL", help="the checkpoint: also bytes of weights, as on a GPU")
    text = "write the best placement, with copies where one R is given, for `serve --expert-placement FILE`"
    plan.add_argument("--write", metavar="FILE", help=text)
    plan.set_defaults(run=Late("moeyard.clients.offline", "experts_plan"))


def run_verify(args: argparse.Namespace) -> int:
    if find_spec("transformers") is None:
        raise ValueError("verify needs transformers: pip install 'moeyard[verify]'")
    set_cpu_environment()
    directory, gguf = weights_source(args)
    return int(load("moeyard_worker.engine.assembly.verify").verify(directory, dtype=args.dtype, gguf=gguf))


def run_completion(args: argparse.Namespace) -> int:
    print(load("shtab").complete(build_parser(), shell=args.shell))
    return 0


def with_subject(argv: list[str]) -> list[str]:
    """`bench URL` as `bench server URL`, unless `bench` is followed by a subject or a call for help."""
    if argv[:1] == ["bench"] and len(argv) > 1 and argv[1] not in (*BENCH_SUBJECTS, "-h", "--help"):
        return ["bench", "server", *argv[1:]]
    return argv


def with_sources(args: argparse.Namespace, words: list[str]) -> argparse.Namespace:
    """Return the arguments of a command line with those of its config file and, for a server, where each is from.

    Raises ValueError or OSError.
    """
    # The command is the first argument: no flag before it lets a command run.
    if getattr(args, "config", None) is not None:
        return cast(argparse.Namespace, load("moeyard.cli.config_file").with_config_file(args, words[1:]))
    if args.command in ("serve", "demo"):
        args.sources = dict.fromkeys(args.parser.given(words[1:]), "flag")
    return args


def main(argv: list[str] | None = None) -> int:
    args = argparse.Namespace(parser=Parser())
    try:
        if signal.getsignal(signal.SIGINT) is leave:
            # From here on an interrupt is an exception, so that cleanup runs.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        words = with_subject(sys.argv[1:] if argv is None else argv)
        args = build_parser().parse_args(words)
        args = with_sources(args, words)
        return int(args.run(args))
    except BrokenPipeError:
        # The reader of stdout has left, as `head` does. Python's final flush would fail again.
        sys.stdout = None
        return 128 + signal.SIGPIPE
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        fail(args.parser.with_flag(message, args))
    except ValueError as error:
        fail(args.parser.with_flag(str(error), args), getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        # By default a second signal would kill a process that already shuts down.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED
