"""The order in which experts lose their slots, in integers that policies, kernel and reference compute alike. Pure.

Each expert in a slot has a distinct rank below 2^63, and the smallest rank is evicted first. A key numbers an expert
over all layers, layer by layer. A visit is one access of a layer by decode rows; visits are counted.

An expert's usage is the sum of 2^(-age / HALF_LIFE) over its uses, with age in steps. It is stored as a base 2
logarithm in units of 1 / UNIT, relative to a fixed step, so it changes at a use and not with time.
"""

import math

# In steps. Tested: 2, 4, 8, 16 and 32, on traces of the demo model with 1, 4 and 8 streams and on synthetic traces of
# 48 to 58 layers. 16 is best by about a point if routing has lasting favourites; 8 loses less if it has none.
HALF_LIFE = 8
UNIT = 256
DECAY = UNIT // HALF_LIFE
# The logarithm of a use in step 0. It exceeds 0 (never used) by so much that adding to 0 changes nothing.
FIRST = 16 * UNIT
# SUMS[d] is the increase of a sum's logarithm when a summand 2^(d / UNIT) times smaller is added. Beyond the table: 0.
SUMS = tuple(round(UNIT * math.log2(1 + 2 ** (-d / UNIT))) for d in range(10 * UNIT))
assert SUMS[-1] == 0, "the table ends with a gain above 0"

# From the lowest bit: the key, then a visit or a use.
KEY_BITS = 20
VISIT_BITS = 38
LAST_VISIT = (1 << VISIT_BITS) - 1
# The sum at the last use, in half powers of 2; at most 2 log2(1 / (1 - 2^(-1 / HALF_LIFE))) = 7.
POWER_SHIFT = KEY_BITS + VISIT_BITS
RECENT = 1 << 62


def now_at(step: int) -> int:
    """Return the logarithm of one use in `step`."""
    return FIRST + step * DECAY


def add_use(now: int, before: int) -> int:
    """Return the logarithm of a sum after another use; `before` is 0 if there was none."""
    apart = abs(now - before)
    return max(now, before) + (SUMS[apart] if apart < len(SUMS) else 0)


def recent_rank(key: int, *, uses: int, now: int, visit: int) -> int:
    """Rank, under slru, an expert used in its layer's last decode visit. The latest visited layer goes first."""
    power = 2 * (uses - now) // UNIT
    return RECENT | power << POWER_SHIFT | (LAST_VISIT - min(visit, LAST_VISIT)) << KEY_BITS | key


def idle_rank(key: int, *, uses: int) -> int:
    """Rank, under slru, an expert not used in the last decode visit of its layer. The least used goes first."""
    return uses << KEY_BITS | key


def lru_rank(key: int, *, visit: int, missed: bool) -> int:
    """Rank under lru by the last visit that used the expert (0: none). In a visit, hits count as used before misses."""
    return visit << (KEY_BITS + 1) | missed << KEY_BITS | key


def slots_of_layers(num_slots: int, num_layers: int) -> tuple[int, ...]:
    """Return how many experts each layer starts with, its first ones. Slots are numbered layer by layer."""
    least, more = divmod(num_slots, num_layers)
    return tuple(least + (layer < more) for layer in range(num_layers))


def wave_limit(num_slots: int) -> int:
    """Return the most experts of a wave: half of the slots, so that a large layer leaves slots to other layers."""
    return max(1, num_slots // 2)


def max_waves(num_needed: int, num_slots: int) -> int:
    """Return the most waves that `num_needed` experts of a layer take, for any resident set."""
    return -(-num_needed // wave_limit(num_slots))
