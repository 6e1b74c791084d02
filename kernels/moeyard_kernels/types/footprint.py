"""What a backend's attention takes beside the weights and the state that it is given. Pure."""

from dataclasses import dataclass
from typing import Protocol

from moeyard_kernels.types.split_sums import SplitSums


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Of one layer, in values.

    `extra`: kept beside the weights, in the served dtype; `fp32_extra`: in fp32. `per_row`: taken in fp32 for each row
    of a step, while the layer computes. `per_position`, in the served dtype, `copied_per_position`, in fp32 unless that
    is served, and `fp32_per_position`: for each position of the longest prefix that a prompt chunk attends to.
    `sums`: what decode rows leave of each split of the keys, where a backend splits them.
    """

    extra: int
    per_row: int
    per_position: int
    copied_per_position: int = 0
    fp32_per_position: int = 0
    fp32_extra: int = 0
    sums: SplitSums | None = None


class Footprints(Protocol):
    """What a backend says of the objects that it would make (`Backend.gqa`, ...), before it makes any.

    FIXED: bytes that the largest step takes whatever its shape. ALLOCATED: bytes that the allocator takes for each byte
    of a step's tensors. STREAM_SLOTS: slots that misses of prompts pass through, beside the cache's. HOST_EXPERTS:
    whether all experts are kept in memory of the host when not all have slots.
    """

    @property
    def FIXED(self) -> int: ...
    @property
    def ALLOCATED(self) -> float: ...
    @property
    def STREAM_SLOTS(self) -> int: ...
    @property
    def HOST_EXPERTS(self) -> bool: ...

    def gqa(self, *, num_heads: int, num_kv_heads: int, head_dim: int, head_norm: bool, fp32_norm: bool) -> Footprint:
        """`head_norm`: queries and keys are normalised head by head, with weights in fp32 if `fp32_norm`."""
        ...

    def gdn(self, *, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int, conv_size: int) -> Footprint:
        """Gated DeltaNet with a convolution over `conv_size` positions. Raises ValueError where there is none."""
        ...

    def kda(self, *, num_heads: int, head_dim: int) -> Footprint:
        """Kimi Delta Attention. Raises ValueError where there is none."""
        ...

    def mla(self, *, num_heads: int, nope_dim: int, rope_dim: int, v_dim: int, rank: int) -> Footprint:
        """Latent attention of rank R."""
        ...
