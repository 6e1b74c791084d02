"""The exchange of a fleet of one rank: every expert is at home, so no row moves; rows are only grouped by expert.

It sits on the path of a single stream once per MoE layer, hence numpy for the index work: on a handful of integers one
numpy call costs about a tenth of the torch call that does the same.
"""

from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from moeyard_worker.exchange.base import Dispatched, ExchangeStats


@dataclass(frozen=True, slots=True)
class LocalHandle:
    """Where each (token, k) of a layer sits among its pairs: `pair_of_slot` [T * K] int64."""

    pair_of_slot: torch.Tensor
    num_tokens: int
    top_k: int


class LocalExchange:
    """Rank 0 of 1, on the CPU. `rows` of a dispatch is `x` itself, not a copy."""

    rank = 0
    world_size = 1

    def __init__(self, *, num_experts: int) -> None:
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        self.num_experts = num_experts
        self.stats = ExchangeStats()

    def begin_step(self, step: int) -> None:
        """Nothing to agree on with oneself."""

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, *, layer: int, num_prefill_tokens: int) -> Dispatched:
        """Group x [T, H] by topk_ids [T, K] (int64, each in [0, num_experts)); see `Exchange.dispatch`."""
        start = perf_counter()
        num_tokens, top_k = topk_ids.shape
        assert x.shape[0] == num_tokens, (x.shape, topk_ids.shape)
        assert 0 <= num_prefill_tokens <= num_tokens, num_prefill_tokens
        experts = topk_ids.numpy().reshape(-1)
        slot_of_pair = experts.argsort(kind="stable")
        pair_of_slot = np.empty_like(slot_of_pair)
        pair_of_slot[slot_of_pair] = np.arange(slot_of_pair.size)
        counts = count_experts(experts, self.num_experts)
        if num_prefill_tokens == 0:
            decode_counts = counts
        else:
            decode_counts = count_experts(experts[num_prefill_tokens * top_k :], self.num_experts)
        dispatched = Dispatched(
            rows=x,
            row_of_pair=torch.from_numpy(slot_of_pair // top_k),
            num_tokens_per_expert=counts,
            num_decode_per_expert=decode_counts,
            handle=LocalHandle(torch.from_numpy(pair_of_slot), num_tokens, top_k),
        )
        self.stats.seconds["dispatch"].append(perf_counter() - start)
        return dispatched

    def combine(self, expert_out: torch.Tensor, handle: LocalHandle) -> torch.Tensor:
        """Scatter expert_out [P, H] back to [T, K, H]."""
        start = perf_counter()
        assert expert_out.shape[0] == handle.num_tokens * handle.top_k, (expert_out.shape, handle)
        home = expert_out.index_select(0, handle.pair_of_slot)
        home = home.view(handle.num_tokens, handle.top_k, expert_out.shape[1])
        self.stats.seconds["combine"].append(perf_counter() - start)
        return home

    def close(self) -> None:
        """Nothing is held."""


def count_experts(experts: np.ndarray, num_experts: int) -> tuple[int, ...]:
    """How often each of `num_experts` ids occurs in `experts` (int64, flat); an id out of range is an assertion."""
    counts = np.bincount(experts, minlength=num_experts)
    assert counts.size == num_experts, f"expert id {counts.size - 1} of {num_experts}"
    return tuple(counts.tolist())
