"""Allocates pages and state slots to requests, reuses prefixes, and frees both. Pure.

If the model keeps state per sequence, a prefix is reused up to the last position that has both pages and a snapshot of
that state. A request takes two snapshots. One is after the last full page of its prompt, where a longer prompt may
continue. The other is where its prompt leaves the known prefix, if there is no snapshot yet. A third request with the
same prefix starts there.
"""

from collections.abc import Iterable
from itertools import islice
from math import lcm
from typing import NamedTuple

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.scheduling.request import Request
from moeyard_worker.state.pages import PagePool
from moeyard_worker.state.slots import SlotPool
from moeyard_worker.state.snapshots import SnapshotPool


class Prefix(NamedTuple):
    """The known beginning of a prompt: the `pages` to reuse, and the number of all known pages.

    They differ if the model has state per sequence and no snapshot after the last known page.
    """

    pages: list[int]
    num_known: int


class Holdings:
    """Owner of a rank's pages and slots. Each request lists those that it holds."""

    def __init__(self, config: SchedulerConfig) -> None:
        first = config.num_state_slots * config.state_ring
        self.snapshots = SnapshotPool(range(first, first + config.num_snapshots))
        self.pool = PagePool(config.num_pages, self.snapshots.forget)
        self.slots = SlotPool(config.num_state_slots, config.state_ring)
        self._page_size = config.page_size
        self._max_num_seqs = config.max_num_seqs
        # A prompt is reused up to a multiple of this many pages.
        self._reuse_unit = lcm(config.page_size, config.chunk_alignment) // config.page_size

    def pages_for(self, length: int) -> int:
        """Return the number of pages for `length` positions."""
        return -(-length // self._page_size)

    def pages_to_start(self, request: Request) -> int:
        """Return the number of pages for all known tokens. With compression, both versions of the prompt count."""
        kept = self.pages_for(request.num_fed - request.num_dropped)
        return kept + self.pages_for(len(request.prompt)) if request.num_dropped else kept

    def known_prefix(self, request: Request) -> Prefix:
        """Return the known pages of this prompt's beginning that have the needed state."""
        # At least the last prompt position is computed, because its logits choose the first output token. Compression
        # needs the queries of its whole window.
        reusable = len(request.prompt) - request.window
        if request.sampling.prompt_logprobs is not None:
            # Pages hold no logits, so positions whose next token must be scored are computed.
            reusable = min(reusable, request.num_scored)
        pages = self.pool.match(request.hashes[: reusable // self._page_size])
        num_known = len(pages) - len(pages) % self._reuse_unit
        if not self.slots.num_slots:
            return Prefix(pages[:num_known], num_known)
        return Prefix(pages[: self.snapshots.reach(request.hashes[:num_known], self._reuse_unit)], num_known)

    def can_start(self, request: Request, cached: list[int]) -> bool:
        """Return whether a slot is free, and enough pages for all known tokens in addition to `cached`."""
        if self.slots.num_slots and not self.slots.num_free:
            return False
        needed = self.pages_to_start(request) - len(cached)
        return needed <= self.pool.num_free - self.pool.num_idle(cached)

    def can_start_first(self, waiting: Iterable[Request], count: int, num_running: int) -> bool:
        """Return whether the first `count` queued requests can start together, without counting known prefixes."""
        if count <= 0:
            return True
        if num_running + count > self._max_num_seqs or (self.slots.num_slots and count > self.slots.num_free):
            return False
        return sum(self.pages_to_start(r) for r in islice(waiting, count)) <= self.pool.num_free

    def start(self, request: Request, prefix: Prefix) -> None:
        """Allocate a slot and all pages of the prompt. The known `prefix` counts as computed.

        All pages are allocated at once, because partly computed prompts could starve each other.
        """
        cached = prefix.pages
        self.pool.acquire(cached)
        if request.num_dropped:
            request.compact = self.pool.allocate(self.pages_for(request.num_fed - request.num_dropped))
        length = len(request.prompt) if request.num_dropped else request.num_fed
        request.pages = cached + self.pool.allocate(self.pages_for(length) - len(cached))
        if self.slots.num_slots:
            request.state_slot = self.slots.allocate()
            self._plan_snapshots(request, prefix)
        request.num_computed = len(cached) * self._page_size
        request.num_registered = len(cached)

    def _plan_snapshots(self, request: Request, prefix: Prefix) -> None:
        """Choose the snapshot to restore and the positions of the snapshots to take."""
        start, unit = len(prefix.pages), self._reuse_unit
        if start:
            request.restored = self.snapshots.use(request.hashes[start - 1])
        ends = sorted({prefix.num_known, len(request.hashes) - len(request.hashes) % unit})
        request.snapshots_at = tuple(end * self._page_size for end in ends if end > start)

    def take_snapshots(self, request: Request, start: int, rows: int) -> tuple[tuple[int, int], ...]:
        """Return (position, slot) of the snapshots that a chunk of `rows` rows from `start` can take."""
        found: list[tuple[int, int]] = []
        for position in request.snapshots_at:
            if start < position <= start + rows:
                slot = self.snapshots.reserve(self._hash_before(request, position))
                if slot is not None:
                    found.append((position, slot))
                    request.taking.append(position)
        return tuple(found)

    def _hash_before(self, request: Request, position: int) -> bytes:
        return request.hashes[position // self._page_size - 1]

    @property
    def num_free_positions(self) -> int:
        """Number of positions that the free pages hold."""
        return self.pool.num_free * self._page_size

    def reach(self, request: Request) -> int:
        """Return the number of positions that the request's pages cover, with the dropped ones of its prompt."""
        return len(request.kept_pages) * self._page_size + request.num_dropped

    def missing(self, request: Request, length: int) -> int:
        """Return how many pages the request lacks for `length` positions in all."""
        return self.pages_for(length - request.num_dropped) - len(request.kept_pages)

    def grow(self, request: Request, count: int) -> None:
        """Allocate `count` more pages for output."""
        request.kept_pages.extend(self.pool.allocate(count))

    def extend(self, request: Request, length: int, num_others: int) -> None:
        """Allocate optional pages for `length` positions, if `num_others` pages stay free."""
        missing = self.missing(request, length)
        if 0 < missing <= self.pool.num_free - num_others:
            self.grow(request, missing)

    def register(self, request: Request) -> None:
        """Add newly filled prompt pages and snapshots to the prefix index. Pages with output positions are not added.

        Once a compressed prompt is copied, the request frees the original pages. The index may keep them.
        """
        full = min(request.num_computed // self._page_size, len(request.hashes))
        # Positions that are computed together with the end of this prompt are not reusable by other prompts.
        full -= full % self._reuse_unit
        for i in range(request.num_registered, full):
            self.pool.register(request.pages[i], request.hashes[i])
        request.num_registered = max(request.num_registered, full)
        while request.taking and request.taking[0] <= request.num_computed:
            self.snapshots.keep(self._hash_before(request, request.taking.pop(0)))
        if request.compact and request.num_computed >= len(request.prompt):
            self.pool.release(request.pages)
            request.pages, request.compact = request.compact, []

    def give_back(self, request: Request) -> None:
        """Free the pages after the known tokens, which were reserved for rejected drafts."""
        kept = self.pages_for(request.length - request.num_dropped)
        if len(request.pages) > kept:
            self.pool.release(request.pages[kept:])
            del request.pages[kept:]

    def release(self, request: Request) -> None:
        """Free everything that the request holds. No step in flight may use it."""
        assert not request.in_flight, f"a step in flight still names {request.key}"
        self.pool.release(request.pages)
        self.pool.release(request.compact)
        request.pages, request.compact = [], []
        for position in request.taking:
            self.snapshots.cancel(self._hash_before(request, position))
        request.taking, request.snapshots_at, request.restored = [], (), -1
        if request.state_slot >= 0:
            self.slots.release(request.state_slot)
            request.state_slot = -1

    def validate(self, holders: Iterable[Request]) -> None:
        """Assert that every page and slot is free or listed by its holders, and covers what they computed."""
        requests = list(holders)
        self.pool.validate(pages for r in requests for pages in (r.pages, r.compact))
        self.slots.validate(r.state_slot for r in requests if r.state_slot >= 0)
        self.snapshots.validate((self._hash_before(r, p) for r in requests for p in r.taking), self.pool.known)
        for r in requests:
            assert len(r.pages) >= self.pages_for(r.num_places), f"{r.key} computed past its pages"
            compacts = bool(r.pages and r.num_dropped and r.num_computed < len(r.prompt))
            assert bool(r.compact) == compacts, f"{r.key} has pages for compression at the wrong time"
            assert (r.state_slot >= 0) == bool(r.pages and self.slots.num_slots), (
                f"{r.key} has no slot, or one too many"
            )
            for chunk in r.in_flight:
                held = r.kept_pages if chunk.dropped else r.pages
                named = tuple(held[: len(chunk.pages)])
                assert (named, r.state_slot) == (chunk.pages, chunk.state_slot), f"{r.key} lost what a step names"
                end = chunk.max_start + chunk.num_tokens
                assert len(chunk.pages) >= self.pages_for(end - chunk.dropped), "rows without a page"
                assert chunk.dropped == (0 if chunk.prompt else r.num_dropped), "a place is taken for a position"
                if chunk.compaction is not None:
                    kept = chunk.compaction.pages
                    assert tuple(r.compact[: len(kept)]) == kept, f"{r.key} lost what its prompt is copied to"
