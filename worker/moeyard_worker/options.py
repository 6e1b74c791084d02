"""Declare the command-line flag of a configuration's field. `moeyard.options` builds parsers from such fields."""

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The flag of one field; a field with an empty `help` has none.

    flag: its name, "" for the field's. group: its section of the help text, "" for that of the field before it.
    kind: how its text is read, by a function or a name in `moeyard.options.KINDS`; "" for the field's type.
    words: texts that stand for values.
    text: what is shown and read for an absent flag, "" for the field's default. on_gpu: the default on a GPU.
    unset: an absent flag leaves the value to the code that builds the configuration. both: the flag has a --no- form.
    per_rank: `moeyard restart` may change it on one rank. nargs, const and action are argparse's.
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
    """A field of a dataclass with this default and a flag; `how` are fields of `Option`."""
    return field(default=default, metadata={"option": Option(help=help, **how)})


def option_of(declared: Field[Any]) -> Option | None:
    """What `option` was told of a field; None for other fields."""
    found: Option | None = declared.metadata.get("option")
    return found
