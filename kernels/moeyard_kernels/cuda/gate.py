"""The gate of a layer on a GPU, and counts of how often gates chose each expert; the choosing launches count."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import cast

import torch

from moeyard_kernels import ops
from moeyard_kernels.cuda.plan import CudaPlan
from moeyard_kernels.types.expert_layout import FEW_PAIRS, can_share
from moeyard_kernels.types.gate import Chosen, SharedRow, TokenChoice, no_choice
from moeyard_kernels.types.layers import GateLayer


class GateCounts:
    """How many rows chose each expert, without padding, for a backend's gates in the order of their creation."""

    # Whether launches and captures count from now on. Off only to time steps without counting (`bench/choices.py`).
    on = True

    def __init__(self) -> None:
        self._counts: list[torch.Tensor] = []
        self._reused: Iterator[torch.Tensor] | None = None
        # The pinned copy, and the event of its completion; None: no copy is in flight.
        self._seen: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def of_gate(self, num_experts: int, device: torch.device) -> torch.Tensor:
        """Return [E] int64 in which another gate counts. Its address is fixed, because graphs write to it."""
        if self._reused is not None:
            return next(self._reused)
        # Layers are created in inference mode, and inference tensors could not be cleared outside of it.
        with torch.inference_mode(mode=False):
            self._counts.append(torch.zeros(num_experts, dtype=torch.int64, device=device))
        return self._counts[-1]

    @contextmanager
    def reused(self) -> Iterator[None]:
        """In this context, new gates count where the present ones do, in the same order."""
        self._reused = iter(self._counts)
        try:
            yield
        finally:
            self._reused = None

    def clear(self) -> None:
        """Count from zero."""
        for counts in self._counts:
            counts.zero_()

    def read(self) -> list[list[int]] | None:
        """Return the counts so far, [L, E] of L gates; None while the copy from the device is in flight: ask again
        later."""
        if not self.on:
            return []
        if self._copied is None:
            # Between steps every layer has counted the same number of rows.
            now = torch.stack(self._counts)
            if not now.is_cuda:
                return cast("list[list[int]]", now.tolist())
            if self._seen is None:
                self._seen = torch.empty_like(now, device="cpu", pin_memory=True)
            self._seen.copy_(now, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        if self._seen is None or not self._copied.query():
            return None
        self._copied = None
        return cast("list[list[int]]", self._seen.tolist())


class CudaGate:
    """The gate of one layer.

    A layer with a table finds the experts of its rows by token ids, on the device.
    fp32 logits of bf16 rows: if the weight's values are bf16, as in bf16 checkpoints, both operands stay bf16 and only
    the sums are fp32. Their products are exact either way, and a GPU's fp32 product is 20 times slower.
    """

    def __init__(self, layer: GateLayer, *, choices: GateCounts) -> None:
        weight, rule, shared_gate, shared = layer.weight.data, layer.rule, layer.shared_gate, layer.shared
        self._choices, self._counts = choices, choices.of_gate(weight.shape[0], weight.device)
        self._num_experts, self._gated = weight.shape[0], shared_gate is not None
        self._fp32_logits = weight.dtype == torch.float32
        if shared_gate is not None:
            # One product gives both. Its rows have a multiple of 16 logits, because Triton vectorises reads of such
            # strides.
            padding = weight.new_zeros(-(1 + weight.shape[0]) % 16, weight.shape[1])
            weight = torch.cat((weight, shared_gate.data.to(weight.dtype), padding))
        # A weight that is not fp32 has the dtype of the rows.
        rounded = weight.to(layer.dtype if self._fp32_logits else weight.dtype)
        self._weight = rounded if torch.equal(rounded.to(weight.dtype), weight) else weight
        self._rule, self._bias, self._arguments = rule, layer.bias, asdict(rule)
        # A lookup takes no time to hide, and the experts' launches have no scores by sqrt(softplus).
        self._defers = rule.top_k <= FEW_PAIRS and layer.table is None and rule.scoring != "sqrtsoftplus"
        self._table = None if layer.table is None else layer.table.long()
        # The shared experts' first product then joins the router's launch, because the operands are alike.
        self.computes_shared = (
            shared is not None
            and self._weight.dtype == shared[0].data.dtype == torch.bfloat16
            and self._defers
            and can_share(shared[1].shape[1])
        )
        self._shared, self._limit = shared if self.computes_shared else None, layer.limit

    def choose(self, x: torch.Tensor, plan: CudaPlan, *, defer: bool) -> Chosen:
        if not plan.num_rows:
            return no_choice(x, self._rule.top_k)
        defer = defer and plan.num_rows == 1 and self._defers
        rows, out_dtype = x.to(self._weight.dtype), torch.float32 if self._fp32_logits else None
        shared = None
        if defer and self._shared is not None:
            gate_up, down = self._shared
            logits, y = ops.linear_pair(rows, self._weight, gate_up.data, static_weight=True, out_dtype=out_dtype)
            shared = SharedRow(gate_up=y, down=down.data, out=torch.empty_like(x), limit=self._limit)
        else:
            logits = ops.linear(rows, self._weight, static_weight=True, out_dtype=out_dtype)
        counted = {"counts": self._counts, "entries": plan.entries} if self._choices.on else {}
        shared_gate = logits[:, self._num_experts] if self._gated else None
        if self._gated:
            logits = logits[:, : self._num_experts]
        if defer:
            weights, ids = (logits.new_empty(1, self._rule.top_k, dtype=d) for d in (torch.float32, torch.int64))
            later = TokenChoice(
                rule=self._rule, logits=logits, bias=self._bias, weights=weights, ids=ids, shared=shared, **counted
            )
            return Chosen(weights=weights, ids=ids, shared_gate=shared_gate, deferred=later)
        given = None if self._table is None else self._table.index_select(0, plan.token_ids)
        weights, ids = ops.topk_gate(logits, **self._arguments, bias=self._bias, ids=given, **counted)
        return Chosen(weights=weights, ids=ids, shared_gate=shared_gate)
