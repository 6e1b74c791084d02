"""Ranks in one process that share memory like those of one host and run one after the other."""

from collections.abc import Callable, Sequence

import torch

from moeyard_kernels.types.peer_shape import PeerShape
from moeyard_kernels.types.peer_window import PeerWindow, open_window

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Op = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


def open_ranks(
    world_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    hidden: int = 40,
    top_k: int = 3,
    max_tokens: int = 6,
    num_experts: int = 10,
    copied: bool = False,
) -> list[PeerWindow]:
    """Return the windows of all ranks. Experts are on ranks in no order, every third also on the next rank."""
    shape = PeerShape(world_size=world_size, top_k=top_k, row_bytes=hidden * dtype.itemsize, max_tokens=max_tokens)
    memory = [torch.zeros(shape.num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(world_size)]
    owner = [(e * 7 + e // 3) % world_size for e in range(num_experts)]
    local = [owner[:e].count(owner[e]) for e in range(num_experts)]
    windows = [
        open_window(shape, memory, rank=rank, dtype=dtype, owner=owner, local=local, seconds=2.0)
        for rank in range(world_size)
    ]
    for e in range(0, num_experts if copied else 0, 3):
        for window in windows:
            window.owner[e, 1], window.local[e, 1] = (owner[e] + 1) % world_size, num_experts + e
    return windows


def random_rows(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """Return random bits, because an exchange only moves them."""
    words = torch.randint(-(2**15), 2**15, (*sizes[:-1], sizes[-1] * dtype.itemsize // 2)).to(torch.int16)
    return words.view(dtype).view(sizes).to(DEVICE)


def random_ids(num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """Return distinct experts per row, some of them masked."""
    ids = torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k].contiguous()
    ids[torch.rand(ids.shape) < 0.1] = -1
    return ids.to(DEVICE)


def in_turn(run: Op, windows: Sequence[PeerWindow], inputs: Sequence[tuple], **arguments: object) -> list:
    """Let all ranks send, then all wait."""
    for window, given in zip(windows, inputs, strict=True):
        run(*given, window, send=True, wait=False, **arguments)
    return [
        run(*given, window, send=False, wait=True, **arguments) for window, given in zip(windows, inputs, strict=True)
    ]
