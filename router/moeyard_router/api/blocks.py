"""Answers made of blocks: items of the Responses API, content blocks of Anthropic's."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moeyard_router.api.choice import ABORTED, Choice, Delta
from moeyard_router.api.intake import Job
from moeyard_router.api.replies import Served
from moeyard_router.errors import ApiError
from moeyard_router.text import exact_json
from moeyard_router.text.detokenizer import TokenBytes
from moeyard_router.text.events import CallBegin, CallEnd, Content, Reasoning, TextEvent

BlockKind = Literal["reasoning", "content", "call"]


@dataclass(slots=True, kw_only=True)
class AnswerBlock:
    """One block of an answer. `pieces` are text or a call's arguments. `cut`: the token limit ended it."""

    kind: BlockKind
    index: int
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    cut: bool = False

    @property
    def text(self) -> str:
        """All pieces."""
        return "".join(self.pieces)


class BlockWriter(ABC):
    """Writes the answer to a job of one choice. At most one block is open. Text of another kind closes it.

    Streams and whole answers are made of the same blocks. Subclasses write their events and objects.
    """

    def __init__(self, job: Job, *, reply_id: str, served: Served, created: int, tokens: TokenBytes) -> None:
        self.job = job
        self.reply_id = reply_id
        self._served = served
        self.created = created
        self.blocks: list[AnswerBlock] = []
        self.cut = False  # by the token limit
        self.stop_string: str | None = None
        self.open_block: AnswerBlock | None = None
        self._begun = False

    @property
    def served(self) -> Mapping[str, str]:
        """The fields of the answer that say what computed it."""
        return self._served()

    text_event = None  # no event consists of text alone: see `ReplyWriter.text_event`

    def chunk(self, index: int, delta: Delta, choices: Sequence[Choice]) -> list[bytes]:
        """Return the events of a delta."""
        out = [] if self._begun else [self.begin(choices)]
        self._begun = True
        self._take(delta, out)
        return [b"".join(out)]

    def body(self, deltas: Sequence[Delta], choices: Sequence[Choice]) -> list[bytes]:
        """Return the answer of a request that is not streamed."""
        self._take(deltas[0], [])
        return [exact_json.dumps(self.whole(choices))]

    def _take(self, delta: Delta, out: list[bytes]) -> None:
        if delta.finish_reason == "abort":
            # These APIs have no finish reason for it.
            raise ApiError(503, ABORTED, reason="")
        if delta.finish_reason is not None:
            self.cut = delta.finish_reason == "length"
            self.stop_string = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        if delta.events is not None:
            self._take_events(delta.events, out)
        elif delta.text:
            self._take_events((Content(delta.text),), out)
        if delta.finish_reason is not None:
            self._close(out, cut=self.cut)

    def _take_events(self, events: Sequence[TextEvent], out: list[bytes]) -> None:
        last = events[-1] if events else None
        for event in events:
            if isinstance(event, CallBegin):
                self._begin_block("call", out, id=event.id, name=event.name)
                continue
            if isinstance(event, CallEnd):
                # A call that the token limit cut off has a CallEnd too. Its arguments are incomplete JSON.
                self._close(out, cut=self.cut and event is last and not self._is_whole())
                continue
            kind: BlockKind = (
                "content" if isinstance(event, Content) else "reasoning" if isinstance(event, Reasoning) else "call"
            )
            if self.open_block is None or self.open_block.kind != kind:
                self._begin_block(kind, out)
            assert self.open_block is not None
            self.open_block.pieces.append(event.text)
            out.append(self.added(self.open_block, event.text))

    def _begin_block(self, kind: BlockKind, out: list[bytes], *, id: str = "", name: str = "") -> None:
        self._close(out)
        self.open_block = AnswerBlock(kind=kind, index=len(self.blocks), id=id, name=name)
        self.blocks.append(self.open_block)
        out.append(self.opened(self.open_block))

    def _close(self, out: list[bytes], *, cut: bool = False) -> None:
        block, self.open_block = self.open_block, None
        if block is not None:
            block.cut = cut
            out.append(self.closed(block))

    def _is_whole(self) -> bool:
        try:
            exact_json.loads("" if self.open_block is None else self.open_block.text)
        except ValueError:
            return False
        return True

    def event(self, kind: str, **data: Any) -> bytes:
        """Return a server-sent event with its name."""
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), exact_json.dumps({"type": kind, **data}))

    @abstractmethod
    def begin(self, choices: Sequence[Choice]) -> bytes:
        """Return the events before the first block."""

    @abstractmethod
    def opened(self, block: AnswerBlock) -> bytes:
        """Return the events that begin a block."""

    @abstractmethod
    def added(self, block: AnswerBlock, text: str) -> bytes:
        """Return the event of a block's next piece."""

    @abstractmethod
    def closed(self, block: AnswerBlock) -> bytes:
        """Return the events that end a block."""

    @abstractmethod
    def end(self, choices: Sequence[Choice]) -> bytes:
        """Return the events after the last block."""

    @abstractmethod
    def failed(self, error: ApiError, choices: Sequence[Choice]) -> bytes:
        """Return the event that ends a failed stream."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer as one object."""
