"""Whether a shared expert that is as wide as a routed one is taken for one more expert of every row.

By itself it is three launches on a stream beside the routed experts, and the weighted sum, which waits for two streams,
cannot begin while its predecessors run: 6 of 53 us of a layer of Qwen3.5-35B-A3B at one row (H200, 2026-11-23). Joined
it is a pair more of each row. The bits are the same: products take K in the same order, and the sum rounds what the
shared expert gives as its gate does. A line of the table of stored configs says where; none does by default.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from moeyard_kernels.common.tuning import Config, choose

OP = "joined_expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig(Config):
    """joined: a pair more of each row. beside: launches of its own. No launch has warps or stages by it."""

    kernel: Literal["joined", "beside"]


CONFIGS = (JoinConfig(kernel="joined"), JoinConfig(kernel="beside"))


def shape_class(num_pairs: int, hidden: int, intermediate: int) -> str:
    """num_pairs: with the one more of each row, where that is a row's."""
    return f"P{num_pairs} H{hidden} I{intermediate}"


def joins(num_pairs: int, down: torch.Tensor) -> bool:
    """Of a step of so many pairs, over down [S, H, I]."""
    name = shape_class(num_pairs, *down.shape[1:])
    return choose(OP, name, down, (JoinConfig,), lambda: CONFIGS[1]).kernel == "joined"
