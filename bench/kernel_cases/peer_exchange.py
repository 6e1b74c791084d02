"""Puts of one GPU into its own memory: the cost of an exchange without the link. `bench/nvlink.py` has real links."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kernel_cases.case import Case, Target, assert_bits
from moeyard_kernels import ops
from moeyard_kernels.experts import peer_exchange
from moeyard_kernels.types.peer_window import PeerShape, PeerWindow, open_window

OPS = ("dispatch_rows", "combine_rows")
_TOP_K, _NUM_EXPERTS = 8, 128


class Shared:
    """A window that is not copied, because it holds addresses of its memory."""

    def __init__(self, window: PeerWindow) -> None:
        self.window = window

    def __deepcopy__(self, memo: Any) -> "Shared":
        return self


def cases() -> Iterator[Case]:
    """Yield decode steps of one rank, which waits for no peer."""
    for hidden in (2048, 7168):
        for num_tokens in (1, 8, 64):
            x = torch.randn(num_tokens, hidden, dtype=torch.bfloat16, device="cuda")
            ids = torch.rand(num_tokens, _NUM_EXPERTS, device="cuda").argsort(1)[:, :_TOP_K].contiguous()
            out = torch.randn(num_tokens * _TOP_K, hidden, dtype=torch.bfloat16, device="cuda")
            [window] = _windows(1, hidden, num_tokens)
            shape, shared = f"H={hidden} T={num_tokens} K={_TOP_K}, alone", Shared(window)
            prove = partial(_prove, hidden, num_tokens)
            yield Case(
                op="dispatch_rows",
                shape=shape,
                run=partial(_dispatch, x, ids, shared, max_rows=num_tokens),
                prove=prove,
                num_bytes=2 * x.nbytes + 2 * ids.nbytes,
                target=Target("us", 5.0 if num_tokens < 64 else 8.0),
            )
            yield Case(
                op="combine_rows",
                shape=shape,
                run=partial(_combine, out, shared, num_tokens=num_tokens),
                prove=prove,
                num_bytes=2 * out.nbytes,
                target=Target("us", 5.0 if num_tokens < 64 else 12.0),
            )


def _windows(world_size: int, hidden: int, num_tokens: int) -> list[PeerWindow]:
    """Return the windows of ranks on one device."""
    shape = PeerShape(world_size=world_size, top_k=_TOP_K, row_bytes=2 * hidden, max_tokens=num_tokens)
    memory = [torch.zeros(shape.num_bytes, dtype=torch.uint8, device="cuda") for _ in range(world_size)]
    share = _NUM_EXPERTS // world_size
    owner, local = ([f(e, share) for e in range(_NUM_EXPERTS)] for f in (int.__floordiv__, int.__mod__))
    return [
        open_window(shape, memory, rank=rank, dtype=torch.bfloat16, owner=owner, local=local, seconds=1.0)
        for rank in range(world_size)
    ]


def _dispatch(x: torch.Tensor, ids: torch.Tensor, shared: Shared, *, max_rows: int) -> tuple[torch.Tensor, ...]:
    return peer_exchange.dispatch_rows(x, ids, shared.window, layer=0, max_rows=max_rows, send=True, wait=True)


def _combine(out: torch.Tensor, shared: Shared, *, num_tokens: int) -> torch.Tensor:
    return peer_exchange.combine_rows(out, shared.window, layer=0, num_tokens=num_tokens, send=True, wait=True)


def _prove(hidden: int, num_tokens: int) -> None:
    """Prove that two ranks of this device, one after the other, leave both memories as the oracle does."""
    ours, theirs = (_windows(2, hidden, num_tokens) for _ in range(2))
    xs = [torch.randn(num_tokens, hidden, dtype=torch.bfloat16, device="cuda") for _ in ours]
    ids = [torch.rand(num_tokens, _NUM_EXPERTS, device="cuda").argsort(1)[:, :_TOP_K].contiguous() for _ in ours]
    out = torch.randn(2 * num_tokens * _TOP_K, hidden, dtype=torch.bfloat16, device="cuda")
    reference = SimpleNamespace(dispatch_rows=ops.dispatch_rows.reference, combine_rows=ops.combine_rows.reference)
    for kernels, windows in ((peer_exchange, ours), (reference, theirs)):
        for send in (True, False):
            for x, chosen, window in zip(xs, ids, windows, strict=True):
                kernels.dispatch_rows(x, chosen, window, layer=0, max_rows=num_tokens, send=send, wait=not send)
        for send in (True, False):
            for window in windows:
                kernels.combine_rows(out, window, layer=0, num_tokens=num_tokens, send=send, wait=not send)
    for rank in range(2):
        assert_bits(f"memory of rank {rank}", ours[rank].memory[rank], theirs[rank].memory[rank])
