"""JSON with long lists in it, in pieces: to encode, to join or to free it whole would keep the interpreter lock.

Measured on 2026-11-22 with orjson 3.13, 240,000 log-probabilities: 0.2 s to encode 13 MB of maps, 13 ms if the items
are encoded already, 11 ms to copy it once.
"""

from collections.abc import Iterable

import orjson

_PIECE = 64 * 1024  # bytes
# Log-probabilities, of prompts or output, above which an answer is written apart from the event loop, its lists item by
# item: fewer are written faster than a thread is woken.
MANY_SCORES = 512


class LongLists:
    """The long lists of one answer. What `add` returns stands for a list until `pieces` puts it into its place."""

    def __init__(self) -> None:
        self._lists: list[list[bytes]] = []

    def add(self, items: Iterable[bytes]) -> orjson.Fragment:
        """Keep a list of values that are JSON already."""
        pieces, waiting, size = [b"["], list[bytes](), 0
        for item in items:
            waiting.append(item)
            size += len(item)
            if size >= _PIECE:
                pieces.append(b",".join(waiting) + b",")
                waiting, size = [], 0
        # Pieces end with a comma, but the last: of a list without items that is the bracket.
        last = b",".join(waiting) if waiting else pieces.pop()[:-1] if len(pieces) > 1 else b""
        pieces += [last, b"]"]
        self._lists.append(pieces)
        # No JSON has a zero byte in it, which is \u0000 there.
        return orjson.Fragment(b"\0%d\0" % (len(self._lists) - 1))

    def pieces(self, data: bytes) -> list[bytes]:
        """What was encoded with places of these lists in it, and the lists, which are forgotten."""
        parts = data.split(b"\0")
        found = parts[:1]
        for number, rest in zip(parts[1::2], parts[2::2], strict=True):
            found += [*self._lists[int(number)], rest]
        self._lists.clear()
        return found
