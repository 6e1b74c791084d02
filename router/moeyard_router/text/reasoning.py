"""Separates a model's reasoning from its answer: <think>...</think> of DeepSeek, Qwen3 and Kimi-K2.

The model opens the block, or its chat template does at the end of the prompt. Newlines next to the markers belong to
the format and to neither text. A <think> that is not at the beginning of the output is content.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moeyard_router.text.code_fence import CodeFence
from moeyard_router.text.events import MAX_BLANK, Content, Reasoning, TextEvent, held_back, joined

THINK, END_THINK = "<think>", "</think>"


def closes_block(prompt: str) -> bool:
    """Return whether a prompt ends with the end of the block, so that the model does not reason."""
    return prompt.rstrip().endswith(END_THINK)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family marks its reasoning.

    assumed: whether an output without <think> begins inside the block, unless the prompt has closed it.
    implicit_ends: markers that end the block without </think>, except in a code block. They belong to the answer.
    """

    name: str
    assumed: bool = False
    implicit_ends: tuple[str, ...] = ()

    def inside_after(self, prompt: str, begun: str | None = None) -> bool:
        """Return whether the output of `prompt` begins in the block. `begun`: a message that the output continues."""
        if begun is not None:
            return begun.rfind(THINK) > begun.rfind(END_THINK)
        return prompt.rstrip().endswith(THINK) or (self.assumed and not closes_block(prompt))


# By vLLM's names of the parsers, which differ in their treatment of an output without a marker.
REASONING_FORMATS = MappingProxyType(
    {
        f.name: f
        for f in (
            ReasoningFormat(name="deepseek_r1", assumed=True),
            ReasoningFormat(name="deepseek_v3"),
            ReasoningFormat(name="qwen3"),
            # Kimi-K2-Thinking may begin a call directly after its reasoning.
            ReasoningFormat(
                name="kimi_k2",
                implicit_ends=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
            ),
            # DeepSeek-V4 does the same (dynamo's pull request 10646, SGLang's 32539).
            ReasoningFormat(name="deepseek_v4", implicit_ends=("<｜DSML｜tool_calls>", '<｜DSML｜invoke name="')),
        )
    }
)


class ReasoningParser:
    """Splits an output that arrives in pieces. The cuts between pieces make no difference."""

    def __init__(self, form: ReasoningFormat, *, inside: bool, more_ends: Sequence[str] = ()) -> None:
        """Begin an output. `more_ends`: further `implicit_ends` of this request."""
        self._ends = (END_THINK, *form.implicit_ends, *more_ends)
        self.ended_early = False  # whether a marker other than </think> ended the block
        self._inside = inside
        self._fence = CodeFence()
        self._buffer = ""
        self._step = self._at_start

    @property
    def in_block(self) -> bool:
        """Whether the text is inside the block."""
        return self._step in (self._block_begins, self._in_block)

    def push(self, text: str) -> list[TextEvent]:
        """Return the events that the next piece settles: `Reasoning` first, then `Content`; either or none."""
        if self._step == self._after:
            return [Content(text)]
        self._buffer += text
        out: list[TextEvent] = []
        while self._step(out):
            pass
        return joined(out)

    def finish(self) -> list[TextEvent]:
        rest, self._buffer = self._buffer, ""
        if self._step == self._in_block or (self._inside and self._step == self._at_start):
            return joined([Reasoning(rest.strip("\n"))])
        return joined([Content(rest)]) if self._step == self._at_start else []

    def _at_start(self, out: list[TextEvent]) -> bool:
        """Read the beginning. A <think> may come, even if the prompt has opened the block."""
        text = self._buffer.lstrip()
        early = len(self._buffer) - len(text) <= MAX_BLANK
        if early and text.startswith(THINK):
            self._buffer = text[len(THINK) :]
            self._step = self._block_begins
            return True
        if early and THINK.startswith(text):
            return False
        self._step = self._block_begins if self._inside else self._after
        return True

    def _block_begins(self, out: list[TextEvent]) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if not self._buffer:
            return False
        self._step = self._in_block
        return True

    def _in_block(self, out: list[TextEvent]) -> bool:
        text = self._buffer
        found = [(i, end) for end in self._ends if (i := text.find(end)) >= 0]
        if not found:
            keep = len(text) - held_back(text, self._ends)
            self._think(out, max(len(text[:keep].rstrip("\n")), keep - MAX_BLANK))
            return False
        place, end = min(found)
        own = end == END_THINK
        if not own and self._fence.inside_after(text[:place]):
            self._think(out, place + len(end))
            return True
        self._think(out, max(len(text[:place].rstrip("\n")), place - MAX_BLANK))
        self._buffer = text[place + len(end) :] if own else text[place:]
        self.ended_early = not own
        self._step = self._block_ended if own else self._after
        return True

    def _think(self, out: list[TextEvent], size: int) -> None:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._fence.push(text)
        out.append(Reasoning(text))

    def _block_ended(self, out: list[TextEvent]) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if not self._buffer:
            return False
        self._step = self._after
        return True

    def _after(self, out: list[TextEvent]) -> bool:
        out.append(Content(self._buffer))
        self._buffer = ""
        return False
