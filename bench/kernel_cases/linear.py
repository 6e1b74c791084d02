"""Bench of `linear` and `linear_pair`: projections with few and many rows, and every product of a model's steps."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from kernel_cases.case import Case, Target, assert_bits
from kernel_cases.model_steps import DECODE_ROWS, ModelStep, Product
from moeyard_kernels.linear import linear as op

OPS: tuple[str, ...] = ("linear", "linear_pair")
# (K, N) of q_a with kv_a, q_b, o (Kimi-K2: 64 heads), q with k and v (Qwen3-30B-A3B), and its vocabulary.
SHAPES = ((7168, 2112), (1536, 12288), (8192, 7168), (2048, 5120), (2048, 151936))
# (K, N of a, N of b): q_a and kv_a; gate and up of Kimi-K2's shared expert.
PAIRS = ((7168, 1536, 576), (7168, 2048, 2048))
FEW, SOME, MANY = (1, 8, 16, 32, 64), (128, 256, 512, 2048), (1024, 4096, 8192)
# Products of more columns are a vocabulary's, which steps have for few rows only.
VOCABULARY = 100_000
# Weights of at least this many bytes should stream at 85 % of the copy bandwidth, smaller ones at 70 %.
LARGE_WEIGHT = 40_000_000
# Products of a model below this size have no target, because launches decide their time.
SMALL_WEIGHT = 20_000_000


def _inputs(num_rows: int, dim: int, *num_out: int) -> tuple[torch.Tensor, ...]:
    """Return x and weights with the spread of a trained model."""
    generator = torch.Generator("cuda").manual_seed(dim + sum(num_out))
    sizes = (num_rows, *num_out)
    x, *weights = (torch.randn(n, dim, device="cuda", dtype=torch.bfloat16, generator=generator) for n in sizes)
    inputs = (x, *(weight * dim**-0.5 for weight in weights))
    # `static_weight` promises that the weights are complete.
    torch.cuda.synchronize()
    return inputs


def _bytes(num_rows: int, dim: int, num_out: int) -> int:
    return 2 * (num_out * dim + num_rows * (dim + num_out))


def _target(num_rows: int, dim: int, num_out: int) -> Target | None:
    if num_rows in SOME:
        return None
    if num_rows in MANY:
        return Target("speedup", 0.9)
    return Target("copy", 0.85 if 2 * num_out * dim >= LARGE_WEIGHT else 0.7)


def _prove_rows(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None) -> Callable[[], None]:
    """Return a proof that a row has the same bits alone and in every batch of up to 300 more rows."""
    product = partial(op.linear, out_dtype=out_dtype)

    def prove() -> None:
        more = torch.cat((x, torch.randn(300, x.shape[1], device=x.device).to(x.dtype)))
        whole = product(more, weight)
        for count in {1, 2, 17, 64, x.shape[0], 300}:
            assert_bits(f"the first {count} rows", product(more[:count], weight), whole[:count])
            assert_bits(f"the last {count} rows", product(more[-count:], weight), whole[-count:])
        assert_bits("a weight read early", product(x, weight, static_weight=True), whole[: len(x)])

    return prove


def _single(num_rows: int, dim: int, num_out: int, *, fp32: bool = False, context: bool = False) -> Case:
    """Return one product. fp32: unrounded sums, compared with torch's rounded ones. context: without a target."""
    x, weight = _inputs(num_rows, dim, num_out)
    out_dtype = torch.float32 if fp32 else None
    run = partial(op.linear, x, weight, static_weight=True, out_dtype=out_dtype)
    return Case(
        op="linear",
        shape=f"M{num_rows} {dim}x{num_out}{' fp32 sums' if fp32 else ''}",
        run=run,
        prove=_prove_rows(x, weight, out_dtype),
        num_bytes=_bytes(num_rows, dim, num_out),
        num_flops=2 * num_rows * dim * num_out,
        target=None if context else _target(num_rows, dim, num_out),
        baseline=partial(F.linear, x, weight),
        baseline_name="F.linear",
        variants=[(config, partial(run, config=config)) for config in op.configs_for(num_rows, num_out)],
        tune_key=(op.OP, op.shape_class(num_rows, dim, num_out)),
    )


def _two_linears(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.linear(x, a), F.linear(x, b)


def _pair(num_rows: int, dim: int, num_a: int, num_b: int) -> Case:
    x, a, b = _inputs(num_rows, dim, num_a, num_b)
    run = partial(op.linear_pair, x, a, b, static_weight=True)

    def prove() -> None:
        assert_bits("a pair equals two projections", run(), (op.linear(x, a), op.linear(x, b)))

    return Case(
        op="linear_pair",
        shape=f"M{num_rows} {dim}x({num_a} + {num_b})",
        run=run,
        prove=prove,
        num_bytes=_bytes(num_rows, dim, num_a + num_b),
        num_flops=2 * num_rows * dim * (num_a + num_b),
        # The project sets no target here. One launch should pay off with few rows.
        target=Target("speedup", 0.9 if num_rows in MANY else 1.1),
        baseline=partial(_two_linears, x, a, b),
        baseline_name="2 F.linear",
        variants=[(config, partial(run, config=config)) for config in op.configs_for(num_rows, num_a, num_b)],
        tune_key=(op.OP, op.shape_class(num_rows, dim, num_a, num_b)),
    )


def cases() -> Iterator[Case]:
    """Yield every shape with few and many rows, then the pairs."""
    for dim, num_out in SHAPES:
        for num_rows in FEW if num_out > VOCABULARY else (*FEW, *SOME, *MANY):
            yield _single(num_rows, dim, num_out)
    for dim, num_a, num_b in PAIRS:
        for num_rows in (*FEW, *MANY):
            yield _pair(num_rows, dim, num_a, num_b)


def _meets(num_rows: int, product: Product) -> bool:
    """Return whether steps of `num_rows` rows have the product."""
    return product.of == "all" or (product.of == "decode") == (num_rows in DECODE_ROWS)


def model_cases(models: Sequence[ModelStep], rows: Sequence[int]) -> Iterator[Case]:
    """Yield every product of the models' steps, each once."""
    for product in dict.fromkeys(product for model in models for product in model.products):
        small = 2 * product.dim * product.num_out < SMALL_WEIGHT
        for num_rows in rows:
            if _meets(num_rows, product):
                yield _single(num_rows, product.dim, product.num_out, fp32=product.fp32, context=small)
