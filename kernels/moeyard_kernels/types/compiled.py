"""What became of kernels that were to be compiled."""

from dataclasses import dataclass


@dataclass(slots=True)
class Compiled:
    """How many kernels were compiled because Triton's cache had not got them, and how many it had."""

    count: int = 0
    found: int = 0
