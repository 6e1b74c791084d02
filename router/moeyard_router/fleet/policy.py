"""Which rank takes the next sequence, and why. Pure: no clock, no sockets.

A rank is scored in prompt tokens, which all costs of a choice can be counted in; the lowest score wins:

    score = prompt tokens it has yet to compute, this prompt's uncached ones included   (how long this request waits)
          + _ROW_TOKENS * sequences it holds                                            (how long every step lasts)
          + _KV_TOKENS if its free KV pages do not hold the prompt                      (preemption, waiting for room)

Ranks run each step together, so a step lasts as long as the rank with most rows needs: _ROW_TOKENS weighs rows spread
evenly against tokens saved by a cached prefix. The rank where this client was last (`home`), then the one that knows
most of the prompt, are kept while no other is better by `_MARGIN` of the prompt: else scores that differ by little send
a conversation back and forth, and its prefix into every rank's cache.

The constants are from `bench/policy.py`, which compares on traces (docs/architecture.md has its table). Tried there
without gain: a further term for tokens by which the rank would exceed the fullest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_ROW_TOKENS = 1000
_KV_TOKENS = 4096
_MARGIN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """What is known of one rank when a prompt asks for a place. Tokens and pages are counts.

    `sequences`: running or waiting there, those sent since its latest snapshot included. `pending_tokens`: prompt
    tokens of them that are not computed yet. `kv_pages` of `page_size` tokens each, of which `kv_pages_free` are free
    or held by the prefix cache alone. `cached_tokens`: how much of the prompt's beginning that cache may hold.
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
    """The rank for a sequence, None while it waits for one.

    `reason`: client, prefix, load or only; `cached_tokens` as expected there.
    """

    rank: int | None
    reason: str
    cached_tokens: int = 0


def choose_rank(loads: Sequence[RankLoad], *, prompt_tokens: int, home: int | None = None) -> Route | None:
    """The usable rank with the lowest score (see above); ties by fewer sequences, then lower rank. None if none."""
    usable = [load for load in loads if load.usable]
    if len(usable) < 2:
        return _route(usable[0], "only") if usable else None

    def score(load: RankLoad) -> int:
        work = load.pending_tokens + prompt_tokens - load.cached_tokens
        return (
            work
            + _ROW_TOKENS * load.sequences
            + (_KV_TOKENS if load.kv_pages_free * load.page_size < prompt_tokens else 0)
        )

    best = min(usable, key=lambda load: (score(load), load.sequences, load.rank))
    good_enough = score(best) + _MARGIN * prompt_tokens
    for load in usable:
        if load.rank == home and score(load) <= good_enough:
            return _route(load, "client")
    warmest = min(usable, key=lambda load: (-load.cached_tokens, score(load), load.rank))
    if warmest.cached_tokens > 0 and score(warmest) <= good_enough:
        return _route(warmest, "prefix")
    return _route(best, "load")


def _route(load: RankLoad, reason: str) -> Route:
    return Route(rank=load.rank, reason=reason, cached_tokens=load.cached_tokens)
