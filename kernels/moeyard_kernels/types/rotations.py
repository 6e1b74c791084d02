"""Rotary tables' rows of one step."""

import torch


class Rotations:
    """What tables hold for the rows at `positions` [rows] int64, looked up once a step however many layers ask."""

    __slots__ = ("_found", "_positions")

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions
        self._found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) [rows, D / 2] fp32 from a table [positions, D] that outlives the step."""
        found = self._found.get(id(table))
        if found is None:
            half = table.shape[1] // 2
            rows = table.index_select(0, self._positions)
            found = self._found[id(table)] = rows[:, :half], rows[:, half:]
        return found
