"""Moves experts that are needed together to different ranks, by swaps that relieve the fullest rank. Pure numpy."""

from collections.abc import Sequence

import numpy as np

# Number of evenly spaced steps that judge a swap. A layer of 256 experts takes about ten seconds.
_STEPS = 1024
_SWEEPS = 4


def apart(owners: Sequence[int], steps: Sequence[Sequence[int]], num_ranks: int) -> tuple[int, ...]:
    """Return improved owners of one layer's experts. `steps` has the experts that each step needs.

    The cost is the sum over steps of the distinct experts on the fullest rank. Each expert in turn swaps its rank with
    the expert that lowers the cost most, until no swap helps or a few rounds are done. Ranks own as many experts as
    before. The result is deterministic: the first of equal swaps is taken.
    """
    taken = steps[:: -(-len(steps) // _STEPS)] if steps else []
    needed = np.zeros((len(taken), len(owners)), np.int32)
    for row, experts in zip(needed, taken, strict=True):
        row[list(experts)] = 1
    owner = np.array(owners)
    held = needed @ (owner[:, None] == np.arange(num_ranks)).astype(np.int32)  # [steps, ranks]
    for _ in range(_SWEEPS):
        if not sum([_swap(expert, owner, needed, held) for expert in range(len(owner))]):
            break
    return tuple(owner.tolist())


def _swap(expert: int, owner: np.ndarray, needed: np.ndarray, held: np.ndarray) -> bool:
    """Swap `expert` with the best expert of another rank if that lowers the cost. Updates `owner` and `held`."""
    here, mine = owner[expert], needed[:, expert, None]
    least, partner = held.max(1).sum(), -1
    for there in range(held.shape[1]):
        theirs = np.flatnonzero(owner == there)
        if there == here or not theirs.size:
            continue
        gain = needed[:, theirs] - mine
        fullest = np.maximum(held[:, here, None] + gain, held[:, there, None] - gain)
        if held.shape[1] > 2:
            fullest = np.maximum(fullest, np.delete(held, [here, there], axis=1).max(1)[:, None])
        sums = fullest.sum(0)
        best = int(sums.argmin())
        if sums[best] < least:
            least, partner = sums[best], int(theirs[best])
    if partner < 0:
        return False
    there, gain = owner[partner], needed[:, partner] - mine[:, 0]
    held[:, here] += gain
    held[:, there] -= gain
    owner[expert], owner[partner] = there, here
    return True
