"""`--config FILE`: flags out of a YAML file. Its keys are the names of flags, without the dashes before them.

    model: /path/to/checkpoint
    port: 8132
    served-model-name: [large, org/large]
    no-prefix-caching: true

Values go through the same parser as the command line's, so that they are checked and named in the same way.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

# Entries of a parsed command line that are no values of flags.
_NO_FLAGS = frozenset(("command", "config", "parser", "run"))
SOURCE = "config file"


def with_config_file(args: argparse.Namespace, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command (`args.parser`), with those of its file where `argv` (behind the command) is silent.

    `sources` of the result names where each value comes from, if it is no default. Raises `ValueError` and `OSError`
    naming the file, and the key at fault.
    """
    path, parser = Path(args.config), args.parser
    merged = parser.parse_args([])
    # Off by default and nothing else: such an option can only be switched on.
    switches = {name for name, value in vars(merged).items() if value is False}
    known = vars(args).keys() - _NO_FLAGS
    model, names = None, []
    for key, value in read(path).items():
        name = key.replace("-", "_")
        if name == "config":
            raise ValueError(f"{path}: '{key}': a config file cannot name another one")
        if name not in known:
            hint = parser.hint(f"--{name.replace('_', '-')}")
            raise ValueError(f"{path}: '{key}' is no flag of this command" + (f"; {hint}" if hint else ""))
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict | list) for v in value)):
            raise ValueError(f"{path}: '{key}' takes a value or a list of values")
        if name == "model":
            model = None if value is None else str(value)
            names += [name] * (value is not None)
            continue
        parser.origin = f"{path}: "
        # Options that are absent leave what is there already; an absent positional argument does not.
        words = flag(name.replace("_", "-"), value, switch=name in switches)
        merged = parser.parse_args(words, namespace=merged)
        names += [name] * bool(words)
        parser.origin = ""
        if merged.model is not None:
            raise ValueError(f"{path}: '{key}' takes one value, got {value}")
    merged = parser.parse_args(argv, namespace=merged)
    merged.model = model if merged.model is None else merged.model
    merged.sources = {**dict.fromkeys(names, SOURCE), **dict.fromkeys(parser.given(argv), "flag")}
    return merged


def read(path: Path) -> dict[str, Any]:
    """The file's keys and values; raises `ValueError` or `OSError` naming it."""
    try:
        text = path.read_text(encoding="utf-8")
        values, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(values, list) else "one value"
        raise ValueError(f"{path}: expected names of flags with their values, got {kind}")
    _check_keys(path, node)
    return {str(key): value for key, value in values.items()}


def _check_keys(path: Path, node: yaml.MappingNode) -> None:
    """Raise `ValueError` naming a key that is given twice, because YAML's parser would keep the last value only."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        name, line = str(key.value).replace("_", "-"), key.start_mark.line + 1
        if name in lines:
            raise ValueError(f"{path}: line {line}: '{key.value}' is given already in line {lines[name]}")
        lines[name] = line


def flag(name: str, value: Any, *, switch: bool) -> list[str]:
    """One flag as a command line has it; a null is the same as no flag."""
    if value is None or (switch and value is False):
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
