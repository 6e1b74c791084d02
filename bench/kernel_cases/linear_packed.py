"""Dense products over tiled fp8 codes of few rows, beside the same products in bf16, and all values of a matrix."""

from collections.abc import Iterator
from functools import partial

import torch

from kernel_cases.case import Case, Target, assert_bits
from kernel_cases.grouped_packed import random_stack
from moeyard_kernels.linear import linear, linear_packed
from moeyard_kernels.types.matrix import Matrix, dequantize
from moeyard_kernels.types.weight_form import fp8_tiles

OPS = ("linear_packed", "write_values")
# Outputs and columns.
_SHAPES = {
    "Qwen3-30B-A3B qkv": (5120, 2048),
    "Qwen3-30B-A3B o": (2048, 4096),
    "DeepSeek-V3 q_kv_a": (2112, 7168),
    "DeepSeek-V3 o": (7168, 16384),
}


def cases() -> Iterator[Case]:
    """Yield each matrix at 1, 8 and 64 rows, and its values."""
    for name, (num_out, dim) in _SHAPES.items():
        weight = random_stack(fp8_tiles(128, 128), 1, matrices=1, rows=num_out, columns=dim)[0]
        values = dequantize(weight)
        for rows in (1, 8, 64):
            yield _case(name, rows, weight, values)
        yield _values_case(name, weight, values)


def _case(name: str, rows: int, weight: Matrix, values: torch.Tensor) -> Case:
    x = torch.empty(rows, weight.shape[1], dtype=torch.bfloat16, device="cuda").normal_()
    run = partial(linear_packed.linear_packed, x, weight)
    baseline = partial(linear.linear, x, values, static_weight=True)
    return Case(
        op="linear_packed",
        shape=f"{name} M={rows}",
        run=run,
        prove=lambda: assert_bits("values in bf16", run(), baseline()),
        num_bytes=sum(array.nbytes for array in weight.arrays) + x.nbytes + 2 * rows * weight.shape[0],
        num_flops=2 * rows * weight.shape[0] * weight.shape[1],
        target=Target("speedup", 1.0),
        baseline=baseline,
        baseline_name="linear in bf16",
    )


def _values_case(name: str, weight: Matrix, values: torch.Tensor) -> Case:
    out = torch.empty_like(values)
    run = partial(linear_packed.write_values, out, weight)
    return Case(
        op="write_values",
        shape=name,
        run=run,
        prove=lambda: assert_bits("values", run(), values),
        num_bytes=sum(array.nbytes for array in weight.arrays) + out.nbytes,
        target=Target("copy", 0.8),
    )
