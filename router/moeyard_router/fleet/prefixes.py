"""What each rank's prefix cache is thought to hold, from the prompts that it was given. Pure.

Nobody asks the ranks: a prompt that was sent to a rank is computed there, page by page, and its pages stay in the
prefix index until others need their room, the least recently used first. The same rule is applied here to hashes of
pages. A wrong guess costs time, never an answer, so 64-bit hashes do.
"""

from collections import OrderedDict
from collections.abc import Sequence

from moeyard_worker.protocol import TokenIds


def page_keys(token_ids: Sequence[int], page_size: int) -> list[int]:
    """A hash per full page of `token_ids` (ids below 2^32): of the page and all before it."""
    raw = (token_ids if isinstance(token_ids, TokenIds) else TokenIds.of(token_ids)).data
    width = page_size * 4
    keys, before = [], 0
    for begin in range(0, len(raw) - width + 1, width):
        before = hash((before, raw[begin : begin + width]))
        keys.append(before)
    return keys


class PrefixMap:
    """Per rank the pages it was given lately, at most as many as it has."""

    def __init__(self, num_ranks: int) -> None:
        self._pages: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_ranks)]

    def known(self, rank: int, keys: Sequence[int]) -> int:
        """Pages at the beginning of `keys` that the rank is thought to hold.

        A page is forgotten after those that follow it, so the known ones are a prefix: O(log n).
        """
        pages, low, high = self._pages[rank], 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if keys[middle] in pages else (low, middle)
        return low

    def sent(self, rank: int, keys: Sequence[int], capacity: int) -> None:
        """The rank gets a prompt of these pages, and has `capacity` pages in all."""
        pages = self._pages[rank]
        for key in reversed(keys):
            pages[key] = None
            pages.move_to_end(key)
        while len(pages) > capacity:
            pages.popitem(last=False)

    def forget(self, rank: int) -> None:
        """The rank has lost its cache."""
        self._pages[rank].clear()
