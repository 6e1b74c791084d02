"""The backend of GPUs: layers over the ops. A row's bits do not depend on other rows.

It also runs without a GPU: on the CPU the ops run their references, which lets tests cover its composition.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from moeyard_kernels import ops
from moeyard_kernels.backend import HyperSite
from moeyard_kernels.cuda.attention import CudaGqa, CudaMla
from moeyard_kernels.cuda.capturing import capture, capture_while_serving, compile_ahead, without_collection
from moeyard_kernels.cuda.compressed import CudaCompressed
from moeyard_kernels.cuda.compressed_blocks import CudaBlockAttend
from moeyard_kernels.cuda.experts import CudaExpertSlots
from moeyard_kernels.cuda.footprint import STREAM_SLOTS
from moeyard_kernels.cuda.gate import CudaGate, GateCounts
from moeyard_kernels.cuda.hyper_connections import CudaHyperSite, write_streams
from moeyard_kernels.cuda.linear_attention import CudaGdn, CudaKda
from moeyard_kernels.cuda.plan import CudaPlan
from moeyard_kernels.cuda.residency import CudaResidency
from moeyard_kernels.cuda.step_inputs import StepInputs, StepStaging
from moeyard_kernels.cuda.verified_rows import Tails
from moeyard_kernels.ops.op import load
from moeyard_kernels.peers import Peers
from moeyard_kernels.types.decode_tables import BLOCK
from moeyard_kernels.types.gate import ExpertParts
from moeyard_kernels.types.layers import (
    GRANULE,
    CompressedLayer,
    GateLayer,
    GdnLayer,
    GqaLayer,
    HyperMix,
    KdaLayer,
    MlaLayer,
)
from moeyard_kernels.types.matrix import Matrix
from moeyard_kernels.types.step import StepRows
from moeyard_kernels.types.step_size import StepSize
from moeyard_kernels.types.weight_form import ExpertForm

# A few rows of a large hidden size are reduced faster by many programs and then normalised: 4.0 us against 4.4 for one
# row of 7168 on an H200. Otherwise one launch is faster (2.2 against 3.2 us for one row of 2048, 86 against 105 for
# 8192 rows).
_FEW_ROWS, _LARGE = 64, 4096
# Up to this many rows, products over fp8 codes decode them on the chip. More rows read values that are made once.
_PACKED_ROWS = 64


class CudaBackend:
    """`Backend` on `device`. Raises ValueError for a page size that does not divide the attention's block of 64."""

    rms_norm = staticmethod(ops.rms_norm)
    add_rms_norm = staticmethod(ops.add_rms_norm)
    mla_split_qkv_a_norm = staticmethod(ops.mla_split_qkv_a_norm)
    silu_mul = staticmethod(ops.silu_mul)
    sigmoid_mul = staticmethod(ops.sigmoid_mul)
    hyper_site = staticmethod(CudaHyperSite)
    sample = staticmethod(ops.sample)
    token_logprobs = staticmethod(ops.token_logprobs)
    # For captured steps: see `capturing`.
    capture = staticmethod(capture)
    capture_while_serving = staticmethod(capture_while_serving)
    without_collection = staticmethod(without_collection)
    stream_slots = STREAM_SLOTS

    def __init__(self, *, page_size: int, device: torch.device) -> None:
        if page_size < 1 or BLOCK % page_size:
            raise ValueError(f"page_size {page_size} does not divide {BLOCK}")
        self.page_size, self.device = page_size, device
        self.peers = Peers(device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # The sliding windows of all layers, whether a layer decompresses its keys, whether one keeps recurrent
        # state in slots, and whether one has compressed attention.
        self.windows: set[int | None] = set()
        self.flat = self.slots = self.compresses = False
        self.choices = GateCounts()
        self._attention: list[CudaGqa | CudaMla] = []
        # The values of one matrix of codes, for prompts.
        self._values: torch.Tensor | None = None

    @property
    def captures_prompts(self) -> bool:
        """Whether steps with prompts can be captured. Prompts of compressed attention are planned by the host."""
        return not self.compresses

    def matrix(self, weight: Matrix) -> Matrix:
        if weight.form.name == "plain":
            return weight
        if weight.form.name != "fp8" or not weight.form.tiled:
            raise ValueError(f"a GPU has no products of {weight.form.name} weights")
        # Matrices are made before steps are captured, so the address stays.
        if self._values is None or self._values.numel() < math.prod(weight.shape):
            self._values = torch.empty(math.prod(weight.shape), dtype=torch.bfloat16, device=self.device)
        return weight

    def plan(self, step: StepRows) -> CudaPlan:
        return CudaPlan(
            step,
            page_size=self.page_size,
            windows=self.windows,
            flat=self.flat,
            device=self.device,
            slots=self.slots,
            compressed=self.compresses,
        )

    def step_inputs(self, size: StepSize, last_ids: torch.Tensor, tails: Tails | None = None) -> StepInputs:
        """Return inputs of a captured step of that size, for the layers built so far; see `StepInputs`."""
        return StepInputs(
            size,
            page_size=self.page_size,
            windows=self.windows,
            last_ids=last_ids,
            slots=self.slots,
            compressed=self.compresses,
            tails=tails,
        )

    def tails(self, *, max_sequences: int, num_drafts: int, limit: int) -> Tails:
        return Tails(max_sequences=max_sequences, num_drafts=num_drafts, limit=limit, device=self.device)

    def staging(self, fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], *, stages: int) -> StepStaging:
        return StepStaging(fields, self.device, stages=stages)

    def compile_ahead(self, runs: Iterable[Callable[[], object]]) -> None:
        compile_ahead(runs, self.device)

    def linear(self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        # Weights do not change while a model serves.
        if weight.form.name == "plain":
            return ops.linear(x, weight.data, bias, static_weight=True)
        if x.shape[0] <= _PACKED_ROWS:
            return ops.linear_packed(x, weight, bias)
        # One stream runs all products of this many rows (`beside`), so they take turns with the memory.
        assert self._values is not None, "matrix() allocates it"
        values = self._values[: math.prod(weight.shape)].view(weight.shape)
        return ops.linear(x, ops.write_values(values, weight), bias)

    def gqa(self, layer: GqaLayer) -> CudaGqa:
        self.windows.add(layer.window)
        found = CudaGqa(layer)
        self._attention.append(found)
        return found

    def mla(self, layer: MlaLayer) -> CudaMla:
        self.windows.add(None)
        self.flat = True
        found = CudaMla(layer)
        self._attention.append(found)
        return found

    @contextmanager
    def rebuilding(self) -> Iterator[None]:
        attention = list(self._attention)
        try:
            with self.choices.reused():
                yield
        finally:
            self._attention = attention

    def before_compiling(self, tell: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `tell` before each kernel that this thread compiles while the context lasts."""
        watching: AbstractContextManager[None] = load("common.compiling").before_compiling(tell)
        return watching

    def warm_compaction(self) -> None:
        """Compile the kernels of compaction before a prompt waits for them."""
        for attention in self._attention:
            attention.warm_compaction()

    def gdn(self, layer: GdnLayer) -> CudaGdn:
        self.slots = True
        return CudaGdn(layer)

    def kda(self, layer: KdaLayer) -> CudaKda:
        self.slots = True
        return CudaKda(layer)

    def compressed(self, layer: CompressedLayer) -> CudaCompressed:
        if self.page_size % GRANULE:
            raise ValueError(f"page_size {self.page_size}: compressed attention needs a multiple of {GRANULE}")
        self.compresses = True
        return CudaCompressed(layer)

    def block_attend(self, layer: CompressedLayer) -> CudaBlockAttend:
        return CudaBlockAttend(layer)

    def hyper_leave(
        self,
        result: torch.Tensor | ExpertParts,
        streams: torch.Tensor,
        mix: HyperMix,
        site: HyperSite,
        plan: CudaPlan,
    ) -> tuple[torch.Tensor, torch.Tensor, HyperMix | None]:
        if isinstance(site, CudaHyperSite):
            return site.leave(result, streams, mix)
        streams = write_streams(result, streams, mix)
        return streams, *site.enter(streams)

    def expert_slots(self, *, num_slots: int, form: ExpertForm) -> CudaExpertSlots:
        return CudaExpertSlots(num_slots=num_slots, form=form, device=self.device)

    def expert_residency(self, slots: CudaExpertSlots, **arguments: Any) -> CudaResidency:
        return CudaResidency(slots, **arguments)

    def gate(self, layer: GateLayer) -> CudaGate:
        return CudaGate(layer, choices=self.choices)

    def beside(self, run: Callable[[], torch.Tensor], plan: CudaPlan) -> Callable[[], torch.Tensor]:
        """Run on a second stream if rows are so few that launches leave much of a GPU idle. Memory freed there is
        reused by the next call, which waits for all earlier launches of the caller."""
        if self._side is None or plan.num_rows > _FEW_ROWS:
            return run
        side = self._side
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            result = run()

        def joined() -> torch.Tensor:
            torch.cuda.current_stream(self.device).wait_stream(side)
            return result

        return joined

    def reduce_add_norm(
        self, parts: ExpertParts, residual: torch.Tensor, norm: torch.Tensor, eps: float, plan: CudaPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not plan.num_rows:
            return residual, residual
        routed, weights, shared, gate = parts.routed, parts.weights, parts.shared, parts.shared_gate
        if plan.num_rows <= _FEW_ROWS and residual.shape[1] > _LARGE and gate is None:
            return ops.add_rms_norm(ops.moe_weighted_reduce(routed, weights, shared), residual, norm, eps)
        return ops.moe_reduce_add_norm(routed, weights, shared, residual, norm, eps, shared_gate=gate)
