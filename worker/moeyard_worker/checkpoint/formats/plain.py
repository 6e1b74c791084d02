"""The plain checkpoint format: a matrix is one tensor of float32 or bfloat16 values. Pure."""

from collections.abc import Container, Mapping
from dataclasses import dataclass

from moeyard_kernels.types.weight_form import ExpertForm, WeightForm, plain_expert, plain_form
from moeyard_worker.checkpoint.formats.format import Scheme, StoredTensor
from moeyard_worker.layers.weights import Part, Weight

PLAIN_DTYPES = ("F32", "BF16")
_ID_DTYPES = ("I64", "I32")
# Names of tensors that only quantised checkpoints hold.
_QUANTIZED = (".weight_scale_inv", ".weight_scale", ".weight_packed", ".qweight", ".qzeros", ".scales")


@dataclass(frozen=True, slots=True)
class PlainScheme:
    """One tensor of values, rounded to the served dtype."""

    dtypes: tuple[str, ...] = PLAIN_DTYPES

    def stored(self, part: Part) -> Mapping[str, StoredTensor]:
        return {part.key: StoredTensor(part.whole or part.shape, _ID_DTYPES if part.ids else self.dtypes)}


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """A `Format` that stores values and rounds them to the served dtype."""

    @property
    def decoded(self) -> str | None:
        return None

    @property
    def left_plain(self) -> tuple[str, ...]:
        return ()

    def form(self, weight: Weight, dtype: str, keys: Container[str]) -> WeightForm:
        return plain_form(weight.kept(dtype))

    def expert_form(self, *, hidden: int, intermediate: int, dtype: str) -> ExpertForm:
        return plain_expert(hidden=hidden, intermediate=intermediate, dtype=dtype)

    def scheme(self, part: Part, keys: Container[str]) -> Scheme:
        return PlainScheme()

    def skips(self, key: str) -> str | None:
        return None

    def contradicts(self, key: str, keys: Container[str]) -> str | None:
        module, _, name = key.rpartition(".")
        # DeepSeek-V4's name of scales says little without the weight beside it.
        if key.endswith(_QUANTIZED) or (name == "scale" and f"{module}.weight" in keys):
            return "the weights are quantised, but config.json has no quantization_config"
        return None
