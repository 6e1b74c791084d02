"""The plain checkpoint format: a matrix is one tensor of float32 or bfloat16 values. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeyard_kernels.types.weight_form import ExpertForm, WeightForm, plain_expert, plain_form
from moeyard_worker.checkpoint.formats.format import Read, StoredTensor
from moeyard_worker.layers.weights import Part, Weight, num_elements

if TYPE_CHECKING:
    from moeyard_kernels.types.matrix import Matrix

PLAIN_DTYPES = ("F32", "BF16")


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """A `Format` that stores values and rounds them to the served dtype."""

    def form(self, weight: Weight, dtype: str, keys: Container[str]) -> WeightForm:
        return plain_form("float32" if weight.fp32 else dtype)

    def expert_form(self, *, hidden: int, intermediate: int, dtype: str) -> ExpertForm:
        return plain_expert(hidden=hidden, intermediate=intermediate, dtype=dtype)

    def stored(self, part: Part, keys: Container[str]) -> Mapping[str, StoredTensor]:
        return {part.key: StoredTensor(part.whole or part.shape, PLAIN_DTYPES)}

    def fill(self, out: Matrix, part: Part, read: Read) -> None:
        # `part.begin` counts rows of the stored tensor, and `read` counts elements.
        read(part.key, out.data, part.begin * num_elements(part.shape[1:]))
