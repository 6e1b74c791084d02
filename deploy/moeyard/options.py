"""Command-line flags from the fields of config dataclasses, and back (`moeyard_worker.options`)."""

import argparse
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, get_args

from moeyard_worker.config.engine_config import MAX_DRAFTS, EngineConfig, parse_size
from moeyard_worker.options import Option, option_of

# A parser, or a group of flags in its help.
Arguments = argparse._ActionsContainer


def whole(least: int, refusal: str = "is not a whole number of at least {}") -> Callable[[str], int]:
    """Return a parser of whole numbers of at least `least`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise ValueError(f"{text!r} {refusal.format(least)}")
        return int(text)

    return read


def real(accepts: Callable[[float], bool], refusal: str) -> Callable[[str], float]:
    """Return a parser of numbers that satisfy `accepts`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not accepts(value):
            raise ValueError(f"{text!r} {refusal}")
        return value

    return read


count = whole(1)
rank = whole(0, "is no rank; ranks are numbers from 0")
duration = real(lambda value: 0 <= value < float("inf"), "is no time in seconds; expected 0 or more")


def port(text: str) -> int:
    """A TCP port, 0 included."""
    if not text.isdigit() or int(text) > 65535:
        raise ValueError(f"{text!r} is not a port; ports go from 0 to 65535")
    return int(text)


def device(text: str) -> str:
    """The value of --device."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise ValueError(f"{text!r} is not auto, cpu, cuda or cuda:N")
    return text


def drafts(text: str) -> int:
    """A number of drafted tokens."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_DRAFTS):
        raise ValueError(f"{text!r} is not auto or a number from 1 to {MAX_DRAFTS}")
    return int(text)


# Parser and metavar by the `kind` of an option. A parser raises ValueError with one line.
KINDS: Mapping[str, tuple[Callable[[str], Any], str | None]] = MappingProxyType(
    {
        "count": (count, "N"),
        "number": (whole(0), "N"),
        "positive": (real(lambda value: value > 0, "is no number above 0"), None),
        "seconds": (real(lambda value: 0 < value < float("inf"), "is not a number of seconds above 0"), "S"),
        "duration": (duration, "S"),
        "size": (parse_size, "SIZE"),
        "port": (port, None),
        "device": (device, None),
        "drafts": (drafts, None),
    }
)


def read_with(parse: Callable[[str], Any], words: Collection[str] = ()) -> Callable[[str], Any]:
    """Return an argparse type that keeps the message of `parse`'s ValueError. `words` are not parsed."""

    def read(text: str) -> Any:
        try:
            return text if text in words else parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def declared(config: type[Any]) -> Iterator[tuple[Field[Any], Option, str]]:
    """Yield the fields of a config that have flags, with the titles of their groups."""
    title = ""
    for each in fields(config):
        option = option_of(each)
        if option is not None and option.help:
            title = option.group or title
            yield each, option, title


def add_options(
    parser: Arguments,
    *configs: type[Any],
    groups: Sequence[str] = (),
    only: Collection[str] = (),
    without: Collection[str] = (),
    choices: Mapping[str, Sequence[str]] = MappingProxyType({}),
    unset: bool = False,
) -> None:
    """Add the flags of configurations: those in `groups`, in that order, or all without groups.

    only, without: names of fields. choices: of fields whose values are known elsewhere. unset: absent flags are None.
    """
    found = [found for config in configs for found in declared(config)]
    for title in groups or (None,):
        place: Arguments = parser if title is None else parser.add_argument_group(title)
        for field, option, group in found:
            if title in (None, group) and (not only or field.name in only) and field.name not in without:
                _add(place, field, option, tuple(choices.get(field.name, option.choices)), unset=unset)


def flag_of(field: Field[Any], option: Option) -> str:
    return option.flag or f"--{field.name.replace('_', '-')}"


def _add(place: Arguments, field: Field[Any], option: Option, choices: tuple[str, ...], *, unset: bool) -> None:
    """Add one flag. Show its default as a word if there is one."""
    flag, words = flag_of(field, option), option.words or {}
    names = tuple(dict.fromkeys((*words, *choices))) if choices else ()
    kinds = [kind for kind in get_args(field.type) or (field.type,) if kind is not NoneType]
    shown = next((text for text, value in words.items() if value == field.default), option.text or field.default)
    default = None if unset or option.unset or option.on_gpu is not None else shown
    text = _help(option, "" if flag.startswith("--no-") else shown, names)
    more: dict[str, Any] = {"help": text.partition(" (default")[0] if unset else text, "dest": _dest(flag)}
    if bool in kinds and not words:
        if option.both:
            more |= {"action": argparse.BooleanOptionalAction, "default": default == "yes" if option.text else default}
        else:
            more["action"] = "store_true"
        place.add_argument(flag, **more)
        return
    metavar = None
    if option.kind:
        parse, metavar = KINDS[option.kind] if isinstance(option.kind, str) else (option.kind, None)
        more["type"] = read_with(parse, words)
    elif kinds[0] in (int, float, Path):
        more["type"], metavar = kinds[0], {int: "N", float: "S", Path: "FILE"}[kinds[0]]
    more |= {name: value for name in ("nargs", "const", "action") if (value := getattr(option, name))}
    more |= {"metavar": option.metavar or metavar, "choices": names or None}
    place.add_argument(flag, default=list(default) if isinstance(default, tuple) else default, **more)


def _help(option: Option, default: Any, names: Sequence[str]) -> str:
    """Return the help text, with the default unless the text mentions it."""
    text = option.help.replace("{choices}", ", ".join(names)).replace("{on_gpu}", str(option.on_gpu))
    if "(default" in text or default in (None, False, "", ()):
        return text
    if option.kind == "size":
        default = f"{default // 1024} KiB"
    elif isinstance(default, float) and option.kind:
        default = f"{default:g}"
    return f"{text} (default {default}" + ("" if option.on_gpu is None else f"; on a GPU {option.on_gpu}") + ")"


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def values(config: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a config that the flags set. Unset flags without a default are left out."""
    found = {}
    for field, option, _ in declared(config):
        flag = flag_of(field, option)
        value = getattr(args, _dest(flag), None)
        if flag.startswith("--no-"):
            value = not value
        if option.words and isinstance(value, str):
            value = option.words.get(value, value)
        elif value is None and (option.unset or option.on_gpu is not None):
            continue
        found[field.name] = tuple(value) if isinstance(value, list) else value
    return found


# Defaults of an engine's fields, None where there is none.
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {field.name: None if field.default is MISSING else field.default for field in fields(EngineConfig)}
)
# The fields of an engine in which ranks may differ (docs/upgrades.md has the reasons).
CHANGEABLE = tuple(field.name for field, option, _ in declared(EngineConfig) if option.per_rank)


def with_flags(message: str) -> str:
    """Replace names of EngineConfig fields in a message by their flags."""
    flags = {field.name: flag_of(field, option) for field, option, _ in declared(EngineConfig)}
    names = "|".join(field.name for field in fields(EngineConfig) if "_" in field.name)
    return re.sub(rf"\b({names})\b", lambda m: flags.get(m[0], f"--{m[0].replace('_', '-')}"), message)
