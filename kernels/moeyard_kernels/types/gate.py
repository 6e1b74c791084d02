"""Rules and results of the choice of experts in a Mixture-of-Experts layer. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRule:
    """Arguments of `ops.topk_gate` that are fixed for a model family.

    `renormalize`: divide the chosen weights by their sum. `num_groups`, `topk_groups`, `group_score`: choose experts
    only within the best groups. `scaling` multiplies the weights.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"]
    renormalize: bool
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2sum"] = "max"
    scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRow:
    """One token's shared expert after its gate_up product; the launches of the routed experts may compute the rest.

    gate_up [1, 2 I]: the product, fp32 or rounded. down [H, I]. out [1, H] in down's dtype receives `linear` of
    `silu_mul` of gate_up in that dtype, with `limit`.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    out: torch.Tensor
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """One token's choice of experts, deferred to the launches of the experts (`ExpertPairs.choice`).

    logits [1, E] fp32 or bf16, bias [E] fp32 or None, counts and entries: as in `ops.topk_gate`. The launches write
    weights [1, K] fp32 and ids [1, K] int64 with that op's bits. shared: a shared expert to compute with them.
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
    """Chosen experts: weights [T', K] fp32, ids [T', K], and the logits [num_rows] of a shared expert's gate.

    deferred: set if the launches of the experts still have to write ids and weights, and the shared experts' output if
    the gate includes it (`SharedRow`).
    """

    weights: torch.Tensor
    ids: torch.Tensor
    shared_gate: torch.Tensor | None = None
    deferred: TokenChoice | None = None

    @property
    def shared(self) -> torch.Tensor | None:
        """Output [1, H] of a deferred choice's shared experts, written by the experts' launches; else None."""
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
    """Return weights [0, K] fp32 and ids [0, K] int64 of a step without rows, on the device of x."""
    return Chosen(weights=x.new_empty(0, top_k).float(), ids=x.new_empty(0, top_k).long())
