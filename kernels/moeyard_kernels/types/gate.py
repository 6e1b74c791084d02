"""How a Mixture-of-Experts layer chooses experts. Pure."""

from dataclasses import dataclass
from typing import Literal


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
