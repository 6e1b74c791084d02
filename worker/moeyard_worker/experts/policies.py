"""The residency policies by name. Pure."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from moeyard_worker.experts.lru import Lru
from moeyard_worker.experts.policy import ResidencyPolicy
from moeyard_worker.experts.slru import SegmentedLru

POLICIES: Mapping[str, Callable[..., ResidencyPolicy]] = MappingProxyType({"lru": Lru, "slru": SegmentedLru})


def make_policy(name: str, *, num_slots: int, cycle: int) -> ResidencyPolicy:
    """A new, empty policy. `cycle`: (layer, expert) pairs that one token visits on a rank at most (`cycle_length`).

    Raises ValueError for an unknown name or fewer than 1 slot.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown expert cache policy {name!r}: choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](num_slots=num_slots, cycle=cycle)


def cycle_length(*, num_layers: int, top_k: int, num_experts: int) -> int:
    """Experts of one rank that one token can visit: MoE layers x min(top_k, experts per layer that the rank owns)."""
    return num_layers * min(top_k, num_experts)


def start_policy(name: str, *, layers: Sequence[int], experts: range, top_k: int, num_slots: int) -> ResidencyPolicy:
    """The policy of one rank as its cache starts with it: empty, or holding everything when everything fits.

    `layers` are the MoE layers, `experts` the rank's shard. More slots than experts are not used. Filled slots are
    numbered layer by layer. Engine and simulator both start here, so that they count the same.
    """
    total = len(layers) * len(experts)
    cycle = cycle_length(num_layers=len(layers), top_k=top_k, num_experts=len(experts))
    policy = make_policy(name, num_slots=min(num_slots, total), cycle=cycle)
    if num_slots >= total:
        policy.fill(itertools.product(layers, experts))
    return policy
