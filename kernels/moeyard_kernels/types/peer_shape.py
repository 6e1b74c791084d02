"""Sizes and offsets of the memory that ranks of a host share (`peer_window`, `fetch_window`). Pure."""

from dataclasses import dataclass

# Integers of 8 bytes per memory line. Different ranks write to different lines.
LINE = 16
# The latest times of each phase that are stored until the host reads them.
KEPT_TIMES = 256
# Offsets of the counters that the host reads: bytes received, bytes sent, number of times per phase, and these times.
# RECEIVED has a line of its own, because peers add to it.
RECEIVED, SENT, NUM_TIMES, TIMES, NUM_COUNTS = 0, LINE, LINE + 1, 2 * LINE, 2 * LINE + 2 * KEPT_TIMES

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerShape:
    """Sizes that all ranks share. `max_tokens` bounds the rows of one rank in one exchange.

    A rank's memory holds, in this order:
    - arrivals [2, LINE] int64: a count per phase, in the first element of each line;
    - heads [2, W, LINE] int64 by phase and source: the number of the exchange and the source's number of rows;
    - counts [NUM_COUNTS] int64;
    - ids [max_tokens, W, K] int32;
    - rows [max_tokens, W, H] by the source's row and the source;
    - home [max_tokens, K, H]: results of this rank's rows.

    Raises ValueError for rows that are no multiple of 16 bytes and for sizes below 1.
    """

    world_size: int
    top_k: int
    row_bytes: int
    max_tokens: int

    def __post_init__(self) -> None:
        for name in ("world_size", "top_k", "row_bytes", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.row_bytes % 16:
            raise ValueError(f"peers move rows of a multiple of 16 bytes, got {self.row_bytes}")
        if self.world_size > 32:
            raise ValueError(f"at most 32 ranks share memory, got {self.world_size}")

    @property
    def num_rows(self) -> int:
        """Rows of all ranks that fit one rank's memory."""
        return self.max_tokens * self.world_size

    @property
    def heads_offset(self) -> int:
        return 2 * LINE * 8

    @property
    def counts_offset(self) -> int:
        return self.heads_offset + 2 * self.world_size * LINE * 8

    @property
    def ids_offset(self) -> int:
        return self.counts_offset + NUM_COUNTS * 8

    @property
    def rows_offset(self) -> int:
        return aligned(self.ids_offset + self.max_tokens * self.world_size * self.top_k * 4)

    @property
    def home_offset(self) -> int:
        return aligned(self.rows_offset + self.max_tokens * self.world_size * self.row_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's memory."""
        return aligned(self.home_offset + self.max_tokens * self.top_k * self.row_bytes)


def aligned(num_bytes: int) -> int:
    """Round up to the alignment of the parts of the memory."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


# Experts of one rank that peers may stage at once, and bytes of a unit. One program fetches a unit and then sets its
# flag: larger units delay the receiver, smaller ones make the program wait for its stores more often.
STAGED_EXPERTS, UNIT_BYTES = 8, 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchShape:
    """Sizes of an expert, `up_bytes` of gate_up and `down_bytes` of down, and of its units. A last unit may be shorter.

    A rank's memory holds:
    - heads [W, LINE] int64 by source: the number of the exchange, the source's number of missed experts, and the places
      of the last `staged` of these in its store;
    - flags [staged units] int64: the number of the exchange of each staged unit;
    - units [staged units, unit_bytes].

    Raises ValueError for impossible sizes.
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
        """Units of an expert's gate_up. The units of down follow them."""
        return -(-self.up_bytes // self.unit_bytes)

    @property
    def units(self) -> int:
        """Units of an expert."""
        return self.up_units + -(-self.down_bytes // self.unit_bytes)

    @property
    def staged_units(self) -> int:
        """Units of the staging memory."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LentMemory:
    """Address of this process's shared memory for other processes of the host. `inode` identifies the file."""

    pid: int
    fd: int
    inode: int
    num_bytes: int
