"""The contract of a checkpoint format: how stored tensors become matrices and experts in memory. Pure.

A new format is one file beside this one, a line of the table in `choose.py`, and a kernel for its form if it has one of
its own. A format that dequantises at load has the plain form.
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
    """A tensor that a checkpoint must hold: its shape, and the dtypes of safetensors that it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


class Read(Protocol):
    """Reads a checkpoint's tensors."""

    def __call__(self, key: str, out: torch.Tensor, begin: int = 0) -> None:
        """Fill the contiguous `out` with elements `begin`, `begin` + 1, ... of tensor `key`, converted to its dtype.

        On a GPU the copy may still run when this returns.
        """
        ...


class Format(Protocol):
    """How a checkpoint stores its weights. `keys` are those that it has, none where weights are random.

    Dtypes are served ones, by torch's name. A format may store some matrices in another way than others.
    """

    def form(self, weight: Weight, dtype: str, keys: Container[str]) -> WeightForm:
        """Return the form in memory of a parameter [rows, columns]. It is plain for all that is not a matrix."""
        ...

    def expert_form(self, *, hidden: int, intermediate: int, dtype: str) -> ExpertForm:
        """Return the form in memory of an expert, the same in all layers."""
        ...

    def stored(self, part: Part, keys: Container[str]) -> Mapping[str, StoredTensor]:
        """Return the stored tensors behind a logical one, by key. All of them must be there."""
        ...

    def fill(self, out: Matrix, part: Part, read: Read) -> None:
        """Write the rows of `part` into `out`, a matrix of these rows in the form that was asked for."""
        ...
