"""Paged state of one rank: page allocator and prefix index. Pure.

A page holds `page_size` consecutive positions of one sequence in every layer. The index finds full prompt pages by a
chained hash of their tokens. Pages that only the index holds are evicted when needed, oldest first. Only pages whose
tokens were all computed with the prompt formula may be registered (one answer).
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, KeysView, Sequence

ROOT_HASH = b"moeyard"


def page_hashes(token_ids: Sequence[int], page_size: int, salt: str = "") -> list[bytes]:
    """Return one chained SHA-256 per full page. Two are equal only if salts and prefixes up to the page's end are."""
    hashes: list[bytes] = []
    parent = hashlib.sha256(ROOT_HASH + salt.encode()).digest() if salt else ROOT_HASH
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        tokens = array("q", token_ids[start : start + page_size]).tobytes()
        parent = hashlib.sha256(parent + tokens).digest()
        hashes.append(parent)
    return hashes


class PagePool:
    """Reference-counted pages [0, num_pages) with a prefix index. Evictions call `forgotten` with the page's hash."""

    def __init__(self, num_pages: int, forgotten: Callable[[bytes], None] | None = None) -> None:
        self.num_pages = num_pages
        self._forgotten = forgotten
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        # Unreferenced pages in the index, oldest first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Number of pages that can be allocated now, with those that only the prefix index holds."""
        return len(self._free) + len(self._idle)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest known prefix of `hashes`, without a reference."""
        pages: list[int] = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    @property
    def known(self) -> KeysView[bytes]:
        """The hashes of all pages in the index."""
        return self._page_of.keys()

    def num_idle(self, pages: Sequence[int]) -> int:
        """Return how many of `pages` count as free. Acquiring these lowers `num_free`."""
        return sum(1 for p in pages if self._refs[p] == 0)

    def acquire(self, pages: Sequence[int]) -> None:
        """Add one reference to each page that `match` found."""
        for page in pages:
            if self._refs[page] == 0:
                del self._idle[page]
            self._refs[page] += 1

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages with one reference each. Evicts the oldest idle pages if needed.

        Raises ValueError if fewer are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count} pages are needed and {self.num_free} are free")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                digest = self._hash_of.pop(page)
                del self._page_of[digest]
                if self._forgotten is not None:
                    self._forgotten(digest)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def register(self, page: int, digest: bytes) -> None:
        """Add a fully computed prompt page to the index. If equal content is already there, nothing changes."""
        if digest not in self._page_of and page not in self._hash_of:
            self._page_of[digest] = page
            self._hash_of[page] = digest

    def forget(self) -> None:
        """Drop the whole prefix index. Pages with references stay allocated, but are not in the index any more."""
        for digest in self._page_of:
            if self._forgotten is not None:
                self._forgotten(digest)
        self._free.extend(self._idle)
        self._page_of, self._hash_of = {}, {}
        self._idle.clear()

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page. The end of a prefix is evicted before its beginning."""
        for page in reversed(pages):
            assert self._refs[page] > 0, f"page {page} is released more often than it was taken"
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page in self._hash_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def validate(self, held: Iterable[Sequence[int]]) -> None:
        """Assert all invariants. `held` are the page tables of the live sequences."""
        counts = Counter(page for table in held for page in table)
        for page in range(self.num_pages):
            assert self._refs[page] == counts[page], f"page {page}: {self._refs[page]} refs, {counts[page]} holders"
        free, idle = set(self._free), set(self._idle)
        used = {p for p in range(self.num_pages) if self._refs[p]}
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free | idle | used) == self.num_pages, "a page is lost"
        assert len(free) + len(idle) + len(used) == self.num_pages, "a page is in two states"
        assert {p: h for h, p in self._page_of.items()} == self._hash_of, "the two directions of the index differ"
        assert idle <= self._hash_of.keys(), "an idle page is not in the index"
        assert not free & self._hash_of.keys(), "a free page is in the index"
