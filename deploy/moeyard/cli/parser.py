"""The command line's parser: errors of one line, hints for flags it does not know, and help in two lengths."""

import argparse
import difflib
import logging
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from moeyard.cli.other_servers import INSTEAD

HELP_WIDTH = 110
_NAME_WIDTH = 24


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line. Flags are never abbreviated, and may be spelt with underscores, as vLLM's may.

    `origin` stands before an error and says where the flags come from. With `everyday` flags, `--help` explains these
    and names the others, which `--help-all` explains.
    """

    origin = ""

    def __init__(self, *args: Any, everyday: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.set_defaults(parser=self)  # the parser of the innermost command remains
        self.everyday = tuple(everyday)
        if self.everyday:
            # Like --help it leaves nothing in the namespace: a config file has no such key.
            nothing = argparse.SUPPRESS
            text = "explain every flag, and exit"
            self.add_argument("--help-all", action=_HelpAll, nargs=0, dest=nothing, default=nothing, help=text)

    def error(self, message: str) -> NoReturn:
        """Print the message and where to read on, and exit with code 2."""
        fail(f"{self.origin}{message}; see `{self.prog} --help`")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse in a command what it does not know: argparse would name the whole program's help."""
        words = list(_dashed(sys.argv[1:] if args is None else args))
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            hints = dict.fromkeys(filter(None, (self.hint(word) for word in rest)))
            self.error("; ".join([f"unrecognized arguments: {' '.join(rest)}", *hints]))
        return found, rest

    def given(self, words: Sequence[str]) -> frozenset[str]:
        """Return the names of the arguments that these words of a valid command line set."""
        names = frozenset(action.dest for action in self._actions)
        # argparse leaves attributes alone that exist, so that absent flags stay None.
        found = vars(self.parse_args(words, namespace=argparse.Namespace(**dict.fromkeys(names))))
        return frozenset(name for name in names if found.get(name) is not None)

    def with_flag(self, message: str, args: argparse.Namespace) -> str:
        """Put the flag before the path with which a message begins, if a flag of `args` gave that path."""
        for action in self._actions:
            value = getattr(args, action.dest, None) if action.option_strings else None
            for path in value if isinstance(value, list | tuple) else [value]:
                if isinstance(path, str | Path) and re.match(
                    re.escape(str(Path(path))) + r"(: |, line | with )", message
                ):
                    return f"{action.option_strings[0]} {message}"
        return message

    def hint(self, word: str) -> str:
        """Guess what an unknown flag meant; "" where nothing is near."""
        if not word.startswith("-"):
            return ""
        name = word.partition("=")[0]
        instead = INSTEAD.get(name.lstrip("-"), "") if self.everyday else ""
        if instead:
            return f"did you mean {instead}?" if instead.startswith("--") else f"{name}: {instead}"
        known = [flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings]
        near = [flag for flag in known if len(name) > 3 and flag.startswith(name)]
        near += difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        return f"did you mean {' or '.join(dict.fromkeys(near[-3:]))}?" if near else ""

    def format_help(self) -> str:
        """The help text: of everyday flags, if there are any, with the names of the others."""
        if not self.everyday:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        actions = {flag: action for action in self._actions for flag in action.option_strings}
        for title, shown in (
            ("arguments", [action for action in self._actions if not action.option_strings]),
            ("everyday flags", [actions[flag] for flag in self.everyday]),
            ("help", [actions["--help"], actions["--help-all"]]),
        ):
            formatter.start_section(title)
            formatter.add_arguments(shown)
            formatter.end_section()
        formatter.add_text(self.epilog)
        more = f"more flags, which `{self.prog} --help-all` explains:\n{self._other_flags()}"
        return f"{formatter.format_help()}\n{more}\n"

    def _other_flags(self) -> str:
        lines = []
        for group in self._action_groups:
            others = [
                action.option_strings[0]
                for action in group._group_actions
                if action.option_strings and action.help != argparse.SUPPRESS and not isinstance(action, _HELP)
            ]
            if others := [flag for flag in others if flag not in self.everyday]:
                lines.append(
                    textwrap.fill(
                        " ".join(others),
                        HELP_WIDTH,
                        initial_indent=f"  {group.title or '':<{_NAME_WIDTH - 2}}",
                        subsequent_indent=" " * _NAME_WIDTH,
                        break_on_hyphens=False,
                    )
                )
        return "\n".join(lines)


class _HelpAll(argparse.Action):
    """`--help-all`."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        assert isinstance(parser, Parser), "only this parser adds the flag"
        parser._print_message(argparse.ArgumentParser.format_help(parser), sys.stdout)
        parser.exit()


_HELP = (_HelpAll, argparse._HelpAction)


def _dashed(words: Sequence[str]) -> Iterator[str]:
    """The same words with dashes for underscores in the names of flags, up to a bare `--`."""
    flags = True
    for word in words:
        flags = flags and word != "--"
        yield re.sub(r"^--[^=]+", lambda name: name[0].replace("_", "-"), word) if flags else word


def fail(message: str, code: int = 2) -> NoReturn:
    """Print one line on stderr and exit with `code`: 2 for what another attempt does not change."""
    for handler in logging.getLogger().handlers:
        handler.flush()  # a thread writes the log, and this line is the last
    print(f"moeyard: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)
