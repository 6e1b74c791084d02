"""Routed experts on a GPU: slots as two tensors; the host decides nothing."""

from collections.abc import Sequence
from typing import Any

import torch

from moeyard_kernels import ops
from moeyard_kernels.backend import ReceivedRows
from moeyard_kernels.types.expert_layout import FEW_PAIRS, ExpertLayout, ExpertPairs, expert_block_rows
from moeyard_kernels.types.matrix import Fill, expert_views
from moeyard_kernels.types.weight_form import ExpertForm


class CudaExpertSlots:
    """S slots: the matrices gate_up [S, 2I, H] (gate rows first) and down [S, H, I], plain or tiled.

    `regions` are their bytes, uint8 [S, bytes of gate_up] and [S, bytes of down], into which experts are copied.
    """

    def __init__(self, *, num_slots: int, form: ExpertForm, device: torch.device) -> None:
        forms = {form.gate_up.name, form.down.name}
        self.tiled = form.gate_up.tiled and form.down.tiled
        if not self.tiled and forms != {"plain"}:
            raise ValueError(f"a GPU has no products of {' and '.join(sorted(forms))} experts")
        self.num_slots, self.form, self.device = num_slots, form, device
        gate_up, down = (torch.empty(num_slots, size, dtype=torch.uint8, device=device) for size in form.region_bytes)
        self.regions = gate_up, down
        found = expert_views(form, gate_up, down)
        self.gate_up, self.down = found.gate_up, found.down

    def write(self, slot: int, fill: Fill) -> None:
        fill(expert_views(self.form, *(region[slot] for region in self.regions)))

    def contents(self, slot: int) -> tuple[torch.Tensor, ...]:
        return tuple(region[slot] for region in self.regions)

    def slot_table(self, slots: Sequence[int]) -> torch.Tensor:
        """Return [local experts, at least 1] int32 on the device. The memory after it holds -1, up to the most experts
        of any layer. Launches after a failed exchange may find ids of another layer and must read nothing by them."""
        table = torch.full((max(self.num_slots, len(slots), 1),), -1, dtype=torch.int32)
        table[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
        return table.to(self.device)[: max(len(slots), 1)]

    def begin(self, received: ReceivedRows, *, num_experts: int) -> "CudaExpertRun":
        return CudaExpertRun(self, received, num_experts=num_experts)


class CudaExpertRun:
    """One layer's rows and their experts: `experts` [R, K], `prompt` [R] or None."""

    known_counts = None

    def __init__(self, slots: CudaExpertSlots, received: ReceivedRows, *, num_experts: int) -> None:
        self._slots, self._received, self._num_experts = slots, received, num_experts
        experts, self.prompt = received.experts, received.prompt
        self.experts = experts
        self._block_rows = expert_block_rows(experts.numel() // received.num_owners, num_experts)
        self._out: torch.Tensor | None = None
        if received.result_window is None:
            self._out = received.rows.new_empty(experts.numel(), received.rows.shape[1])

    @property
    def counts(self) -> tuple[int, ...]:
        """Waits for the device."""
        return self._count(self.experts)

    @property
    def decode_counts(self) -> tuple[int, ...]:
        """Waits for the device."""
        return self._count(self.experts if self.prompt is None else self.experts[~self.prompt])

    def _count(self, experts: torch.Tensor) -> tuple[int, ...]:
        counts = torch.bincount(experts.flatten() + 1, minlength=self._num_experts + 1)
        return tuple(counts[1:].tolist())

    def compute(self, slot_of_expert: torch.Tensor) -> None:
        if not self.experts.numel():
            return
        slots, received, layout = self._slots, self._received, self._layout(slot_of_expert)
        top_k, window = self.experts.shape[1], received.result_window
        given: Any = {"top_k": top_k, "limit": slots.form.limit, "out": self._out, "home": window}
        if slots.tiled:
            ops.grouped_gemm_packed(received.rows, slots.gate_up, slots.down, layout, **given)
        else:
            ops.grouped_gemm(received.rows, slots.gate_up.data, slots.down.data, layout, **given)

    def _layout(self, slot_of_expert: torch.Tensor) -> ExpertLayout | ExpertPairs:
        num_slots, choice, num_owners = self._slots.num_slots, self._received.deferred_choice, self._received.num_owners
        if self.experts.numel() <= FEW_PAIRS:
            return ExpertPairs(topk_ids=self.experts, slot_of_expert=slot_of_expert, num_slots=num_slots, choice=choice)
        assert choice is None, "the gate has chosen for this many pairs"
        return ops.expert_layout(
            self.experts, slot_of_expert, num_slots=num_slots, block_rows=self._block_rows, one_in=num_owners
        )

    def result(self) -> torch.Tensor | None:
        return None if self._out is None else self._out.view(*self.experts.shape, self._out.shape[1])
