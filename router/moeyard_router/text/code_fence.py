"""Detects fenced code blocks of Markdown in text that arrives in pieces."""

import re

_MAX_LINE = 256  # characters; a longer line is no fence
_MAX_DEPTH = 16  # of nested blocks
_FENCE = re.compile(r"[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?(?P<fence>`{3,}|~{3,})(?P<info>.*)", re.DOTALL)


class CodeFence:
    """Tracks the fences of a text.

    A fence with a language always opens a block, because models nest blocks with equal fences. CommonMark does not.
    """

    def __init__(self) -> None:
        self._fences: list[str] = []  # of the open blocks
        self._line = ""

    def push(self, text: str) -> None:
        *lines, rest = (self._line + text).split("\n")
        for line in lines:
            _end_line(self._fences, line)
        self._line = rest[:_MAX_LINE]

    def inside_after(self, text: str) -> bool:
        """Return whether the text is in a block after `text`, which comes next."""
        fences = self._fences.copy()
        *lines, rest = (self._line + text).split("\n")
        for line in lines:
            _end_line(fences, line)
        _end_line(fences, rest)
        return bool(fences)


def _end_line(fences: list[str], line: str) -> None:
    """Update the open blocks after a line of text."""
    match = _FENCE.match(line)
    if match is None or len(line) >= _MAX_LINE:
        return
    fence, info = match["fence"], match["info"].lstrip()
    if fence[0] in info:
        return  # inline code: ```x```
    language = info[:1].isalnum() or info[:1] in ("{", ".")
    if fences and not language and fence.startswith(fences[-1]):
        fences.pop()
    elif len(fences) < _MAX_DEPTH:
        fences.append(fence)
