"""Routed experts on a GPU: slots as two tensors; the host decides nothing."""

from collections.abc import Sequence

import torch

from moeyard_kernels import ops
from moeyard_kernels.types.expert_layout import FEW_PAIRS, ExpertLayout, ExpertPairs, expert_block_rows
from moeyard_kernels.types.gate import TokenChoice
from moeyard_kernels.types.matrix import Fill, expert_views
from moeyard_kernels.types.peer_window import PeerWindow
from moeyard_kernels.types.weight_form import ExpertForm


class CudaExpertSlots:
    """S slots: the matrices gate_up [S, 2I, H] (gate rows first) and down [S, H, I], as `ops.grouped_gemm` reads them.

    `regions` are their bytes, uint8 [S, bytes of gate_up] and [S, bytes of down], into which experts are copied.
    """

    def __init__(self, *, num_slots: int, form: ExpertForm, device: torch.device) -> None:
        if not form.gate_up.name == form.down.name == "plain":
            raise ValueError(f"a GPU has no products of {form.gate_up.name} and {form.down.name} experts")
        self.num_slots, self.form, self.device = num_slots, form, device
        gate_up, down = (torch.empty(num_slots, size, dtype=torch.uint8, device=device) for size in form.region_bytes)
        self.regions = gate_up, down
        found = expert_views(form, gate_up, down)
        self.gate_up, self.down = found.gate_up.data, found.down.data

    def write(self, slot: int, fill: Fill) -> None:
        fill(expert_views(self.form, *(region[slot] for region in self.regions)))

    def slot_table(self, slots: Sequence[int]) -> torch.Tensor:
        """Return [local experts, at least 1] int32 on the device.

        The memory after it holds -1, up to the most experts of any layer. Launches after a failed exchange may find ids
        of another layer and must read nothing by them.
        """
        table = torch.full((max(self.num_slots, len(slots), 1),), -1, dtype=torch.int32)
        table[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
        return table.to(self.device)[: max(len(slots), 1)]

    def begin(
        self, rows: torch.Tensor, experts: torch.Tensor, *, num_experts: int, prompt: torch.Tensor | None,
        one_in: int = 1, choice: TokenChoice | None = None, home: PeerWindow | None = None,
    ) -> "CudaExpertRun":  # fmt: skip
        return CudaExpertRun(
            self, rows, experts, num_experts=num_experts, prompt=prompt, one_in=one_in, choice=choice, home=home
        )  # fmt: skip


class CudaExpertRun:
    """One layer's rows and their experts: `experts` [R, K], `prompt` [R] or None."""

    known_counts = None

    def __init__(
        self, slots: CudaExpertSlots, rows: torch.Tensor, experts: torch.Tensor, *, num_experts: int,
        prompt: torch.Tensor | None, one_in: int, choice: TokenChoice | None, home: PeerWindow | None,
    ) -> None:  # fmt: skip
        self._slots, self._rows, self.experts, self.prompt, self._choice = slots, rows, experts, prompt, choice
        self._num_experts, self._one_in, self._home = num_experts, one_in, home
        self._block_rows = expert_block_rows(experts.numel() // one_in, num_experts)
        self._out = None if home is not None else rows.new_empty(experts.numel(), rows.shape[1])

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
        layout: ExpertLayout | ExpertPairs
        if self.experts.numel() <= FEW_PAIRS:
            layout = ExpertPairs(
                topk_ids=self.experts, slot_of_expert=slot_of_expert, num_slots=self._slots.num_slots,
                choice=self._choice,
            )  # fmt: skip
        else:
            assert self._choice is None, "of so many pairs the gate has chosen"
            layout = ops.expert_layout(
                self.experts, slot_of_expert, num_slots=self._slots.num_slots, block_rows=self._block_rows,
                one_in=self._one_in,
            )  # fmt: skip
        ops.grouped_gemm(
            self._rows, self._slots.gate_up, self._slots.down, layout, top_k=self.experts.shape[1], out=self._out,
            home=self._home,
        )  # fmt: skip

    def result(self) -> torch.Tensor | None:
        return None if self._out is None else self._out.view(*self.experts.shape, self._out.shape[1])
