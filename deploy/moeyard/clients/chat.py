"""`moeyard chat`: talk with a running server in a terminal, or send it the text of a pipe."""

import argparse
import json
import re
import readline
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moeyard.clients.api_client import StreamedAnswer, first_model, stream_chat
from moeyard.clients.target_config import Target, parse_target

HELP = """\
/help               this
/clear              forget the conversation (the system message stays)
/system [TEXT]      set the system message, or drop it
/set [NAME=VALUE]   a field of the requests, such as temperature=0.7 or max_tokens=200; no value: the server's
/quit               leave, as Ctrl-D does
Ctrl-C stops an answer.
A line that ends with \\ goes on in the next one; lines between two of \"\"\" are one message."""
PROMPT, CONTINUED = "> ", ". "
FENCE = '"""'
# Control characters, which a terminal would interpret. Remove them from a model's text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"


@dataclass(slots=True)
class Talk:
    """A conversation and the settings of its requests."""

    model: str
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": head + self.messages, **self.settings}


def chat(args: argparse.Namespace) -> int:
    """Until Ctrl-D, or one answer to what is piped in; returns the exit code.

    Raises ValueError with one line when there is no server, and for an error that ends a piped request.
    """
    target = parse_target(args.url, args.api_key)
    talk = Talk(model=args.model or first_model(target), system=args.system)
    for setting in args.set:
        put(talk, setting)
    if not sys.stdin.isatty():
        return once(target, talk, sys.stdin.read())
    print(f"{talk.model} at {target.url}; /help says what else there is, Ctrl-D ends", file=sys.stderr)
    converse(target, talk, read_message)
    return 0


def once(target: Target, talk: Talk, prompt: str) -> int:
    """The answer to one prompt on stdout, and nothing else there."""
    if not prompt.strip():
        raise ValueError("there is no prompt on stdin; type in a terminal, or pipe one in")
    talk.messages.append({"role": "user", "content": prompt.removesuffix("\n")})
    reply = stream_chat(target, talk.body(), show)
    if reply.text and not reply.text.endswith("\n"):
        print()
    if reply.error is not None:
        raise ValueError(reply.error)
    if reply.interrupted:
        return 130
    if sys.stderr.isatty():
        print(figures(reply), file=sys.stderr)
    return 0


def converse(target: Target, talk: Talk, read: Callable[[], str | None]) -> None:
    """Message by message until `read` gives None."""
    while (message := read()) is not None:
        if message.startswith("/"):
            if not command(talk, message):
                return
        elif message.strip():
            say(target, talk, message)


def say(target: Target, talk: Talk, message: str) -> None:
    """Ask, show the answer as it comes, and remember both; of a failed request nothing is remembered."""
    talk.messages.append({"role": "user", "content": message})
    reply = stream_chat(target, talk.body(), show)
    print(flush=True)
    if reply.error is not None:
        print(f"moeyard: {' '.join(reply.error.split())}", file=sys.stderr)
    else:
        print(figures(reply), file=sys.stderr)
    if reply.error is not None or not reply.text:
        talk.messages.pop()
        return
    # Keep an interrupted answer, because the next question may be about it.
    talk.messages.append({"role": "assistant", "content": reply.text})


def figures(reply: StreamedAnswer) -> str:
    """Format the speed of an answer in one line."""
    parts = ["stopped"] if reply.interrupted else []
    if reply.usage is not None:
        parts.append(f"{reply.output_tokens} tokens")
        if reply.output_tokens > 1 and reply.times and reply.times[-1] > reply.times[0]:
            parts.append(f"{(reply.output_tokens - 1) / (reply.times[-1] - reply.times[0]):.1f} tokens/s")
    if reply.times:
        parts.append(f"the first after {(reply.times[0] - reply.sent) * 1e3:.0f} ms")
    if reply.finish_reason == "length":
        parts.append("cut off by its length (max_tokens)")
    return f"[{', '.join(parts) or 'no text'}]"


def command(talk: Talk, line: str) -> bool:
    """Follow a line that begins with a slash; False if it is the last."""
    name, _, rest = line[1:].strip().partition(" ")
    try:
        match name:
            case "quit" | "exit" | "bye" | "q":
                return False
            case "help":
                said = HELP
            case "clear":
                talk.messages.clear()
                said = "forgotten"
            case "system":
                talk.system = rest.strip() or None
                said = "the system message is set" if talk.system else "no system message"
            case "set":
                said = put(talk, rest.strip())
            case _:
                said = f"no command /{name}; /help lists them"
        print(said, file=sys.stderr)
    except ValueError as error:
        print(f"moeyard: {error}", file=sys.stderr)
    return True


def put(talk: Talk, rest: str) -> str:
    """/set: NAME=VALUE, the value as JSON if it is some and as text otherwise. Raises ValueError."""
    if not rest:
        return ", ".join(f"{name}={json.dumps(value)}" for name, value in talk.settings.items()) or "nothing is set"
    name, equals, value = (part.strip() for part in rest.partition("="))
    if not equals or not name.isidentifier():
        raise ValueError(f"{rest!r} sets nothing; expected such as temperature=0.7")
    if name in ("messages", "stream", "stream_options", "n", "model"):
        raise ValueError(f"{name} is not for /set")
    if not value:
        talk.settings.pop(name, None)
        return f"{name} is left to the server"
    try:
        talk.settings[name] = json.loads(value)
    except ValueError:
        talk.settings[name] = value
    return f"{name}={json.dumps(talk.settings[name])}"


def read_message() -> str | None:
    """The next message that the user types, None at the end of input. Ctrl-C drops a message."""
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
