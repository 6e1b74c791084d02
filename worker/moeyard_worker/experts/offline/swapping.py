"""Experts that are needed together, kept apart: swaps between ranks that empty the fullest one. Pure numpy."""

from collections.abc import Sequence

import numpy as np

# Steps that a swap is judged by, evenly spaced: with 256 experts a layer takes some ten seconds.
_STEPS = 1024
_SWEEPS = 4


def apart(owners: Sequence[int], steps: Sequence[Sequence[int]], num_ranks: int) -> tuple[int, ...]:
    """The owners of one layer's experts, better: `steps` are the experts that each step needs.

    What is lowered is the sum over steps of the distinct experts on the fullest rank. Every expert in turn swaps places
    with the expert of another rank with which that sum falls most, until none can or for a few rounds, so that ranks
    own as many as before. The same for the same arguments: of equal swaps the first is taken.
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
    """Swap `expert` with the best of another rank, if any betters the sum; in `owner` and `held`."""
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
