"""The routed experts over tiled codes on Hopper: two launches of `packed_product`."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
import triton

from moeyard_kernels.common import launch
from moeyard_kernels.common.dependent import dependent
from moeyard_kernels.elementwise.silu_mul import rounded_limit
from moeyard_kernels.experts.grouped_choice import is_simple, writing_arguments
from moeyard_kernels.experts.grouped_gemm import num_blocks
from moeyard_kernels.experts.grouped_slice import settle_choice
from moeyard_kernels.experts.packed_product import (
    LAYOUT,
    PAIRS,
    PackedConfig,
    packed_product_kernel,
    product_arguments,
    shared_bytes,
)
from moeyard_kernels.experts.result_rows import result_arguments
from moeyard_kernels.types.expert_layout import ExpertLayout, ExpertPairs
from moeyard_kernels.types.matrix import Matrix
from moeyard_kernels.types.peer_window import PeerWindow
from moeyard_kernels.types.weight_form import WeightForm

OP = "grouped_gemm_packed"


def block_rows(layout: ExpertLayout | ExpertPairs) -> int:
    """Return the rows of a block. Without a layout every expert has one block, with a row for each token."""
    if isinstance(layout, ExpertLayout):
        return layout.block_rows
    return max(8, triton.next_power_of_2(layout.topk_ids.shape[0]))


# Shared memory that a program may have, by the CUDA programming guide (227 KiB on Hopper).
MAX_SHARED = 227 << 10


def default_config(form: WeightForm, *, dim: int, rows: int, gated: bool) -> PackedConfig:
    """Return the config of a product over blocks of `rows` rows, 1 of them used if it is 1, and `dim` columns.

    It is one of the fastest of 18 to 24 on an H200 (2026-11-30), for Qwen3-30B-A3B and e2m1 codes of DeepSeek-V4-Flash,
    or smaller if many scales need the memory.
    """
    found = _fastest(form.name, rows, gated, dim // form.tile_columns)
    while shared_bytes(found, form, dim=dim, rows=max(8, rows), gated=gated) > MAX_SHARED:
        # A warp computes at least 16 outputs, and 4 warps work together.
        if found.BN * (2 if gated else 1) > 16 * found.num_warps:
            found = replace(found, BN=found.BN // 2)
        elif found.num_warps > 4:
            found = replace(found, num_warps=found.num_warps // 2)
        elif found.num_stages > 2:
            found = replace(found, num_stages=found.num_stages - 1)
        elif found.tiles > 1:
            found = replace(found, tiles=found.tiles // 2)
        else:
            raise ValueError(f"{OP}: the scales of {dim} columns of {form.name} codes exceed a GPU's shared memory")
    return found


# By codes and by rows of a block, from so many on: outputs, tiles, stages, warps and perhaps `warp_products` of gate_up
# and down.
_FASTEST: Mapping[str, Mapping[int, tuple[tuple[int, ...], ...]]] = MappingProxyType(
    {
        "fp8": {
            1: ((64, 2, 4, 8, True), (64, 4, 3, 4)),
            8: ((64, 2, 2, 4), (64, 2, 4, 4)),
            16: ((64, 2, 2, 4), (128, 2, 2, 4)),
            64: ((128, 1, 3, 8), (128, 1, 3, 4)),
        },
        "int4": {
            1: ((64, 2, 3, 8, True), (64, 4, 2, 4)),
            8: ((64, 1, 4, 4), (64, 4, 2, 4)),
            16: ((64, 2, 2, 4), (128, 2, 2, 4)),
            64: ((128, 1, 2, 8), (128, 1, 2, 4)),
        },
        "fp4": {
            1: ((64, 2, 3, 8, True), (64, 2, 4, 4, True)),
            8: ((64, 2, 2, 4), (128, 1, 3, 4)),
            16: ((64, 2, 2, 4), (128, 2, 2, 4)),
            64: ((128, 1, 2, 8), (128, 1, 2, 4)),
        },
    }
)


def _fastest(codes: str, rows: int, gated: bool, tiles: int) -> PackedConfig:
    by_rows = _FASTEST[codes]
    gate_up, down = by_rows[max(each for each in by_rows if each <= rows)]
    columns, copied, stages, warps, *by_warps = gate_up if gated else down
    while tiles % copied:
        copied //= 2
    return PackedConfig(BN=columns, tiles=copied, num_stages=stages, num_warps=warps, warp_products=by_warps == [True])


def _launch(
    a: torch.Tensor,
    weight: Matrix,
    out: torch.Tensor,
    layout: ExpertLayout | ExpertPairs,
    *,
    top_k: int,
    home: PeerWindow | None,
    config: PackedConfig | None,
    limit: float | None = None,
) -> None:
    """Run one product. top_k is 0 for the second, whose results may go to `home` instead of out.

    If the choice of one token is still to be made, programs of both products repeat it and one of the second writes it.
    """
    choice, gated = None, top_k > 0
    rows = block_rows(layout)
    if isinstance(layout, ExpertPairs):
        choice, top_k, found = layout.choice, layout.topk_ids.shape[1], PAIRS
        index = (layout.topk_ids, *[layout.slot_of_expert] * 2)
        padded = 1 if layout.one_token else triton.next_power_of_2(layout.num_pairs)
    else:
        found, padded = LAYOUT, 0
        index = (layout.pairs, layout.slot_of_block, layout.num_blocks)
    used = 1 if isinstance(layout, ExpertPairs) and layout.one_token else rows
    config = config or default_config(weight.form, dim=weight.shape[-1], rows=used, gated=gated)
    gathers = gated and found is LAYOUT
    arguments = product_arguments(weight, config, a, rows, gated=gated, gathers=gathers) | result_arguments(out, home)
    packed_product_kernel[num_blocks(layout) * triton.cdiv(arguments["N"], config.BN),](
        p_a=a,
        p_pairs=index[0],
        p_slots=index[1],
        p_num_blocks=index[2],
        P=layout.num_pairs,
        s_a=a.stride(0),
        ROWS=found,
        SOURCE_K=max(1, top_k),
        BM=rows,
        BP=padded,
        LIMIT=rounded_limit(limit, a.dtype),
        **writing_arguments(choice, a, config.num_warps) | ({"HAS_COUNTS": False} if gated else {}),
        **arguments,
        **dependent(a),
    )


def gate_up_rows(
    x: torch.Tensor,
    gate_up: Matrix,
    layout: ExpertLayout | ExpertPairs,
    *,
    top_k: int,
    out: torch.Tensor,
    limit: float | None = None,
    config: PackedConfig | None = None,
) -> torch.Tensor:
    """Run the first launch: write the rows of pairs in h [rows of the layout, I]."""
    _launch(x, gate_up, out, layout, top_k=top_k, home=None, config=config, limit=limit)
    return out


def down_pairs(
    h: torch.Tensor,
    down: Matrix,
    layout: ExpertLayout | ExpertPairs,
    *,
    out: torch.Tensor,
    home: PeerWindow | None = None,
    config: PackedConfig | None = None,
) -> torch.Tensor:
    """Run the second launch: write the rows of the layout's pairs in out [P, H] or `home`."""
    _launch(h, down, out, layout, top_k=0, home=home, config=config)
    return out


def grouped_gemm_packed(
    x: torch.Tensor,
    gate_up: Matrix,
    down: Matrix,
    layout: ExpertLayout | ExpertPairs,
    *,
    top_k: int,
    limit: float | None = None,
    out: torch.Tensor | None = None,
    home: PeerWindow | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.grouped_gemm_packed`."""
    if not launch.on_hopper(x):
        raise ValueError(f"{OP}: products over {gate_up.form.name} codes need bf16 rows and a Hopper GPU")
    if isinstance(layout, ExpertPairs):
        layout = settle_choice(layout, chooses=layout.choice is not None and is_simple(layout.choice))
    hidden, inner = x.shape[1], down.shape[-1]
    if x.shape[0] * x.stride(0) >= 1 << 31:
        raise ValueError(f"{OP}: {x.shape[0]} rows of {x.stride(0)} values exceed 32-bit offsets")
    if num_blocks(layout) * triton.cdiv(max(hidden, inner), 32) > launch.MAX_GRID_X:
        raise ValueError(f"{OP}: {num_blocks(layout)} blocks of {hidden} outputs exceed the grid of a GPU")
    if home is not None:
        out = home.views(home.rank).home.flatten(0, 1)
    elif out is None:
        out = x.new_empty(layout.num_pairs, hidden)
    if layout.num_pairs and gate_up.data.numel():
        h = gate_up_rows(
            x,
            gate_up,
            layout,
            top_k=top_k,
            out=x.new_empty(num_blocks(layout) * block_rows(layout), inner),
            limit=limit,
        )
        down_pairs(h, down, layout, out=out, home=home)
    return out
