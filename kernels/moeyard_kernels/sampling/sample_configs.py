"""Tiles of `sample`. All give the same tokens."""

from dataclasses import dataclass
from typing import Literal

import triton

from moeyard_kernels.common.tuning import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig(Config):
    """Tokens per program: BLOCK x ROUNDS to find the largest, with num_warps; RACE in the race.

    PART to sum masses, MASS at a time; LIST to find top-k in registers.
    """

    kernel: Literal["chain"] = "chain"
    BLOCK: int
    ROUNDS: int
    RACE: int = 4096
    MASS: int = 512
    PART: int = 8192
    LIST: int = 4096
    num_stages: int = 1


CONFIGS = (
    SampleConfig(BLOCK=1024, ROUNDS=8),
    SampleConfig(BLOCK=512, ROUNDS=4, PART=2048),
    SampleConfig(BLOCK=2048, ROUNDS=4, PART=4096, num_warps=8),
    *(SampleConfig(BLOCK=1024, ROUNDS=8, RACE=race) for race in (2048, 8192)),
    SampleConfig(BLOCK=1024, ROUNDS=8, MASS=256, LIST=2048),
)


def shape_class(num_rows: int, vocab: int) -> str:
    """Return the shape class: rows rounded up to a power of two, and the vocabulary."""
    return f"B{triton.next_power_of_2(num_rows)} V{vocab}"


def default_config(num_rows: int, vocab: int) -> SampleConfig:
    """Return the config of untuned shapes: small parts if few rows have to fill the GPU."""
    return CONFIGS[0] if num_rows * vocab > 2**21 else CONFIGS[1]


def mass_bits(vocab: int) -> int:
    """Return the bits of a mass, such that the mass of a row is below 2^62."""
    return min(51, 62 - (vocab - 1).bit_length())
