"""Samples: the token ids of a prompt and of an output, and the experts that a server chose for them."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """Token ids of a prompt and of the output behind it; neither is empty.

    routed_experts: integers [tokens - 1, layers, top_k], the experts that the rows must use. Entries of dense
    layers are ignored. None: the model's own choice.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    routed_experts: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows that a model computes: the last token of the output is not computed."""
        return len(self.prompt) + len(self.output) - 1

    @staticmethod
    def of_choice(prompt: Sequence[int], choice: Mapping[str, Any]) -> "Sample":
        """Return the sample of a choice of `/inference/v1/generate`, with its `routed_experts` if it has any.

        Choices of other routes have `token_ids` if the request has `return_token_ids`. Raises ValueError without them.
        """
        if choice.get("token_ids") is None:
            raise ValueError('the choice has no token_ids: the request needs "return_token_ids": true')
        routed = None
        if (text := choice.get("routed_experts")) is not None:
            routed = torch.from_numpy(np.load(io.BytesIO(base64.b64decode(text))).astype(np.int64))
        return Sample(prompt=prompt, output=choice["token_ids"], routed_experts=routed)
