"""Which experts a rank has, layer by layer, and which of them its slots hold when these change. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeyard_kernels.types.expert_ranks import slots_of_layers
from moeyard_worker.experts.policy import ExpertKey

# The experts of each MoE layer in order, ascending: local id i of a layer is its i-th.
Owned = tuple[tuple[int, ...], ...]


def of_layers(experts: range | Owned, num_layers: int) -> Owned:
    """A range stands for the same experts in every layer. Raises ValueError if they are out of order, or none."""
    owned = (tuple(experts),) * num_layers if isinstance(experts, range) else experts
    if len(owned) != num_layers or any(list(each) != sorted({*each}) for each in owned) or not any(owned):
        raise ValueError(f"{owned} are not a rank's experts of {num_layers} layers")
    return owned


def local_keys(layers: Sequence[int], owned: Owned) -> list[ExpertKey]:
    """(layer, local id) of all of them, layer by layer."""
    return [(layer, i) for layer, experts in zip(layers, owned, strict=True) for i in range(len(experts))]


def first_residents(layers: Sequence[int], owned: Owned, num_slots: int) -> list[ExpertKey]:
    """What so many slots start with, as (layer, local id): the first experts of each layer, evenly; all that fit."""
    counts = slots_of_layers(num_slots, len(layers))
    out = [key for key in local_keys(layers, owned) if key[1] < counts[layers.index(key[0])]]
    kept = set(out)
    rest = [key for key in local_keys(layers, owned) if key not in kept]
    return sorted([*out, *rest[: num_slots - len(out)]], key=lambda key: (layers.index(key[0]), key[1]))


@dataclass(frozen=True, slots=True)
class Change:
    """Experts that a cache is to have, in how many slots, and what was read of them: (layer, global id) -> packed."""

    owned: Owned
    num_slots: int
    packed: dict[ExpertKey, Any] = field(default_factory=dict)

    def missing(self, resident: Collection[ExpertKey], layers: Sequence[int]) -> list[ExpertKey]:
        """Which (layer, global id) go into slots that nothing of `resident` keeps: the first, layer by layer."""
        all_keys = [(layer, e) for layer, experts in zip(layers, self.owned, strict=True) for e in experts]
        kept = set(resident).intersection(all_keys)
        return [key for key in all_keys if key not in kept][: max(0, self.num_slots - len(kept))]
