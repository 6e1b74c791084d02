"""The contract of a checkpoint format: which tensors it stores, and how they become matrices in memory. Pure.

To add a format, write one file in this folder and add a line to the table in `choose.py`. A format that dequantises at
load returns the plain form. A format that stays quantised returns a form of its own, and needs kernels for that form.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moeyard_kernels.types.weight_form import ExpertForm, WeightForm
from moeyard_worker.layers.weights import Part, Weight

if TYPE_CHECKING:
    import torch

    from moeyard_kernels.types.matrix import Matrix


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that a checkpoint must hold: its shape, and the safetensors dtypes that the format reads."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


class Read(Protocol):
    """Reads a checkpoint's tensors."""

    def __call__(self, key: str, out: torch.Tensor, begin: int = 0) -> None:
        """Fill the contiguous `out` from element `begin` of tensor `key` on, converted to the dtype of `out`.

        On a GPU the copy may still run on return.
        """
        ...


class Format(Protocol):
    """How a checkpoint stores its weights.

    `keys` are the checkpoint's keys, empty for random weights. A format reads from them which matrices are quantised.
    `dtype` is the served dtype, by torch's name.
    """

    def form(self, weight: Weight, dtype: str, keys: Container[str]) -> WeightForm:
        """Return the form in memory of a parameter. It is plain for every parameter that is not a matrix."""
        ...

    def expert_form(self, *, hidden: int, intermediate: int, dtype: str) -> ExpertForm:
        """Return the form in memory of an expert. It is the same in all layers."""
        ...

    def stored(self, part: Part, keys: Container[str]) -> Mapping[str, StoredTensor]:
        """Return by key the tensors that `part` is stored in. The checkpoint must hold all of them."""
        ...

    def fill(self, out: Matrix, part: Part, read: Read) -> None:
        """Write `part` into `out`, a matrix of its rows in the form that `form` or `expert_form` returned."""
        ...
