"""Bench of norms and the activation."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from kernel_cases.case import Case, Target, assert_bits
from kernel_cases.model_steps import DECODE_ROWS, Grouped, Latent, ModelStep
from moeyard_kernels import ops
from moeyard_kernels.common.rows import row_class
from moeyard_kernels.elementwise import rms_norm, sigmoid_mul, silu_mul

OPS = ("rms_norm", "add_rms_norm", "mla_split_qkv_a_norm", "silu_mul", "sigmoid_mul", "copy")
_EPS = 1e-6
_COPY = Target("copy", 0.8)
_FP32 = ", fp32 weight"


def cases() -> Iterator[Case]:
    """Yield prompt shapes, decode steps, and copies of equal size, because writes cost more if the L2 keeps them."""
    for num_rows, dim in ((4096, 2048), (4096, 7168), (16384, 7168)):
        yield _copy(num_rows, dim)
    for num_rows in (1, 8, 64):
        yield _mla_split(num_rows)
    # Also heads of 128, as Qwen3 normalises them.
    yield _norm(32, 128)
    for num_rows, dim in ((4096, 7168), (4096, 2048), (64, 7168), (1, 7168)):
        yield _norm(num_rows, dim)
        yield _add_norm(num_rows, dim)
    for num_rows, inner in ((4096, 2048), (4096, 7168), (4096, 18432), (64, 2048), (64, 18432), (1, 18432)):
        yield _silu(num_rows, inner)
    for num_rows in (4096, 64, 1):  # the output gate of Qwen3-Next, 16 heads of 256
        yield _gate(num_rows, 4096)


def model_cases(models: Sequence[ModelStep], rows: Sequence[int]) -> Iterator[Case]:
    """Yield norms before the first layer and after the others, of latents, and the gates of an MLP or attention."""
    for num_rows in rows:
        for hidden, fp32 in dict.fromkeys((model.hidden, model.fp32_norms) for model in models):
            yield _norm(num_rows, hidden, fp32=fp32)
            yield _add_norm(num_rows, hidden, fp32=fp32)
        kinds = dict.fromkeys(kind for model in models for kind in model.attention)
        if any(isinstance(kind, Latent) and kind.query_rank for kind in kinds):
            yield _mla_split(num_rows)
        for inner in dict.fromkeys(width for model in models for width in model.widths):
            yield _silu(num_rows, inner)
        for kind in kinds:
            if isinstance(kind, Grouped) and kind.gated:
                yield _gate(num_rows, kind.heads * kind.dim)


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _copy(num_rows: int, dim: int) -> Case:
    x = _rows(num_rows, dim)
    y = torch.empty_like(x)
    return Case(
        op="copy",
        shape=f"T{num_rows} D{dim}, torch.neg",
        run=partial(torch.neg, x, out=y),
        # A ceiling for the others, not an op of ours. Only torch runs, and there is nothing to prove.
        prove=lambda: None,
        num_bytes=4 * num_rows * dim,
    )


def _weight(dim: int, *, fp32: bool) -> torch.Tensor:
    return _rows(dim).float() if fp32 else _rows(dim)


def _norm(num_rows: int, dim: int, *, fp32: bool = False) -> Case:
    x, weight = _rows(num_rows, dim), _weight(dim, fp32=fp32)

    def prove() -> None:
        whole = ops.rms_norm(x, weight, _EPS)
        for t in {0, num_rows // 2, num_rows - 1}:
            assert_bits("row alone", ops.rms_norm(x[t : t + 1].clone(), weight, _EPS), whole[t : t + 1])
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + _EPS).sqrt()
        error = (whole.double() - exact * weight.double()).norm() / (exact * weight.double()).norm()
        assert error < 1e-2, f"relative error {error:.2e}"

    return Case(
        op="rms_norm",
        shape=f"T{num_rows} D{dim}{_FP32 if fp32 else ''}",
        run=partial(ops.rms_norm, x, weight, _EPS),
        prove=prove,
        num_bytes=4 * num_rows * dim + weight.nbytes,
        target=_COPY if num_rows >= 4096 else None,
        baseline=partial(F.rms_norm, x, (dim,), weight.to(x.dtype), _EPS),
        baseline_name="F.rms_norm",
    )


def _add_then_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm(x + residual, weight, _EPS)


def _add_norm(num_rows: int, dim: int, *, fp32: bool = False) -> Case:
    x, residual, weight = _rows(num_rows, dim), _rows(num_rows, dim), _weight(dim, fp32=fp32)

    def prove() -> None:
        normed, total = ops.add_rms_norm(x, residual, weight, _EPS)
        assert_bits("sum", total, x + residual)
        assert_bits("unfused chain", normed, _add_then_norm(x, residual, weight))
        assert_bits("row alone", ops.add_rms_norm(x[-1:], residual[-1:], weight, _EPS), (normed[-1:], total[-1:]))

    return Case(
        op="add_rms_norm",
        shape=f"T{num_rows} D{dim}{_FP32 if fp32 else ''}",
        run=partial(ops.add_rms_norm, x, residual, weight, _EPS),
        prove=prove,
        num_bytes=8 * num_rows * dim + weight.nbytes,
        target=_COPY if num_rows >= 4096 else None,
        baseline=partial(_add_then_norm, x, residual, weight),
        baseline_name="add, rms_norm",
    )


def _three_launches(qkv_a: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, kv, rope = qkv_a.split((1536, 512, 64), 1)
    return (
        rms_norm.rms_norm(q, q_weight, _EPS),
        rms_norm.rms_norm(kv, kv_weight, _EPS),
        rope.clone(memory_format=torch.contiguous_format),
    )


def _mla_split(num_rows: int) -> Case:
    qkv_a, q_weight, kv_weight = _rows(num_rows, 2112), _rows(1536), _rows(512)

    def prove() -> None:
        whole = ops.mla_split_qkv_a_norm(qkv_a, q_weight, kv_weight, _EPS)
        assert_bits("three launches", whole, _three_launches(qkv_a, q_weight, kv_weight))
        last = ops.mla_split_qkv_a_norm(qkv_a[-1:], q_weight, kv_weight, _EPS)
        assert_bits("row alone", last, tuple(x[-1:] for x in whole))

    return Case(
        op="mla_split_qkv_a_norm",
        shape=f"T{num_rows} Rq1536 R512 Dr64",
        run=partial(ops.mla_split_qkv_a_norm, qkv_a, q_weight, kv_weight, _EPS),
        prove=prove,
        num_bytes=4 * num_rows * 2112 + 2 * 2048,
        target=Target("speedup", 2) if num_rows in DECODE_ROWS else None,
        baseline=partial(_three_launches, qkv_a, q_weight, kv_weight),
        baseline_name="rms_norm x 2, copy",
    )


def _silu_chain(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, 1)
    return F.silu(gate) * up


def _silu(num_rows: int, inner: int) -> Case:
    gate_up = _rows(num_rows, 2 * inner)
    run = partial(silu_mul.silu_mul, gate_up)

    def prove() -> None:
        whole = run()
        assert_bits("row alone", ops.silu_mul(gate_up[-1:].clone()), whole[-1:])
        rows = gate_up[:64].double()
        exact = F.silu(rows[:, :inner]) * rows[:, inner:]
        error = (whole[:64].double() - exact).norm() / exact.norm()
        assert error < 1e-2, f"relative error {error:.2e}"

    return Case(
        op="silu_mul",
        shape=f"T{num_rows} I{inner}",
        run=run,
        prove=prove,
        num_bytes=6 * num_rows * inner,
        target=_COPY if num_rows >= 4096 else None,
        baseline=partial(_silu_chain, gate_up),
        baseline_name="silu, mul",
        variants=[(config, partial(run, config=config)) for config in silu_mul.CONFIGS],
        tune_key=("silu_mul", row_class(num_rows, f"I{inner}")),
    )


def _gate_chain(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * gate.sigmoid()


def _gate(num_rows: int, width: int) -> Case:
    x, gate = _rows(num_rows, 2 * width).chunk(2, 1)
    run = partial(sigmoid_mul.sigmoid_mul, x, gate)

    def prove() -> None:
        whole = run()
        assert_bits("row alone", ops.sigmoid_mul(x[-1:].clone(), gate[-1:].clone()), whole[-1:])
        exact = x[:64].double() * gate[:64].double().sigmoid()
        error = (whole[:64].double() - exact).norm() / exact.norm()
        assert error < 1e-2, f"relative error {error:.2e}"

    return Case(
        op="sigmoid_mul",
        shape=f"T{num_rows} N{width}",
        run=run,
        prove=prove,
        num_bytes=6 * num_rows * width,
        target=_COPY if num_rows == 4096 else None,
        baseline=partial(_gate_chain, x, gate),
        baseline_name="sigmoid, mul",
        variants=[(config, partial(run, config=config)) for config in sigmoid_mul.CONFIGS],
        tune_key=("sigmoid_mul", row_class(num_rows, f"N{width}")),
    )
