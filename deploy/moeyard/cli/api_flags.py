"""Flags of what clients see of a model: its names, its chat template, what holds where their requests do not say."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from moeyard.cli.parser import Arguments
from moeyard.local.model_source import hub_id
from moeyard_router.config import UNKNOWN_FIELDS, SamplingDefaults
from moeyard_router.text.answer_formats import AUTO, REASONING_PARSERS, TOOL_PARSERS, AnswerFormats, answer_formats
from moeyard_router.text.chat import Codec
from moeyard_worker.config.engine_config import EngineConfig, rows_beside, window_rows
from moeyard_worker.config.fields import Fields, read_json
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.protocol import KV_METHODS, KvCompression

GENERATION_CONFIG = "generation_config.json"
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """`names` of the model, the first of which answers say; `defaults_from` is the file that `defaults` are from.

    Parsers by their names in text/answer_formats.py of the router.
    """

    names: tuple[str, ...]
    chat_template: Path | None
    defaults: SamplingDefaults
    defaults_from: Path | None
    tool_call_parser: str
    reasoning_parser: str
    enable_auto_tool_choice: bool | None
    kv_compression: KvCompression | None = None
    unknown_fields: str = UNKNOWN_FIELDS[0]

    def describe_defaults(self) -> str | None:
        """One line about the sampling defaults, or None without any."""
        given = ", ".join(f"{name} {value:g}" for name, value in self.defaults.given().items())
        return (
            f"sampling defaults of {self.defaults_from}: {given} (--generation-config none: neutral)" if given else None
        )


def add_api_arguments(parser: Arguments) -> None:
    """Flags of every command that serves."""
    add = parser.add_argument
    add(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names of the model in the API, the first is what answers say (default: the directory's, or the hub's id)",
    )
    add("--chat-template", type=Path, metavar="FILE", help="a jinja template in place of the checkpoint's own")
    add(
        "--generation-config",
        default="auto",
        metavar="WHICH",
        help=f"sampling where requests do not say: auto is by the checkpoint's {GENERATION_CONFIG}, none (or vllm) is "
        "OpenAI's defaults, a directory has such a file (default %(default)s)",
    )
    add(
        "--kv-compression",
        metavar="JSON",
        help='what is kept of prompts where requests do not say: {"method": "snapkv", "budget": 2048, "window": 32}, '
        "which changes answers; docs/snapkv.md (default: all)",
    )
    add(
        "--tool-call-parser",
        choices=TOOL_PARSERS,
        default=AUTO,
        metavar="NAME",
        help=f"format of the model's tool calls: {', '.join(TOOL_PARSERS)} (default %(default)s: by the chat template)",
    )
    add(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default=AUTO,
        metavar="NAME",
        help=f"format of its reasoning: {', '.join(REASONING_PARSERS)} (default %(default)s: by the chat template)",
    )
    add(
        "--enable-auto-tool-choice",
        action=argparse.BooleanOptionalAction,
        help='tools with tool_choice "auto" (default: where the format of tool calls is known)',
    )
    add(
        "--unknown-fields",
        choices=UNKNOWN_FIELDS,
        default=UNKNOWN_FIELDS[0],
        help="what becomes of unknown fields in requests: reject answers 400, ignore drops them and names them in a "
        "header of the answer (default %(default)s)",
    )


def api_settings(args: argparse.Namespace, config: EngineConfig) -> ApiSettings:
    """What these flags say; raises `ValueError` or `OSError` with one line that names the flag or the file."""
    names = served_names(args, config)
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"--served-model-name: names must differ and not be empty, got {', '.join(map(repr, names))}")
    file = generation_file(args.generation_config, config.model_path)
    kept = None if args.kv_compression is None else kv_compression(args.kv_compression)
    return ApiSettings(
        names=names,
        chat_template=args.chat_template,
        defaults=SamplingDefaults() if file is None else sampling_defaults(file),
        defaults_from=file,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        enable_auto_tool_choice=args.enable_auto_tool_choice,
        kv_compression=kept,
        unknown_fields=args.unknown_fields,
    )


def kv_compression(text: str) -> KvCompression:
    """What --kv-compression means; raises `ValueError` with one line."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict) or not {"method", "budget"} <= given.keys() <= {"method", "budget", "window"}:
        raise ValueError(f'--kv-compression: expected {{"method": "snapkv", "budget": N, "window": N}}, got {text}')
    if given["method"] not in KV_METHODS:
        raise ValueError(f"--kv-compression: method {given['method']!r} is not one of {', '.join(KV_METHODS)}")
    for name in ("budget", "window"):
        if name in given and type(given[name]) is not int:
            raise ValueError(f"--kv-compression: {name} is {given[name]!r}, expected an integer")
    found = KvCompression(**given)
    if not 1 <= found.window <= found.budget < 2**31:
        raise ValueError(f"--kv-compression: window {found.window} must be in [1, budget {found.budget}], below 2**31")
    return found


def check_compression(api: ApiSettings, config: EngineConfig, model: ModelConfig) -> None:
    """Raise `ValueError` where prompts would be kept in part by default and cannot be: clients could not help it."""
    kept = api.kv_compression
    if kept is None:
        return
    rows = window_rows(config, model.state_spec(1).chunk_alignment)
    if kept.window > rows:
        raise ValueError(
            f"--kv-compression: the window of {kept.window} exceeds the {rows} prompt rows that a step has at least; "
            "raise --prefill-chunk, --max-batch-tokens or --mixed-prefill-tokens"
        )


def start_notes(api: ApiSettings, config: EngineConfig, model: ModelConfig) -> list[str]:
    """What holds where requests do not say, and what a step has no room for: a line each."""
    notes = [] if (defaults := api.describe_defaults()) is None else [defaults]
    if (kept := api.kv_compression) is not None:
        notes.append(
            f"prompts of more than {kept.budget} tokens are kept in part ({kept.method}, window {kept.window}; "
            '--kv-compression) where a request does not say {"kv_compression": {"method": "none"}}'
        )
    together, beside = model.state_spec(1).chunk_alignment, rows_beside(config)
    if config.max_batch_tokens < together + beside:
        notes.append(
            f"--max-batch-tokens {config.max_batch_tokens}: {model.family} computes {together} positions of a prompt "
            f"together, for which a step has no room beside {beside} rows of output: prompts will wait for sequences "
            f"to end; {together + beside} or more let them in"
        )
    return notes


def answer_formats_of(codec: Codec, api: ApiSettings) -> AnswerFormats:
    """What the model's answers are read for; raises `ValueError` that names the flag where a parser is missing."""
    try:
        return answer_formats(
            codec, tools=api.tool_call_parser, reasoning=api.reasoning_parser, auto=api.enable_auto_tool_choice
        )
    except ValueError as error:
        raise ValueError(str(error).replace("enable_auto_tool_choice", "--enable-auto-tool-choice")) from error


def served_names(args: argparse.Namespace, config: EngineConfig) -> tuple[str, ...]:
    """What the model is called; where nobody says it is its id of the hub, its directory's name, or its shape."""
    if args.served_model_name:
        for name in args.served_model_name[1:] if getattr(args, "model", None) is None else ():
            if Path(name).is_dir():
                raise ValueError(f"--served-model-name: '{name}' is a directory; a MODEL stands before this flag")
        return tuple(args.served_model_name)
    return (config.shape or hub_id(args.model) or Path(config.model_path or "").name,)


def generation_file(choice: str, model_path: str | None) -> Path | None:
    """The file that --generation-config means, None for none."""
    if choice in ("none", "vllm"):
        return None
    if choice == "auto":
        file = None if model_path is None else Path(model_path) / GENERATION_CONFIG
        return file if file is not None and file.is_file() else None
    file = Path(choice) / GENERATION_CONFIG
    if not file.is_file():
        raise ValueError(f"--generation-config {choice}: expected auto, none or a directory with a {GENERATION_CONFIG}")
    return file


def sampling_defaults(file: Path) -> SamplingDefaults:
    """Defaults out of a generation_config.json; raises `ValueError` naming file and key.

    The keys that vLLM takes. Its `max_new_tokens` also bounds what requests ask for; here it is a default like the
    others. `do_sample` is not looked at, as there.
    """
    values = Fields(str(file), read_json(file))
    numbers = {key: _number(values, key) for key in _NUMBERS}
    try:
        return SamplingDefaults(**numbers, top_k=_count(values, "top_k"), max_tokens=_count(values, "max_new_tokens"))
    except ValueError as error:
        raise ValueError(f"{file}: {str(error).replace('max_tokens', 'max_new_tokens')}") from error


def _number(fields: Fields, key: str) -> float | None:
    value = fields.values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise fields.error(key, f"is {value!r}, expected a number")
    return float(value)


def _count(fields: Fields, key: str) -> int | None:
    value = fields.values.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise fields.error(key, f"is {value!r}, expected an integer")
    return value
