"""The contract of a checkpoint format: which tensors it stores, and their form in memory. Pure.

To add a format, write one file in this folder with its scheme and add a line to the table in `choose.py`. The
conversion of its stored layout goes to `checkpoint/decoding.py`.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Protocol

from moeyard_kernels.types.weight_form import ExpertForm, WeightForm
from moeyard_worker.layers.weights import Part, Weight


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that a checkpoint must hold: its shape, and the safetensors dtypes that the format reads.

    `other_shapes` are accepted too. They hold the same values. `why` says which settings call for the tensor.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    other_shapes: tuple[tuple[int, ...], ...] = ()
    why: str = ""


def stores(module: str, keys: Container[str]) -> bool:
    """Return whether a checkpoint with `keys` stores the weight of `module` in any layout."""
    return any(f"{module}.{name}" in keys for name in ("weight", "weight_packed", "qweight"))


class Scheme(Protocol):
    """How one tensor of a model is stored."""

    def stored(self, part: Part) -> Mapping[str, StoredTensor]:
        """Return by key the tensors that `part` is stored in. The checkpoint must hold all of them."""
        ...


class Format(Protocol):
    """How a checkpoint stores its weights.

    `keys` are the checkpoint's keys, empty for random weights. A format reads from them which matrices are quantised.
    `dtype` is the served dtype, by torch's name.
    """

    @property
    def decoded(self) -> str | None:
        """Reason why the codes of experts become bfloat16 on a GPU, None if they stay or if that was chosen."""
        ...

    @property
    def left_plain(self) -> tuple[str, ...]:
        """Tensors that config.json quantises at run time and the server does not, such as activations."""
        ...

    def form(self, weight: Weight, dtype: str, keys: Container[str]) -> WeightForm:
        """Return the form in memory of a parameter. It is plain for every parameter that is not a matrix."""
        ...

    def expert_form(self, *, hidden: int, intermediate: int, dtype: str) -> ExpertForm:
        """Return the form in memory of an expert. It is the same in all layers."""
        ...

    def scheme(self, part: Part, keys: Container[str]) -> Scheme:
        """Return how `part` is stored. Raises CheckpointError if config.json and the stored tensors disagree."""
        ...

    def skips(self, key: str) -> str | None:
        """Return the reason why the tensor `key` is not loaded, or None if the format does not know it."""
        ...

    def contradicts(self, key: str, keys: Container[str]) -> str | None:
        """Return how config.json contradicts the unexpected tensor `key`, or None if its name does not show it."""
        ...
