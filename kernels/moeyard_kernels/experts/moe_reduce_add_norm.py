"""Triton: the end of one layer and the beginning of the next in one launch: weighted sum, residual, norm.

A program takes whole rows, in the tile of the norm, which determines the order of its sum (`rms_norm`). So a row's bits
are those of `moe_weighted_reduce` followed by `add_rms_norm`. Results of several experts are requested before the first
is used, so a single row does not pay one latency per expert. They are in registers, where ptxas keeps at most 15 to 20
loads of a thread in flight, or in shared memory, where all are. The gate of the shared expert is applied here too: as a
separate launch it would be the last of a chain that this launch waits for.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, check_layout, finish, new_output
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.common.tuning import Config, choose
from moeyard_kernels.elementwise.rms_norm import NUM_WARPS, add_rms_norm, normed, row_tile
from moeyard_kernels.elementwise.scale_rows import scale_rows_, scaled
from moeyard_kernels.experts.moe_weighted_reduce import moe_weighted_reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceConfig(Config):
    """Experts' results in flight: num_stages in shared memory, or, if that is 1, AHEAD in registers.

    The number of warps is fixed by the norm's tile.
    """

    kernel: Literal["rows"] = "rows"
    num_warps: int = NUM_WARPS
    num_stages: int = 1
    AHEAD: int = 1


CONFIGS = (
    *(ReduceConfig(AHEAD=ahead) for ahead in (4, 8)),
    *(ReduceConfig(num_stages=stages) for stages in (3, 5, 9)),
)
# Shared memory of a block on Hopper, without the part of the norm's sum.
_SHARED_BYTES = 220 * 1024


def shape_class(num_rows: int, top_k: int, hidden: int) -> str:
    """Return the shape class. Decode steps need few latencies, prompts many programs."""
    rows = "one" if num_rows == 1 else "some" if num_rows <= 32 else "few" if num_rows <= 64 else "many"
    return f"{rows} K{top_k} H{hidden}"


def default_config(num_rows: int, hidden: int) -> ReduceConfig:
    """Return the config of untuned shapes, from an H200: all in flight, or as many as 128 registers per thread hold."""
    if num_rows == 1 or 32 < num_rows <= 64:
        return CONFIGS[4]
    return CONFIGS[1 if hidden <= 4096 else 0]


@triton.jit
def _moe_reduce_add_norm_kernel(
    p_partial, p_weights, p_shared, p_gate, p_residual, p_norm, p_out, p_total, num_rows, gate_stride, H, eps,
    K: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, HAS_SHARED: tl.constexpr, GATED: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute rows [i BR, i BR + BR) of [num_rows, H]. Grid: (ceil(num_rows / BR),).

    A loop over experts has STAGES stages or, if that is 1, takes AHEAD at a time.
    """
    DTYPE: tl.constexpr = p_partial.dtype.element_ty
    let_next_begin()
    wait_for_previous()
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_h = tl.arange(0, BD)
    m_r, m_h = o_r < num_rows, o_h < H
    m_x = m_r[:, None] & m_h[None, :]
    o_x = o_r[:, None] * H + o_h[None, :]
    b_residual = tl.load(p_residual + o_x, mask=m_x, other=0.0)
    b_norm = tl.load(p_norm + o_h, mask=m_h, other=0.0)
    if HAS_SHARED:
        b_shared = tl.load(p_shared + o_x, mask=m_x, other=0.0)
        if GATED:
            b_gate = tl.load(p_gate + o_r * gate_stride, mask=m_r, other=0.0)
    b_acc = tl.zeros([BR, BD], dtype=tl.float32)
    if STAGES > 1:
        # The weights are loaded outside the pipeline, whose copies are 16 bytes wide.
        b_ws = ()
        for k in tl.static_range(K):
            b_w = tl.load(p_weights + o_r * K + k, mask=m_r, other=0.0)
            # Triton has no unpacking.
            b_ws = b_ws + (b_w,)  # type: ignore[assignment]  # noqa: RUF005
        for i_k in tl.range(0, K, num_stages=STAGES):
            b_x = tl.load(p_partial + (o_r * K + i_k)[:, None] * H + o_h[None, :], mask=m_x, other=0.0)
            b_w = b_ws[0]  # type: ignore[misc]
            for k in tl.static_range(1, K):
                b_w = tl.where(i_k == k, b_ws[k], b_w)
            b_acc = tl.fma(tl.broadcast_to(b_w[:, None], [BR, BD]), b_x.to(tl.float32), b_acc)
    else:
        for k0 in tl.static_range(0, K, AHEAD):
            # All loads before the first use: they are in flight together.
            b_ws = ()
            b_xs = ()
            for u in tl.static_range(AHEAD):
                if k0 + u < K:
                    o_pair = o_r * K + (k0 + u)
                    b_w = tl.load(p_weights + o_pair, mask=m_r, other=0.0)
                    b_x = tl.load(p_partial + o_pair[:, None] * H + o_h[None, :], mask=m_x, other=0.0)
                    # Triton has no unpacking.
                    b_ws = b_ws + (b_w,)  # type: ignore[assignment]  # noqa: RUF005
                    b_xs = b_xs + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
            for u in tl.static_range(AHEAD):
                if k0 + u < K:
                    b_w = tl.broadcast_to(b_ws[u][:, None], [BR, BD])  # type: ignore[misc]
                    b_acc = tl.fma(b_w, b_xs[u].to(tl.float32), b_acc)  # type: ignore[misc]
    if GATED:
        b_acc += scaled(b_shared, b_gate[:, None], True, DTYPE)
    elif HAS_SHARED:
        b_acc += b_shared.to(tl.float32)
    b_total = round_to(round_to(b_acc, DTYPE) + b_residual.to(tl.float32), DTYPE)
    tl.store(p_total + o_x, b_total.to(p_total.dtype.element_ty), mask=m_x)
    b_y = normed(b_total, b_norm.to(tl.float32), H, eps, p_norm.dtype.element_ty)
    tl.store(p_out + o_x, b_y.to(p_out.dtype.element_ty), mask=m_x)


def moe_reduce_add_norm(
    partial: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    *,
    shared_gate: torch.Tensor | None = None,
    config: ReduceConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.moe_reduce_add_norm`. Raises ValueError for what its grid cannot hold.

    Rows that do not begin at multiples of 16 bytes take two launches. Otherwise different threads could read an
    expert's row and the residual, and the compiler would choose the order of the norm's sum.
    """
    op = "moe_reduce_add_norm"
    num_rows, top_k, hidden = partial.shape
    if hidden % 16:
        if shared is not None and shared_gate is not None:
            shared = scale_rows_(shared.clone(), shared_gate.contiguous(), sigmoid=True)
        return add_rms_norm(moe_weighted_reduce(partial, weights, shared), residual, norm, eps)
    check_layout(op, partial=partial, weights=weights, shared=shared, residual=residual, norm=norm)
    rows, block = row_tile(hidden)
    if triton.cdiv(num_rows, rows) > MAX_GRID_X:
        raise ValueError(f"{op}: {list(partial.shape)} exceeds the grid of a GPU")
    out, total = new_output(num_rows, hidden, like=partial), new_output(num_rows, hidden, like=partial)
    name = shape_class(num_rows, top_k, hidden)
    config = config or choose(op, name, partial, (ReduceConfig,), lambda: default_config(num_rows, hidden))
    # A pipeline has one buffer, of an expert's rows, less than stages.
    stages = min(config.num_stages, top_k + 1, 1 + _SHARED_BYTES // (rows * block * partial.element_size()))
    if out.numel():
        _moe_reduce_add_norm_kernel[(triton.cdiv(num_rows, rows),)](
            partial,
            weights,
            partial if shared is None else shared,
            weights if shared_gate is None else shared_gate,
            residual,
            norm,
            out,
            total,
            num_rows,
            1 if shared_gate is None else shared_gate.stride(0),
            hidden,
            eps,
            K=top_k,
            AHEAD=min(config.AHEAD, top_k),
            STAGES=stages,
            HAS_SHARED=shared is not None,
            GATED=shared_gate is not None,
            BR=rows,
            BD=block,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
            **dependent(partial),
        )
    return finish(out, partial.dtype), finish(total, partial.dtype)
