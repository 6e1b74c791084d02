"""The terminal of `moeyard chat`: messages of several lines in, text without control characters out."""

import re
import readline
import sys

PROMPT, CONTINUED = "> ", ". "
FENCE = '"""'
# What a terminal would obey; a model's text is not trusted with that.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"


def read_message() -> str | None:
    """What the user types next, None at the end of it. Ctrl-C drops what was typed so far."""
    readline.set_auto_history(True)
    try:
        return _message(input(PROMPT))
    except EOFError:
        print(file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print("\nCtrl-D ends", file=sys.stderr)
        return ""


def _message(line: str) -> str:
    """A line, or the several that it begins."""
    if line.lstrip().startswith(FENCE):
        return _fenced(line.lstrip().removeprefix(FENCE))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(CONTINUED))
    return "\n".join(lines)


def _fenced(line: str) -> str:
    lines = []
    while not line.rstrip().endswith(FENCE):
        lines.append(line)
        line = input(CONTINUED)
    return "\n".join([*lines, line.rstrip().removesuffix(FENCE)]).strip("\n")


def show(text: str, thought: bool) -> None:
    """Write a piece of an answer. Thoughts are dim on a terminal, and elsewhere left out: a pipe wants the answer."""
    if sys.stdout.isatty():
        plain = _CONTROLS.sub("", text)
        sys.stdout.write(f"{_DIM}{plain}{_PLAIN}" if thought else plain)
    elif not thought:
        sys.stdout.write(text)
    sys.stdout.flush()
