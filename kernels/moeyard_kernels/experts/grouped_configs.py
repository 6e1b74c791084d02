"""The kernels and tiles that the products of `grouped_gemm` may run with. All give the same bits."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton

from moeyard_kernels.common.tuning import Config


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
# For blocks of 64 and 128 rows. The last holds too many gates and ups at once. In groups no default runs until they are
# timed.
WIDE = (
    _copied(64, 64, 4, 4),
    _copied(128, 64, 4, 3),
    _copied(128, 64, 8, 4, HALVES=True),
    replace(_copied(128, 64, 8, 4, HALVES=True), GROUP=4),
    replace(_copied(128, 64, 8, 4, HALVES=True), GROUP=8),
    replace(_copied(128, 64, 8, 4, HALVES=True), GROUP=16),
    _loaded(128, 64, 8, 3, HALVES=True),
    _copied(256, 64, 8, 4, HALVES=True),
)
# For the second product of prompts.
STREAM = (
    ExpertStream(BN=128, BK=64, PER_SM=2, num_warps=4, num_stages=3),
    ExpertStream(BN=256, BK=64, PER_SM=1, num_warps=8, num_stages=4),
    ExpertStream(BN=128, BK=64, PER_SM=2, num_warps=4, num_stages=3, GROUP=8),
    ExpertStream(BN=256, BK=64, PER_SM=1, num_warps=8, num_stages=4, GROUP=8),
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


def shape_class(step: str, num_pairs: int, num_slots: int, block_rows: int, num_out: int, dim: int) -> str:
    """The class that bf16 configs are stored under; step is "gate_up" or "down", pairs round up to a power of 8."""
    pairs = next((n for n in (8, 64, 512, 4096) if num_pairs <= n), 32768)
    return f"{step} P{pairs} S{num_slots} B{block_rows} N{num_out} K{dim}"


def default_config(step: str, block_rows: int, dtype: torch.dtype) -> AnyConfig:
    """The config of a shape that nobody tuned: what an H200 ran fastest for two models at 1 to 4096 tokens."""
    if dtype == torch.float32:
        return FP32[0]
    if block_rows <= 32:
        return NARROW[0 if step == "gate_up" else 1]
    if block_rows == 64:
        return WIDE[0 if step == "gate_up" else 1]
    return WIDE[2] if step == "gate_up" else STREAM[0]


# What a copy brings of K in slices: 128 bytes, as far as shared memory is swizzled.
STEP = 64
# Multiprocessors, and the programs that are at work at once if two fit each of them.
_MULTIPROCESSORS = 132
_TWO_EACH = 2 * _MULTIPROCESSORS
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
    usual = default_config(step, 16, torch.bfloat16)
    if step == "gate_up":
        if one_token and num_pairs * triton.cdiv(num_out, NARROW[-1].BN) <= _TWO_EACH:
            return NARROW[-1]
        return NARROW[2] if one_token or dim <= 2048 else usual
    # What a block takes by itself, too.
    fitting = _ALL_SHARED // (slice_bytes(dim, SLICE[0].BN) + _OF_BLOCK)
    num_slices = num_pairs * triton.cdiv(num_out, SLICE[0].BN)
    return SLICE[0] if one_token and num_slices <= _MULTIPROCESSORS * max(2, fitting) else usual
