"""Inputs and outputs of sampling: edits of logits, and a token per row with its log-probabilities."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

# A word of `LogitEdits`: the index of the token's bias, whether the token is in the prompt, and its count in the
# output, up to 262143.
BIAS_BITS = 12
MAX_BIASES = 2**BIAS_BITS - 1
IN_PROMPT = 1 << BIAS_BITS
COUNT_SHIFT = BIAS_BITS + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """State of every token for bias, penalties and grammars. It stays on the device from step to step, by slot.

    words: [S, V] int32, per token i + IN_PROMPT * (in the prompt) + ONCE * (times in the output). If i > 0,
    bias[slot, i - 1] is added to the logit. bias: [S, L] fp64, L at most 4095 (0 without any bias); -inf forbids a
    token whatever the penalties are. slots: [B] int64, the slot of each row; -1 for a row without edits, whose words
    are not read. penalties: [B, 3] fp64: repetition (1 is off), frequency and presence (0 is off). allowed: None, or
    [S, ceil(V / 32)] int32, token t at bit t % 32 of word t / 32. A token whose bit is 0 is forbidden.

    A slot takes 4 V bytes (0.66 MB for 163840 tokens). One scatter of the prompt and one addition of ONCE per chosen
    token maintain it. For rows with a slot, a step reads as many bytes of words as of fp32 logits.
    """

    IN_PROMPT: ClassVar[int] = IN_PROMPT
    ONCE: ClassVar[int] = 1 << COUNT_SHIFT

    words: torch.Tensor
    bias: torch.Tensor
    slots: torch.Tensor
    penalties: torch.Tensor
    allowed: torch.Tensor | None = None

    def named(self) -> dict[str, torch.Tensor]:
        """Return the tensors by their names in errors."""
        named = {f"edits.{field.name}": getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def folded(self) -> "LogitEdits":
        """Return these edits with `allowed` folded into words and one more bias; itself if `allowed` is None.

        It takes five launches over [S, V], for a kernel that reads words anyway.
        """
        if self.allowed is None:
            return self
        ids = torch.arange(self.words.shape[1], device=self.words.device)
        bits = self.allowed[:, ids >> 5] >> (ids & 31).int() & 1
        held = self.words & ~MAX_BIASES | (self.bias.shape[1] + 1)
        never = self.bias.new_full((self.bias.shape[0], 1), float("-inf"))
        return LogitEdits(
            words=torch.where(bits == 1, self.words, held),
            bias=torch.cat((self.bias, never), 1),
            slots=self.slots,
            penalties=self.penalties,
        )


# The most top tokens per position that a request may ask for.
MAX_TOP = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """One token per row of logits [B, V]. All fields but `ids` are None unless log-probabilities were requested.

    ids: [B] int64. logprobs: [B] fp32, of the chosen tokens. ranks: [B] int64, 1 + the number of strictly larger
    logits. The
    n likeliest tokens, by falling logit and then lowest id, are top_ids, top_logprobs: [B, n] int64 and fp32; None if n
    is 0. All refer to the unmodified logits. A log-probability is NaN if the largest logit is not finite.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "SampledTokens":
        """Return a copy with `change` applied to every tensor that is present."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return SampledTokens(**{name: change(x) for name, x in found.items() if x is not None})

    @classmethod
    def room(cls, ids: torch.Tensor, num_top: int) -> "SampledTokens":
        """Return these ids with uninitialized tensors for the log-probabilities."""
        num_rows = ids.shape[0]
        wide = {}
        if num_top:
            wide["top_ids"] = ids.new_empty(num_rows, num_top)
            wide["top_logprobs"] = ids.new_empty(num_rows, num_top, dtype=torch.float32)
        logprobs = ids.new_empty(num_rows, dtype=torch.float32)
        return cls(ids=ids, logprobs=logprobs, ranks=torch.empty_like(ids), **wide)
