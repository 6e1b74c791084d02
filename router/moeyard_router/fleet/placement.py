"""The memory behind the choice of rank: which prompts went where, and where each client was last. Pure."""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from moeyard_router.fleet.policy import RankLoad, Route, choose_rank
from moeyard_router.fleet.prefixes import Block, PrefixMap, blocks

_MAX_CLIENTS = 65536
_PROMPTS = 32  # whose blocks are kept until they are asked for again


class Placement:
    """Chooses ranks for prompts and remembers what it chose. Without prefix caching prompts leave nothing behind."""

    def __init__(self, num_ranks: int, *, prefix_caching: bool) -> None:
        self._prefix_caching = prefix_caching
        self._prefixes = PrefixMap(num_ranks)
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._seen: OrderedDict[int, tuple[Sequence[int], int, list[Block]]] = OrderedDict()

    def forget(self, ranks: Iterable[int]) -> None:
        """Other workers took the place of these: nothing is cached there, and no client is at home."""
        gone = frozenset(ranks)
        for rank in gone:
            self._prefixes.forget(rank)
        self._homes = OrderedDict((client, home) for client, home in self._homes.items() if home not in gone)

    def choose(self, loads: Sequence[RankLoad], prompt: Sequence[int], *, client: str | None) -> Route | None:
        """The rank for `prompt` (token ids), None if none can be used; `client` names who asks, if known."""
        if not any(load.usable for load in loads):
            return None
        pieces = self.read(prompt, loads[0].page_size) if self._prefix_caching else []
        known = [
            dataclasses.replace(load, cached_tokens=self._prefixes.known(load.rank, pieces) * load.page_size)
            for load in loads
        ]
        route = choose_rank(known, prompt_tokens=len(prompt), home=None if client is None else self._homes.get(client))
        assert route is not None, "there is a usable rank"
        assert route.rank is not None
        self._prefixes.sent(route.rank, pieces, next(load.kv_pages for load in loads if load.rank == route.rank))
        if client is not None:
            self._homes[client] = route.rank
            self._homes.move_to_end(client)
            if len(self._homes) > _MAX_CLIENTS:
                self._homes.popitem(last=False)
        return route

    def read(self, prompt: Sequence[int], page_size: int) -> list[Block]:
        """The prompt's blocks; remembered for a while, for its other choices and for who reads before it submits."""
        seen = self._seen.get(id(prompt))  # the entry keeps the prompt, so that its id stays its own
        if seen is None or seen[1] != page_size:
            seen = self._seen[id(prompt)] = (prompt, page_size, blocks(prompt, page_size))
            if len(self._seen) > _PROMPTS:
                self._seen.popitem(last=False)
        return seen[2]
