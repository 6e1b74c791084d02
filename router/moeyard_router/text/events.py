"""The parts of an answer's text: reasoning, content, tool calls. The JSON of each API is made elsewhere."""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_BLANK = 64  # characters of white space that may wait for a marker, beside which they would mean nothing


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Call `index` (0, 1, ... within a choice) of function `name` begins; `id` is what a client's answer refers to."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments of call `index`: JSON as the model wrote it, valid or not."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Nothing follows of call `index`. Exactly one per `CallBegin`, also where the output was cut off."""

    index: int


TextEvent = Reasoning | Content | CallBegin | CallArguments | CallEnd


def joined(events: Iterable[TextEvent]) -> list[TextEvent]:
    """The same events with neighbouring pieces of one text put together, and without empty ones."""
    out: list[TextEvent] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Reasoning | Content | CallArguments) and not event.text:
            continue
        if isinstance(event, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            out[-1] = CallArguments(event.index, last.text + event.text)
        else:
            out.append(event)
    return out


def held_back(text: str, markers: Iterable[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a marker: what may become one."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if marker.startswith(text[-size:]):
                longest = size
                break
    return longest
