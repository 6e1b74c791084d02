"""The backend of GPUs: layers over the door's kernels, each row's bits its own. See `backend`.

It asks for no GPU itself: on the CPU the same calls run through the oracles, which is how its composition is tested
where there is none.
"""

from typing import Any

import torch

from moeyard_kernels import ops
from moeyard_kernels.cuda.attention import CudaGqa, CudaMla
from moeyard_kernels.cuda.experts import CudaExpertSlots
from moeyard_kernels.cuda.footprint import STREAM_SLOTS
from moeyard_kernels.cuda.plan import CudaPlan
from moeyard_kernels.cuda.residency import CudaResidency
from moeyard_kernels.types.decode_tables import BLOCK
from moeyard_kernels.types.gate import GateRule, no_choice
from moeyard_kernels.types.step import StepRows

# Rows of a step up to which the reduce takes the next norm in. Beyond it nothing was measured yet; the bits are the
# same either way.
_ONE_LAUNCH_ROWS = 512


class CudaGate:
    """See `Gate`.

    fp32 logits of bf16 rows: where the weight's values are bf16's, as those of bf16 checkpoints are, both operands stay
    bf16 and only the sums are fp32. Their products are exact either way, and the fp32 product of a GPU is 20 times as
    slow.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, rule: GateRule, *, norm: torch.Tensor, eps: float
    ) -> None:
        self._norm, self._eps = norm, eps
        self._fp32_logits = weight.dtype == torch.float32
        rounded = weight.to(norm.dtype)
        self._weight = rounded if torch.equal(rounded.to(weight.dtype), weight) else weight
        self._bias, self._rule = bias, rule
        # Of this layer alone: launches that share it must follow one another, as those of one layer do.
        self._arrived = torch.zeros(1, dtype=torch.int32, device=weight.device)

    def route(
        self, x: torch.Tensor, residual: torch.Tensor, plan: CudaPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Gate.route`."""
        if not plan.num_rows:
            return x, residual, *no_choice(x, self._rule.top_k)
        return ops.norm_gate(
            x, residual, self._norm, self._weight, self._bias, self._rule, eps=self._eps, arrived=self._arrived,
            fp32_logits=self._fp32_logits, static_weight=True,
        )  # fmt: skip


class CudaBackend:
    """`Backend` on `device`. Raises ValueError for a page size that does not divide the attention's block of 64."""

    rms_norm = staticmethod(ops.rms_norm)
    add_rms_norm = staticmethod(ops.add_rms_norm)
    mla_split_qkv_a_norm = staticmethod(ops.mla_split_qkv_a_norm)
    silu_mul = staticmethod(ops.silu_mul)
    stream_slots = STREAM_SLOTS

    def __init__(self, *, page_size: int, device: torch.device) -> None:
        if page_size < 1 or BLOCK % page_size:
            raise ValueError(f"page_size {page_size} does not divide {BLOCK}")
        self.page_size, self.device = page_size, device
        # The sliding windows of the layers built so far, and whether one of them decompresses its keys.
        self.windows: set[int | None] = set()
        self.flat = False

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Backend.matrix`: as it is."""
        return weight

    def plan(self, step: StepRows) -> CudaPlan:
        """See `Backend.plan`."""
        return CudaPlan(step, page_size=self.page_size, windows=self.windows, flat=self.flat, device=self.device)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Backend.linear`; weights do not change while a model serves."""
        return ops.linear(x, weight, bias, static_weight=True)

    def gqa(self, **arguments: Any) -> CudaGqa:
        """See `Backend.gqa`."""
        self.windows.add(arguments["window"])
        return CudaGqa(**arguments)

    def mla(self, **arguments: Any) -> CudaMla:
        """See `Backend.mla`."""
        self.windows.add(None)
        self.flat = True
        return CudaMla(**arguments)

    def expert_slots(self, *, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype) -> CudaExpertSlots:
        """See `Backend.expert_slots`."""
        return CudaExpertSlots(
            num_slots=num_slots, hidden=hidden, intermediate=intermediate, dtype=dtype, device=self.device
        )

    def expert_residency(self, slots: CudaExpertSlots, **arguments: Any) -> CudaResidency:
        """See `Backend.expert_residency`."""
        return CudaResidency(slots, **arguments)

    def gate(
        self, weight: torch.Tensor, bias: torch.Tensor | None, rule: GateRule, *, norm: torch.Tensor, eps: float
    ) -> CudaGate:
        """See `Backend.gate`."""
        return CudaGate(weight, bias, rule, norm=norm, eps=eps)

    def reduce_add_norm(
        self, partial: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, residual: torch.Tensor,
        norm: torch.Tensor, eps: float, plan: CudaPlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """See `Backend.reduce_add_norm`."""
        if not plan.num_rows:
            return residual, residual
        if plan.num_rows > _ONE_LAUNCH_ROWS:
            return ops.add_rms_norm(ops.moe_weighted_reduce(partial, weights, shared), residual, norm, eps)
        return ops.moe_reduce_add_norm(partial, weights, shared, residual, norm, eps)
