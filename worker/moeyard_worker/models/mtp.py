"""The layer of multi-token prediction, which drafts the token after the next one (DeepSeek-V3, arXiv 2412.19437, 2.2).

The row of position i takes the model's hidden state at i, behind the last norm, and the token at i + 1. It guesses the
token at i + 2. For further tokens the layer takes its own output in place of the hidden state.
"""

import torch

from moeyard_kernels.backend import Backend, StepPlan
from moeyard_worker.layers.overwriting import overwrite
from moeyard_worker.models.decoder import Decoder, DecoderLayer, Load, load_all
from moeyard_worker.models.spec import DraftSpec


class Drafter:
    """Runs `layer` with the embedding and the head of `model`."""

    def __init__(self, spec: DraftSpec, layer: DecoderLayer, *, model: Decoder, backend: Backend, load: Load) -> None:
        self._layer, self._model, self._backend = layer, model, backend
        self._token_norm, self._hidden_norm = load(spec.token_norm), load(spec.hidden_norm)
        self._join, self._head_site = load(spec.join), model.streams.site(load_all(load, spec.head_site))

    def overwrite(self, spec: DraftSpec, load: Load) -> None:
        """Load weights into the memory of the present ones, but for those of `layer`, which the model overwrites."""
        parts = (load(spec.token_norm), load(spec.hidden_norm), load(spec.join))
        overwrite((self._token_norm, self._hidden_norm, self._join), parts)
        overwrite(self._head_site, self._model.streams.site(load_all(load, spec.head_site)))

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Return the rows [num_rows, H] that the head reads.

        `token_ids` [num_rows] int64 are the tokens that follow the plan's rows, and `hidden` [num_rows, H] the hidden
        states of these rows. The plan's own tokens are not read. A plan without rows takes part in the exchange.
        """
        backend, layer, eps = self._backend, self._layer, self._model.eps
        if not plan.num_tokens:
            layer.idle(hidden[:0], plan)
            return hidden[:0]
        tokens = backend.rms_norm(self._model.embed(token_ids), self._token_norm, eps)
        hidden = backend.rms_norm(hidden, self._hidden_norm, eps)
        residual = self._model.streams.begin(backend.linear(torch.cat((tokens, hidden), 1), self._join), plan)
        return layer.forward(residual.enter(layer.site), residual, self._head_site, plan)
