"""The sizes that every rank of a fleet must agree on, and the layout of its slab in shared memory. Pure."""

from dataclasses import dataclass

from moeyard_kernels.types.peer_shape import PeerShape
from moeyard_worker.config.engine_config import DTYPE_BYTES

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeShape:
    """`dtype` is "float32" or "bfloat16"; `max_tokens` bounds the rows of one rank in one step."""

    num_experts: int
    top_k: int
    hidden: int
    dtype: str
    max_tokens: int

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"the exchange moves float32 and bfloat16, got {self.dtype}")

    @property
    def row_bytes(self) -> int:
        """Bytes of one token row."""
        return self.hidden * DTYPE_BYTES[self.dtype]

    def window(self, world_size: int) -> PeerShape:
        """Sizes of the memory that each of `world_size` GPUs shares. Raises ValueError for rows of another kind."""
        return PeerShape(world_size=world_size, top_k=self.top_k, row_bytes=self.row_bytes, max_tokens=self.max_tokens)

    @property
    def fingerprint(self) -> str:
        """Text that is equal exactly when two ranks agree."""
        return (
            f"experts={self.num_experts} top_k={self.top_k} hidden={self.hidden} dtype={self.dtype} "
            f"max_tokens={self.max_tokens}"
        )

    @property
    def rows_offset(self) -> int:
        """Start of the token rows in a slab, behind the ids (int64)."""
        return _aligned(self.max_tokens * self.top_k * 8)

    @property
    def results_offset(self) -> int:
        """Start of the returned expert rows in a slab."""
        return self.rows_offset + _aligned(self.max_tokens * self.row_bytes)

    @property
    def slab_bytes(self) -> int:
        """Bytes of one rank's slab."""
        return self.results_offset + _aligned(self.max_tokens * self.top_k * self.row_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
