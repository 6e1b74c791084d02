"""DSpark, the drafter of DeepSeek-V4's later releases: one pass over a block of rows drafts several tokens.

A few layers with a window read the model's states: their keys of a position are projections of the mean over streams
behind some of the model's layers. The first row of a block holds the last known token, the other rows a noise token.
All rows of a block see each other, and the keys of the positions before it. Row j guesses the token j + 1 positions
behind the known one. The guess depends on the draft before it by a low-rank bias of the logits alone (Markov head).

Source: the authors' inference code, checked against SGLang 0.5.23. They round keys to fp8, which is left out here, as
in the model. They also score drafts (confidence head), which nothing here reads.
"""

from typing import Any

import torch

from moeyard_kernels.backend import Backend, StepPlan
from moeyard_worker.layers.compressed import BlockAttention
from moeyard_worker.models.decoder import Decoder, Load, Use, load_all
from moeyard_worker.models.spec import BlockDraftSpec, ModelSpec


class BlockDrafter:
    """Runs the last layers of `model` with its embedding and head."""

    def __init__(self, spec: ModelSpec, *, model: Decoder, backend: Backend, load: Load) -> None:
        assert spec.config.block_drafts is not None, "the model drafts blocks"
        self.block = spec.config.block_drafts
        self._model, self._backend, self._layers = model, backend, model.more_layers
        self._parts = self._load(spec, load)
        self._read_join, self._read_norm, self._markov_in, self._markov_out, self._ending = self._parts
        last, self._to_head = self._ending
        self._following = [*(layer.site for layer in self._layers[1:]), last]

    def _load(self, spec: ModelSpec, load: Load) -> tuple[Any, ...]:
        draft = spec.draft
        assert isinstance(draft, BlockDraftSpec), "the model drafts blocks"
        parts = (draft.read_join, draft.read_norm, draft.markov_in, draft.markov_out)
        return *map(load, parts), self._model.streams.last(load_all(load, draft.head_site))

    def renew(self, spec: ModelSpec, load: Load, use: Use) -> None:
        """Call `use` as `Decoder.renew`, but for the weights of the layers, which the model renews."""
        use(self._parts, self._load(spec, load))

    def store(self, hidden: torch.Tensor, plan: StepPlan) -> None:
        """Store the keys of a step's rows, from the model's `hidden` states [num_rows, ...] of the same plan."""
        x = self._backend.linear(self._model.read(hidden).contiguous(), self._read_join)
        x = self._backend.rms_norm(x, self._read_norm, self._model.eps)
        for layer in self._layers:
            assert isinstance(layer.attention, BlockAttention), "its layers are of one kind"
            layer.attention.store(x, plan)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Return hidden states [num_rows, S H] for a plan whose chunks are blocks. It stores nothing.

        A plan without rows takes part in the exchanges.
        """
        x = self._model.embed(plan.token_ids)
        if not plan.num_tokens:
            for layer in self._layers:
                layer.idle(x[:0], plan)
            return x[:0]
        residual = self._model.streams.begin(x, plan)
        x = residual.enter(self._layers[0].site)
        for layer, following in zip(self._layers, self._following, strict=True):
            x = layer.forward(x, residual, following, plan)
        return x

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V] of the hidden states x of `forward`, without the bias of the tokens before."""
        return self._model.logits(self._to_head(x))

    def bias(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return what is added to the logits behind tokens [M], [M, V]."""
        return self._backend.linear(self._markov_in.index_select(0, token_ids), self._markov_out)
