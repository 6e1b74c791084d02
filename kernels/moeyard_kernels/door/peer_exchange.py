"""The door to the exchange of rows among GPUs of one host. See `ops`."""

import torch

from moeyard_kernels.common.checks import check_devices, show
from moeyard_kernels.door.load import kernel
from moeyard_kernels.types.peer_window import PeerWindow


def dispatch_rows(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    window: PeerWindow,
    *,
    layer: int,
    max_rows: int,
    send: bool = True,
    wait: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the first T rows of x [any, H] where the experts of topk_ids [T, K] (int64 or int32, -1: none) are.

    -> (rows [max_rows * W, H], ids [max_rows * W, K] int32), of this rank's memory: row t * W + s is row t of rank s,
    its ids the numbers of its experts here, -1 for all others. A row without one here was not sent: what lies in its
    place is old. No rank may have more than `max_rows`, or the exchange fails; ranks need not name the same number.
    Valid until this rank's next `combine_rows`.

    Every rank calls it for every layer, with no row too, and then `combine_rows`. A call both sends and waits, unless
    it is told to do one of them; on a CPU nothing arrives while it waits. No host sync. A packet that does not come
    within the window's limit is named in its record of failure, and the rank takes no further part.
    """
    _check("dispatch_rows", window, x)
    if topk_ids.dim() != 2 or topk_ids.shape[1] != window.shape.top_k or topk_ids.dtype not in (
        torch.int64,
        torch.int32,
    ):  # fmt: skip
        raise ValueError(f"dispatch_rows: topk_ids {show(topk_ids)}, expected [T, {window.shape.top_k}]")
    num_tokens, most = topk_ids.shape[0], window.shape.max_tokens
    if not num_tokens <= min(x.shape[0], most) or not 1 <= max_rows <= most:
        raise ValueError(
            f"dispatch_rows: {num_tokens} tokens of x {show(x)}, max_rows {max_rows}, the memory holds {most}"
        )
    check_devices("dispatch_rows", topk_ids=topk_ids, x=x, table=window.table)
    return kernel("experts.peer_exchange", x).dispatch_rows(
        x, topk_ids, window, layer=layer, max_rows=max_rows, send=send, wait=wait
    )


def combine_rows(
    out: torch.Tensor | None,
    window: PeerWindow,
    *,
    layer: int,
    num_tokens: int,
    max_rows: int | None = None,
    send: bool = True,
    wait: bool = True,
) -> torch.Tensor:
    """Bring results home: out [max_rows * W * K, H], by the rows and ids of the `dispatch_rows` before -> [T, K, H].

    Without `out` a `grouped_gemm` has put them there (`home`), and ranks learn of each other that they have; of how
    many rows of each rank at most, which need not be known, `max_rows` says as it did to `dispatch_rows`. Result
    (t, k) is the row of the expert that token t of this rank chose as its k-th; what lies where the id was -1 is old.
    In memory that peers write to: valid until this rank's next `dispatch_rows`.
    """
    group = window.shape.world_size * window.shape.top_k
    if out is not None:
        _check("combine_rows", window, out)
        if out.shape[0] % group:
            raise ValueError(f"combine_rows: out {show(out)}, expected a multiple of {group} rows")
    if not 0 <= num_tokens <= window.shape.max_tokens:
        raise ValueError(f"combine_rows: {num_tokens} tokens, the memory holds {window.shape.max_tokens}")
    table = window.table
    check_devices("combine_rows", out=out, table=table)
    return kernel("experts.peer_exchange", table).combine_rows(
        out, window, layer=layer, num_tokens=num_tokens, max_rows=max_rows, send=send, wait=wait
    )


def _check(op: str, window: PeerWindow, rows: torch.Tensor) -> None:
    if rows.dim() != 2 or rows.shape[1] != window.hidden or rows.dtype != window.dtype:
        raise ValueError(f"{op}: rows {show(rows)}, expected {window.dtype} [any, {window.hidden}]")
