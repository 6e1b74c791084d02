"""Bench of `head_linear`: around the decode of latent attention, for four models, Kimi Delta Attention's gates, and the
output groups of DeepSeek-V4-Flash."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from kernel_cases.case import Case, Target, assert_bits
from kernel_cases.model_steps import DECODE_ROWS, DIM_V, MODELS, NOPE, RANK, Delta, Latent, ModelStep
from moeyard_kernels.linear import head_linear as op

OPS: tuple[str, ...] = ("head_linear",)


def _bmm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2))


def _prove(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Prove that all configs give the same bits, that a row is equal alone and among 300, and near float64."""
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
    x = torch.randn(num_rows, num_heads, weight.shape[2], device="cuda", dtype=torch.bfloat16, generator=generator)
    return _product(f"{model} T{num_rows} H{num_heads} {'absorb' if absorb else 'expand'}", x, weight)


def _gates(model: str, num_rows: int) -> Case:
    """Return the decay rates and output gates of 32 heads, from two slices of a projection."""
    x = torch.randn(num_rows, 3 * 4096 + 256 + 32, device="cuda", dtype=torch.bfloat16)[:, 3 * 4096 : 3 * 4096 + 256]
    weight = torch.randn(2, 4096, 128, device="cuda", dtype=torch.bfloat16)
    return _product(f"{model} T{num_rows} gates", x.unflatten(1, (2, -1)), weight)


def groups_case(num_rows: int) -> Case:
    """Return the first output projection of 8 groups of 8 heads."""
    x = torch.randn(num_rows, 8, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(8, 1024, 4096, device="cuda", dtype=torch.bfloat16)
    return _product(f"DeepSeek-V4-Flash T{num_rows} groups", x, weight)


def _product(shape: str, x: torch.Tensor, weight: torch.Tensor) -> Case:
    num_rows, (num_heads, num_out, dim) = x.shape[0], weight.shape
    # `static_weight` promises that the weight is complete.
    torch.cuda.synchronize()
    run = partial(op.head_linear, x, weight, static_weight=True)
    along_k = weight.stride(2) == 1
    return Case(
        op="head_linear",
        shape=f"{shape} {dim}x{num_out}",
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
        tune_key=(op.OP, op.shape_class(num_rows, num_heads, num_out, dim, along_k)),
    )


def cases() -> Iterator[Case]:
    """Yield absorption of queries and expansion of values, at 1, 8 and 64 rows, and gates and groups of prompts too."""
    yield from model_cases(tuple(MODELS.values()), (*DECODE_ROWS, 4096))
    for num_rows in (*DECODE_ROWS, 4096):
        yield groups_case(num_rows)


def model_cases(models: Sequence[ModelStep], rows: Sequence[int]) -> Iterator[Case]:
    """Yield products around the decode of latent attention, and gates of Kimi Delta Attention."""
    for model in models:
        for kind in model.attention:
            for num_rows in rows:
                if isinstance(kind, Latent) and num_rows in DECODE_ROWS:
                    for absorb in (True, False):
                        yield _case(model.name, kind.heads, num_rows, absorb=absorb)
                elif isinstance(kind, Delta) and kind.op == "kda_step":
                    yield _gates(model.name, num_rows)
