"""Kernels and tiles of `linear`, and which of them to time for a shape. All give the same bits.

Stages fit the 227 KB of shared memory of Hopper. Configs with fewer stages than fit were faster.
"""

from dataclasses import dataclass
from typing import Literal

import triton

from moeyard_kernels.common.tuning import MULTIPROCESSORS, Config

# Shared memory of a block on Hopper, without the barriers of a pipeline.
_SHARED_BYTES = 227 * 1024 - 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles(Config):
    """`linear_tiles_kernel`: any shape and alignment. Rows fastest in groups of GROUP. SWAP: weight on the left."""

    kernel: Literal["tiles"] = "tiles"
    BM: int
    BN: int
    BK: int
    SWAP: bool
    GROUP: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream(Config):
    """`linear._stream_kernel`: PER_SM programs per multiprocessor. Tail tiles (none if 0): BMT x BNT, SWAP_T."""

    kernel: Literal["stream"] = "stream"
    BM: int
    BN: int
    BK: int
    SWAP: bool
    GROUP: int
    PER_SM: int
    BMT: int
    BNT: int
    SWAP_T: bool

    def fp32_stages(self) -> int:
        """Return the stages that fit beside a tile of fp32 results, which Triton 3.6 stores through shared memory."""
        free = _SHARED_BYTES - self.BM * self.BN * 4
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
    LEFT: bool


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


def _tiles(
    BM: int, BN: int, BK: int, *, num_stages: int, num_warps: int = 4, SWAP: bool = True, GROUP: int = 8
) -> Tiles:
    return Tiles(BM=BM, BN=BN, BK=BK, SWAP=SWAP, GROUP=GROUP, num_warps=num_warps, num_stages=num_stages)


def _stream(
    BM: int,
    BN: int,
    BK: int,
    *,
    num_stages: int,
    num_warps: int = 8,
    SWAP: bool = False,
    PER_SM: int = 1,
    BMT: int = 0,
    BNT: int = 0,
    SWAP_T: bool = False,
) -> Stream:
    return Stream(
        BM=BM,
        BN=BN,
        BK=BK,
        SWAP=SWAP,
        GROUP=8,
        PER_SM=PER_SM,
        BMT=BMT,
        BNT=BNT,
        SWAP_T=SWAP_T,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _skinny(BM: int, BN: int, BK: int, *, num_stages: int, EARLY: int, LEFT: bool | None = None) -> Skinny:
    left = BN == 64 if LEFT is None else LEFT
    return Skinny(BM=BM, BN=BN, BK=BK, EARLY=EARLY, LEFT=left, num_stages=num_stages)


_SKINNY = (
    _skinny(8, 16, 256, num_stages=8, EARLY=4),
    _skinny(8, 32, 256, num_stages=10, EARLY=4),
    _skinny(8, 64, 256, num_stages=6, EARLY=4),
    _skinny(8, 64, 128, num_stages=12, EARLY=12),
    _skinny(16, 16, 256, num_stages=8, EARLY=4),
    _skinny(16, 32, 256, num_stages=9, EARLY=4),
    _skinny(16, 48, 256, num_stages=6, EARLY=4),
    _skinny(16, 64, 256, num_stages=5, EARLY=4),
    _skinny(16, 64, 128, num_stages=11, EARLY=11),
    _skinny(32, 16, 256, num_stages=8, EARLY=3),
    _skinny(32, 32, 256, num_stages=6, EARLY=3),
    _skinny(32, 48, 128, num_stages=11, EARLY=6),
    _skinny(32, 64, 128, num_stages=9, EARLY=9),
    _skinny(64, 16, 128, num_stages=11, EARLY=6),
    _skinny(64, 32, 128, num_stages=9, EARLY=9),
    _skinny(64, 40, 128, num_stages=8, EARLY=4),
    _skinny(64, 48, 128, num_stages=8, EARLY=8),
    _skinny(64, 64, 128, num_stages=7, EARLY=7),
    # Listed last: the configs above are the defaults, and were faster in whole steps wherever both were timed.
    _skinny(8, 16, 256, num_stages=8, EARLY=4, LEFT=True),
    _skinny(8, 32, 256, num_stages=10, EARLY=4, LEFT=True),
    _skinny(8, 32, 768, num_stages=3, EARLY=3, LEFT=True),
    _skinny(8, 40, 256, num_stages=8, EARLY=4, LEFT=True),
    _skinny(8, 48, 256, num_stages=7, EARLY=4, LEFT=True),
    _skinny(16, 32, 256, num_stages=9, EARLY=4, LEFT=True),
    _skinny(16, 48, 256, num_stages=6, EARLY=4, LEFT=True),
    _skinny(32, 48, 128, num_stages=11, EARLY=6, LEFT=True),
)
_FEW_ROWS = (
    _tiles(16, 64, 128, num_stages=6),
    _tiles(16, 64, 64, num_stages=8),
    _tiles(16, 128, 64, num_stages=6),
    _tiles(32, 64, 128, num_stages=5),
    _tiles(32, 128, 64, num_stages=5),
    _tiles(64, 64, 128, num_stages=5),
    _tiles(64, 64, 64, num_stages=8),
    _tiles(64, 128, 64, num_stages=6),
    _stream(16, 64, 256, num_stages=5, num_warps=4, SWAP=True),
    _stream(16, 128, 128, num_stages=5, num_warps=4, SWAP=True),
    _stream(32, 64, 128, num_stages=7, num_warps=4, SWAP=True),
    _stream(32, 64, 256, num_stages=4, num_warps=4, SWAP=True),
    _stream(32, 128, 128, num_stages=4, num_warps=4, SWAP=True),
    _stream(64, 16, 256, num_stages=5, num_warps=4),
    _stream(64, 64, 128, num_stages=6, num_warps=4, SWAP=True),
    _stream(64, 128, 128, num_stages=4, num_warps=4, SWAP=True),
)
# Sorted by size.
_MIDDLE = (
    _stream(64, 32, 256, num_stages=4, num_warps=4),
    _stream(64, 64, 128, num_stages=6, num_warps=4),
    _stream(64, 64, 64, num_stages=6, num_warps=4, PER_SM=2),
    _stream(64, 128, 128, num_stages=4, num_warps=4),
    _stream(128, 64, 128, num_stages=4, num_warps=4),
    _stream(128, 64, 64, num_stages=4, num_warps=4, PER_SM=2),
    _stream(128, 128, 64, num_stages=6),
)
# Two programs of _NARROW share a multiprocessor; one of _ONE_WAVE fills it.
_NARROW = Wide(BM=128, BN=80, BK=64, num_warps=4, num_stages=4, GROUP=4)
_ONE_WAVE = Wide(BM=128, BN=320, BK=32, num_warps=8, num_stages=6, GROUP=8)
_WIDE = (
    _stream(128, 256, 64, num_stages=4),
    _stream(128, 256, 64, num_stages=4, BMT=256, BNT=64, SWAP_T=True),
    _stream(128, 256, 64, num_stages=4, BMT=128, BNT=64),
    _stream(128, 128, 64, num_stages=4, BMT=256, BNT=64, SWAP_T=True),
    _stream(128, 128, 64, num_stages=6, BMT=128, BNT=64),
    _ONE_WAVE,
    _NARROW,
)
# For many rows that tensor descriptors cannot describe.
_MISALIGNED = _tiles(128, 128, 64, num_stages=3, SWAP=False)
# fp32 runs on the CUDA cores, which is slow with any tile: one tile for few rows, one for many.
FP32_CONFIGS = (_tiles(16, 32, 32, num_stages=2, SWAP=False), _tiles(64, 64, 32, num_warps=8, num_stages=2, SWAP=False))
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


def _tiles_of_a_wave(num_rows: int, *num_out: int) -> Stream | Wide:
    """Return the smallest tiles that all multiprocessors can compute in one wave (docs/kernels.md)."""

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
