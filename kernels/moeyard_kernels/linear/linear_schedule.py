"""How the tiles of a product are dealt out to the programs of a GPU, so that the last wave leaves few of them idle.

Columns below a cut are computed in main tiles, the others in smaller tail tiles. Main tiles go to the programs in turn;
those that got one less than others then take some tail tiles ahead of the rest.
"""

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """`cut`: the first column of tail tiles. `repeat`: how many of them each program with fewer main tiles takes."""

    cut: int
    repeat: int


def tile_cycles(rows: int, columns: int) -> int:
    """About how long 64 steps of K take in a tile of rows x columns (the left operand first), in cycles of Hopper.

    Two groups of warps, each at 1024 products a cycle, share 128 bytes a cycle of shared memory, where copies land and
    from where a group reads both operands anew for every 64 rows; 150 cycles go to barriers.
    """
    products = rows * columns // 32
    copied = rows + columns
    read = rows // 64 * (64 + columns) if rows >= 128 else 2 * (64 + columns // 2)
    return max(products, copied + read) + 150


@functools.lru_cache(maxsize=4096)
def schedule(
    num_rows: int, num_out: int, *, ahead: int = 0, main: tuple[int, int], tail: tuple[int, int], tail_cost: float,
    programs: int,
) -> Schedule:  # fmt: skip
    """No tail, or the cut whose slowest program ends first; of equals the last, which is a multiple of main's columns.

    ahead: main tiles that were dealt out before. main and tail: rows and columns of a tile. tail_cost: the time of a
    tail tile in main tiles.
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
            # Late tiles go to all programs in turn, beginning with those that had a main tile more.
            busy = done + (rest > 0) + -(-late // programs) * tail_cost
            spared = done + early * tail_cost + -(-max(late - rest, 0) // programs) * tail_cost
            end = max(busy, spared)
            if end < best:
                best, found = end, Schedule(cut, repeat)
    return found
