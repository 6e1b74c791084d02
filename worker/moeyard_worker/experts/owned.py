"""The experts of a rank by layer, and the contents of its slots when they change. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeyard_kernels.types.expert_ranks import slots_of_layers
from moeyard_worker.experts.policy import ExpertKey

# The global ids of each MoE layer's experts, ascending. Local id i is the i-th of them.
Owned = tuple[tuple[int, ...], ...]


def of_layers(experts: range | Owned, num_layers: int) -> Owned:
    """Return the experts by layer. A range means the same ones in every layer.

    Raises ValueError if they are not ascending, or if there are none.
    """
    owned = (tuple(experts),) * num_layers if isinstance(experts, range) else experts
    if len(owned) != num_layers or any(list(each) != sorted({*each}) for each in owned) or not any(owned):
        raise ValueError(f"{owned} are not a rank's experts of {num_layers} layers")
    return owned


def local_keys(layers: Sequence[int], owned: Owned) -> list[ExpertKey]:
    """Return (layer, local id) of all experts, layer by layer."""
    return [(layer, i) for layer, experts in zip(layers, owned, strict=True) for i in range(len(experts))]


def first_residents(layers: Sequence[int], owned: Owned, num_slots: int) -> list[ExpertKey]:
    """Return (layer, local id) of the experts that `num_slots` slots hold first: the first of each layer, evenly."""
    counts = slots_of_layers(num_slots, len(layers))
    out = [key for key in local_keys(layers, owned) if key[1] < counts[layers.index(key[0])]]
    kept = set(out)
    rest = [key for key in local_keys(layers, owned) if key not in kept]
    return sorted([*out, *rest[: num_slots - len(out)]], key=lambda key: (layers.index(key[0]), key[1]))


@dataclass(frozen=True, slots=True)
class Change:
    """The next experts of a cache, their number of slots, and those read so far: (layer, global id) -> packed."""

    owned: Owned
    num_slots: int
    packed: dict[ExpertKey, Any] = field(default_factory=dict)

    def missing(self, resident: Collection[ExpertKey], layers: Sequence[int]) -> list[ExpertKey]:
        """Return (layer, global id) of the experts for the slots that `resident` leaves free, layer by layer."""
        all_keys = [(layer, e) for layer, experts in zip(layers, self.owned, strict=True) for e in experts]
        kept = set(resident).intersection(all_keys)
        return [key for key in all_keys if key not in kept][: max(0, self.num_slots - len(kept))]
