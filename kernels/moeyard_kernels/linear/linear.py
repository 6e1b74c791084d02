"""Triton: y = x @ weight.T (+ bias). A row's bits do not depend on the number of rows.

Each output has one fp32 accumulator, K ascending. The bits are the same for every tile, for either left operand, and
for copies by threads or by the tensor memory accelerator (TMA). With SWAP the weight is on the left and fills the rows
of the tensor cores, so that few rows of x waste none of them. So the shape alone selects the kernel and its tile:
- `linear_tiles_kernel`: one output tile per program, any shape and alignment;
- `linear_wide_kernel`: the same with tensor descriptors, in tiles whose columns are the sum of two powers of two;
- `_stream_kernel`: persistent programs with tensor descriptors, for many rows, scheduled by `linear_schedule`;
- `linear_skinny`: few rows on Hopper, in slices of 16 to 64 columns.
Measured on an H200 and rejected: Triton 3.6's warp specialization (slower, and wrong at depth), and K in parts. That is
another formula for every row; many rows would pay with a second accumulator.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moeyard_kernels.common import launch, tuning
from moeyard_kernels.common.dependent import dependent, wait_for_previous
from moeyard_kernels.common.rounding import product
from moeyard_kernels.common.tile_order import place
from moeyard_kernels.linear import linear_skinny
from moeyard_kernels.linear.linear_configs import (
    CONFIGS,
    FP32_CONFIGS,
    GROUP_STEP,
    KINDS,
    LinearConfig,
    Skinny,
    Stream,
    Tiles,
    Wide,
    configs_for,
    default_config,
    grouped_config,
    head_and_tail,
    plain_config,
    shape_class,
)
from moeyard_kernels.linear.linear_schedule import Schedule, schedule, tile_cycles
from moeyard_kernels.linear.linear_tiles import linear_tiles_kernel, linear_wide_kernel, store

__all__ = ["CONFIGS", "FP32_CONFIGS", "KINDS", "OP", "configs_for", "linear", "linear_pair", "shape_class"]

OP = "linear"


@triton.jit
def _stream_tiles(
    d_x, d_w, p_bias, p_y, num_early, i_early, stride_early, i_late, num_tiles, n_first, n_end, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    HAS_BIAS: tl.constexpr, GN: tl.constexpr,
):  # fmt: skip
    """Compute num_tiles tiles of columns [n_first, n_end): every stride_early-th, then every num_programs-th."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(n_end - n_first, BN)
    for j in tl.range(0, num_tiles, flatten=True):
        i_tile = tl.where(j < num_early, i_early + stride_early * j, i_late + tl.num_programs(0) * (j - num_early))
        i_m, i_n = place(i_tile, tiles_m, tiles_n, GROUP)
        o_m, o_n = i_m * BM, n_first + i_n * BN
        o_x = 0
        if GN:
            o_x = o_n // GN * K
        b_acc = tl.zeros([BN, BM] if SWAP else [BM, BN], dtype=tl.float32)
        for k in range(0, K, BK):
            b_acc = product(d_x.load([o_m, o_x + k]), d_w.load([o_n, k]), b_acc, SWAP)
        store(b_acc, p_y, p_bias, o_m + tl.arange(0, BM), o_n + tl.arange(0, BN), M, N, SWAP, HAS_BIAS)


@triton.jit(do_not_specialize=["M", "CUT", "REPEAT"])
def _stream_kernel(
    d_x, d_wa, d_wb, d_xt, d_wt, p_bias, p_ya, p_yb, M, NA, NB, K, CUT, REPEAT,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    BMT: tl.constexpr, BNT: tl.constexpr, SWAP_T: tl.constexpr,
    HAS_BIAS: tl.constexpr, PAIR: tl.constexpr, GN: tl.constexpr,
):  # fmt: skip
    """Compute x [M, K] @ wa [NA, K].T if PAIR, then @ wb [NB, K].T, in tiles [BM, BN].

    From column CUT of wb on, tiles are [BMT, BNT]. Programs take tiles in turn. Programs with one main tile less than
    others take REPEAT tail tiles first. CUT is NB or a multiple of BN. GN: as in `linear_skinny_kernel`.
    """
    wait_for_previous()
    i_program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_a, i_first = 0, i_program
    if PAIR:
        tiles_a = tl.cdiv(M, BM) * tl.cdiv(NA, BN)
        num_first = tl.cdiv(tl.maximum(tiles_a - i_program, 0), programs)
        i_first = i_program + num_first * programs - tiles_a
        _stream_tiles(
            d_x, d_wa, p_bias, p_ya, 0, 0, 0, i_program, num_first, 0, NA, M, NA, K,
            BM, BN, BK, GROUP, SWAP, HAS_BIAS, GN,
        )  # fmt: skip
    tiles_b = tl.cdiv(M, BM) * tl.cdiv(CUT, BN)
    num_main = tl.cdiv(tl.maximum(tiles_b - i_first, 0), programs)
    _stream_tiles(
        d_x, d_wb, p_bias, p_yb, 0, 0, 0, i_first, num_main, 0, CUT, M, NB, K,
        BM, BN, BK, GROUP, SWAP, HAS_BIAS, GN,
    )  # fmt: skip
    if BNT:
        tails = tl.cdiv(M, BMT) * tl.cdiv(NB - CUT, BNT)
        idle = programs - (tiles_a + tiles_b) % programs
        i_early = i_program - (programs - idle)
        num_early = tl.where(i_early >= 0, tl.minimum(tl.cdiv(tl.maximum(tails - i_early, 0), idle), REPEAT), 0)
        i_late = idle * REPEAT + i_program
        num_tails = num_early + tl.cdiv(tl.maximum(tails - i_late, 0), programs)
        _stream_tiles(
            d_xt, d_wt, p_bias, p_yb, num_early, i_early, idle, i_late, num_tails, CUT, NB, M, NB, K,
            BMT, BNT, BK, GROUP, SWAP_T, HAS_BIAS, GN,
        )  # fmt: skip


def _num_programs(x: torch.Tensor) -> int:
    """Return the number of persistent programs that fill the device; few in the interpreter, where each costs time."""
    return launch.num_multiprocessors(x) if x.is_cuda else 3


def _fits_stream(*tensors: torch.Tensor) -> bool:
    """Return whether tensor descriptors can describe these matrices: not empty, rows and base 16-byte aligned."""
    return all(t.numel() and t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in tensors)


def _schedule(chosen: Stream, num_rows: int, num_out: list[int], programs: int) -> Schedule:
    main, tail = (chosen.BM, chosen.BN), (chosen.BMT, chosen.BNT)
    ahead = triton.cdiv(num_rows, main[0]) * sum(triton.cdiv(n, main[1]) for n in num_out[:-1])
    cost = tile_cycles(*(tail[::-1] if chosen.SWAP_T else tail)) / tile_cycles(*main)
    return schedule(num_rows, num_out[-1], ahead=ahead, main=main, tail=tail, tail_cost=cost, programs=programs)


def _launch_stream(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], chosen: Stream, tiles: int, rest: tuple[Any, ...], flags: Any
) -> None:
    bk, num_out = chosen.BK, [weight.shape[0] for weight in weights]
    programs = chosen.PER_SM * _num_programs(x)
    tail = (chosen.BMT, chosen.BNT) if chosen.BNT else (chosen.BM, chosen.BN)
    if chosen.BNT:
        plan = _schedule(chosen, x.shape[0], num_out, programs)
    else:
        plan, programs = Schedule(num_out[-1], 0), min(tiles, programs)
    d_x, d_xt = (TensorDescriptor.from_tensor(x, [bm, bk]) for bm in (chosen.BM, tail[0]))
    d_wa, d_wb = (TensorDescriptor.from_tensor(weight, [chosen.BN, bk]) for weight in (weights[0], weights[-1]))
    d_wt = TensorDescriptor.from_tensor(weights[-1], [tail[1], bk])
    flags |= {"BN": chosen.BN, "BK": bk, "SWAP": chosen.SWAP, "GROUP": chosen.GROUP}
    flags |= {"BMT": chosen.BMT, "BNT": chosen.BNT, "SWAP_T": chosen.SWAP_T}
    _stream_kernel[(programs,)](d_x, d_wa, d_wb, d_xt, d_wt, *rest, plan.cut, plan.repeat, **flags)


def _launch_wide(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    chosen: Wide,
    bias: torch.Tensor,
    outs: tuple[torch.Tensor, ...],
    flags: Any,
) -> None:
    """Launch once per weight: the sums of two weights do not fit the registers."""
    bm, bk, (head, tail) = chosen.BM, chosen.BK, head_and_tail(chosen.BN)
    d_x = TensorDescriptor.from_tensor(x, [bm, bk])
    flags |= {"BK": bk, "GROUP": chosen.GROUP, "num_stages": chosen.num_stages}
    for weight, out in zip(weights, outs, strict=True):
        num_rows, num_out = out.shape
        d_w, d_t = (TensorDescriptor.from_tensor(weight, [n, bk]) for n in (head, tail))
        tiles = triton.cdiv(num_rows, bm) * triton.cdiv(num_out, chosen.BN)
        linear_wide_kernel[(tiles,)](
            d_x,
            d_w,
            d_t,
            bias,
            out,
            num_rows,
            num_out,
            x.shape[1],
            HEAD=head,
            TAIL=tail,
            **flags,
        )


def _launch_skinny(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], chosen: Skinny, tiles: int, rest: tuple[Any, ...], flags: Any
) -> None:
    head, tail = head_and_tail(chosen.BN)
    blocks = [linear_skinny.descriptor(w, n) for w in (weights[0], weights[-1]) for n in (head, tail or head)]
    stages = linear_skinny.fitting_stages(chosen)
    linear_skinny.linear_skinny_kernel[(min(tiles, _num_programs(x)),)](
        linear_skinny.descriptor(x, chosen.BM),
        *blocks,
        *rest,
        HEAD=head,
        TAIL=tail,
        EARLY=min(chosen.EARLY, stages),
        LEFT=chosen.LEFT,
        SUB=chosen.BK // linear_skinny.COLUMNS,
        STAGES=stages,
        **flags,
    )


def _choose(x: torch.Tensor, num_out: list[int]) -> LinearConfig:
    num_rows, dim = x.shape
    if x.dtype == torch.float32:
        return FP32_CONFIGS[num_rows > 64]
    name = shape_class(num_rows, dim, *num_out)
    return tuning.choose(OP, name, x, KINDS, lambda: default_config(num_rows, *num_out))


def _run(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    chosen: LinearConfig | None,
    *,
    static_weight: bool,
    out_dtype: torch.dtype | None = None,
    group: int = 0,
) -> tuple[torch.Tensor, ...]:
    """group: 0, or the outputs of each group of a weight whose groups read their own columns of x."""
    names = ("weight",) if len(weights) == 1 else ("weight_a", "weight_b")
    launch.check_layout(OP, x=x, **dict(zip(names, weights, strict=True)), bias=bias)
    num_rows, dim = x.shape[0], weights[0].shape[1]
    num_out = [weight.shape[0] for weight in weights]
    dtype = out_dtype or x.dtype
    outs = tuple(launch.new_output(num_rows, n, like=x, dtype=dtype) for n in num_out)
    if num_rows == 0 or not any(num_out):
        return tuple(launch.finish(out, dtype) for out in outs)
    x, weights = launch.packed(x), tuple(map(launch.packed, weights))
    chosen = chosen or _choose(x, num_out)
    if not isinstance(chosen, Tiles) and not _fits_stream(x, *weights):
        chosen = plain_config(num_rows)
    if isinstance(chosen, Skinny) and not launch.on_hopper(x):
        chosen = plain_config(num_rows)
    rows = triton.cdiv(num_rows, chosen.BM)
    tiles = rows * sum(triton.cdiv(n, chosen.BN) for n in num_out)
    if tiles > launch.MAX_GRID_X:
        raise ValueError(f"{OP}: x {list(x.shape)} and weights of {num_out} rows exceed the grid of a GPU")
    flags: dict[str, Any] = {
        "BM": chosen.BM,
        "num_warps": chosen.num_warps,
        "HAS_BIAS": bias is not None,
        **dependent(x),
    }
    # The kernels do not read an absent bias, but need a tensor.
    bias = x if bias is None else bias
    rest = (bias, outs[0], outs[-1], num_rows, num_out[0], num_out[-1], dim)
    pair = {"PAIR": len(weights) == 2}
    grouped = pair | {"GN": group}
    if isinstance(chosen, Wide):
        _launch_wide(x, weights, chosen, bias, outs, flags)
    elif isinstance(chosen, Skinny):
        _launch_skinny(x, weights, chosen, tiles, rest, flags | grouped | {"STATIC": static_weight})
    elif isinstance(chosen, Stream):
        stages = chosen.fp32_stages() if dtype == torch.float32 else chosen.num_stages
        _launch_stream(x, weights, chosen, tiles, rest, flags | grouped | {"num_stages": stages})
    else:
        flags |= pair | {"BN": chosen.BN, "BK": chosen.BK, "SWAP": chosen.SWAP, "num_stages": chosen.num_stages}
        group, even = 0 if rows == 1 else chosen.GROUP, dim % chosen.BK == 0
        linear_tiles_kernel[(tiles,)](x, weights[0], weights[-1], *rest, GROUP=group, EVEN_K=even, **flags)
    return tuple(launch.finish(out, dtype) for out in outs)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    static_weight: bool = False,
    out_dtype: torch.dtype | None = None,
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.linear`. `config` is one of CONFIGS; every one gives the same bits."""
    return _run(x, (weight,), bias, config, static_weight=static_weight, out_dtype=out_dtype)[0]


def linear_pair(
    x: torch.Tensor,
    weight_a: torch.Tensor,
    weight_b: torch.Tensor,
    *,
    static_weight: bool = False,
    out_dtype: torch.dtype | None = None,
    config: LinearConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.linear_pair`."""
    y_a, y_b = _run(x, (weight_a, weight_b), None, config, static_weight=static_weight, out_dtype=out_dtype)
    return y_a, y_b


def takes_groups(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `linear_groups` takes x [T, H, K] and weight [H, N, K] (bf16): long K, whole steps and tiles."""
    num_out, dim = weight.shape[1:]
    whole = dim >= 1024 and dim % GROUP_STEP == 0 and num_out % GROUP_STEP == 0
    return whole and x.is_contiguous() and weight.is_contiguous() and _fits_stream(x.flatten(1), weight.flatten(0, 1))


def linear_groups(
    x: torch.Tensor, weight: torch.Tensor, *, static_weight: bool = False, config: Skinny | Stream | None = None
) -> torch.Tensor:
    """`head_linear` of what `takes_groups` accepts, with the same bits, by the kernels of `linear`: [T, H, N]."""
    num_rows, num_groups, _ = x.shape
    columns, group = num_groups * weight.shape[1], weight.shape[1]
    chosen = config or grouped_config(num_rows, columns, hopper=launch.on_hopper(x))
    out = _run(x.flatten(1), (weight.flatten(0, 1),), None, chosen, static_weight=static_weight, group=group)[0]
    return out.view(num_rows, num_groups, group)
