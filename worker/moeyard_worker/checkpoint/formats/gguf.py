"""The format of GGUF files: every tensor has its own type, and becomes bfloat16 when it is loaded. Pure.

`gguf_index.py` gives the tensors the names of a family's safetensors. Two kinds of matrices also have other rows there.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass

from moeyard_worker.checkpoint.formats.format import Scheme, StoredTensor
from moeyard_worker.checkpoint.formats.plain import PlainFormat, PlainScheme
from moeyard_worker.layers.weights import Part

GGUF_DTYPES = ("F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")


@dataclass(frozen=True, slots=True)
class PairedScheme(PlainScheme):
    """Rows of heads of `dim` rows, in which row 2 i is row i of the model, and row 2 i + 1 is row dim / 2 + i."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class SplitKvScheme:
    """kv_b as two tensors: k_b [heads, rank, nope], which is transposed, and v_b [heads, v, rank]."""

    heads: int
    nope: int
    v: int

    def keys(self, part: Part) -> tuple[str, str]:
        """Return the keys of k_b and v_b."""
        at = part.key.removesuffix("kv_b_proj.weight")
        return f"{at}k_b_proj.weight", f"{at}v_b_proj.weight"

    def stored(self, part: Part) -> Mapping[str, StoredTensor]:
        k_b, v_b = self.keys(part)
        rank = part.shape[1]
        return {
            k_b: StoredTensor((self.heads, rank, self.nope), GGUF_DTYPES),
            v_b: StoredTensor((self.heads, self.v, rank), GGUF_DTYPES),
        }


@dataclass(frozen=True, slots=True)
class GgufFormat(PlainFormat):
    """A `Format` that reads GGUF tensors, for files of a model given by its config.json.

    paired: rows of a head if query and key projections are a `PairedScheme`, else 0.
    split_kv: how kv_b is stored if it is split.
    """

    paired: int = 0
    split_kv: SplitKvScheme | None = None

    def scheme(self, part: Part, keys: Container[str]) -> Scheme:
        if self.paired and part.key.endswith((".q_proj.weight", ".k_proj.weight")):
            return PairedScheme(GGUF_DTYPES, self.paired)
        if self.split_kv and part.key.endswith(".kv_b_proj.weight") and part.key not in keys:
            return self.split_kv
        return PlainScheme(GGUF_DTYPES)
