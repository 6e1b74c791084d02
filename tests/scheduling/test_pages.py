"""The page pool compared with a naive model of lists, and the hashes of page-sized prefixes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeyard_worker.state.pages import PagePool, page_hashes

NUM_PAGES = 6


class NaivePool:
    """The pool's promises in plain lists: holders per page, and the index with its pages in order of release."""

    def __init__(self) -> None:
        self.held: list[list[int]] = []
        self.index: dict[bytes, int] = {}
        self.idle: list[int] = []

    def refs(self, page: int) -> int:
        return sum(table.count(page) for table in self.held)

    def known(self, page: int) -> bool:
        return page in self.index.values()

    def num_free(self) -> int:
        return sum(1 for page in range(NUM_PAGES) if self.refs(page) == 0)

    def match(self, hashes: list[bytes]) -> list[int]:
        pages = []
        for digest in hashes:
            if digest not in self.index:
                break
            pages.append(self.index[digest])
        return pages

    def take(self, pages: list[int]) -> None:
        """Add a holder of `pages`; idle pages leave the reuse queue."""
        self.idle = [p for p in self.idle if p not in pages]
        self.held.append(pages)

    def evict(self, pages: list[int]) -> None:
        """Check allocated `pages`: blank ones go first, then the longest idle ones, which the index forgets."""
        num_blank = self.num_free() - len(self.idle)
        num_evicted = max(0, len(pages) - num_blank)
        assert sorted(p for p in pages if p in self.idle) == sorted(self.idle[:num_evicted])
        self.index = {h: p for h, p in self.index.items() if p not in pages}

    def release(self, which: int) -> list[int]:
        table = self.held.pop(which)
        self.idle += [p for p in reversed(table) if self.refs(p) == 0 and self.known(p)]
        return table


operations = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.lists(st.integers(0, 1), min_size=1, max_size=5)),
        st.tuples(st.just("register"), st.integers(0, 9)),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.tuples(st.just("allocate"), st.integers(0, NUM_PAGES + 1)),
    ),
    max_size=40,
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(operations)
def test_pool_equals_the_naive_one(operations: list[tuple[str, object]]) -> None:
    pool, naive = PagePool(NUM_PAGES), NaivePool()
    hashes_of: dict[int, list[bytes]] = {}  # id of a naive table -> its hashes
    for name, argument in operations:
        if name == "start":
            # Like the scheduler: reuse the known prefix and allocate the rest, or do not start.
            assert isinstance(argument, list)
            hashes = page_hashes(argument, 1)
            cached = pool.match(hashes)
            assert cached == naive.match(hashes)
            assert pool.num_idle(cached) == sum(1 for p in cached if naive.refs(p) == 0)
            missing = len(hashes) - len(cached)
            if missing > pool.num_free - pool.num_idle(cached):
                continue
            pool.acquire(cached)
            table = list(cached)
            naive.take(table)
            new = pool.allocate(missing)
            naive.evict(new)
            table += new
            naive.idle = [p for p in naive.idle if p not in new]
            hashes_of[id(table)] = hashes
        elif name == "allocate":
            assert isinstance(argument, int)
            if argument > naive.num_free():
                with pytest.raises(ValueError, match=f"{argument} pages are needed and {naive.num_free()} are free"):
                    pool.allocate(argument)
                continue
            new = pool.allocate(argument)
            assert all(naive.refs(p) == 0 for p in new), "a held page was allocated"
            assert len(set(new)) == len(new) == argument
            naive.evict(new)
            naive.take(new)
        elif naive.held:
            assert isinstance(argument, int)
            which = argument % len(naive.held)
            table = naive.held[which]
            if name == "register":
                for page, digest in zip(table, hashes_of.get(id(table), []), strict=False):
                    pool.register(page, digest)
                    if digest not in naive.index and not naive.known(page):
                        naive.index[digest] = page
            else:
                pool.release(naive.release(which))
        pool.validate(naive.held)
        assert pool.num_free == naive.num_free()
    for which in range(len(naive.held)):
        pool.release(naive.held[which])
    pool.validate([])
    assert pool.num_free == NUM_PAGES


def test_oldest_idle_tail_is_forgotten_first() -> None:
    pool = PagePool(4)
    first, second = page_hashes([1, 2], 1), page_hashes([3, 4], 1)
    for hashes in (first, second):
        pages = pool.allocate(2)
        for page, digest in zip(pages, hashes, strict=True):
            pool.register(page, digest)
        pool.release(pages)
    assert pool.num_free == 4
    # The first prefix is now the younger one.
    again = pool.match(first)
    pool.acquire(again)
    pool.release(again)
    pool.allocate(1)
    assert (len(pool.match(first)), len(pool.match(second))) == (2, 1)
    pool.allocate(1)
    assert (len(pool.match(first)), len(pool.match(second))) == (2, 0)
    pool.allocate(1)
    assert len(pool.match(first)) == 1


def test_first_page_of_equal_content_stays_known() -> None:
    pool = PagePool(3)
    (digest,) = page_hashes([7, 8], 2)
    one, two = pool.allocate(1), pool.allocate(1)
    pool.register(one[0], digest)
    pool.register(two[0], digest)
    assert pool.match([digest]) == one
    pool.release(two)
    pool.validate([one])
    pool.acquire(one)
    pool.release(one)
    assert pool.num_free == 2
    pool.release(one)
    assert (pool.num_free, pool.match([digest])) == (3, one)


def test_second_release_is_detected() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match=f"page {pages[0]} is released more often"):
        pool.release(pages)


def test_validate_detects_wrong_holders() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.validate([pages])
    for held in ([], [pages[:1]], [pages, pages[:1]]):
        with pytest.raises(AssertionError, match="refs"):
            pool.validate(held)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12), st.integers(1, 4))
def test_hashes_are_equal_exactly_when_prefixes_are(one: list[int], two: list[int], page_size: int) -> None:
    hashes = [page_hashes(tokens, page_size) for tokens in (one, two)]
    assert [len(h) for h in hashes] == [len(one) // page_size, len(two) // page_size]
    for i, (a, b) in enumerate(zip(*hashes, strict=False)):
        end = (i + 1) * page_size
        assert (a == b) == (one[:end] == two[:end])
    assert len({*hashes[0]}) == len(hashes[0]), "equal pages at different positions hash alike"


def test_hashes_distinguish_large_token_ids() -> None:
    assert page_hashes([1], 1) != page_hashes([1 + 2**32], 1)
    assert page_hashes((5, 6), 2) == page_hashes([5, 6], 2)


def test_salts_keep_prefixes_apart() -> None:
    plain, one, other = (page_hashes([5, 6, 7, 8], 2, salt) for salt in ("", "a", "b"))
    assert not set(plain) & set(one)
    assert not set(one) & set(other)
    assert one == page_hashes([5, 6, 7, 8], 2, "a")
