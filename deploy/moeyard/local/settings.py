"""Configs from the flags of `moeyard serve`: engines, routers, keys, logs and the model in the API."""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeyard.local.device_choice import choose_device
from moeyard.local.model_source import described, gguf_source, hub_id, local_directory
from moeyard.local.serve_config import GENERATION_CONFIG, take_keys, traces_protocol
from moeyard.logs import LogConfig
from moeyard.options import DEFAULTS, declared, values, with_flags
from moeyard_router.config import AccessConfig, RoutedShape, RouterConfig, SamplingDefaults
from moeyard_router.http.origins import parse_origins
from moeyard_router.text.answer_formats import AnswerFormats, answer_formats
from moeyard_router.text.chat import Codec
from moeyard_worker.config.engine_config import (
    DEFAULT_SEQS,
    DEVICE_DEFAULTS,
    SPECULATIONS,
    EngineConfig,
    rows_beside,
    window_rows,
)
from moeyard_worker.config.fields import Fields, read_json
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.shapes import shape_model
from moeyard_worker.protocol import KV_METHODS, KvCompression

API_GROUP = "the model in the API"
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the EngineConfig of the flags. Raises ValueError that names the wrong flag.

    The description of a model of the hub is fetched after all flags are checked; its weights are not.
    """
    choose_device(args)
    try:
        config = _engine_config(args)
        if config.shape is not None:
            shape_model(config.shape, config.num_layers)
        # Check the flags before any download.
        return config if hub_id(args.model) is None else replace(config, model_path=described(args))
    except ValueError as error:
        raise ValueError(with_flags(str(error))) from error


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    given = {**DEVICE_DEFAULTS["cpu" if args.device == "cpu" else "cuda"], **values(EngineConfig, args)}
    if given["record_routing"] is not None:
        given["record_routing"] = str(Path(given["record_routing"]).resolve())
    if "max_num_seqs" not in given:
        # Lower only a default silently, to the number of sequences (with drafts) that fit a step.
        rows = given.get("max_batch_tokens", DEFAULTS["max_batch_tokens"])
        each = 1 + (given["draft_tokens"] or SPECULATIONS[given["speculate"]]) if given["speculate"] else 1
        given["max_num_seqs"] = max(min(DEFAULT_SEQS, rows // each), 1)
    if given["load_format"] == "dummy" and args.model is None:
        return EngineConfig(model_path=None, **given)
    if (source := gguf_source(args)) is not None:
        return EngineConfig(model_path=source[1], gguf=source[0], **given)
    return EngineConfig(model_path=hub_id(args.model) or local_directory(args), **given)


def access_config(args: argparse.Namespace) -> AccessConfig:
    """Return keys and certificates of the flags and the environment. Raises ValueError for an invalid origin."""
    given = values(AccessConfig, args)
    given["allowed_origins"] = tuple(parse_origins(given["allowed_origins"]))
    return AccessConfig(**given, api_keys=take_keys(), otlp_traces_protocol=traces_protocol())


def log_config(args: argparse.Namespace) -> LogConfig:
    """Return the log config of the flags."""
    return LogConfig(**values(LogConfig, args))


def router_fields(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Return the RouterConfig fields set by flags and the engines' limits."""
    each = config.max_num_seqs + config.max_waiting
    return {
        "max_inflight": config.num_workers * each,
        "inflight_per_worker": each if args.max_inflight is None else None,
        "worker_places": config.max_num_seqs,
        "max_queue_seconds": config.max_queue_seconds,
        **values(RouterConfig, args),
    }


def routed_shape(config: EngineConfig, model: ModelConfig) -> RoutedShape | None:
    """Return the form of the routed experts that the workers keep, or None."""
    if not config.enable_return_routed_experts:
        return None
    return RoutedShape(
        top_k=model.top_k,
        id_bytes=model.expert_id_bytes,
        places=tuple(model.routed_layers),
        num_layers=model.num_layers,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """The model in the API. `defaults_from` is the file of `defaults`; other fields are as in RouterConfig."""

    names: tuple[str, ...]
    defaults: SamplingDefaults
    defaults_from: Path | None
    chat_template: Path | None
    kv_compression: KvCompression | None
    tool_call_parser: str
    reasoning_parser: str
    enable_auto_tool_choice: bool | None
    unknown_fields: str

    def describe_defaults(self) -> str | None:
        """Return one line on the sampling defaults, or None without any."""
        given = ", ".join(f"{name} {value:g}" for name, value in self.defaults.given().items())
        return (
            f"sampling defaults of {self.defaults_from}: {given} (--generation-config none: neutral)" if given else None
        )


def api_settings(args: argparse.Namespace, config: EngineConfig) -> ApiSettings:
    """Settings of the API; raises `ValueError` or `OSError` with one line that names the flag or the file."""
    names = served_names(args, config)
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"--served-model-name: names must differ and not be empty, got {', '.join(map(repr, names))}")
    file = generation_file(args.generation_config, config.model_path)
    given = values(RouterConfig, args)
    api = {field.name: given[field.name] for field, _, group in declared(RouterConfig) if group == API_GROUP}
    if args.kv_compression is not None:
        api["kv_compression"] = kv_compression(args.kv_compression)
    defaults = SamplingDefaults() if file is None else sampling_defaults(file)
    return ApiSettings(names=names, defaults=defaults, defaults_from=file, **api)


def kv_compression(text: str) -> KvCompression:
    """Parse --kv-compression; raises `ValueError` with one line."""
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
    """Raise `ValueError` if the default compression of prompts cannot work: clients could not avoid the error."""
    kept = api.kv_compression
    if kept is None:
        return
    state = model.state_spec(1)
    if not state.compressible:
        raise ValueError(
            f"--kv-compression: {model.family} cannot be compressed, because its cache holds one entry for several "
            "positions; start without it"
        )
    rows = window_rows(config, state.chunk_alignment)
    if kept.window > rows:
        raise ValueError(
            f"--kv-compression: the window of {kept.window} exceeds the {rows} prompt rows that a step has at least; "
            "raise --prefill-chunk, --max-batch-tokens or --mixed-prefill-tokens"
        )


def start_notes(api: ApiSettings, config: EngineConfig, model: ModelConfig) -> list[str]:
    """Return lines on request defaults, quantised checkpoints, and prompts that do not fit a step."""
    notes = [] if (defaults := api.describe_defaults()) is None else [defaults]
    if model.weights.decoded is not None:
        notes.append(f"the codes of experts become bfloat16 on the GPU: {model.weights.decoded}")
    if model.weights.left_plain:
        notes.append(
            f"config.json has {' and '.join(model.weights.left_plain)} quantised, which the server does not do"
        )
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
    """Return the parsers of the model's answers. Raises `ValueError` that names the flag of a missing parser."""
    try:
        return answer_formats(
            codec, tools=api.tool_call_parser, reasoning=api.reasoning_parser, auto=api.enable_auto_tool_choice
        )
    except ValueError as error:
        raise ValueError(str(error).replace("enable_auto_tool_choice", "--enable-auto-tool-choice")) from error


def served_names(args: argparse.Namespace, config: EngineConfig) -> tuple[str, ...]:
    """Return the model's names: by default its shape, its hub id, or the name of its directory or GGUF file."""
    if args.served_model_name:
        for name in args.served_model_name[1:] if getattr(args, "model", None) is None else ():
            if Path(name).is_dir():
                raise ValueError(f"--served-model-name: '{name}' is a directory; a MODEL stands before this flag")
        return tuple(args.served_model_name)
    file = None if config.gguf is None else Path(config.gguf).stem
    return (config.shape or file or hub_id(args.model) or Path(config.model_path or "").name,)


def generation_file(choice: str, model_path: str | None) -> Path | None:
    """Return the file of --generation-config, or None."""
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
    """Return the defaults of a generation_config.json. Raises `ValueError` that names file and key.

    The keys that vLLM takes. Its `max_new_tokens` also bounds what requests ask for; here it is a default like the
    others. `do_sample` is not looked at, as there.
    """
    fields = Fields(str(file), read_json(file))
    numbers = {key: _checked(fields, key, float, "a number") for key in _NUMBERS}
    top_k, most = (_checked(fields, key, int, "an integer") for key in ("top_k", "max_new_tokens"))
    try:
        return SamplingDefaults(**numbers, top_k=top_k, max_tokens=most)
    except ValueError as error:
        raise ValueError(f"{file}: {str(error).replace('max_tokens', 'max_new_tokens')}") from error


def _checked(fields: Fields, key: str, kind: type, expected: str) -> Any:
    """Return a key's value, or None. Raises `ValueError` unless it is an `int` or of type `kind`."""
    value = fields.values.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | kind)):
        raise fields.error(key, f"is {value!r}, expected {expected}")
    return value if value is None else kind(value)
