"""Log-probability and rank of chosen tokens, and the likeliest tokens beside them."""

import math

import numpy as np
import torch

from moeyard_kernels.types.sampled_tokens import SampledTokens


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> SampledTokens:
    """Of the tokens ids [B] under logits [B, V]; sums are fp64, each row's its own."""
    count = min(num_top, logits.shape[1])
    out = SampledTokens.room(ids, count)
    assert out.logprobs is not None, "there is room for them"
    assert out.ranks is not None, "there is room for them"
    chosen, top = logits.gather(1, ids[:, None]), logits.amax(1, keepdim=True).double()
    log_sum = torch.tensor([_log_sum(row, t) for row, t in zip(logits, top.flatten().tolist(), strict=True)])
    log_sum = log_sum.double()[:, None]
    out.logprobs.copy_((chosen.double() - top - log_sum).squeeze(1))
    torch.sum(logits > chosen, 1, out=out.ranks).add_(1)
    if out.top_ids is not None and out.top_logprobs is not None:
        out.top_ids.copy_(_likeliest(logits, count))
        out.top_logprobs.copy_(logits.gather(1, out.top_ids).double() - top - log_sum)
    return out


def _log_sum(row: torch.Tensor, top: float) -> float:
    """log of the sum of exp(x - top); NaN if the largest is not finite."""
    if not math.isfinite(top):
        return math.nan
    shifted = row.double().numpy() - top
    return math.log(np.exp(shifted, out=shifted).sum())


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """[B, count], ids of the largest of each row, falling, ties by the lowest. A NaN is larger than all."""
    values, ids = logits.topk(count)
    # `topk` leaves open which of equals it takes and how it orders them.
    last = values[:, -1:]
    clear = ((logits >= last).sum(1) == count) & (values[:, 1:] < values[:, :-1]).all(1)
    for b in (~clear).nonzero().flatten().tolist():
        row = logits[b]
        some = torch.arange(row.numel()) if values[b, 0].isnan() else (row >= last[b]).nonzero().squeeze(1)
        ids[b] = some[row[some].sort(descending=True, stable=True).indices[:count]]
    return ids
