"""The CPU backend: row counts that preserve a row's bits, packed weights, index work in numpy."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch

from moeyard_kernels import ops
from moeyard_kernels.cpu.attention import CpuGqa, CpuMla
from moeyard_kernels.cpu.compressed_attention import CpuBlockAttend, CpuCompressed
from moeyard_kernels.cpu.experts import CpuExpertSlots
from moeyard_kernels.cpu.footprint import STREAM_SLOTS
from moeyard_kernels.cpu.hyper_connections import CpuHyperSite
from moeyard_kernels.cpu.linear import linear, pack_matrix
from moeyard_kernels.cpu.linear_attention import CpuGdn, CpuKda
from moeyard_kernels.cpu.plan import CpuPlan, pad_rows
from moeyard_kernels.ops.elementwise import rows_apart
from moeyard_kernels.ops.hyper_connections import write_streams
from moeyard_kernels.peers import Peers
from moeyard_kernels.types.decode_tables import BLOCK
from moeyard_kernels.types.gate import Chosen, ExpertParts, no_choice
from moeyard_kernels.types.layers import GRANULE, CompressedLayer, GateLayer, GqaLayer, HyperMix, MlaLayer
from moeyard_kernels.types.matrix import Matrix
from moeyard_kernels.types.step import StepRows


class CpuGate:
    """The gate of one layer. The product runs in the weight's own dtype, and no choice is deferred."""

    computes_shared = False

    def __init__(self, layer: GateLayer) -> None:
        self._weight, self._top_k, self._table = layer.weight.data, layer.rule.top_k, layer.table
        self._shared_gate = None if layer.shared_gate is None else layer.shared_gate.data
        self._arguments: dict[str, Any] = {**asdict(layer.rule), "bias": layer.bias}

    def choose(self, x: torch.Tensor, plan: CpuPlan, *, defer: bool) -> Chosen:
        if not plan.num_tokens:
            return no_choice(x, self._top_k)
        logits = linear(x.to(self._weight.dtype), self._weight)
        ids = None if self._table is None else self._table.index_select(0, plan.token_ids).long()
        weights, ids = ops.topk_gate.reference(logits.float(), ids=ids, **self._arguments)
        shared = None if self._shared_gate is None else linear(x, self._shared_gate)[:, 0]
        return Chosen(weights=weights[: plan.num_tokens], ids=ids[: plan.num_tokens], shared_gate=shared)


class CpuBackend:
    """`Backend` on the CPU. Raises ValueError for a page size that does not divide the attention's block of 64."""

    device = torch.device("cpu")
    matrix = staticmethod(pack_matrix)
    rms_norm = staticmethod(ops.rms_norm.reference)
    add_rms_norm = staticmethod(ops.add_rms_norm.reference)
    mla_split_qkv_a_norm = staticmethod(ops.mla_split_qkv_a_norm.reference)
    silu_mul = staticmethod(ops.silu_mul.reference)
    sample = staticmethod(ops.sample)
    token_logprobs = staticmethod(ops.token_logprobs)
    expert_slots = staticmethod(CpuExpertSlots)
    gate = staticmethod(CpuGate)
    gdn = staticmethod(CpuGdn)
    kda = staticmethod(CpuKda)
    hyper_site = staticmethod(CpuHyperSite)
    stream_slots = STREAM_SLOTS
    choices = None

    def __init__(self, *, page_size: int) -> None:
        if page_size < 1 or BLOCK % page_size:
            raise ValueError(f"page_size {page_size} does not divide {BLOCK}")
        self.page_size = page_size
        self.peers = Peers(self.device)
        # The sliding windows of all layers; each needs its own plan.
        self._windows: set[int | None] = set()

    def plan(self, step: StepRows) -> CpuPlan:
        return CpuPlan(step, page_size=self.page_size, windows=self._windows)

    def linear(self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, weight.data, bias)

    def gqa(self, layer: GqaLayer) -> CpuGqa:
        self._windows.add(layer.window)
        return CpuGqa(layer)

    def mla(self, layer: MlaLayer) -> CpuMla:
        self._windows.add(None)
        return CpuMla(layer)

    def compressed(self, layer: CompressedLayer) -> CpuCompressed:
        if self.page_size % GRANULE:
            raise ValueError(f"page_size {self.page_size}: compressed attention needs a multiple of {GRANULE}")
        return CpuCompressed(layer)

    def block_attend(self, layer: CompressedLayer) -> CpuBlockAttend:
        return CpuBlockAttend(layer)

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (x * rows_apart(gate).sigmoid()).to(x.dtype)

    def rebuilding(self) -> AbstractContextManager[None]:
        return nullcontext()

    def expert_residency(self, slots: CpuExpertSlots, **_: Any) -> None:
        """Return None: the host knows the counts, and a copy occupies the processor anyway."""

    def beside(self, run: Callable[[], torch.Tensor], plan: CpuPlan) -> Callable[[], torch.Tensor]:
        # Every core is busy anyway.
        return run

    def reduce_add_norm(
        self, parts: ExpertParts, residual: torch.Tensor, norm: torch.Tensor, eps: float, plan: CpuPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not plan.num_tokens:
            return residual, residual
        return ops.add_rms_norm.reference(self._reduced(parts, plan), residual, norm, eps)

    def _reduced(self, parts: ExpertParts, plan: CpuPlan) -> torch.Tensor:
        """Return the sum [num_rows, H] of the results of experts and shared experts."""
        count, shared = plan.num_tokens, parts.shared
        if shared is not None and parts.shared_gate is not None:
            shared = self.sigmoid_mul(shared, parts.shared_gate[:, None])
        shared = None if shared is None else shared[:count]
        return pad_rows(ops.moe_weighted_reduce.reference(parts.routed, parts.weights, shared), plan.num_rows)

    def hyper_leave(
        self,
        result: torch.Tensor | ExpertParts,
        streams: torch.Tensor,
        mix: HyperMix,
        site: CpuHyperSite,
        plan: CpuPlan,
    ) -> tuple[torch.Tensor, torch.Tensor, HyperMix | None]:
        if isinstance(result, ExpertParts):
            result = self._reduced(result, plan)
        streams = write_streams(result, streams, mix)
        return streams, *site.enter(streams)
