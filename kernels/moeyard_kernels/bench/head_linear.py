"""Cases of `head_linear`: what a step's latent attention does around its decode, for three models."""

from collections.abc import Iterator
from functools import partial

import torch

from moeyard_kernels.bench.case import Case, Target, assert_bits
from moeyard_kernels.linear import head_linear as op

OPS: tuple[str, ...] = ("head_linear",)
MODELS = (("DeepSeek-V2-Lite", 16), ("Kimi-K2", 64), ("DeepSeek-V3", 128))
NOPE, RANK, DIM_V = 128, 512, 128


def _bmm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2))


def _prove(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Every config gives the same bits, a row alone and in a batch of 300 those of the row, near float64."""
    whole = op.head_linear(x, weight)
    exact = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    error = ((whole.double() - exact).norm() / exact.norm()).item()
    assert error < 1e-2, f"{error:.1e} from float64"
    many = torch.cat((torch.randn_like(x[:1]).expand(300, -1, -1), x))
    for config in (None, *op.CONFIGS):
        assert_bits(f"{config}", op.head_linear(x, weight, config=config), whole)
        assert_bits(f"last of many, {config}", op.head_linear(many, weight, config=config)[300:], whole)
    for t in {0, x.shape[0] - 1}:
        assert_bits(f"row {t} alone", op.head_linear(x[t : t + 1], weight, static_weight=True), whole[t : t + 1])


def _case(model: str, num_heads: int, num_rows: int, *, absorb: bool) -> Case:
    generator = torch.Generator("cuda").manual_seed(num_heads)
    kv_b = torch.randn(num_heads, NOPE + DIM_V, RANK, device="cuda", dtype=torch.bfloat16, generator=generator)
    weight = kv_b[:, :NOPE].transpose(1, 2) if absorb else kv_b[:, NOPE:]
    _, num_out, dim = weight.shape
    x = torch.randn(num_rows, num_heads, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
    # `static_weight` promises that it is complete.
    torch.cuda.synchronize()
    run = partial(op.head_linear, x, weight, static_weight=True)
    return Case(
        op="head_linear",
        shape=f"{model} T{num_rows} H{num_heads} {'absorb' if absorb else 'expand'} {dim}x{num_out}",
        run=run,
        prove=partial(_prove, x, weight),
        num_bytes=2 * (num_heads * num_out * dim + num_rows * num_heads * (dim + num_out)),
        num_flops=2 * num_rows * num_heads * num_out * dim,
        target=Target("copy", 0.8),
        baseline=partial(_bmm, x, weight),
        baseline_name="torch bmm",
        variants=[
            (config, partial(run, config=config))
            for config in op.configs_for(num_rows)
            if isinstance(config, op.HeadConfig) or op.suits(config, x, weight)
        ],
        tune_key=(op.OP, op.shape_class(num_rows, num_heads, num_out, dim, not absorb)),
    )


def cases() -> Iterator[Case]:
    """Absorption of queries and expansion of values, at 1, 8 and 64 rows."""
    for model, num_heads in MODELS:
        for num_rows in (1, 8, 64):
            for absorb in (True, False):
                yield _case(model, num_heads, num_rows, absorb=absorb)
