"""In which order experts give up their slots, in integers: what policies, kernel and oracle compute alike. Pure.

Every expert in a slot has a rank below 2^63, no two the same, and the smallest rank goes first. A key is an expert's
number over all layers, layer by layer; a visit is one access of a layer by decode rows, and visits are counted.

How often an expert was used is the sum of 2^(-age / HALF_LIFE) over its uses, age in steps. It is kept as its base 2
logarithm in units of 1 / UNIT, as it would be long ago: then it changes with a use only, not with time.
"""

import math

# Steps. Of 2, 4, 8, 16 and 32, on traces of the demo model with 1, 4 and 8 streams and on synthetic ones of 48 to 58
# layers, 16 is best by about a point where routing has lasting favourites, and 8 loses less where it has none.
HALF_LIFE = 8
UNIT = 256
DECAY = UNIT // HALF_LIFE
# The logarithm of a use in step 0: so much more than never used (0) that nothing is added to that.
FIRST = 16 * UNIT
# SUMS[d] is what a sum's logarithm gains by another summand 2^(d / UNIT) times smaller; 0 from there on.
SUMS = tuple(round(UNIT * math.log2(1 + 2 ** (-d / UNIT))) for d in range(10 * UNIT))
assert SUMS[-1] == 0, "the table ends where nothing is gained any more"

# From the lowest bit: the key, then a visit or a use.
KEY_BITS = 20
VISIT_BITS = 38
LAST_VISIT = (1 << VISIT_BITS) - 1
# Of a sum as of its last use, in half powers of 2; at most 2 log2(1 / (1 - 2^(-1 / HALF_LIFE))) = 7.
POWER_SHIFT = KEY_BITS + VISIT_BITS
RECENT = 1 << 62


def now_at(step: int) -> int:
    """The logarithm of one use in this step."""
    return FIRST + step * DECAY


def add_use(now: int, before: int) -> int:
    """The logarithm of a sum when a use is added to it; `before` is 0 if there was none."""
    apart = abs(now - before)
    return max(now, before) + (SUMS[apart] if apart < len(SUMS) else 0)


def recent_rank(key: int, *, uses: int, now: int, visit: int) -> int:
    """slru, of an expert that was needed when decode rows last visited its layer: the last visited goes first."""
    power = 2 * (uses - now) // UNIT
    return RECENT | power << POWER_SHIFT | (LAST_VISIT - min(visit, LAST_VISIT)) << KEY_BITS | key


def idle_rank(key: int, *, uses: int) -> int:
    """slru, of one that was not: the least used goes first."""
    return uses << KEY_BITS | key


def lru_rank(key: int, *, visit: int, missed: bool) -> int:
    """lru: by the visit that last needed it (0: none), where hits count as used before misses."""
    return visit << (KEY_BITS + 1) | missed << KEY_BITS | key


def slots_of_layers(num_slots: int, num_layers: int) -> tuple[int, ...]:
    """With how many of its experts, the first ones, each layer starts; their slots are numbered layer by layer."""
    least, more = divmod(num_slots, num_layers)
    return tuple(least + (layer < more) for layer in range(num_layers))


def wave_limit(num_slots: int) -> int:
    """Experts of a wave: half of the slots, so that a layer which needs more leaves other layers something."""
    return max(1, num_slots // 2)


def max_waves(num_needed: int, num_slots: int) -> int:
    """Waves in which so many experts of a layer are computed at most, whatever is resident."""
    return -(-num_needed // wave_limit(num_slots))
