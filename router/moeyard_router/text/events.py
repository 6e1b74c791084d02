"""The parts of an answer's text: reasoning, content, tool calls. The JSON of each API is made elsewhere."""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_BLANK = 64  # characters of white space held back before a possible marker, next to which they have no meaning


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Call `index` (0, 1, ... within a choice) of function `name` begins. A client's result refers to its `id`."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments of call `index`: the model's JSON, valid or not."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of call `index`. There is exactly one per `CallBegin`, even if the output was cut off."""

    index: int


TextEvent = Reasoning | Content | CallBegin | CallArguments | CallEnd


def joined(events: Iterable[TextEvent]) -> list[TextEvent]:
    """Return the events with neighbouring pieces of one text joined, and without empty pieces."""
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
    """Return the length of the longest suffix of `text` that is a proper prefix of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if marker.startswith(text[-size:]):
                longest = size
                break
    return longest
