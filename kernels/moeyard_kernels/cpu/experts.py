"""The CPU backend's routed experts: slots of packed matrices, and rows grouped by expert on the host.

A few rows use many experts, so index work is done in numpy. On a few integers a numpy call takes about a tenth of the
time of the torch call.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from moeyard_kernels.backend import ReceivedRows
from moeyard_kernels.cpu.joint_experts import FEW_PAIRS, JOINT_ROWS, joins, joint_mlp, pairs_mlp
from moeyard_kernels.cpu.linear import pack_matrix, padded_rows, project
from moeyard_kernels.ops.elementwise import silu_mul
from moeyard_kernels.types.matrix import ExpertViews, Fill, Matrix, blob_views
from moeyard_kernels.types.weight_form import ExpertForm


class CpuExpertSlots:
    """S slots; `gate_up[s]` [2I, H] (gate rows first) and `down[s]` [H, I] are packed for the CPU's matrix products.

    Every slot is packed, because products of packed and plain matrices may differ in bits. Small experts are never
    packed if `joins` finds that one product can compute several of them with the same bits. A slot takes memory when it
    is first written.
    """

    regions: tuple[torch.Tensor, ...] = ()

    def __init__(self, *, num_slots: int, form: ExpertForm) -> None:
        self.num_slots, self.limit = num_slots, form.limit
        self._form = form
        self._scratch = self._views()
        self._empty = self._scratch.down.data.new_empty(0)
        self.gate_up = [self._empty] * num_slots
        self.down = [self._empty] * num_slots
        plain = form.gate_up.name == form.down.name == "plain"
        self.joint = plain and joins(hidden=form.hidden, intermediate=form.intermediate, dtype=self._empty.dtype)

    def _views(self) -> ExpertViews:
        return blob_views(self._form, torch.empty(self._form.blob_bytes, dtype=torch.uint8))

    def write(self, slot: int, fill: Fill) -> None:
        fill(self._scratch)
        self.gate_up[slot], self.down[slot] = self._kept(self._scratch.gate_up), self._kept(self._scratch.down)

    def pack(self, fill: Fill) -> tuple[torch.Tensor, torch.Tensor]:
        fill(views := self._views())
        return self._kept(views.gate_up), self._kept(views.down)

    def rearrange(self, order: Sequence[int | tuple[torch.Tensor, torch.Tensor] | None]) -> None:
        empty = self._empty
        slots = [
            (empty, empty) if each is None else (self.gate_up[each], self.down[each]) if isinstance(each, int) else each
            for each in order
        ]
        self.gate_up, self.down = [gate_up for gate_up, _ in slots], [down for _, down in slots]
        self.num_slots = len(slots)

    def contents(self, slot: int) -> tuple[torch.Tensor, ...]:
        return self.gate_up[slot], self.down[slot]

    def slot_table(self, slots: Sequence[int]) -> Sequence[int]:
        """Return the slots themselves."""
        return slots

    def begin(self, received: ReceivedRows, *, num_experts: int) -> "CpuExpertRun":
        assert received.deferred_choice is None, "a CPU's gate has chosen"
        return CpuExpertRun(self, received, num_experts=num_experts)

    def _kept(self, matrix: Matrix) -> torch.Tensor:
        """Return a copy of `matrix` in the layout of the products, which is the plain one on some machines."""
        packed = matrix if self.joint else pack_matrix(matrix)
        return packed.data.clone() if packed.data is matrix.data else packed.data


class CpuExpertRun:
    """One layer's rows, grouped by expert. Asserts that every id is below num_experts."""

    def __init__(self, slots: CpuExpertSlots, received: ReceivedRows, *, num_experts: int) -> None:
        self._slots, self._rows, experts, prompt = slots, received.rows, received.experts, received.prompt
        self._num_rows, self._top_k = experts.shape
        self._flat = flat = experts.numpy().reshape(-1)
        counts = np.bincount(flat + 1, minlength=num_experts + 1).tolist()
        assert len(counts) == num_experts + 1, f"expert {len(counts) - 2} of {num_experts}"
        self._num_elsewhere = counts[0]
        self.counts: tuple[int, ...] = tuple(counts[1:])
        self._groups: _Groups | None = None
        self._result: torch.Tensor | None = None
        self.decode_counts = self.counts
        if prompt is not None:
            decode = flat[~prompt.numpy().repeat(self._top_k)]
            self.decode_counts = tuple(np.bincount(decode + 1, minlength=num_experts + 1).tolist()[1:])

    @property
    def known_counts(self) -> tuple[int, ...]:
        """The counts: the host has grouped the pairs itself."""
        return self.counts

    def compute(self, slot_of_expert: Sequence[int]) -> None:
        slots = self._slots
        if slots.joint and 0 < self._flat.size <= FEW_PAIRS and not self._num_elsewhere:
            of_pairs = [slot_of_expert[expert] for expert in self._flat.tolist()]
            if min(of_pairs) >= 0:
                self._result = pairs_mlp(self._rows, of_pairs, slots.gate_up, slots.down, slots.limit)
                return
        if self._groups is None:
            self._groups = _Groups(self._rows, self._flat, self._num_elsewhere, top_k=self._top_k)
        groups, start = [], 0
        for count, slot in zip(self.counts, slot_of_expert, strict=True):
            if count and slot >= 0:
                groups.append((start, count, slot))
            start += count
        found = self._groups
        few = sum(count for _, count, _ in groups) <= JOINT_ROWS * len(groups)
        mlp = joint_mlp if slots.joint and few else grouped_mlp
        mlp(self._rows, found.row_of_pair, groups, slots.gate_up, slots.down, found.out, slots.limit)

    def result(self) -> torch.Tensor:
        if self._result is not None:
            return self._result
        out = self._rows.new_empty(self._num_rows * self._top_k, self._rows.shape[1])
        if self._groups is not None:
            out.index_copy_(0, self._groups.pairs, self._groups.out)
        return out.view(self._num_rows, self._top_k, out.shape[1])


class _Groups:
    """`pairs` row * K + k of local experts, ordered by expert, then by pair; the row and the output of each."""

    __slots__ = ("out", "pairs", "row_of_pair")

    def __init__(self, rows: torch.Tensor, flat: np.ndarray, num_elsewhere: int, *, top_k: int) -> None:
        pairs = flat.argsort(kind="stable")[num_elsewhere:]
        self.pairs, self.row_of_pair = torch.from_numpy(pairs), torch.from_numpy(pairs // top_k)
        self.out = rows.new_empty(pairs.size, rows.shape[1])


def grouped_mlp(
    rows: torch.Tensor,
    row_of_pair: torch.Tensor,
    groups: Sequence[tuple[int, int, int]],
    gate_up: torch.Tensor | Sequence[torch.Tensor],
    down: torch.Tensor | Sequence[torch.Tensor],
    out: torch.Tensor,
    limit: float | None = None,
) -> torch.Tensor:
    """Run pairs through their experts: out[p] = down[slot] @ silu_mul(gate_up[slot] @ rows[row_of_pair[p]]) -> out.

    rows [R, H], row_of_pair [P] int64, out [P, H]; gate_up and down hold S matrices [2 I, H] and [H, I], packed or not.
    `limit`: as in `silu_mul`. Each group (start, count, slot) covers the pairs start..start + count - 1. Pairs without
    a group keep their value in `out`, so two calls can compute hits and misses into one `out`.

    A group is padded to a row count of `linear` with the pairs after it, whose results are dropped. Rows do not affect
    each other, and no padding has to be written.
    """
    num_pairs = row_of_pair.shape[0]
    for start, count, slot in groups:
        if count == 0:
            continue
        w_in, w_out = gate_up[slot], down[slot]
        stop = start + padded_rows(count)
        if stop > row_of_pair.shape[0]:
            row_of_pair = F.pad(row_of_pair[:num_pairs], (0, stop - num_pairs))
        x = rows.index_select(0, row_of_pair[start:stop])
        y = project(silu_mul.reference(project(x, w_in), limit), w_out)
        out[start : start + count] = y[:count]
    return out
