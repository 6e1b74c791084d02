"""What each rank's prefix cache is thought to hold, from the prompts that it was given. Pure.

Nobody asks the ranks: a prompt that was sent to a rank is computed there, page by page, and its pages stay in the
prefix index until others need their room, the least recently used first. The same rule is applied here to hashes of
blocks of pages. A wrong guess costs time, never an answer, so 64-bit hashes do.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from moeyard_worker.protocol import TokenIds

_ENDS = 256  # bytes at either end of a block that are looked at: the middle of a long one is not worth the time
_FINE = 32  # pages; from there on blocks grow with the prompt, so that a long one has few


class Block(NamedTuple):
    """A piece of a prompt: `key` is of it and all before it, `pages` counts its own, `end` those up to its end."""

    key: int
    pages: int
    end: int


def blocks(token_ids: Sequence[int], page_size: int) -> list[Block]:
    """The full pages of `token_ids` (ids below 2^32) in blocks: of 1 page up to 64, of 2 up to 128, of 4 and so on.

    Where blocks begin does not depend on what follows. 131,072 ids in pages of 16 are 288 blocks, and take 0.2 ms.
    """
    raw = (token_ids if isinstance(token_ids, TokenIds) else TokenIds.of(token_ids)).data
    width = page_size * 4
    found: list[Block] = []
    key, begin, pages = 0, 0, 1
    while (begin + pages) * width <= len(raw):
        start, end = begin * width, (begin + pages) * width
        if end - start > 2 * _ENDS:
            key = hash((key, raw[start : start + _ENDS], raw[end - _ENDS : end]))
        else:
            key = hash((key, raw[start:end]))
        begin += pages
        found.append(Block(key, pages, begin))
        if begin == 2 * _FINE * pages:
            pages *= 2
    return found


class PrefixMap:
    """Per rank the blocks it was given lately, at most as many pages as it has."""

    def __init__(self, num_ranks: int) -> None:
        self._blocks: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(num_ranks)]  # key -> pages
        self._held = [0] * num_ranks

    def forget(self, rank: int) -> None:
        """Another worker took the place of this one: it holds nothing. Ranks that were not there yet are there now."""
        while len(self._blocks) <= rank:
            self._blocks.append(OrderedDict())
            self._held.append(0)
        self._blocks[rank].clear()
        self._held[rank] = 0

    def known(self, rank: int, prompt: Sequence[Block]) -> int:
        """Pages at the beginning of a prompt that the rank is thought to hold.

        A block is forgotten after those that follow it, so the known ones are a prefix: O(log n).
        """
        held, low, high = self._blocks[rank], 0, len(prompt)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if prompt[middle].key in held else (low, middle)
        return prompt[low - 1].end if low else 0

    def sent(self, rank: int, prompt: Sequence[Block], capacity: int) -> None:
        """The rank gets this prompt, and has `capacity` pages in all."""
        held = self._blocks[rank]
        if prompt and prompt[-1].end > capacity:  # of which what comes last is forgotten first
            prompt = prompt[: bisect_right(prompt, capacity, key=_end)]
        if prompt and next(reversed(held), None) == prompt[0].key and self.known(rank, prompt) == prompt[-1].end:
            return  # the latest prompt once more
        for block in reversed(prompt):
            if block.key not in held:
                self._held[rank] += block.pages
            held[block.key] = block.pages
            held.move_to_end(block.key)
        while self._held[rank] > capacity:
            self._held[rank] -= held.popitem(last=False)[1]


def _end(block: Block) -> int:
    return block.end
