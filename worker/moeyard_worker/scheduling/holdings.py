"""What requests hold on a rank: pages and a slot each, taken, grown, found again and given back. Pure."""

from collections.abc import Iterable
from itertools import islice
from math import lcm

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.scheduling.request import Request
from moeyard_worker.state.pages import PagePool
from moeyard_worker.state.slots import SlotPool


class Holdings:
    """Owner of a rank's pages and slots; which request holds which is written in the request."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = PagePool(config.num_pages)
        self.slots = SlotPool(config.num_state_slots)
        self._page_size = config.page_size
        self._max_num_seqs = config.max_num_seqs
        # A prompt is reused up to a multiple of this many pages.
        self._reuse_unit = lcm(config.page_size, config.chunk_alignment) // config.page_size

    def pages_for(self, length: int) -> int:
        """Pages of `length` positions."""
        return -(-length // self._page_size)

    def known_prefix(self, request: Request) -> list[int]:
        """Pages of other requests that hold the beginning of this one's prompt."""
        # At least the last prompt position is computed, because its logits choose the first output token.
        reusable = len(request.prompt) - 1
        if request.sampling.prompt_logprobs is not None:
            # Pages hold no logits: a position whose next token is still to be scored is computed here.
            reusable = min(reusable, request.num_scored)
        pages = self.pool.match(request.hashes[: reusable // self._page_size])
        return pages[: len(pages) - len(pages) % self._reuse_unit]

    def can_start(self, request: Request, cached: list[int]) -> bool:
        """Whether a slot is free, and the pages for all known tokens beside the `cached` ones."""
        if self.slots.num_slots and not self.slots.num_free:
            return False
        needed = self.pages_for(request.length) - len(cached)
        return needed <= self.pool.num_free - self.pool.num_idle(cached)

    def can_start_first(self, waiting: Iterable[Request], count: int, num_running: int) -> bool:
        """Whether the first `count` of the queue have places, slots and pages together, whatever prefixes are known."""
        if count <= 0:
            return True
        if num_running + count > self._max_num_seqs or (self.slots.num_slots and count > self.slots.num_free):
            return False
        return sum(self.pages_for(r.length) for r in islice(waiting, count)) <= self.pool.num_free

    def start(self, request: Request, cached: list[int]) -> None:
        """Give the request a slot, the `cached` pages, whose positions count as computed, and the rest for its tokens.

        All pages of the prompt at once: prompts that are still being computed must not starve each other.
        """
        self.pool.acquire(cached)
        request.pages = cached + self.pool.allocate(self.pages_for(request.length) - len(cached))
        if self.slots.num_slots:
            request.state_slot = self.slots.allocate()
        request.num_computed = len(cached) * self._page_size
        request.num_registered = len(cached)

    @property
    def num_free_positions(self) -> int:
        """Positions that the free pages hold."""
        return self.pool.num_free * self._page_size

    def reach(self, request: Request) -> int:
        """Positions that the request's pages hold."""
        return len(request.pages) * self._page_size

    def extend(self, request: Request, length: int, num_others: int) -> None:
        """Give the request pages for `length` positions if `num_others` are free beside them: it can do without."""
        missing = self.pages_for(length) - len(request.pages)
        if 0 < missing <= self.pool.num_free - num_others:
            request.pages += self.pool.allocate(missing)

    def register(self, request: Request) -> None:
        """Make newly filled prompt pages findable; a page shared with output positions never is."""
        full = min(request.num_computed // self._page_size, len(request.hashes))
        for i in range(request.num_registered, full):
            self.pool.register(request.pages[i], request.hashes[i])
        request.num_registered = max(request.num_registered, full)

    def give_back(self, request: Request) -> None:
        """Free the pages behind the known tokens: they were reserved for drafts that were refused."""
        kept = self.pages_for(request.length)
        if len(request.pages) > kept:
            self.pool.release(request.pages[kept:])
            del request.pages[kept:]

    def release(self, request: Request) -> None:
        """Free all that the request holds, which no step in flight may name any more."""
        assert not request.in_flight, f"a step in flight still names {request.key}"
        self.pool.release(request.pages)
        request.pages = []
        if request.state_slot >= 0:
            self.slots.release(request.state_slot)
            request.state_slot = -1

    def validate(self, holders: Iterable[Request]) -> None:
        """Assert that every page and slot is free or held as the requests say, and covers what they computed."""
        requests = list(holders)
        self.pool.validate(r.pages for r in requests)
        self.slots.validate(r.state_slot for r in requests if r.state_slot >= 0)
        for r in requests:
            assert len(r.pages) >= self.pages_for(r.num_computed), f"{r.key} computed past its pages"
            assert (r.state_slot >= 0) == bool(r.pages and self.slots.num_slots), (
                f"{r.key} has no slot, or one too many"
            )
            for chunk in r.in_flight:
                named = tuple(r.pages[: len(chunk.pages)])
                assert (named, r.state_slot) == (chunk.pages, chunk.state_slot), f"{r.key} lost what a step names"
                assert len(chunk.pages) >= self.pages_for(chunk.max_start + chunk.num_tokens), "rows without a page"
