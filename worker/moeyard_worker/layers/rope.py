"""Rotary position embedding: the table of cos and sin of every position, looked up once per step.

A table is necessary for reproducible bits. The vectorised part of a tensor and its scalar tail have cos values that
differ in the last bit. So a position's angle would depend on its place in the batch.
"""

import math

import torch

from moeyard_worker.config.rope_config import RopeConfig


def rope_table(config: RopeConfig, *, max_position: int, device: torch.device) -> torch.Tensor:
    """Return [max_position, dim] fp32: cos of each rotated pair, then sin, both scaled by the attention factor."""
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse_frequencies(config)
    return (torch.cat((angles.cos(), angles.sin()), -1) * config.attention_factor).to(device)


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """Return the radians per position of each rotated pair, [dim / 2] fp32; sources are in rope_config.py."""
    dim = config.dim
    inverse = 1.0 / config.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if config.kind == "linear":
        return inverse / config.factor
    if config.kind == "llama3":
        return _llama3(config, inverse)
    if config.kind == "yarn":
        return _yarn(config, inverse)
    if config.kind == "longrope":
        return inverse / torch.tensor(config.divisors, dtype=torch.float32)
    assert config.kind == "default", config.kind
    return inverse


def _llama3(config: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Divide long wavelengths by the factor, keep short ones, interpolate between them."""
    original = config.original_max_position
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelength = 2 * math.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / config.factor + smooth * inverse


def _yarn(config: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Keep pairs with more than beta_fast turns in the original context, interpolate those below beta_slow."""

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
