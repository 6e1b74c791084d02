"""The layer of multi-token prediction, which drafts the token after the next one (DeepSeek-V3, arXiv 2412.19437, 2.2).

The row of position i takes the model's hidden state at i, and the token at i + 1. It guesses the token at i + 2. For
further tokens the layer takes its own hidden state in place of the model's.
"""

import torch

from moeyard_kernels.backend import Backend, StepPlan
from moeyard_worker.layers.residual import Residual
from moeyard_worker.models.decoder import Decoder, DecoderLayer, Load, Use, load_all
from moeyard_worker.models.spec import DraftSpec, ModelSpec


class Drafter:
    """Runs `layer` with the embedding and the head of `model`.

    With one stream, a projection joins the normed embedding and the hidden state. With several (DeepSeek-V4), each
    stream gets the sum of a projection of its own hidden state and a projection of the embedding.
    """

    def __init__(self, spec: ModelSpec, layer: DecoderLayer, *, model: Decoder, backend: Backend, load: Load) -> None:
        self._layer, self._model, self._backend = layer, model, backend
        draft = spec.draft
        assert isinstance(draft, DraftSpec), "the model has a layer of multi-token prediction"
        self._token_norm, self._hidden_norm = load(draft.token_norm), load(draft.hidden_norm)
        self._joins = load_all(load, draft.joins)
        self._ending = model.streams.last(load_all(load, draft.head_site))
        self._last, self._to_head = self._ending

    def renew(self, spec: ModelSpec, load: Load, use: Use) -> None:
        """Call `use` as `Decoder.renew`, but for the weights of `layer`, which the model renews."""
        draft = spec.draft
        assert isinstance(draft, DraftSpec), "the model has a layer of multi-token prediction"
        parts = (load(draft.token_norm), load(draft.hidden_norm), load_all(load, draft.joins))
        use((self._token_norm, self._hidden_norm, self._joins), parts)
        use(self._ending, self._model.streams.last(load_all(load, draft.head_site)))

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Return the layer's hidden states, which `head` reads, in the shape of `hidden`.

        `token_ids` [num_rows] int64 are the tokens that follow the plan's rows, and `hidden` [num_rows, H or S H] the
        hidden states of these rows. The plan's own tokens are not read. A plan without rows takes part in the exchange.
        """
        if not plan.num_tokens:
            self._layer.idle(self._model.embed(token_ids[:0]), plan)
            return hidden[:0]
        residual = self._joined(token_ids, hidden, plan)
        return self._layer.forward(residual.enter(self._layer.site), residual, self._last, plan)

    def _joined(self, token_ids: torch.Tensor, hidden: torch.Tensor, plan: StepPlan) -> Residual:
        backend, eps = self._backend, self._model.eps
        tokens = backend.rms_norm(self._model.embed(token_ids), self._token_norm, eps)
        num_rows, width = tokens.shape
        if "join" in self._joins:
            hidden = backend.rms_norm(hidden, self._hidden_norm, eps)
            return self._model.streams.begin(backend.linear(torch.cat((tokens, hidden), 1), self._joins["join"]), plan)
        streams = backend.rms_norm(hidden.reshape(-1, width), self._hidden_norm, eps)
        streams = backend.linear(streams, self._joins["hidden"]).view(num_rows, -1, width)
        return self._model.streams.begin(streams + backend.linear(tokens, self._joins["token"]).unsqueeze(1), plan)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V] of the hidden states x of `forward`."""
        return self._model.logits(self._to_head(x))
