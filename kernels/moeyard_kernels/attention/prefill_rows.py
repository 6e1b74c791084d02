"""Queries, keys or values as rows of memory, as the prefill kernels address them."""

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from moeyard_kernels.common import launch
from moeyard_kernels.types.decode_tables import BLOCK


class Rows:
    """`row` elements from one position to the next, `head` from head to head; `width` of them are read.

    Paged ones [Hkv, num_pages, page, D] are rows of all heads below each other (head 0); contiguous ones [L, H, D]
    have heads side by side, and shared ones [L, D] one for all.
    """

    def __init__(self, x: torch.Tensor, width: int, paged: bool) -> None:
        self.x, self.width = x, width
        self.row = x.stride(-2) if paged else x.stride(0)
        self.head = x.stride(1) if x.dim() == 3 and not paged else 0
        self._count = x.shape[0] * x.shape[1] * x.shape[2] if paged else x.shape[0]
        self._columns = width if self.head == 0 else self.head * (x.shape[1] - 1) + width

    def tma_ready(self) -> bool:
        """Whether the copy engine takes it: 16-byte starts, and a row at least as long as what is read of it."""
        size = self.x.element_size()
        return self.x.data_ptr() % 16 == 0 and self.row * size % 16 == 0 and self._columns <= self.row

    def descriptor(self) -> TensorDescriptor:
        """For copies of BLOCK rows by Triton."""
        return TensorDescriptor(self.x, [self._count, self._columns], [self.row, 1], [BLOCK, self.width])

    def gluon_descriptor(self) -> GluonDescriptor:
        """For copies of BLOCK rows by Gluon; bf16."""
        layout = launch.shared_layout(BLOCK, self.width)
        return GluonDescriptor(self.x, [self._count, self._columns], [self.row, 1], [BLOCK, self.width], layout)
