"""Triton: addresses of the second product's results: rows of one tensor, or the source's memory, over NVLink.

Received row t * W + s is row t of rank s (`peer_exchange`), so its result k belongs to [t, k] of that rank's `home`.
The product writes it there itself. It crosses NVLink while other results are still computed, and is neither written
here nor read again. Peers read it after the `combine` of all ranks, in which this rank takes part when its products
have ended. No rank still reads what is overwritten: the source used its earlier results before it sent the rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moeyard_kernels.types import peer_window
from moeyard_kernels.types.peer_window import PeerWindow

_POISONED = tl.constexpr(peer_window.POISONED)


@triton.jit
def result_rows(
    p_out, p_table, p_state, b_pair, N: tl.constexpr, TOP_K: tl.constexpr, WORLD: tl.constexpr, HOME: tl.constexpr
):
    """Return the addresses of the N results of each pair of b_pair [BM], and which to store: pairs below 0 are padding.

    WORLD 0: rows of p_out. Otherwise: memory of the row's source, by the addresses in p_table. A poisoned rank stores
    nothing, because peers may be in another exchange.
    """
    m_pair = b_pair >= 0
    if WORLD:
        m_pair = m_pair & (tl.load(p_state + _POISONED) == 0)
        b_row, b_k = b_pair // TOP_K, b_pair % TOP_K
        b_home = tl.load(p_table + b_row % WORLD, mask=m_pair, other=0) + HOME
        p_home = tl.multiple_of(b_home.to(tl.pointer_type(p_out.dtype.element_ty)), [16])
        p_row = p_home + ((b_row // WORLD).to(tl.int64) * TOP_K + b_k) * N
    else:
        p_row = p_out + b_pair.to(tl.int64) * N
    return p_row, m_pair


def result_arguments(out: torch.Tensor, home: PeerWindow | None) -> dict[str, Any]:
    """Return the host arguments of `result_rows`: rows of out, or the memory of all ranks."""
    if home is None:
        return {"p_out": out, "p_table": out, "p_state": out, "TOP_K": 1, "WORLD": 0, "HOME": 0}
    shape, mine = home.shape, home.views(home.rank).home
    return {
        "p_out": mine,
        "p_table": home.table,
        "p_state": home.state,
        "TOP_K": shape.top_k,
        "WORLD": shape.world_size,
        "HOME": shape.home_offset,
    }
