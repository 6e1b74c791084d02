"""Check that an op works in a CUDA graph: replays read new inputs."""

from collections.abc import Callable

import torch
from kernel_cases.case import assert_bits
from kernel_cases.timing import capture


def assert_replays(step: Callable[[], tuple[torch.Tensor, ...]], refill: Callable[[], object]) -> None:
    """Capture `step`. After each `refill` of its inputs in place, a replay gives the bits of an eager call.

    `step` returns new tensors, which are poisoned before each replay.
    """
    results: list[tuple[torch.Tensor, ...]] = []
    graph = capture(lambda: results.append(step()))
    captured = results[-1]
    for i in range(3):
        refill()
        for x in captured:
            x.fill_(float("nan") if x.is_floating_point() else -7)
        graph.replay()
        assert_bits(f"replay {i}", captured, step())
