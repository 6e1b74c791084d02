"""Tensors that say which experts of a rank are in which slots; `expert_ranks` holds the eviction order."""

from dataclasses import dataclass
from typing import Literal

import torch

from moeyard_kernels.types.expert_ranks import KEY_BITS, SUMS, idle_rank, lru_rank, max_waves, slots_of_layers

PolicyName = Literal["slru", "lru"]

# Indices of `ResidencyState.counts`: the policy's clock, then totals over decode rows. GATHER_NANOSECONDS is measured
# by kernels, and 0 in the reference and the interpreter. FOR_PEERS and BY_PEERS are bytes read for and by peers, in
# whole units (`FetchShape`).
STEP, VISIT, LAYER, HITS_PROBATION, HITS_PROTECTED, MISSES, EVICTED_PROBATION, EVICTED_PROTECTED = range(8)
GATHER_NANOSECONDS, FOR_PEERS, BY_PEERS = 8, 9, 10
NUM_COUNTS = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyState:
    """S slots over L layers of E experts. A key is layer * E + expert, both counted from 0.

    slot_of: [L, E] int32, -1 for an expert without a slot. keys: [S] int32, the expert in each slot; no slot is empty.
    ranks: [S] int64. protected: [S] int32, 1 after a hit of decode rows. uses: [L, E] int64. counts: [NUM_COUNTS]
    int64.
    sums: the table `SUMS`, int32.
    place_of: [L, E] int32, the row of host memory that holds an expert without a slot; -1 for an expert with one. None:
    host memory holds every expert, and its key is its row.
    """

    policy: PolicyName
    slot_of: torch.Tensor
    keys: torch.Tensor
    ranks: torch.Tensor
    protected: torch.Tensor
    uses: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor
    place_of: torch.Tensor | None = None

    @property
    def num_slots(self) -> int:
        """S."""
        return self.keys.shape[0]

    def num_waves(self, ids: torch.Tensor, num_needed: int | None) -> int:
        """Return the waves that ids take if at most `num_needed` of them (None: all) are distinct."""
        most = min(ids.numel(), self.slot_of.shape[1])
        return max_waves(most if num_needed is None else min(most, num_needed), self.num_slots)

    def validate(self) -> None:
        """Assert every invariant; waits for the device."""
        keys, slot_of = self.keys.tolist(), self.slot_of.flatten().tolist()
        assert len(set(keys)) == len(keys), "an expert has two slots"
        held = {key: slot for key, slot in enumerate(slot_of) if slot >= 0}
        assert held == {key: slot for slot, key in enumerate(keys)}, "slots and experts disagree"
        ranks = self.ranks.tolist()
        assert len(set(ranks)) == len(ranks), "two experts rank alike"
        assert min(ranks) >= 0, "a rank exceeds 63 bits"
        assert max(ranks) < 2**63 - 1, "an expert is still pinned"
        if self.place_of is not None:
            places = self.place_of.flatten().tolist()
            assert all((place < 0) == (key in held) for key, place in enumerate(places)), "slots and places disagree"
            assert sorted(place for place in places if place >= 0) == list(range(len(places) - len(held)))


def start_residency(
    policy: PolicyName,
    *,
    num_layers: int,
    num_experts: int,
    num_slots: int,
    device: torch.device,
    one_copy: bool = False,
) -> ResidencyState:
    """Return the initial state: the first experts of every layer have slots, and no expert was used.

    one_copy: host memory holds only experts without a slot (`place_of`).
    """
    assert num_layers * num_experts <= 1 << KEY_BITS, f"{num_layers} x {num_experts} experts exceed a rank's key"
    held = slots_of_layers(num_slots, num_layers)
    keys = [layer * num_experts + expert for layer, count in enumerate(held) for expert in range(count)]
    slot_of = torch.full((num_layers * num_experts,), -1, dtype=torch.int32)
    slot_of[keys] = torch.arange(num_slots, dtype=torch.int32)
    ranks = [idle_rank(k, uses=0) if policy == "slru" else lru_rank(k, visit=0, missed=False) for k in keys]
    counts = torch.zeros(NUM_COUNTS, dtype=torch.int64)
    counts[LAYER] = -1
    place_of = torch.full_like(slot_of, -1)
    place_of[slot_of < 0] = torch.arange(len(slot_of) - num_slots, dtype=torch.int32)
    return ResidencyState(
        policy=policy,
        slot_of=slot_of.view(num_layers, num_experts).to(device),
        keys=torch.tensor(keys, dtype=torch.int32, device=device),
        ranks=torch.tensor(ranks, dtype=torch.int64, device=device),
        protected=torch.zeros(num_slots, dtype=torch.int32, device=device),
        uses=torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device),
        counts=counts.to(device),
        sums=torch.tensor(SUMS, dtype=torch.int32, device=device),
        place_of=place_of.view(num_layers, num_experts).to(device) if one_copy else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyCounts:
    """Totals since the start. Hits and evictions are (probation, protected) pairs. Prompts evict nothing.

    `gather_seconds`: time that missed experts of decode rows took to arrive. `bytes_by_peers`: the part of these bytes
    that peers read for this rank. `bytes_for_peers`: the bytes that this rank read for peers.
    """

    decode_hits: tuple[int, int]
    decode_misses: int
    evictions: tuple[int, int]
    prompt_hits: tuple[int, int]
    prompt_misses: int
    gather_seconds: float
    bytes_for_peers: int = 0
    bytes_by_peers: int = 0
