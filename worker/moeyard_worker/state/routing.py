"""The experts that the positions of each page chose. Pure: their ids are bytes here.

Only positions of prompts are stored. A request reads them once, when its prompt is computed, also for pages of other
requests that it reuses. Pages are those of the KV cache, so evicting a page needs no further step.
"""

from collections.abc import Sequence


class PageRouting:
    """`width` bytes per position. Memory is taken when a page is first written."""

    def __init__(self, *, num_pages: int, page_size: int, width: int) -> None:
        self._page_size, self.width = page_size, width
        self._data = bytearray(num_pages * page_size * width)

    def write(self, pages: Sequence[int], start: int, experts: bytes) -> None:
        """Store the experts of the positions from `start` on of a sequence with these pages."""
        for place, first, last in self._parts(pages, start, start + len(experts) // self.width):
            self._data[place : place + last - first] = experts[first:last]

    def read(self, pages: Sequence[int], start: int, end: int) -> bytes:
        """Return the experts of positions [start, end) of a sequence with these pages."""
        return b"".join(
            self._data[place : place + last - first] for place, first, last in self._parts(pages, start, end)
        )

    def _parts(self, pages: Sequence[int], start: int, end: int) -> list[tuple[int, int, int]]:
        """Return, per page, the place of its first byte, and the range of bytes within those of [start, end)."""
        size, width, parts = self._page_size, self.width, []
        position = start
        while position < end:
            page, offset = divmod(position, size)
            last = min(end, (page + 1) * size)
            parts.append(((pages[page] * size + offset) * width, (position - start) * width, (last - start) * width))
            position = last
        return parts
