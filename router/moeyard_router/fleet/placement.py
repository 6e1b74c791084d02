"""Remembers which prompts went to which rank, and each client's last rank, for the choice of a rank. Pure.

The router infers the contents of the ranks' prefix caches. A rank computes each prompt that it receives, page by page.
Its pages stay in the prefix index until others need the space, least recently used first. This module applies the same
rule to hashes of blocks of pages. A wrong guess costs time and never changes an answer, so 64-bit hashes suffice.
"""

import dataclasses
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from moeyard_router.fleet.policy import RankLoad, Route, choose_rank
from moeyard_worker.protocol import TokenIds

_ENDS = 256  # bytes at either end of a block that are hashed, because hashing all of a long block takes too long
_FINE = 32  # pages; beyond them blocks grow with the prompt, so that a long prompt has few blocks
_MAX_CLIENTS = 65536
_PROMPTS = 32  # prompts with cached blocks


class PromptBlock(NamedTuple):
    """A piece of a prompt. `key` hashes the prompt up to its end. `pages`: its length. `end`: pages up to its end."""

    key: int
    pages: int
    end: int


def blocks(token_ids: Sequence[int], page_size: int) -> list[PromptBlock]:
    """Return the full pages of `token_ids` (ids below 2^32) in blocks: of 1 page up to 64, of 2 up to 128, and so on.

    Later tokens do not move the boundaries. 131,072 ids in pages of 16 make 288 blocks and take 0.2 ms.
    """
    raw = (token_ids if isinstance(token_ids, TokenIds) else TokenIds.of(token_ids)).data
    width = page_size * 4
    found: list[PromptBlock] = []
    key, begin, pages = 0, 0, 1
    while (begin + pages) * width <= len(raw):
        start, end = begin * width, (begin + pages) * width
        if end - start > 2 * _ENDS:
            key = hash((key, raw[start : start + _ENDS], raw[end - _ENDS : end]))
        else:
            key = hash((key, raw[start:end]))
        begin += pages
        found.append(PromptBlock(key, pages, begin))
        if begin == 2 * _FINE * pages:
            pages *= 2
    return found


class PrefixMap:
    """The blocks that were sent to each rank lately, up to the number of pages of the rank."""

    def __init__(self, num_ranks: int) -> None:
        self._blocks: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(num_ranks)]  # key -> pages
        self._held = [0] * num_ranks

    def forget(self, rank: int) -> None:
        """Forget a rank's blocks, because its worker was replaced. A rank beyond the last one is added."""
        while len(self._blocks) <= rank:
            self._blocks.append(OrderedDict())
            self._held.append(0)
        self._blocks[rank].clear()
        self._held[rank] = 0

    def known(self, rank: int, prompt: Sequence[PromptBlock]) -> int:
        """Return how many pages at the beginning of a prompt the rank probably holds.

        A block is forgotten after its successors, so the known blocks are a prefix: O(log n).
        """
        held, low, high = self._blocks[rank], 0, len(prompt)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if prompt[middle].key in held else (low, middle)
        return prompt[low - 1].end if low else 0

    def sent(self, rank: int, prompt: Sequence[PromptBlock], capacity: int) -> None:
        """Note that the rank gets this prompt. It has `capacity` pages in total."""
        held = self._blocks[rank]
        if prompt and prompt[-1].end > capacity:  # the last blocks are forgotten first
            prompt = prompt[: bisect_right(prompt, capacity, key=attrgetter("end"))]
        if prompt and next(reversed(held), None) == prompt[0].key and self.known(rank, prompt) == prompt[-1].end:
            return  # the same prompt as the latest
        for block in reversed(prompt):
            if block.key not in held:
                self._held[rank] += block.pages
            held[block.key] = block.pages
            held.move_to_end(block.key)
        while self._held[rank] > capacity:
            self._held[rank] -= held.popitem(last=False)[1]


class PromptPlacement:
    """Chooses ranks for prompts and remembers the choices. Without prefix caching it remembers no prompts."""

    def __init__(self, num_ranks: int, *, prefix_caching: bool) -> None:
        self._prefix_caching = prefix_caching
        self._prefixes = PrefixMap(num_ranks)
        self._last_ranks: OrderedDict[str, int] = OrderedDict()
        self._seen: OrderedDict[int, tuple[Sequence[int], int, list[PromptBlock]]] = OrderedDict()

    def forget(self, ranks: Iterable[int]) -> None:
        """Forget the prompts and clients of these ranks, because their workers were replaced."""
        gone = frozenset(ranks)
        for rank in gone:
            self._prefixes.forget(rank)
        self._last_ranks = OrderedDict((client, rank) for client, rank in self._last_ranks.items() if rank not in gone)

    def choose(self, loads: Sequence[RankLoad], prompt: Sequence[int], *, client: str | None) -> Route | None:
        """Return the rank for `prompt` (token ids), or None if no rank is usable. `client`: its name, if known."""
        if not any(load.usable for load in loads):
            return None
        found = self.read(prompt, loads[0].page_size) if self._prefix_caching else []
        known = [
            dataclasses.replace(load, cached_tokens=self._prefixes.known(load.rank, found) * load.page_size)
            for load in loads
        ]
        last_rank = None if client is None else self._last_ranks.get(client)
        route = choose_rank(known, prompt_tokens=len(prompt), last_rank=last_rank)
        assert route is not None, "there is a usable rank"
        assert route.rank is not None
        self._prefixes.sent(route.rank, found, next(load.kv_pages for load in loads if load.rank == route.rank))
        if client is not None:
            self._last_ranks[client] = route.rank
            self._last_ranks.move_to_end(client)
            if len(self._last_ranks) > _MAX_CLIENTS:
                self._last_ranks.popitem(last=False)
        return route

    def read(self, prompt: Sequence[int], page_size: int) -> list[PromptBlock]:
        """Return the prompt's blocks, and cache them for further choices of the prompt and a later `choose`."""
        seen = self._seen.get(id(prompt))  # the entry holds the prompt, so no other object gets its id
        if seen is None or seen[1] != page_size:
            seen = self._seen[id(prompt)] = (prompt, page_size, blocks(prompt, page_size))
            if len(self._seen) > _PROMPTS:
                self._seen.popitem(last=False)
        return seen[2]
