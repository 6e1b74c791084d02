"""The residency policies by name. Pure."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from moeyard_worker.experts.lru import Lru
from moeyard_worker.experts.policy import ExpertKey, ResidencyPolicy
from moeyard_worker.experts.slru import SegmentedLru

POLICIES: Mapping[str, Callable[..., ResidencyPolicy]] = MappingProxyType({"lru": Lru, "slru": SegmentedLru})


def start_policy(
    name: str, *, layers: Sequence[int], experts: range, num_slots: int, num_streams: int = 1,
    resident: Sequence[ExpertKey] | None = None,
) -> ResidencyPolicy:  # fmt: skip
    """The policy of one rank as its cache starts with it: every slot holds an expert.

    `layers` are the MoE layers, `experts` the rank's shard. More slots than experts are not used. `num_streams`: slots
    beside them, which misses of prompts pass through. `resident`: what the slots hold, one each, if it is not the first
    experts of every layer. Engine and simulator both start here, so that they count the same. Raises ValueError for an
    unknown name or fewer than 1 slot.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown expert cache policy {name!r}: choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](
        layers=layers, experts=experts, num_slots=num_slots, num_streams=num_streams, resident=resident
    )
