"""The sizes of the memory through which ranks of a host fetch experts for each other (`fetch_window.py`). Pure."""

from dataclasses import dataclass

from moeyard_kernels.types.peer_shape import LINE, aligned

# Experts of one rank that peers may have on their way to it, and what is fetched by one program and told as a whole:
# its receiver waits for no more than that, and a program that fetches waits for its stores no oftener.
STAGED_EXPERTS, UNIT_BYTES = 8, 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchShape:
    """An expert is `up_bytes` of gate_up and `down_bytes` of down, each in units of `unit_bytes`, the last one shorter.

    In a rank's memory: heads [W, LINE] int64, by source: the number of the exchange, how many experts the source
    misses, and the places in its store of the last of these, up to `staged`; flags [staged units] int64: of which
    exchange the unit is that lies there; units [staged units, unit_bytes]. Raises ValueError for sizes that cannot be.
    """

    world_size: int
    up_bytes: int
    down_bytes: int
    staged: int = STAGED_EXPERTS
    unit_bytes: int = UNIT_BYTES

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= 32:
            raise ValueError(f"1 to 32 ranks share memory, got {self.world_size}")
        if not 1 <= self.staged <= LINE - 2:
            raise ValueError(f"1 to {LINE - 2} experts are named to peers, got {self.staged}")
        if self.up_bytes < 1 or self.down_bytes < 1 or self.up_bytes % 16 or self.down_bytes % 16:
            raise ValueError(f"experts are multiples of 16 bytes, got {self.up_bytes} and {self.down_bytes}")
        if self.unit_bytes < 16 or self.unit_bytes & (self.unit_bytes - 1):
            raise ValueError(f"a unit is a power of 2 of 16 bytes or more, got {self.unit_bytes}")

    @property
    def up_units(self) -> int:
        """Units of an expert's gate_up, which come before those of its down."""
        return -(-self.up_bytes // self.unit_bytes)

    @property
    def units(self) -> int:
        """Units of an expert."""
        return self.up_units + -(-self.down_bytes // self.unit_bytes)

    @property
    def staged_units(self) -> int:
        """Units that have a place on their way."""
        return self.staged * self.units

    @property
    def flags_offset(self) -> int:
        return self.world_size * LINE * 8

    @property
    def staging_offset(self) -> int:
        return aligned(self.flags_offset + self.staged_units * 8)

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's memory."""
        return self.staging_offset + self.staged_units * self.unit_bytes
