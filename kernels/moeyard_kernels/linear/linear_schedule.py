"""Schedule of a product's tiles over the programs of a GPU, such that the last wave leaves few programs idle.

Columns below a cut use main tiles; the others use smaller tail tiles. Programs take main tiles in turn. Those with one
main tile less than others then take some tail tiles before the rest.
"""

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """`cut`: the first column of tail tiles. `repeat`: tail tiles that programs with fewer main tiles take first."""

    cut: int
    repeat: int


def tile_cycles(rows: int, columns: int) -> int:
    """Estimate the cycles of 64 steps of K on Hopper for a tile of rows x columns (the left operand first).

    Two groups of warps, each with 1024 products per cycle, share 128 bytes per cycle of shared memory. Copies arrive
    there, and a group reads both operands again for every 64 rows. Barriers take 150 cycles.
    """
    products = rows * columns // 32
    copied = rows + columns
    read = rows // 64 * (64 + columns) if rows >= 128 else 2 * (64 + columns // 2)
    return max(products, copied + read) + 150


@functools.lru_cache(maxsize=4096)
def schedule(
    num_rows: int,
    num_out: int,
    *,
    ahead: int = 0,
    main: tuple[int, int],
    tail: tuple[int, int],
    tail_cost: float,
    programs: int,
) -> Schedule:
    """Return no tail, or the cut whose slowest program ends first; of equal cuts the last. Cuts are whole main tiles.

    ahead: main tiles that were scheduled before. main, tail: rows and columns of a tile. tail_cost: time of a tail tile
    in main tiles.
    """
    rows, tail_rows = -(-num_rows // main[0]), -(-num_rows // tail[0])
    best, found = float(-(-(ahead + rows * -(-num_out // main[1])) // programs)), Schedule(num_out, 0)
    for columns in range(num_out // main[1], -1, -1):
        cut = columns * main[1]
        done, rest = divmod(ahead + rows * columns, programs)
        idle = programs - rest
        tails = tail_rows * -(-(num_out - cut) // tail[1])
        for repeat in range(1, 5):
            early = min(-(-tails // idle), repeat)
            late = max(tails - idle * repeat, 0)
            # All programs take late tiles in turn, beginning with those that had one more main tile.
            busy = done + (rest > 0) + -(-late // programs) * tail_cost
            spared = done + early * tail_cost + -(-max(late - rest, 0) // programs) * tail_cost
            end = max(busy, spared)
            if end < best:
                best, found = end, Schedule(cut, repeat)
    return found
