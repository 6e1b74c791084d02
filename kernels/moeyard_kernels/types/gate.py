"""How a Mixture-of-Experts layer chooses experts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRule:
    """The arguments of `ops.topk_gate` that a family fixes.

    `renormalize`: the chosen weights are divided by their sum. `num_groups`, `topk_groups`, `group_score`: experts are
    chosen within the best groups only. `scaling` multiplies the weights.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    renormalize: bool
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2sum"] = "max"
    scaling: float = 1.0


def no_choice(x: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [0, K] fp32 and ids [0, K] int64 of a step without rows, where x is."""
    return x.new_empty(0, top_k).float(), x.new_empty(0, top_k).long()
