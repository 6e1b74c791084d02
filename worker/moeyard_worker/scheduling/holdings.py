"""What requests hold on a rank: pages and a slot each, taken, grown, found again and given back. Pure.

Where a model keeps state per sequence, the beginning of a prompt is reused up to the longest position at which there
are both pages and a snapshot of that state. A request takes two: behind the last whole pages of its prompt, where a
longer prompt goes on from; and where it leaves what others had in their prompts, if there is none yet. A third request
with the same beginning will start there.
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
    """What is known of the beginning of a prompt: the `pages` to start behind, and how many are known in all.

    They differ where state is kept per sequence and there is no snapshot of it behind the last.
    """

    pages: list[int]
    num_known: int


class Holdings:
    """Owner of a rank's pages and slots; which request holds which is written in the request."""

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
        """Pages of `length` positions."""
        return -(-length // self._page_size)

    def pages_to_start(self, request: Request) -> int:
        """Pages for all known tokens: where not all of the prompt is kept, its own and those of what is."""
        kept = self.pages_for(request.length - request.num_dropped)
        return kept + self.pages_for(len(request.prompt)) if request.num_dropped else kept

    def known_prefix(self, request: Request) -> Prefix:
        """Pages of other requests that hold the beginning of this one's prompt, with the state behind them."""
        # At least the last prompt position is computed, because its logits choose the first output token; or all those
        # whose queries choose what is kept.
        reusable = len(request.prompt) - request.window
        if request.sampling.prompt_logprobs is not None:
            # Pages hold no logits: a position whose next token is still to be scored is computed here.
            reusable = min(reusable, request.num_scored)
        pages = self.pool.match(request.hashes[: reusable // self._page_size])
        num_known = len(pages) - len(pages) % self._reuse_unit
        if not self.slots.num_slots:
            return Prefix(pages[:num_known], num_known)
        return Prefix(pages[: self.snapshots.reach(request.hashes[:num_known], self._reuse_unit)], num_known)

    def can_start(self, request: Request, cached: list[int]) -> bool:
        """Whether a slot is free, and the pages for all known tokens beside the `cached` ones."""
        if self.slots.num_slots and not self.slots.num_free:
            return False
        needed = self.pages_to_start(request) - len(cached)
        return needed <= self.pool.num_free - self.pool.num_idle(cached)

    def can_start_first(self, waiting: Iterable[Request], count: int, num_running: int) -> bool:
        """Whether the first `count` of the queue have places, slots and pages together, whatever prefixes are known."""
        if count <= 0:
            return True
        if num_running + count > self._max_num_seqs or (self.slots.num_slots and count > self.slots.num_free):
            return False
        return sum(self.pages_to_start(r) for r in islice(waiting, count)) <= self.pool.num_free

    def start(self, request: Request, prefix: Prefix) -> None:
        """Give the request a slot, the pages of its known `prefix`, which counts as computed, and the rest it needs.

        All pages of the prompt at once: prompts that are still being computed must not starve each other.
        """
        cached = prefix.pages
        self.pool.acquire(cached)
        if request.num_dropped:
            request.compact = self.pool.allocate(self.pages_for(request.length - request.num_dropped))
        length = len(request.prompt) if request.num_dropped else request.length
        request.pages = cached + self.pool.allocate(self.pages_for(length) - len(cached))
        if self.slots.num_slots:
            request.state_slot = self.slots.allocate()
            self._plan_snapshots(request, prefix)
        request.num_computed = len(cached) * self._page_size
        request.num_registered = len(cached)

    def _plan_snapshots(self, request: Request, prefix: Prefix) -> None:
        """Where a request that starts behind a snapshot, or behind none, takes others."""
        start, unit = len(prefix.pages), self._reuse_unit
        if start:
            request.restored = self.snapshots.use(request.hashes[start - 1])
        ends = sorted({prefix.num_known, len(request.hashes) - len(request.hashes) % unit})
        request.snapshots_at = tuple(end * self._page_size for end in ends if end > start)

    def take_snapshots(self, request: Request, start: int, rows: int) -> tuple[tuple[int, int], ...]:
        """(position, slot) of the snapshots that a chunk of so many rows from `start` takes, where there is room."""
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
        """Positions that the free pages hold."""
        return self.pool.num_free * self._page_size

    def reach(self, request: Request) -> int:
        """Positions that the request's pages hold, those of its prompt that are not kept among them."""
        return len(request.kept_pages) * self._page_size + request.num_dropped

    def missing(self, request: Request, length: int) -> int:
        """Pages that the request lacks for `length` positions, its prompt among them."""
        return self.pages_for(length - request.num_dropped) - len(request.kept_pages)

    def grow(self, request: Request, count: int) -> None:
        """Give the request so many pages more, for what comes behind its prompt."""
        request.kept_pages.extend(self.pool.allocate(count))

    def extend(self, request: Request, length: int, num_others: int) -> None:
        """Give the request pages for `length` positions if `num_others` are free beside them: it can do without."""
        missing = self.missing(request, length)
        if 0 < missing <= self.pool.num_free - num_others:
            self.grow(request, missing)

    def register(self, request: Request) -> None:
        """Make newly filled prompt pages, and snapshots behind them, findable; a page with output positions never is.

        A whole prompt of which what is kept was copied needs its pages no more; others, and the index, may.
        """
        full = min(request.num_computed // self._page_size, len(request.hashes))
        # Of a chunk that is computed together and ends with this prompt, what lies in pages is this prompt's alone.
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
        """Free the pages behind the known tokens: they were reserved for drafts that were refused."""
        kept = self.pages_for(request.length - request.num_dropped)
        if len(request.pages) > kept:
            self.pool.release(request.pages[kept:])
            del request.pages[kept:]

    def release(self, request: Request) -> None:
        """Free all that the request holds, which no step in flight may name any more."""
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
        """Assert that every page and slot is free or held as the requests say, and covers what they computed."""
        requests = list(holders)
        self.pool.validate(pages for r in requests for pages in (r.pages, r.compact))
        self.slots.validate(r.state_slot for r in requests if r.state_slot >= 0)
        self.snapshots.validate((self._hash_before(r, p) for r in requests for p in r.taking), self.pool.known)
        for r in requests:
            assert len(r.pages) >= self.pages_for(r.num_places), f"{r.key} computed past its pages"
            compacts = bool(r.pages and r.num_dropped and r.num_computed < len(r.prompt))
            assert bool(r.compact) == compacts, f"{r.key} was compacted and does not know, or the other way round"
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
