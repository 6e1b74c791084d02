"""What a step of sampling gives: a token per row, and what a log-probability answer says of it."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

# The most likeliest tokens that an answer may list.
MAX_TOP = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """One token per row of logits [B, V]; all but `ids` is None unless log-probabilities were asked for.

    ids: [B] int64. logprobs: [B] fp32, of the chosen tokens. ranks: [B] int64, 1 + how many logits are strictly larger.
    top_ids, top_logprobs: [B, n] int64 and fp32, the n likeliest by falling logit, ties by the lowest id; None if n is
    0. All are of the unmodified logits; a log-probability is NaN where the largest logit is not finite.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "SampledTokens":
        """These with `change` applied to every tensor that is there."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return SampledTokens(**{name: change(x) for name, x in found.items() if x is not None})

    @classmethod
    def room(cls, ids: torch.Tensor, num_top: int) -> "SampledTokens":
        """These ids, with tensors beside them for whoever computes the rest."""
        num_rows = ids.shape[0]
        wide = {}
        if num_top:
            wide["top_ids"] = ids.new_empty(num_rows, num_top)
            wide["top_logprobs"] = ids.new_empty(num_rows, num_top, dtype=torch.float32)
        logprobs = ids.new_empty(num_rows, dtype=torch.float32)
        return cls(ids=ids, logprobs=logprobs, ranks=torch.empty_like(ids), **wide)
