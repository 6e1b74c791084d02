"""Router logits to expert ids and weights, for the gates of mixtral, qwen3_moe, deepseek_v2 and deepseek_v3."""

from dataclasses import asdict

import torch

from moeyard_kernels.types.gate import TokenChoice

# The sigmoid of a contiguous tensor takes a scalar path for what does not fill two vector registers.
_LANES = 32


def topk_gate(
    logits: torch.Tensor,
    *,
    top_k: int,
    scoring: str,
    renormalize: bool,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "max",
    scaling: float = 1.0,
    counts: torch.Tensor | None = None,
    entries: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.topk_gate`."""
    logits = logits.float().contiguous()
    scores = torch.softmax(logits, -1) if scoring == "softmax" else _sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if topk_groups < num_groups:
        choice = _mask_groups(
            choice, num_groups, topk_groups, group_score, float("-inf") if scoring == "sigmoid" else 0.0
        )
    ids = _largest(choice, top_k)
    if counts is not None and entries is not None:
        counts += torch.bincount(ids[entries >= 0].flatten(), minlength=counts.shape[0])
    weights = scores.gather(1, ids)
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights /= total.add_(1e-20) if scoring == "sigmoid" else total
    if scaling != 1.0:
        weights *= scaling
    return weights, ids


def make_choice(choice: TokenChoice) -> None:
    """Make one token's choice, whose weights and ids are written."""
    arguments = {**asdict(choice.rule), "counts": choice.counts, "entries": choice.entries}
    weights, ids = topk_gate(choice.logits, bias=choice.bias, **arguments)
    choice.weights.copy_(weights)
    choice.ids.copy_(ids)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    num_rows, num_experts = logits.shape
    if num_rows * num_experts % _LANES == 0:
        return torch.sigmoid(logits)
    padded = logits.new_zeros(num_rows + -num_rows % _LANES, num_experts)
    padded[:num_rows] = logits
    return torch.sigmoid(padded)[:num_rows]


def _mask_groups(
    choice: torch.Tensor, num_groups: int, topk_groups: int, group_score: str, masked: float
) -> torch.Tensor:
    """choice [T, E] with all experts outside the best `topk_groups` groups of consecutive experts set to `masked`."""
    grouped = choice.view(choice.shape[0], num_groups, choice.shape[1] // num_groups)
    best = grouped.amax(-1) if group_score == "max" else grouped.topk(2, -1).values.sum(-1)
    kept = _largest(best, topk_groups)
    dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), masked).view_as(choice)


def _largest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Ids [T, k] of the k largest of scores [T, N], falling, ties by the lower id (topk leaves ties open)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
