"""Rotary position embedding: cos and sin of every position, looked up once per step.

They come from one table and not from the step's positions, because cos of a tensor's vectorised part and of its scalar
tail differ in the last bit, so that a position's angle would depend on its place in the batch.
"""

import math

import torch

from moeyard_worker.config.rope_config import RopeConfig


class RopeTable:
    """cos and sin [max_position, dim / 2] in fp32, scaled by the attention factor."""

    def __init__(self, config: RopeConfig, *, max_position: int, device: torch.device | None = None) -> None:
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse_frequencies(config)
        table = torch.cat((angles.cos(), angles.sin()), -1) * config.attention_factor
        self._half = config.dim // 2
        self._table = table.to(device)

    def lookup(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of positions [T], each [T, dim / 2] fp32."""
        rows = self._table.index_select(0, positions)
        return rows[:, : self._half], rows[:, self._half :]


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """Radians per position of each rotated pair, [dim / 2] fp32; the formulas' sources are in rope_config.py."""
    dim = config.dim
    inverse = 1.0 / config.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if config.kind == "linear":
        return inverse / config.factor
    if config.kind == "llama3":
        return _llama3(config, inverse)
    if config.kind == "yarn":
        return _yarn(config, inverse)
    assert config.kind == "default", config.kind
    return inverse


def _llama3(config: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    original = config.original_max_position
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelength = 2 * math.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / config.factor + smooth * inverse


def _yarn(config: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Pairs that turn more than beta_fast times in the original context are kept, fewer than beta_slow interpolated."""

    def pair_of(rotations: float) -> float:
        period = config.original_max_position / (rotations * 2 * math.pi)
        return config.dim * math.log(period) / (2 * math.log(config.theta))

    low, high = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inverse / config.factor * interpolated + inverse * (1 - interpolated)
