"""Kernels and tiles of the products of `grouped_gemm`. All give the same bits."""

from dataclasses import dataclass
from typing import Literal

import torch
import triton

from moeyard_kernels.common.launch import LARGER_VIEWS
from moeyard_kernels.common.tuning import MULTIPROCESSORS, Config
from moeyard_kernels.types.expert_layout import ExpertLayout, ExpertPairs


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig(Config):
    """BN outputs per program (BN gates and BN ups in the first launch), K in steps of BK.

    kernel: "descriptors" copies weights by tensor descriptors. SWAP: weights instead of rows fill the rows of the
    tensor cores. HALVES: a block whose second half is empty costs half the work. GROUP: blocks that use a tile of
    weights before the next tile. If an expert's weights exceed the L2, they are read once for all of these blocks.
    """

    kernel: Literal["pointers", "descriptors"] = "descriptors"
    BN: int
    BK: int
    SWAP: bool = False
    HALVES: bool = False
    GROUP: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStream(Config):
    """`grouped_stream`: the second product over blocks of 64 rows or more, with PER_SM programs per multiprocessor.

    GROUP is as in `ExpertConfig`.
    """

    kernel: Literal["stream"] = "stream"
    BN: int
    BK: int
    PER_SM: int
    GROUP: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSlice(Config):
    """`grouped_slice`, slices of BN outputs: the second product of one token's pairs."""

    kernel: Literal["slice"] = "slice"
    BN: int


AnyConfig = ExpertConfig | ExpertStream | ExpertSlice


# For blocks of 16 and 32 rows, whose time depends only on the bytes of the weights.
NARROW = (
    ExpertConfig(BN=32, BK=128, num_warps=4, num_stages=4, SWAP=True),
    ExpertConfig(BN=64, BK=128, num_warps=4, num_stages=3, SWAP=True),
    ExpertConfig(BN=32, BK=256, num_warps=4, num_stages=3, SWAP=True),
    ExpertConfig(BN=128, BK=64, num_warps=4, num_stages=5, SWAP=True),
    ExpertConfig(kernel="pointers", BN=64, BK=128, num_warps=4, num_stages=4, SWAP=True),
    ExpertConfig(kernel="pointers", BN=32, BK=128, num_warps=4, num_stages=4),
    ExpertConfig(BN=16, BK=256, num_warps=4, num_stages=4, SWAP=True),
)
# For blocks of 64 and 128 rows. The last one holds too many gates and ups for the first product.
WIDE = (
    ExpertConfig(BN=64, BK=64, num_warps=4, num_stages=4),
    ExpertConfig(BN=128, BK=64, num_warps=4, num_stages=3),
    ExpertConfig(BN=128, BK=64, num_warps=8, num_stages=4, HALVES=True),
    ExpertConfig(BN=128, BK=64, num_warps=8, num_stages=4, HALVES=True, GROUP=8),
    ExpertConfig(kernel="pointers", BN=128, BK=64, num_warps=8, num_stages=3, HALVES=True),
    ExpertConfig(BN=256, BK=64, num_warps=8, num_stages=4, HALVES=True),
)
# For the second product of prompts.
STREAM = (
    ExpertStream(BN=128, BK=64, PER_SM=2, num_warps=4, num_stages=3),
    ExpertStream(BN=256, BK=64, PER_SM=1, num_warps=8, num_stages=4, GROUP=8),
    ExpertStream(BN=256, BK=64, PER_SM=1, num_warps=8, num_stages=4),
)
# For the second product of one token.
SLICE = (ExpertSlice(BN=64), ExpertSlice(BN=128))
# fp32 products run on the CUDA cores, which is slow with any tile.
FP32 = (
    ExpertConfig(kernel="pointers", BN=32, BK=32, num_warps=4, num_stages=2),
    ExpertConfig(kernel="pointers", BN=16, BK=64, num_warps=4, num_stages=2),
)
CONFIGS: tuple[AnyConfig, ...] = (*NARROW, *WIDE, *STREAM, *SLICE, *FP32)
KINDS: tuple[type[AnyConfig], ...] = (ExpertConfig, ExpertStream, ExpertSlice)


def candidates(step: str, block_rows: int, dtype: torch.dtype) -> tuple[AnyConfig, ...]:
    """Return the configs to time for "gate_up" or "down" over blocks of `block_rows` rows."""
    if dtype == torch.float32:
        return FP32
    if block_rows <= 32:
        return NARROW if step == "gate_up" else (*NARROW, *SLICE)
    return WIDE[:-1] if step == "gate_up" else (*WIDE, *STREAM)


def shape_class(step: str, layout: ExpertLayout | ExpertPairs, num_out: int, dim: int) -> str:
    """Return the class under which bf16 configs are stored; step is "gate_up" or "down".

    It holds the rows per expert, rounded up to a power of two, or, without a layout, the pairs up to a power of 8.
    """
    if isinstance(layout, ExpertLayout):
        rows = f"R{triton.next_power_of_2(max(1, layout.rows_per_expert))} B{layout.block_rows}"
    else:
        rows = "P8" if layout.num_pairs <= 8 else "P64"
    return f"{step} {rows} N{num_out} K{dim}"


# Bytes of the L2 of an H100; an H200's is a fifth larger.
_L2 = 50 << 20


def default_config(step: str, block_rows: int, rows_per_expert: int, num_bytes: int) -> AnyConfig:
    """Return the bf16 config of an untuned shape, by rows of an expert and bytes of its weights of this product.

    For blocks of up to 64 rows it is the fastest in steps of two models on an H200. For blocks of 128 it is the fastest
    at 1024 and 8192 tokens of eight models on an H100. If ranks send unequal numbers of rows, rows_per_expert can be
    too high.

    If an expert's first product exceeds the L2, eight blocks read it at once (Mixtral-8x7B, 8192 tokens: 6.5 ms, not
    11.3). The second product streams from one block per expert on. Wide tiles are used from two blocks on, or for
    experts above a third of the L2 (Kimi-K2 at 170 rows: 0.66 ms, not 0.81). Otherwise they lose to narrow ones
    (Qwen3-30B-A3B at 128: 205 us, not 187).
    """
    if block_rows <= 32:
        return NARROW[0 if step == "gate_up" else 1]
    if block_rows == 64:
        return WIDE[0 if step == "gate_up" else 1]
    if step == "gate_up":
        return WIDE[3 if num_bytes > _L2 else 2]
    if rows_per_expert < 128:
        return WIDE[1]
    return STREAM[1 if rows_per_expert >= 256 or num_bytes > _L2 // 3 else 0]


# Values of K per copy: 128 bytes, the width of the shared memory swizzle.
STEP = 64
# Programs that run at once if two fit each multiprocessor.
_TWO_EACH = 2 * MULTIPROCESSORS
# Shared memory of a multiprocessor, the part that each block reserves, and the limit of a block without barriers.
_ALL_SHARED, _OF_BLOCK = 228 << 10, 1088
SHARED_BYTES = (227 << 10) - 1024
# Limit of each of two programs on a multiprocessor, without barriers.
_HALF_SHARED = _ALL_SHARED // 2 - _OF_BLOCK - 256


@dataclass(frozen=True, slots=True)
class ChoiceTile:
    """Tile of `grouped_choice`: gates and ups per program, and `stages` copies in flight, of `steps` STEPs of K."""

    columns: int
    steps: int
    stages: int


def slices_of_choice(top_k: int, *, hidden: int, inner: int) -> ChoiceTile | None:
    """Return the tile of one token's first product whose programs also choose; None if not all would run at once.

    It has sixteen columns if all programs still run at once, as in `few_pairs_config`. For a layer of Qwen3-30B-A3B
    without attention on
    an H100: two steps in five copies take 48.0 us, four in two 48.0, one in ten 48.4, two in three 48.3. Twice the
    memory, which leaves room for one program, takes 49.9.
    """
    columns = 16 if top_k * triton.cdiv(inner, 16) <= _TWO_EACH else 32
    if hidden % (2 * STEP) or inner % STEP or top_k * triton.cdiv(inner, columns) > _TWO_EACH:
        return None
    # Subtract eight rows of x, and the rest of the operand that begins with the last block.
    rest, rows = _HALF_SHARED - hidden * 16 - (64 - 2 * columns) * STEP * 2, 2 * columns
    if not LARGER_VIEWS:
        rest, rows = _HALF_SHARED - hidden * 16, 64
    stages = min(rest // (2 * rows * STEP * 2), hidden // (2 * STEP))
    return ChoiceTile(columns, 2, stages) if stages >= 3 else None


def slice_bytes(dim: int, columns: int) -> int:
    """Return the shared memory of a bf16 slice: `columns` outputs by dim values of a weight, and 8 rows."""
    return 2 * dim * (columns + 8)


def slice_fits(dim: int, columns: int) -> bool:
    """Return whether a slice of `columns` outputs by dim values fits shared memory, in whole steps."""
    return dim % STEP == 0 and slice_bytes(dim, columns) <= SHARED_BYTES


def few_pairs_config(step: str, num_pairs: int, num_out: int, dim: int, *, one_token: bool) -> AnyConfig:
    """Return the bf16 config for pairs without a layout: of one token, or of a few tokens.

    gate_up: rows of 2048 values use longer steps; so do longer rows of one token. One token uses narrow tiles if all
    can run at once, two per multiprocessor. On an H200 this saves 1.6, 1.8 and 0.8 % of a step of one row of Qwen3.5,
    Kimi-Linear and DeepSeek-V3. It saves nothing for four and eight rows of the last two.

    down: slices of 64 outputs for one token, if they fit the multiprocessors or are at most two per multiprocessor.
    (For rows of 1408 values only one fits, and slices were faster.)
    """
    usual = NARROW[0 if step == "gate_up" else 1]
    if step == "gate_up":
        if one_token and num_pairs * triton.cdiv(num_out, NARROW[-1].BN) <= _TWO_EACH:
            return NARROW[-1]
        return NARROW[2] if one_token or dim <= 2048 else usual
    # Each block also reserves shared memory.
    fitting = _ALL_SHARED // (slice_bytes(dim, SLICE[0].BN) + _OF_BLOCK)
    num_slices = num_pairs * triton.cdiv(num_out, SLICE[0].BN)
    return SLICE[0] if one_token and num_slices <= MULTIPROCESSORS * max(2, fitting) else usual
