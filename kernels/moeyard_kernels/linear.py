"""Triton: y = x @ weight.T (+ bias), whose rows do not know how many they are.

One fp32 accumulator per output, K ascending: the bits are the same for every tile, for either operand on the left of
the product (SWAP: the weight's rows fill the tensor cores' rows, so that few rows of x waste none of them), and whether
threads copy or the tensor memory accelerator (TMA) does. So the kernel and its tile are chosen by shape alone:
- `_tiles_kernel`: one output tile per program, any shape and alignment; few rows are a matter of bandwidth;
- `_stream_kernel`: persistent programs with tensor descriptors, for many rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moeyard_kernels import launch, tuning
from moeyard_kernels.tuning import Config, config

OP = "linear"


def _tiles(BM: int, BN: int, BK: int, *, num_warps: int, num_stages: int, SWAP: int = 0, GROUP: int = 8) -> Config:
    return config(BM=BM, BN=BN, BK=BK, SWAP=SWAP, GROUP=GROUP, TMA=0, num_warps=num_warps, num_stages=num_stages)


def _stream(BM: int, BN: int, BK: int, *, num_warps: int, num_stages: int, GROUP: int = 8) -> Config:
    return config(BM=BM, BN=BN, BK=BK, SWAP=0, GROUP=GROUP, TMA=1, num_warps=num_warps, num_stages=num_stages)


_SKINNY = (
    _tiles(16, 16, 256, num_warps=2, num_stages=6),
    _tiles(16, 32, 128, num_warps=4, num_stages=6),
    _tiles(16, 64, 128, num_warps=4, num_stages=5, SWAP=1),
    _tiles(32, 64, 128, num_warps=4, num_stages=5, SWAP=1),
    _tiles(64, 64, 128, num_warps=4, num_stages=4, SWAP=1),
    _tiles(64, 128, 64, num_warps=4, num_stages=4, SWAP=1),
)
_WIDE = (
    _tiles(128, 128, 64, num_warps=4, num_stages=3),
    _tiles(128, 256, 64, num_warps=8, num_stages=3),
    _stream(128, 128, 64, num_warps=4, num_stages=3),
    _stream(128, 256, 64, num_warps=8, num_stages=3),
)
# fp32 runs on the plain cores, which is slow however it is cut: two tiles, for few rows and for many.
FP32_CONFIGS = (_tiles(16, 32, 32, num_warps=4, num_stages=2), _tiles(64, 64, 32, num_warps=8, num_stages=2))
CONFIGS: tuple[Config, ...] = (*_SKINNY, *_WIDE, *FP32_CONFIGS)

_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def shape_class(num_rows: int, num_out: int, dim: int) -> str:
    """The class that configs are stored under: rows rounded up to one of a few counts, at most 4096."""
    rows = next((r for r in _ROWS if num_rows <= r), _ROWS[-1])
    return f"M{rows} N{num_out} K{dim}"


def default_config(num_rows: int, num_out: int, dim: int) -> Config:
    """The config of bf16 shapes that nobody tuned."""
    if num_rows <= 64:
        return _SKINNY[1] if num_rows <= 16 else _SKINNY[4]
    return _WIDE[0] if dim % 8 else _WIDE[3]


@triton.jit(do_not_specialize=["M"])
def _tiles_kernel(  # type: ignore[no-untyped-def]
    p_x,
    p_wa,
    p_wb,
    p_bias,
    p_ya,
    p_yb,
    M,
    NA,
    NB,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PAIR: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile [BM, BN] of x [M, K] @ wa [NA, K].T, or of wb's after wa's. Grid: tiles, rows fastest in a group."""
    tiles_m = tl.cdiv(M, BM)
    tiles_a = tl.cdiv(NA, BN)
    tiles_n = tiles_a + tl.cdiv(NB, BN)
    i_group = tl.program_id(0) // (GROUP * tiles_n)
    rows_here = tl.minimum(tiles_m - i_group * GROUP, GROUP)
    i_m = i_group * GROUP + tl.program_id(0) % (GROUP * tiles_n) % rows_here
    i_n = tl.program_id(0) % (GROUP * tiles_n) // rows_here
    p_w, p_y, N = p_wa, p_ya, NA
    if PAIR:
        second = i_n >= tiles_a
        p_w, p_y, N = tl.where(second, p_wb, p_wa), tl.where(second, p_yb, p_ya), tl.where(second, NB, NA)
        i_n = tl.where(second, i_n - tiles_a, i_n)

    o_m = i_m * BM + tl.arange(0, BM)
    o_n = i_n * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_m = o_m[:, None] < M
    p_bx = p_x + o_m.to(tl.int64)[:, None] * K + o_k[None, :]
    # Rows of the weight past its end repeat the last: their results are not stored.
    p_bw = p_w + tl.minimum(o_n, N - 1).to(tl.int64)[:, None] * K + o_k[None, :]
    b_acc = tl.zeros([BN, BM] if SWAP else [BM, BN], dtype=tl.float32)
    for k in range(0, K, BK):
        if EVEN_K:
            b_x = tl.load(p_bx, mask=m_m, other=0.0)
            b_w = tl.load(p_bw, eviction_policy="evict_first")
        else:
            b_x = tl.load(p_bx, mask=m_m & (o_k[None, :] < K - k), other=0.0)
            b_w = tl.load(p_bw, mask=o_k[None, :] < K - k, other=0.0)
        if UPCAST:
            b_x, b_w = b_x.to(tl.float32), b_w.to(tl.float32)
        if SWAP:
            b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision="ieee")
        else:
            b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
        p_bx += BK
        p_bw += BK
    if SWAP:
        b_acc = tl.trans(b_acc)
    if HAS_BIAS:
        b_acc += tl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    p_by = p_y + o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    tl.store(p_by, b_acc.to(p_ya.dtype.element_ty), mask=m_m & (o_n[None, :] < N))


@triton.jit
def _product(d_x, d_w, i_m, i_n, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 [BM, BN]: tile (i_m, i_n) of x @ w.T."""
    b_acc = tl.zeros([BM, BN], dtype=tl.float32)
    for k in range(0, K, BK):
        b_x = d_x.load([i_m * BM, k])
        b_w = d_w.load([i_n * BN, k])
        if UPCAST:
            b_x, b_w = b_x.to(tl.float32), b_w.to(tl.float32)
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
    return b_acc


@triton.jit(do_not_specialize=["M"])
def _stream_kernel(  # type: ignore[no-untyped-def]
    d_x,
    d_wa,
    d_wb,
    p_bias,
    p_ya,
    p_yb,
    M,
    NA,
    NB,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PAIR: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Tiles program_id, + num_programs, ... of the same grid of tiles as `_tiles_kernel`."""
    tiles_m = tl.cdiv(M, BM)
    tiles_a = tl.cdiv(NA, BN)
    tiles_n = tiles_a + tl.cdiv(NB, BN)
    for i_tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=not PAIR):
        i_group = i_tile // (GROUP * tiles_n)
        rows_here = tl.minimum(tiles_m - i_group * GROUP, GROUP)
        i_m = i_group * GROUP + i_tile % (GROUP * tiles_n) % rows_here
        i_n = i_tile % (GROUP * tiles_n) // rows_here
        p_y, N = p_ya, NA
        if PAIR:
            if i_n < tiles_a:
                b_acc = _product(d_x, d_wa, i_m, i_n, K, BM, BN, BK, UPCAST)
            else:
                i_n -= tiles_a
                p_y, N = p_yb, NB
                b_acc = _product(d_x, d_wb, i_m, i_n, K, BM, BN, BK, UPCAST)
        else:
            b_acc = _product(d_x, d_wa, i_m, i_n, K, BM, BN, BK, UPCAST)
        o_m = i_m * BM + tl.arange(0, BM)
        o_n = i_n * BN + tl.arange(0, BN)
        if HAS_BIAS:
            b_acc += tl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
        p_by = p_y + o_m.to(tl.int64)[:, None] * N + o_n[None, :]
        tl.store(p_by, b_acc.to(p_ya.dtype.element_ty), mask=(o_m[:, None] < M) & (o_n[None, :] < N))


def _num_programs(x: torch.Tensor) -> int:
    """How many persistent programs fill the device; few in the interpreter, where programs cost time."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def _fits_stream(*tensors: torch.Tensor) -> bool:
    """Whether tensor descriptors can describe these matrices: rows and base at multiples of 16 bytes, no empty ones."""
    return all(t.numel() and t.data_ptr() % 16 == 0 and t.shape[1] * t.element_size() % 16 == 0 for t in tensors)


def _choose(x: torch.Tensor, num_out: int) -> Config:
    num_rows, dim = x.shape
    if x.dtype == torch.float32:
        return FP32_CONFIGS[num_rows > 64]
    key = shape_class(num_rows, num_out, dim)
    return tuning.choose(OP, key, x, lambda: default_config(num_rows, num_out, dim))


def _run(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], bias: torch.Tensor | None, chosen: Config | None
) -> tuple[torch.Tensor, ...]:
    names = ("weight",) if len(weights) == 1 else ("weight_a", "weight_b")
    launch.check_layout(OP, x=x, **dict(zip(names, weights, strict=True)), bias=bias)
    num_rows, dim = x.shape
    num_out = [weight.shape[0] for weight in weights]
    outs = tuple(launch.new_output(num_rows, n, like=x) for n in num_out)
    if num_rows == 0 or not any(num_out):
        return tuple(launch.finish(out, x.dtype) for out in outs)
    if chosen is None:
        chosen = _choose(x, sum(num_out))
    if chosen["TMA"] and not _fits_stream(x, *weights):
        chosen = _WIDE[0]
    bm, bn, bk = chosen["BM"], chosen["BN"], chosen["BK"]
    tiles = triton.cdiv(num_rows, bm) * sum(triton.cdiv(n, bn) for n in num_out)
    if tiles > launch.MAX_GRID_X:
        raise ValueError(f"{OP}: x {list(x.shape)} and weights of {num_out} rows exceed the grid of a GPU")
    flags: dict[str, Any] = {
        "BM": bm, "BN": bn, "BK": bk, "GROUP": chosen["GROUP"],
        "HAS_BIAS": bias is not None, "PAIR": len(weights) == 2, "UPCAST": launch.interpreted(),
        "num_warps": chosen["num_warps"], "num_stages": chosen["num_stages"],
    }  # fmt: skip
    num_b = num_out[1] if len(weights) == 2 else 0
    rest = (x if bias is None else bias, outs[0], outs[-1], num_rows, num_out[0], num_b, dim)
    if chosen["TMA"]:
        d_x = TensorDescriptor.from_tensor(x, [bm, bk])
        d_w = [TensorDescriptor.from_tensor(weight, [bn, bk]) for weight in (weights[0], weights[-1])]
        _stream_kernel[(min(tiles, _num_programs(x)),)](d_x, *d_w, *rest, **flags)
    else:
        even = dim % bk == 0
        _tiles_kernel[(tiles,)](x, weights[0], weights[-1], *rest, SWAP=chosen["SWAP"], EVEN_K=even, **flags)
    return tuple(launch.finish(out, x.dtype) for out in outs)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, config: Config | None = None
) -> torch.Tensor:
    """See `moeyard_kernels.ops.linear`. `config` is one of CONFIGS; every one gives the same bits."""
    return _run(x, (weight,), bias, config)[0]


def linear_pair(
    x: torch.Tensor, weight_a: torch.Tensor, weight_b: torch.Tensor, *, config: Config | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.linear_pair`."""
    y_a, y_b = _run(x, (weight_a, weight_b), None, config)
    return y_a, y_b
