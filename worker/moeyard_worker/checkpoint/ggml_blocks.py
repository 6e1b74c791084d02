"""Dequantise the block types of ggml: raw bytes of whole blocks to fp32 values, on the device of the bytes.

Each function performs the operations of `dequantize_row_*` (llama.cpp, ggml-quants.c) in the same order in fp32, every
one rounded on its own. So the values equal those of `gguf.quants.dequantize`. A weight is their bfloat16.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type whose blocks of `num_bytes` bytes hold `elements` values.

    scales: the bytes of a block that hold fp16 scales, as (begin, end).
    dequantize: from uint8 [blocks, num_bytes] to fp32 [blocks, elements].
    """

    elements: int
    num_bytes: int
    scales: tuple[int, int]
    dequantize: Callable[[torch.Tensor], torch.Tensor]

    def finite(self, blocks: torch.Tensor) -> bool:
        """Return whether the scales of all blocks [blocks, num_bytes] are finite."""
        return bool(_halves(blocks, *self.scales).isfinite().all())


def _halves(blocks: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return bytes [begin, end) of each block as fp16 numbers, widened to fp32."""
    return blocks[:, begin:end].contiguous().view(torch.float16).float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _halves(blocks, 0, 2)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = blocks[:, 2:]
    # Low nibbles are the first half of the block.
    values = torch.cat([codes & 15, codes >> 4], dim=1).to(torch.int8) - 8
    return _halves(blocks, 0, 2) * values.float()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, least = _halves(blocks, 0, 4).split(1, dim=1)
    # Groups 0 to 3 have 6 bits in one byte. Groups 4 to 7 have 4 bits in `rest` and 2 bits above those of the others.
    low, low_least, rest = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat([low & 63, (rest & 15) | ((low >> 2) & 48)], dim=1).float()
    leasts = torch.cat([low_least & 63, (rest >> 4) | ((low_least >> 2) & 48)], dim=1).float()
    codes = blocks[:, 16:].unflatten(1, (4, 1, 32))
    values = torch.cat([codes & 15, codes >> 4], dim=2).flatten(1, 2).float()
    return ((scale * scales).unsqueeze(2) * values - (least * leasts).unsqueeze(2)).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = blocks[:, :128].unflatten(1, (2, 1, 64))
    low = torch.cat([low & 15, low >> 4], dim=2).reshape(-1, 8, 32)
    high = blocks[:, 128:192].unflatten(1, (2, 1, 32))
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2).reshape(-1, 8, 32)
    values = (low | (high << 4)).to(torch.int8) - 32
    scales = _halves(blocks, 208, 210) * blocks[:, 192:208].view(torch.int8).float()
    return (scales.unsqueeze(2) * values.view(-1, 16, 16).float()).flatten(1)


# By the name of the type in ggml.
BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        "Q8_0": BlockType(32, 34, (0, 2), _q8_0),
        "Q4_0": BlockType(32, 18, (0, 2), _q4_0),
        "Q4_K": BlockType(256, 144, (0, 4), _q4_k),
        "Q6_K": BlockType(256, 210, (208, 210), _q6_k),
    }
)
