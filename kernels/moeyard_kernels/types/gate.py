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


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRow:
    """One token's shared expert behind its first product, whose rest whoever computes the routed ones may do with them.

    gate_up [1, 2 I]: that product's sums, fp32 or rounded; down [H, I]; out [1, H], in down's dtype, is written by
    then: `linear` of `silu_mul` of gate_up in that dtype.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """One token's choice of experts that is still to be made, by whoever computes them (`ExpertPairs.choice`).

    logits [1, E] fp32 or bf16, bias [E] fp32 or None, counts and entries as `ops.topk_gate` takes them. weights [1, K]
    fp32 and ids [1, K] int64 are written by then, with that op's bits. shared: what is to be computed with them.
    """

    rule: GateRule
    logits: torch.Tensor
    bias: torch.Tensor | None
    weights: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor | None = None
    entries: torch.Tensor | None = None
    shared: SharedRow | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What rows have chosen: weights [T', K] fp32 and ids [T', K], and the logits [num_rows] of a shared expert's gate.

    deferred: where ids and weights are still to be written, by whoever computes the experts, and with them what shared
    experts give (`SharedRow`), if the gate takes these too.
    """

    weights: torch.Tensor
    ids: torch.Tensor
    shared_gate: torch.Tensor | None = None
    deferred: TokenChoice | None = None

    @property
    def shared(self) -> torch.Tensor | None:
        """What shared experts give, where they come with a deferred choice: [1, H], written as late as that."""
        return self.deferred.shared.out if self.deferred is not None and self.deferred.shared is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParts:
    """The results of an MoE block before their sum: routed [T', K, H] and weights [T', K] fp32, T' as in `Chosen`.

    shared [num_rows, H]: the shared experts' output, multiplied by the sigmoid of shared_gate [num_rows] if given.
    """

    routed: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor | None
    shared_gate: torch.Tensor | None


def no_choice(x: torch.Tensor, top_k: int) -> Chosen:
    """Weights [0, K] fp32 and ids [0, K] int64 of a step without rows, where x is."""
    return Chosen(weights=x.new_empty(0, top_k).float(), ids=x.new_empty(0, top_k).long())
