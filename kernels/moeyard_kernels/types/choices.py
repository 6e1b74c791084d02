"""What is asked of whoever counts the choices of gates."""

from collections.abc import Sequence
from typing import Protocol


class Choices(Protocol):
    """How many rows have chosen each expert, padding left out, where a device counts them as they choose."""

    def read(self) -> Sequence[Sequence[int]] | None:
        """[L, E] so far, of the backend's L gates in the order in which they were made; None while a device is still to
        tell, for which nobody waits: ask again."""
        ...

    def clear(self) -> None:
        """Count from zero."""
        ...
