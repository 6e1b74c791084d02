"""The effective settings of a server and the source of each value, for `/v1/fleet/config` and the page at /.

Values never hold a secret: of keys only the number is told, of a path only its last part, and of a URL no credentials.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

from moeyard.fleet.messages import Rank
from moeyard.local.device_choice import device_reason
from moeyard.local.model_source import hub_id
from moeyard.local.serve_config import GENERATION_CONFIG, ServeConfig
from moeyard.local.settings import ApiSettings
from moeyard.logs import LogConfig
from moeyard.options import declared, flag_of
from moeyard_router.config import KEY_VARIABLE, RouterConfig, Setting, SettingSource
from moeyard_router.text.answer_formats import NONE, AnswerFormats
from moeyard_worker.config.engine_config import DEFAULT_SEQS, EngineConfig, format_size
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.options import Option

# The meaning of an absent value in a help text.
_DEFAULT = re.compile(r"\(default:? ([^()]+)\)")
# Options with other metavars whose values may be paths.
_PATHS = ("expert_placement", "generation_config")
# Settings whose resolved value replaces a given one, which is the word "auto" or the port 0.
_ALWAYS = ("device", "exchange", "dtype", "port")
_SAMPLING = "the model in the API"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A value that was found at the start, and why."""

    value: Any
    source: SettingSource
    why: str


def effective_settings(
    args: argparse.Namespace,
    config: EngineConfig,
    *,
    model: ModelConfig,
    options: ServeConfig,
    router: RouterConfig,
    log: LogConfig,
    api: ApiSettings,
    formats: AnswerFormats,
    ranks: list[Rank],
) -> tuple[Setting, ...]:
    """Return every setting of a server, in the order of the help text. `args.sources`: the arguments that were given.

    router: as the routers get it, with keys, certificates and limits.
    """
    sources: Mapping[str, Any] = getattr(args, "sources", {})
    found = [_model(args, config, sources)]
    known = _resolved(args, config, model=model, router=router, api=api, formats=formats, report=ranks[0].report)
    for part in (config, options, router, router.access, log):
        for field, option, group in declared(type(part)):
            flag = flag_of(field, option)
            name = flag.removeprefix("--").removeprefix("no-")
            source = sources.get(flag.removeprefix("--").replace("-", "_"), "default")
            resolved = known.get(field.name) if source == "default" or field.name in _ALWAYS else None
            value = getattr(part, field.name) if resolved is None else resolved.value
            made = Setting(name=name, group=group, value=_shown(value, field.name, option), source=source)
            if resolved is not None:
                made = replace(made, source=resolved.source if source == "default" else source, why=resolved.why)
            elif source == "default" and option.on_gpu is not None and config.device != "cpu":
                made = replace(made, why="default on a GPU")
            elif source == "default" and value is None and (text := _DEFAULT.search(option.help)):
                made = replace(made, why=text[1])
            found.append(made)
    order = list(dict.fromkeys(setting.group for setting in found))
    found += _without_flags(router, api, sources)
    # Groups stay together: several configurations have flags of one group.
    order += [setting.group for setting in found if setting.group not in order]
    return tuple(sorted(found, key=lambda setting: order.index(setting.group)))


def _model(args: argparse.Namespace, config: EngineConfig, sources: Mapping[str, Any]) -> Setting:
    """Return the checkpoint's directory name, GGUF file or hub id; the shape if there is none."""
    hub = hub_id(args.model)
    path = config.gguf or config.model_path
    value = hub or (config.shape if path is None else PurePath(path).name)
    why = "" if args.model is not None else "random weights" if path is None else "the bundled demo"
    return Setting(name="model", group="the model", value=value, source=sources.get("model", "default"), why=why)


def _resolved(
    args: argparse.Namespace,
    config: EngineConfig,
    *,
    model: ModelConfig,
    router: RouterConfig,
    api: ApiSettings,
    formats: AnswerFormats,
    report: Mapping[str, Any],
) -> dict[str, Resolved]:
    """Return by field name what the checkpoint, the device or other settings decided."""

    def derived(value: Any, why: str) -> Resolved:
        return Resolved(value=value, source="derived", why=why)

    def of_checkpoint(value: Any, why: str) -> Resolved:
        return Resolved(value=value, source="checkpoint", why=why)

    template = "by the chat template"
    tools, thoughts = (NONE if each is None else each.name for each in (formats.tools, formats.reasoning))
    found = {
        "served_model_name": derived(api.names, "name of the checkpoint"),
        "kv_memory": derived(f"{report['num_pages']} pages of {config.page_size} tokens", "from limits and memory"),
        "max_inflight": derived(router.max_inflight, "workers × (max-num-seqs + max-waiting)"),
    }
    longest = router.max_model_len
    if longest == model.max_position:
        found["max_model_len"] = of_checkpoint(longest, "the model's limit")
    else:
        found["max_model_len"] = derived(longest, "what the KV pages hold")
    if (why := device_reason(args)) is not None:
        found["device"] = derived(args.device, why)
    if config.dtype == "auto":
        found["dtype"] = of_checkpoint(report["dtype"], "dtype of the checkpoint")
    if config.exchange == "auto":
        found["exchange"] = derived(report["exchange"], report["exchange_why"])
    if config.max_num_seqs != DEFAULT_SEQS:
        found["max_num_seqs"] = derived(config.max_num_seqs, "rows of a step (max-batch-tokens)")
    if config.expert_slots is None:
        why = "as many as fit" if config.expert_memory is None else "what expert-memory holds"
        found["expert_slots"] = derived(report["expert_slots"], f"{why}, of {report['num_experts']} experts")
    if config.prefix_caching and not router.prefix_caching:
        found["prefix_caching"] = derived(False, "the model or its memory plan has none")
    if api.tool_call_parser == "auto":
        found["tool_call_parser"] = of_checkpoint(tools, template)
    if api.reasoning_parser == "auto":
        found["reasoning_parser"] = of_checkpoint(thoughts, template)
    if api.enable_auto_tool_choice is None:
        found["enable_auto_tool_choice"] = derived(formats.auto_tools, "whether the format of tool calls is known")
    if args.port == 0:
        found["port"] = derived(router.port, "a free port")
    return found


def _without_flags(router: RouterConfig, api: ApiSettings, sources: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield settings that no flag names: sampling of the checkpoint, the environment, and the limit of open files."""
    where = "" if api.defaults_from is None else GENERATION_CONFIG
    given = sources.get("generation_config", "checkpoint")
    for name, value in api.defaults.given().items():
        yield Setting(name=f"default {name}", group=_SAMPLING, value=value, source=given, why=where)
    access, group = router.access, "keys, TLS and logs"
    if access.api_keys:
        count = len(access.api_keys)
        why = f"{KEY_VARIABLE}, never shown"
        yield Setting(name="API keys", group=group, value=count, source="environment", why=why)
    if access.otlp_traces_protocol is not None:
        protocol, why = access.otlp_traces_protocol, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
        yield Setting(name="otlp-traces-protocol", group=group, value=protocol, source="environment", why=why)
    most, why = router.max_connections, "by the limit of open files"
    yield Setting(name="connections", group="HTTP", value=most, source="derived", why=why)


def _shown(value: Any, name: str, option: Option) -> Any:
    """Return a value as JSON, without directories and credentials."""
    if isinstance(value, Path) or option.metavar in ("FILE", "DIR") or name in _PATHS:
        return None if value is None else PurePath(value).name
    if option.metavar == "URL" and value is not None:
        parts = urlsplit(value)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if isinstance(value, tuple):
        return list(value)
    if option.kind == "size" and isinstance(value, int):
        return format_size(value)
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    words = {meaning: word for word, meaning in (option.words or {}).items()}
    return words.get(value, value)
