"""Declare the command-line flag of a configuration's field. `moeyard.options` builds parsers from such fields."""

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The flag of one field. A field with an empty `help` has no flag.

    flag: its name, "" for the field's name.
    group: its section of the help text, "" for that of the previous field.
    kind: the parser of its text: a function, or a name in `moeyard.options.KINDS`. "" for the field's type.
    words: texts that stand for values.
    text: the default as shown and parsed, "" for the field's default.
    on_gpu: the default on a GPU.
    unset: whether the code that builds the configuration chooses the value if the flag is absent.
    both: whether the flag has a --no- form.
    per_rank: whether `moeyard restart` may change it on one rank.
    nargs, const, action: as in argparse.
    """

    help: str
    flag: str = ""
    group: str = ""
    kind: str | Callable[[str], Any] = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    words: Mapping[str, Any] | None = None
    text: str = ""
    on_gpu: Any = None
    unset: bool = False
    both: bool = False
    per_rank: bool = False
    nargs: str = ""
    const: Any = None
    action: str = ""


def option(default: Any, help: str, **how: Any) -> Any:
    """Return a dataclass field with this default and a flag. `how` are fields of `Option`."""
    return field(default=default, metadata={"option": Option(help=help, **how)})


def option_of(declared: Field[Any]) -> Option | None:
    """Return the `Option` of a field, or None."""
    found: Option | None = declared.metadata.get("option")
    return found
