"""Row addressing of queries, keys and values in the prefill kernels."""

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from moeyard_kernels.common import launch
from moeyard_kernels.types.decode_tables import BLOCK


class Rows:
    """A tensor with `row` elements between positions and `head` between heads; `width` elements of a row are read.

    Paged tensors [Hkv, num_pages, page, D] have the rows of all heads below each other (head is 0). Others are
    [L, H, D], or [L, D] if all heads share the rows.
    """

    def __init__(self, x: torch.Tensor, width: int, paged: bool) -> None:
        self.x, self.width = x, width
        self.row = x.stride(-2) if paged else x.stride(0)
        self.head = x.stride(1) if x.dim() == 3 and not paged else 0
        self._count = x.shape[0] * x.shape[1] * x.shape[2] if paged else x.shape[0]
        self._columns = width if self.head == 0 else self.head * (x.shape[1] - 1) + width

    def tma_ready(self) -> bool:
        """Whether TMA can copy it: rows start at multiples of 16 bytes and are at least as long as the read columns."""
        size = self.x.element_size()
        return self.x.data_ptr() % 16 == 0 and self.row * size % 16 == 0 and self._columns <= self.row

    def descriptor(self) -> TensorDescriptor:
        """Return Triton's descriptor of BLOCK rows."""
        return TensorDescriptor(self.x, [self._count, self._columns], [self.row, 1], [BLOCK, self.width])

    def gluon_descriptor(self) -> GluonDescriptor:
        """Return Gluon's descriptor of BLOCK rows in bf16."""
        layout = launch.shared_layout(BLOCK, self.width)
        return GluonDescriptor(self.x, [self._count, self._columns], [self.row, 1], [BLOCK, self.width], layout)
