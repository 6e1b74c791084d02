"""The kernels and tiles that the products of `grouped_gemm` may run with. All give the same bits."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton

from moeyard_kernels.common.tuning import MULTIPROCESSORS, Config
from moeyard_kernels.types.expert_layout import ExpertLayout, ExpertPairs


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig(Config):
    """BN outputs of a program (as many gates and ups for the first launch), K in steps of BK.

    kernel: whether the weights come by tensor descriptors. SWAP: they, not the rows, fill the rows of the tensor cores.
    HALVES: half the work for a block whose second half is empty. GROUP: so many blocks take a tile of weights in turn
    before the next one comes, so that it is read once for them if an expert's weights are more than the L2 holds.
    """

    kernel: Literal["pointers", "descriptors"] = "descriptors"
    BN: int
    BK: int
    SWAP: bool = False
    HALVES: bool = False
    GROUP: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStream(Config):
    """`grouped_stream`, PER_SM programs a multiprocessor: the second product over blocks of 64 rows or more. GROUP: as
    `ExpertConfig` has it."""

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


def _copied(
    BN: int, BK: int, num_warps: int, num_stages: int, *, SWAP: bool = False, HALVES: bool = False
) -> ExpertConfig:
    return ExpertConfig(BN=BN, BK=BK, SWAP=SWAP, HALVES=HALVES, num_warps=num_warps, num_stages=num_stages)


def _loaded(
    BN: int, BK: int, num_warps: int, num_stages: int, *, SWAP: bool = False, HALVES: bool = False
) -> ExpertConfig:
    copied = _copied(BN, BK, num_warps, num_stages, SWAP=SWAP, HALVES=HALVES)
    return replace(copied, kernel="pointers")


# For blocks of 16 and 32 rows, where the weights' bytes are all that counts.
NARROW = (
    _copied(32, 128, 4, 4, SWAP=True),
    _copied(64, 128, 4, 3, SWAP=True),
    _copied(32, 256, 4, 3, SWAP=True),
    _copied(128, 64, 4, 5, SWAP=True),
    _loaded(64, 128, 4, 4, SWAP=True),
    _loaded(32, 128, 4, 4),
    _copied(16, 256, 4, 4, SWAP=True),
)
# For blocks of 64 and 128 rows. The last holds too many gates and ups at once.
WIDE = (
    _copied(64, 64, 4, 4),
    _copied(128, 64, 4, 3),
    _copied(128, 64, 8, 4, HALVES=True),
    replace(_copied(128, 64, 8, 4, HALVES=True), GROUP=8),
    _loaded(128, 64, 8, 3, HALVES=True),
    _copied(256, 64, 8, 4, HALVES=True),
)
# For the second product of prompts.
STREAM = (
    ExpertStream(BN=128, BK=64, PER_SM=2, num_warps=4, num_stages=3),
    ExpertStream(BN=256, BK=64, PER_SM=1, num_warps=8, num_stages=4, GROUP=8),
    ExpertStream(BN=256, BK=64, PER_SM=1, num_warps=8, num_stages=4),
)
# For the second product of one token.
SLICE = (ExpertSlice(BN=64), ExpertSlice(BN=128))
# fp32 products run on the plain cores, which is slow however they are cut.
FP32 = (_loaded(32, 32, 4, 2), _loaded(16, 64, 4, 2))
CONFIGS: tuple[AnyConfig, ...] = (*NARROW, *WIDE, *STREAM, *SLICE, *FP32)
KINDS: tuple[type[AnyConfig], ...] = (ExpertConfig, ExpertStream, ExpertSlice)


def candidates(step: str, block_rows: int, dtype: torch.dtype) -> tuple[AnyConfig, ...]:
    """The configs worth timing for "gate_up" or "down" over blocks of so many rows."""
    if dtype == torch.float32:
        return FP32
    if block_rows <= 32:
        return NARROW if step == "gate_up" else (*NARROW, *SLICE)
    return WIDE[:-1] if step == "gate_up" else (*WIDE, *STREAM)


def shape_class(step: str, layout: ExpertLayout | ExpertPairs, num_out: int, dim: int) -> str:
    """The class that bf16 configs are stored under; step is "gate_up" or "down".

    By rows of an expert, up to a power of two; of few pairs, which are laid out nowhere, by pairs, up to a power of 8.
    """
    if isinstance(layout, ExpertLayout):
        rows = f"R{triton.next_power_of_2(max(1, layout.rows_per_expert))} B{layout.block_rows}"
    else:
        rows = "P8" if layout.num_pairs <= 8 else "P64"
    return f"{step} {rows} N{num_out} K{dim}"


# What the L2 of an H100 holds; an H200's is a fifth larger.
_L2 = 50 << 20


def default_config(step: str, block_rows: int, rows_per_expert: int, num_bytes: int) -> AnyConfig:
    """The bf16 config of a shape that nobody tuned, by rows of an expert and bytes of its weights of this product.

    Blocks of up to 64 rows: what two models' steps ran fastest on an H200. Of 128: eight models' 1024 and 8192 tokens
    on an H100; rows_per_expert may be too high, where ranks bring unlike numbers of rows. An expert whose first product
    exceeds the L2 is read for eight blocks at once (Mixtral-8x7B, 8192 tokens: 6.5 ms, not 11.3). The second product
    streams from a block for each expert on: by wide tiles from two on, or of experts of a third of the L2 (Kimi-K2 at
    170 rows: 0.66 ms, not 0.81), as they lose to narrow ones otherwise (Qwen3-30B-A3B at 128: 205 us, not 187).
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


# What a copy brings of K in slices: 128 bytes, as far as shared memory is swizzled.
STEP = 64
# The programs that are at work at once if two fit each multiprocessor.
_TWO_EACH = 2 * MULTIPROCESSORS
# A multiprocessor's shared memory, what a block takes of it by itself, and what a block may have, less barriers.
_ALL_SHARED, _OF_BLOCK = 228 << 10, 1088
SHARED_BYTES = (227 << 10) - 1024
# What two programs of a multiprocessor may have each, less barriers.
_HALF_SHARED = _ALL_SHARED // 2 - _OF_BLOCK - 256


@dataclass(frozen=True, slots=True)
class ChoiceTile:
    """`grouped_choice`: so many gates and ups of a program, `stages` copies on the way, of `steps` times STEP of K."""

    columns: int
    steps: int
    stages: int


def slices_of_choice(top_k: int, *, hidden: int, inner: int) -> ChoiceTile | None:
    """How one token's first product is cut where its programs choose; None: not at all, for not all would be at work.

    Sixteen columns where they still are, as in `few_pairs_config`. Of an H100's layer of Qwen3-30B-A3B but attention,
    two steps in five copies take 48.0 us, four in two 48.0, one in ten 48.4, two in three 48.3, and twice as much,
    which leaves room for one program, 49.9.
    """
    columns = 16 if top_k * triton.cdiv(inner, 16) <= _TWO_EACH else 32
    if hidden % (2 * STEP) or inner % STEP or top_k * triton.cdiv(inner, columns) > _TWO_EACH:
        return None
    # Eight rows of x, and the operand that the last block is the beginning of.
    rest = _HALF_SHARED - hidden * 16 - (64 - 2 * columns) * STEP * 2
    stages = min(rest // (2 * 2 * columns * STEP * 2), hidden // (2 * STEP))
    return ChoiceTile(columns, 2, stages) if stages >= 3 else None


def slice_bytes(dim: int, columns: int) -> int:
    """Shared memory of a slice: `columns` outputs by dim values of a weight in bf16, and the 8 rows it is for."""
    return 2 * dim * (columns + 8)


def slice_fits(dim: int, columns: int) -> bool:
    """Whether a slice of `columns` outputs of a weight of dim values fits shared memory, in whole steps."""
    return dim % STEP == 0 and slice_bytes(dim, columns) <= SHARED_BYTES


def few_pairs_config(step: str, num_pairs: int, num_out: int, dim: int, *, one_token: bool) -> AnyConfig:
    """The bf16 config where nothing is laid out: of one token's pairs, or of a few tokens'.

    gate_up: rows of 2048 values come in longer steps, of one token longer rows, too, in narrow tiles if all can be at
    work at once, two on each of 132 multiprocessors: 1.6, 1.8, 0.8 % of a step of one row of Qwen3.5, Kimi-Linear and
    DeepSeek-V3 on an H200, nothing of four and eight rows of the last two. down, of one token: slices of 64 outputs up
    to as many as fit the multiprocessors, or two for each of them (of rows of 1408 values one fits: they were faster).
    """
    usual = NARROW[0 if step == "gate_up" else 1]
    if step == "gate_up":
        if one_token and num_pairs * triton.cdiv(num_out, NARROW[-1].BN) <= _TWO_EACH:
            return NARROW[-1]
        return NARROW[2] if one_token or dim <= 2048 else usual
    # What a block takes by itself, too.
    fitting = _ALL_SHARED // (slice_bytes(dim, SLICE[0].BN) + _OF_BLOCK)
    num_slices = num_pairs * triton.cdiv(num_out, SLICE[0].BN)
    return SLICE[0] if one_token and num_slices <= MULTIPROCESSORS * max(2, fitting) else usual
