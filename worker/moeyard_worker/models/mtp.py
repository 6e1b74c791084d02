"""A layer of multi-token prediction: what a sequence's next token but one may be (DeepSeek-V3, arXiv 2412.19437, 2.2).

Its row of position i is given the model's hidden state of i, behind the last norm, and the token at i + 1, and guesses
the token at i + 2. Used again for the token behind that, it is given its own output in the place of the hidden state.
"""

import torch

from moeyard_kernels.backend import Backend, StepPlan
from moeyard_worker.models.decoder import Decoder, DecoderLayer, Load
from moeyard_worker.models.spec import DraftSpec


class Drafter:
    """The layer `layer` between two norms of its own, over the embedding and the head of `model`."""

    def __init__(self, spec: DraftSpec, layer: DecoderLayer, *, model: Decoder, backend: Backend, load: Load) -> None:
        self._layer, self._model, self._backend, self._eps = layer, model, backend, model.eps
        self._token_norm, self._hidden_norm = load(spec.token_norm), load(spec.hidden_norm)
        self._join, self._norm = load(spec.join), load(spec.norm)

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """[num_rows, H], what the head reads, of the plan's rows.

        `token_ids` [num_rows] int64 are the tokens behind these, `hidden` [num_rows, H] the states that saw them. The
        plan's own tokens are not read. A plan without rows takes part in the layer's exchange.
        """
        backend, layer = self._backend, self._layer
        if not plan.num_tokens:
            assert layer.moe is not None, "a layer of multi-token prediction has experts"
            nothing = hidden[:0]
            layer.moe.forward(nothing, nothing, self._norm, plan)
            return nothing
        tokens = backend.rms_norm(self._model.embed(token_ids), self._token_norm, self._eps)
        hidden = backend.rms_norm(hidden, self._hidden_norm, self._eps)
        residual = backend.linear(torch.cat((tokens, hidden), 1), self._join)
        x = backend.rms_norm(residual, layer.input_norm, self._eps)
        return layer.transform(layer.attention.forward(x, plan), residual, self._norm, plan)[0]
