"""The backend of GPUs: layers over the door's kernels, each row's bits its own. See `backend`.

It asks for no GPU itself: on the CPU the same calls run through the oracles, which is how its composition is tested
where there is none.
"""

from typing import Any

import torch

from moeyard_kernels import ops
from moeyard_kernels.cuda.attention import CudaGqa, CudaMla
from moeyard_kernels.cuda.experts import CudaExpertSlots
from moeyard_kernels.cuda.plan import CudaPlan
from moeyard_kernels.types.decode_tables import BLOCK
from moeyard_kernels.types.gate import GateRule
from moeyard_kernels.types.step import StepRows


class CudaBackend:
    """`Backend` on `device`. Raises ValueError for a page size that does not divide the attention's block of 64."""

    rms_norm = staticmethod(ops.rms_norm)
    add_rms_norm = staticmethod(ops.add_rms_norm)
    mla_split_qkv_a_norm = staticmethod(ops.mla_split_qkv_a_norm)
    silu_mul = staticmethod(ops.silu_mul)

    def __init__(self, *, page_size: int, device: torch.device) -> None:
        if page_size < 1 or BLOCK % page_size:
            raise ValueError(f"page_size {page_size} does not divide {BLOCK}")
        self.page_size, self.device = page_size, device
        # The sliding windows of the layers built so far, and whether one of them decompresses its keys.
        self.windows: set[int | None] = set()
        self._flat = False

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Backend.matrix`: as it is."""
        return weight

    def plan(self, step: StepRows) -> CudaPlan:
        """See `Backend.plan`."""
        return CudaPlan(step, page_size=self.page_size, windows=self.windows, flat=self._flat, device=self.device)

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
        self._flat = True
        return CudaMla(**arguments)

    def expert_slots(self, *, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype) -> CudaExpertSlots:
        """See `Backend.expert_slots`."""
        return CudaExpertSlots(
            num_slots=num_slots, hidden=hidden, intermediate=intermediate, dtype=dtype, device=self.device
        )

    def route(
        self, x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None, rule: GateRule, plan: CudaPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Backend.route`."""
        if not plan.num_rows:
            return x.new_empty(0, rule.top_k, dtype=torch.float32), x.new_empty(0, rule.top_k, dtype=torch.int64)
        return ops.topk_gate(
            self.linear(x.to(gate.dtype), gate).float(),
            top_k=rule.top_k,
            scoring=rule.scoring,
            renormalize=rule.renormalize,
            bias=bias,
            num_groups=rule.num_groups,
            topk_groups=rule.topk_groups,
            group_score=rule.group_score,
            scaling=rule.scaling,
        )

    def weighted_reduce(
        self, partial: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, plan: CudaPlan
    ) -> torch.Tensor:
        """See `Backend.weighted_reduce`."""
        if not plan.num_rows:
            return partial.new_empty(0, partial.shape[2])
        return ops.moe_weighted_reduce(partial, weights, shared)
