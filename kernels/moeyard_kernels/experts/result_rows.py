"""Triton: where the experts' second product puts a pair's result: rows of one tensor, or straight home, over NVLink.

Row t * W + s of what a rank has received is row t of rank s (`peer_exchange`), so its result k belongs to [t, k] of
what comes home there. Written by the product itself it crosses while the others are still computed, and is neither
written here nor read again. Peers read it behind the `combine` of all ranks, which this one takes part in when its
products have ended; and nobody still reads what is written over: who sent the rows had used what came home before.
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
    """(where the rows of N results of pairs b_pair [BM] begin, which are to be stored): those below 0 are none.

    Of WORLD 0 rows of p_out. Otherwise of the memory of the row's source, by the addresses in p_table, and none at all
    of a rank that is poisoned: peers may be at work on another exchange.
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
    """What `result_rows` takes of the host: rows of out, or the memory of all ranks."""
    if home is None:
        return {"p_out": out, "p_table": out, "p_state": out, "TOP_K": 1, "WORLD": 0, "HOME": 0}
    shape, mine = home.shape, home.views(home.rank).home
    return {
        "p_out": mine, "p_table": home.table, "p_state": home.state, "TOP_K": shape.top_k, "WORLD": shape.world_size,
        "HOME": shape.home_offset,
    }  # fmt: skip
