"""Kernels and tiles of `linear`, and which of them to time for a shape. All give the same bits.

Stages fit the 227 KB of shared memory of Hopper. Configs with fewer stages than fit were faster.
"""

from dataclasses import dataclass
from typing import Literal

import triton

from moeyard_kernels.common.tuning import MULTIPROCESSORS, Config

# Shared memory of a block on Hopper, without the barriers of a pipeline.
SHARED_BYTES = 227 * 1024 - 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles(Config):
    """`linear_tiles_kernel`: any shape and alignment. Rows fastest in groups of GROUP. SWAP: weight on the left."""

    kernel: Literal["tiles"] = "tiles"
    BM: int
    BN: int
    BK: int
    SWAP: bool = True
    GROUP: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream(Config):
    """`linear._stream_kernel`: PER_SM programs per multiprocessor. Tail tiles (none if 0): BMT x BNT, SWAP_T."""

    kernel: Literal["stream"] = "stream"
    BM: int
    BN: int
    BK: int
    SWAP: bool = False
    GROUP: int = 8
    PER_SM: int = 1
    BMT: int = 0
    BNT: int = 0
    SWAP_T: bool = False
    num_warps: int = 8

    def fp32_stages(self) -> int:
        """Return the stages that fit beside a tile of fp32 results, which Triton 3.6 stores through shared memory."""
        free = SHARED_BYTES - self.BM * self.BN * 4
        return min(self.num_stages, free // ((self.BM + self.BN) * self.BK * 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Skinny(Config):
    """`linear_skinny_kernel`, for few rows on Hopper: EARLY steps of the weight before x.

    LEFT: the weight is the left operand, of at most 64 columns BN.
    """

    kernel: Literal["skinny"] = "skinny"
    BM: int
    BN: int
    BK: int
    EARLY: int
    LEFT: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wide(Config):
    """`linear_wide_kernel`: BN is the sum of two powers of two."""

    kernel: Literal["wide"] = "wide"
    BM: int
    BN: int
    BK: int
    GROUP: int


LinearConfig = Tiles | Stream | Skinny | Wide
KINDS: tuple[type[LinearConfig], ...] = (Tiles, Stream, Skinny, Wide)


_SKINNY = (
    Skinny(BM=8, BN=16, BK=256, num_stages=8, EARLY=4),
    Skinny(BM=8, BN=32, BK=256, num_stages=10, EARLY=4),
    Skinny(BM=8, BN=64, BK=256, num_stages=6, EARLY=4, LEFT=True),
    Skinny(BM=8, BN=64, BK=128, num_stages=12, EARLY=12, LEFT=True),
    Skinny(BM=16, BN=16, BK=256, num_stages=8, EARLY=4),
    Skinny(BM=16, BN=32, BK=256, num_stages=9, EARLY=4),
    Skinny(BM=16, BN=48, BK=256, num_stages=6, EARLY=4),
    Skinny(BM=16, BN=64, BK=256, num_stages=5, EARLY=4, LEFT=True),
    Skinny(BM=16, BN=64, BK=128, num_stages=11, EARLY=11, LEFT=True),
    Skinny(BM=32, BN=16, BK=256, num_stages=8, EARLY=3),
    Skinny(BM=32, BN=32, BK=256, num_stages=6, EARLY=3),
    Skinny(BM=32, BN=48, BK=128, num_stages=11, EARLY=6),
    Skinny(BM=32, BN=64, BK=128, num_stages=9, EARLY=9, LEFT=True),
    Skinny(BM=64, BN=16, BK=128, num_stages=11, EARLY=6),
    Skinny(BM=64, BN=32, BK=128, num_stages=9, EARLY=9),
    Skinny(BM=64, BN=40, BK=128, num_stages=8, EARLY=4),
    Skinny(BM=64, BN=48, BK=128, num_stages=8, EARLY=8),
    Skinny(BM=64, BN=64, BK=128, num_stages=7, EARLY=7, LEFT=True),
    # Listed last: the configs above are the defaults, and were faster in whole steps wherever both were timed.
    Skinny(BM=8, BN=16, BK=256, num_stages=8, EARLY=4, LEFT=True),
    Skinny(BM=8, BN=32, BK=256, num_stages=10, EARLY=4, LEFT=True),
    Skinny(BM=8, BN=32, BK=768, num_stages=3, EARLY=3, LEFT=True),
    Skinny(BM=8, BN=40, BK=256, num_stages=8, EARLY=4, LEFT=True),
    Skinny(BM=8, BN=48, BK=256, num_stages=7, EARLY=4, LEFT=True),
    Skinny(BM=16, BN=32, BK=256, num_stages=9, EARLY=4, LEFT=True),
    Skinny(BM=16, BN=48, BK=256, num_stages=6, EARLY=4, LEFT=True),
    Skinny(BM=32, BN=48, BK=128, num_stages=11, EARLY=6, LEFT=True),
)
_FEW_ROWS = (
    Tiles(BM=16, BN=64, BK=128, num_stages=6),
    Tiles(BM=16, BN=64, BK=64, num_stages=8),
    Tiles(BM=16, BN=128, BK=64, num_stages=6),
    Tiles(BM=32, BN=64, BK=128, num_stages=5),
    Tiles(BM=32, BN=128, BK=64, num_stages=5),
    Tiles(BM=64, BN=64, BK=128, num_stages=5),
    Tiles(BM=64, BN=64, BK=64, num_stages=8),
    Tiles(BM=64, BN=128, BK=64, num_stages=6),
    Stream(BM=16, BN=64, BK=256, num_stages=5, num_warps=4, SWAP=True),
    Stream(BM=16, BN=128, BK=128, num_stages=5, num_warps=4, SWAP=True),
    Stream(BM=32, BN=64, BK=128, num_stages=7, num_warps=4, SWAP=True),
    Stream(BM=32, BN=64, BK=256, num_stages=4, num_warps=4, SWAP=True),
    Stream(BM=32, BN=128, BK=128, num_stages=4, num_warps=4, SWAP=True),
    Stream(BM=64, BN=16, BK=256, num_stages=5, num_warps=4),
    Stream(BM=64, BN=64, BK=128, num_stages=6, num_warps=4, SWAP=True),
    Stream(BM=64, BN=128, BK=128, num_stages=4, num_warps=4, SWAP=True),
)
# Sorted by size.
_MIDDLE = (
    Stream(BM=64, BN=32, BK=256, num_stages=4, num_warps=4),
    Stream(BM=64, BN=64, BK=128, num_stages=6, num_warps=4),
    Stream(BM=64, BN=64, BK=64, num_stages=6, num_warps=4, PER_SM=2),
    Stream(BM=64, BN=128, BK=128, num_stages=4, num_warps=4),
    Stream(BM=128, BN=64, BK=128, num_stages=4, num_warps=4),
    Stream(BM=128, BN=64, BK=64, num_stages=4, num_warps=4, PER_SM=2),
    Stream(BM=128, BN=128, BK=64, num_stages=6),
)
# Two programs of _NARROW share a multiprocessor; one of _ONE_WAVE fills it.
_NARROW = Wide(BM=128, BN=80, BK=64, num_warps=4, num_stages=4, GROUP=4)
_ONE_WAVE = Wide(BM=128, BN=320, BK=32, num_warps=8, num_stages=6, GROUP=8)
_WIDE = (
    Stream(BM=128, BN=256, BK=64, num_stages=4),
    Stream(BM=128, BN=256, BK=64, num_stages=4, BMT=256, BNT=64, SWAP_T=True),
    Stream(BM=128, BN=256, BK=64, num_stages=4, BMT=128, BNT=64),
    Stream(BM=128, BN=128, BK=64, num_stages=4, BMT=256, BNT=64, SWAP_T=True),
    Stream(BM=128, BN=128, BK=64, num_stages=6, BMT=128, BNT=64),
    _ONE_WAVE,
    _NARROW,
)
# For many rows that tensor descriptors cannot describe.
_MISALIGNED = Tiles(BM=128, BN=128, BK=64, num_stages=3, SWAP=False)
# fp32 runs on the CUDA cores, which is slow with any tile: one tile for few rows, one for many.
FP32_CONFIGS = (
    Tiles(BM=16, BN=32, BK=32, num_stages=2, SWAP=False),
    Tiles(BM=64, BN=64, BK=32, num_warps=8, num_stages=2, SWAP=False),
)
CONFIGS: tuple[LinearConfig, ...] = (*_SKINNY, *_FEW_ROWS, *_MIDDLE, *_WIDE, _MISALIGNED, *FP32_CONFIGS)


def head_and_tail(columns: int) -> tuple[int, int]:
    """Split a tile's columns into a power of two, which a copy can bring, and 0 or another power of two: 40 = 32 + 8.

    Raises ValueError for other counts.
    """
    head = 1 << (columns.bit_length() - 1)
    tail = columns - head
    if tail & (tail - 1):
        raise ValueError(f"{columns} columns are not the sum of two powers of two")
    return head, tail


# Counts of rows with separate configs.
_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def shape_class(num_rows: int, dim: int, *num_out: int) -> str:
    """Return the class under which configs are stored: rows rounded up to one of a few counts, at most 8192."""
    rows = next((r for r in _ROWS if num_rows <= r), _ROWS[-1])
    return f"M{rows} N{'+'.join(map(str, num_out))} K{dim}"


def _skinny_rows(num_rows: int) -> int:
    """Return the BM of `_SKINNY` for `num_rows` rows. Descriptors of many more rows than that copy slowly."""
    return next(rows for rows in (8, 16, 32, 64) if num_rows <= rows)


def configs_for(num_rows: int, *num_out: int) -> tuple[LinearConfig, ...]:
    """Return the configs to time for these rows and the outputs of these weights, in bf16."""
    if num_rows > 64:
        few = num_rows <= 512 or triton.cdiv(num_rows, 64) * triton.cdiv(sum(num_out), 128) <= MULTIPROCESSORS
        return (*(_MIDDLE if few else _MIDDLE[-2:]), *_WIDE)
    rows = _skinny_rows(num_rows)
    # 64 rows can also run as two tiles of 32.
    skinny = (c for c in _SKINNY if rows == c.BM or (rows, c.BM) == (64, 32))
    return (*(c for c in _FEW_ROWS if max(rows, 16) == c.BM), *skinny)


def plain_config(num_rows: int) -> Tiles:
    """Return the config for tensors of any alignment, on any GPU."""
    if num_rows > 64:
        return _MISALIGNED
    return next(c for c in _FEW_ROWS if isinstance(c, Tiles) and num_rows <= c.BM)


def default_config(num_rows: int, *num_out: int) -> LinearConfig:
    """Return the config of untuned bf16 shapes, for the outputs of one or two weights."""
    columns = sum(num_out)
    if num_rows <= 64:
        # Use slices of 64 columns, if the weight has enough of them to occupy half of the multiprocessors. Otherwise
        # use 16 columns if every multiprocessor would need them: a few that have two slices take as long as if all had.
        # For a weight of [2304 x 4096], 144 slices of 16 on 132, one or eight rows gain 1.8 and 1.0 % of a step (the
        # output product of Kimi-Linear's layers). 16 rows and more, and two weights, were not timed with it.
        width = 64 if columns >= 32 * MULTIPROCESSORS else 16 if columns <= 16 * MULTIPROCESSORS else 32
        return next(c for c in _SKINNY if (_skinny_rows(num_rows), width) == (c.BM, c.BN))
    return _tiles_of_a_wave(num_rows, *num_out)


# Tiles and steps of `grouped_config` divide this number of outputs of a group, and of columns of x.
GROUP_STEP = 256


def grouped_config(num_rows: int, columns: int, *, hopper: bool) -> Skinny | Stream:
    """Return the config of products in groups of outputs, in bf16."""
    if num_rows > 64:
        tiles = _tiles_of_a_wave(num_rows, columns)
        return tiles if isinstance(tiles, Stream) else _WIDE[1]
    few = default_config(num_rows, columns)
    if isinstance(few, Skinny) and hopper:
        return few
    return next(c for c in _FEW_ROWS if isinstance(c, Stream) and num_rows <= c.BM)


def _tiles_of_a_wave(num_rows: int, *num_out: int) -> Stream | Wide:
    """Return the smallest tiles that all multiprocessors can compute in one wave (docs/journal.md)."""

    def waves(config: Stream | Wide) -> float:
        return triton.cdiv(num_rows, config.BM) * triton.cdiv(sum(num_out), config.BN) / MULTIPROCESSORS

    largest, half = _WIDE[1], _MIDDLE[-1]
    for config in _MIDDLE:
        if config.PER_SM == 1 and waves(config) <= 1:
            return config
    # Nearly a full wave of other tiles leaves fewer multiprocessors idle. Two weights would take two launches.
    if len(num_out) == 1:
        if waves(largest) > 1 and 5 / 6 <= waves(_ONE_WAVE) <= 1:
            return _ONE_WAVE
        if 5 / 6 <= waves(_NARROW) / 2 <= 1:
            return _NARROW
    # Three waves of half as wide tiles instead of two. With more rows, tail tiles compensate.
    if num_rows <= 512 and waves(largest) <= 2 < waves(half) <= 3:
        return half
    return largest
