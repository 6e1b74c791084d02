"""Chooses the rank for the next sequence. Pure: no clock, no sockets.

A rank's score counts all costs of a choice in prompt tokens. The lowest score wins:

    score = prompt tokens it has yet to compute, this prompt's uncached ones included   (how long this request waits)
          + _ROW_TOKENS * sequences it holds                                            (how long every step lasts)
          + _KV_TOKENS if its free KV pages do not hold the prompt                      (preemption, waiting for room)

Ranks run each step together, so a step lasts as long as the rank with most rows needs. The constant `_ROW_TOKENS`
weighs an even spread of rows against tokens saved by a cached prefix. The client's last rank is preferred, then the
rank that knows most of the prompt, unless another is better by `_MARGIN` of the prompt. Otherwise small differences
would move a conversation between ranks, and its prefix into every rank's cache.

The constants are from `bench/policy.py`, which compares on traces (docs/journal.md has its figures). A further term
for tokens by which the rank would exceed the fullest one gained nothing there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_ROW_TOKENS = 1000
_KV_TOKENS = 4096
_MARGIN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """The load of one rank at the time of a choice.

    sequences: running or waiting there, with those sent since its latest snapshot.
    pending_tokens: prompt tokens of these sequences that are not computed yet.
    kv_pages, kv_pages_free: pages of `page_size` tokens. Pages that only the prefix cache holds are free.
    cached_tokens: tokens at the beginning of the prompt that the rank's prefix cache probably holds.
    """

    rank: int
    usable: bool
    sequences: int
    pending_tokens: int
    page_size: int
    kv_pages: int
    kv_pages_free: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The rank for a sequence, None while the sequence waits.

    reason: client, prefix, load or only. `cached_tokens`: expected prefix hit on that rank.
    """

    rank: int | None
    reason: str
    cached_tokens: int = 0


def choose_rank(loads: Sequence[RankLoad], *, prompt_tokens: int, last_rank: int | None = None) -> Route | None:
    """Return the usable rank with the lowest score, or None if no rank is usable. `last_rank`: of this client.

    Ties go to the rank with fewer sequences, then to the lower rank.
    """
    usable = [load for load in loads if load.usable]
    if len(usable) < 2:
        return _route(usable[0], "only") if usable else None

    def score(load: RankLoad) -> int:
        return (
            load.pending_tokens
            + (prompt_tokens - load.cached_tokens)
            + _ROW_TOKENS * load.sequences
            + (_KV_TOKENS if load.kv_pages_free * load.page_size < prompt_tokens else 0)
        )

    best = min(usable, key=lambda load: (score(load), load.sequences, load.rank))
    good_enough = score(best) + _MARGIN * prompt_tokens
    for load in usable:
        if load.rank == last_rank and score(load) <= good_enough:
            return _route(load, "client")
    warmest = min(usable, key=lambda load: (-load.cached_tokens, score(load), load.rank))
    if warmest.cached_tokens > 0 and score(warmest) <= good_enough:
        return _route(warmest, "prefix")
    return _route(best, "load")


def _route(load: RankLoad, reason: str) -> Route:
    return Route(rank=load.rank, reason=reason, cached_tokens=load.cached_tokens)
