"""Memory of the host that one process of it lends to others. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LentMemory:
    """How other processes of the host find memory of this one. `inode`: that it is still the same file."""

    pid: int
    fd: int
    inode: int
    num_bytes: int
