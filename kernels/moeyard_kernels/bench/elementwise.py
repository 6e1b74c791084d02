"""Bench cases of norms, rotary embedding with cache write, and the activation."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from moeyard_kernels import ops
from moeyard_kernels.attention import rope, rope_cache_write
from moeyard_kernels.bench.case import Case, Target, assert_bits
from moeyard_kernels.elementwise import rms_norm, silu_mul
from moeyard_kernels.ref import rope as rope_reference

OPS = (
    *("rms_norm", "add_rms_norm", "mla_split_qkv_a_norm", "silu_mul"),
    *("rope", "rope_cache_write_mla", "rope_cache_write_gqa", "copy"),
)
_EPS = 1e-6
_COPY = Target("copy", 0.8)
_PAGE = 64


def cases() -> Iterator[Case]:
    """The issue's shapes, decode steps beside them, and copies as large: writes cost more where the L2 keeps them."""
    for num_rows, dim in ((4096, 2048), (4096, 7168), (16384, 7168)):
        yield _copy(num_rows, dim)
    for num_rows in (1, 8, 64):
        yield _mla_split(num_rows)
    for num_rows, dim in ((4096, 7168), (4096, 2048), (64, 7168), (1, 7168)):
        yield _norm(num_rows, dim)
        yield _add_norm(num_rows, dim)
    for num_tokens in (4096, 64, 1):
        yield _rope(num_tokens, 32, 128, interleaved=False)
        yield _rope(num_tokens, 128, 64, interleaved=True)
        yield _write_mla(num_tokens, interleaved=True)
        yield _write_gqa(num_tokens)
    for num_rows, inner in ((4096, 2048), (4096, 7168), (4096, 18432), (64, 2048), (64, 18432), (1, 18432)):
        yield _silu(num_rows, inner)


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _copy(num_rows: int, dim: int) -> Case:
    x = _rows(num_rows, dim)
    y = torch.empty_like(x)
    return Case(
        op="copy",
        shape=f"T{num_rows} D{dim}, torch.neg",
        run=partial(torch.neg, x, out=y),
        # A ceiling for the others, not an op of ours: torch alone runs, and there is nothing to prove.
        prove=lambda: None,
        num_bytes=4 * num_rows * dim,
    )


def _norm(num_rows: int, dim: int) -> Case:
    x, weight = _rows(num_rows, dim), _rows(dim)

    def prove() -> None:
        whole = ops.rms_norm(x, weight, _EPS)
        for t in {0, num_rows // 2, num_rows - 1}:
            assert_bits("row alone", ops.rms_norm(x[t : t + 1].clone(), weight, _EPS), whole[t : t + 1])
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + _EPS).sqrt()
        error = (whole.double() - exact * weight.double()).norm() / (exact * weight.double()).norm()
        assert error < 1e-2, f"relative error {error:.2e}"

    return Case(
        op="rms_norm",
        shape=f"T{num_rows} D{dim}",
        run=partial(ops.rms_norm, x, weight, _EPS),
        prove=prove,
        num_bytes=4 * num_rows * dim + 2 * dim,
        target=_COPY if num_rows == 4096 else None,
        baseline=partial(F.rms_norm, x, (dim,), weight, _EPS),
        baseline_name="F.rms_norm",
    )


def _add_then_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm(x + residual, weight, _EPS)


def _add_norm(num_rows: int, dim: int) -> Case:
    x, residual, weight = _rows(num_rows, dim), _rows(num_rows, dim), _rows(dim)

    def prove() -> None:
        normed, total = ops.add_rms_norm(x, residual, weight, _EPS)
        assert_bits("sum", total, x + residual)
        assert_bits("unfused chain", normed, _add_then_norm(x, residual, weight))
        assert_bits("row alone", ops.add_rms_norm(x[-1:], residual[-1:], weight, _EPS), (normed[-1:], total[-1:]))

    return Case(
        op="add_rms_norm",
        shape=f"T{num_rows} D{dim}",
        run=partial(ops.add_rms_norm, x, residual, weight, _EPS),
        prove=prove,
        num_bytes=8 * num_rows * dim + 2 * dim,
        target=_COPY if num_rows == 4096 else None,
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
        target=Target("speedup", 2),
        baseline=partial(_three_launches, qkv_a, q_weight, kv_weight),
        baseline_name="rms_norm x 2, copy",
    )


def _rope_chain(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def _rope(num_tokens: int, heads: int, dim: int, *, interleaved: bool) -> Case:
    x = _rows(num_tokens, heads, dim)
    cos, sin = (torch.randn(num_tokens, dim // 2, device="cuda") for _ in range(2))
    run = partial(rope.rope, x, cos, sin, interleaved=interleaved)

    def prove() -> None:
        whole, some = run(), slice(num_tokens // 2, num_tokens // 2 + 32)
        wanted = rope_reference.rope(x[some].cpu(), cos[some].cpu(), sin[some].cpu(), interleaved=interleaved)
        assert_bits("reference", whole[some].cpu(), wanted)
        assert_bits("row alone", ops.rope(x[-1:], cos[-1:], sin[-1:], interleaved=interleaved), whole[-1:])

    return Case(
        op="rope",
        shape=f"T{num_tokens} N{heads} D{dim}{' interleaved' if interleaved else ''}",
        run=run,
        prove=prove,
        num_bytes=4 * num_tokens * heads * dim + 4 * num_tokens * dim,
        baseline=partial(_rope_chain, x, cos, sin, interleaved=interleaved),
        baseline_name="torch products, cat",
        variants=[(config, partial(run, config=config)) for config in rope.CONFIGS],
        tune_key=("rope", rope.shape_class(num_tokens, heads, dim)),
    )


def _unfused_mla(
    q: torch.Tensor, kv_a: torch.Tensor, k_rope: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slots: torch.Tensor, cache: torch.Tensor, *, interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    rotated = ops.rope(k_rope.unsqueeze(1), cos, sin, interleaved=interleaved).squeeze(1)
    cache.flatten(0, 1).index_copy_(0, slots, torch.cat((kv_a, rotated), 1))
    return ops.rope(q, cos, sin, interleaved=interleaved)


def _write_mla(num_tokens: int, *, interleaved: bool) -> Case:
    heads, latent, dim = 128, 512, 64
    q = _rows(num_tokens, heads, 128 + dim)[:, :, 128:]
    kv_a, k_rope = _rows(num_tokens, latent), _rows(num_tokens, dim)
    cos, sin = (torch.randn(num_tokens, dim // 2, device="cuda") for _ in range(2))
    cache = torch.zeros(num_tokens // _PAGE + 16, _PAGE, latent + dim, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(num_tokens, device="cuda") + 5
    other = torch.zeros_like(cache)
    inputs = q, kv_a, k_rope, cos, sin, slots
    run = partial(rope_cache_write.rope_cache_write_mla, *inputs, cache, interleaved=interleaved)
    unfused = partial(_unfused_mla, *inputs, other, interleaved=interleaved)

    def prove() -> None:
        cache.zero_()
        other.zero_()
        assert_bits("rope", run(), unfused())
        assert_bits("cache", cache, other)
        assert bool(other.any())

    return Case(
        op="rope_cache_write_mla",
        shape=f"T{num_tokens} N{heads} Dr{dim} R{latent}{' interleaved' if interleaved else ''}",
        run=run,
        prove=prove,
        num_bytes=4 * num_tokens * (heads * dim + latent + dim) + num_tokens * (4 * dim + 8),
        target=_COPY if num_tokens == 4096 else None,
        baseline=unfused,
        baseline_name="rope x 2, cat, index_copy",
        variants=[(config, partial(run, config=config)) for config in rope_cache_write.CONFIGS],
        tune_key=("rope_cache_write_mla", rope_cache_write.shape_class(num_tokens, heads, dim)),
    )


def _unfused_gqa(
    qk: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    heads = qk.shape[1] - v.shape[1]
    qk = ops.rope(qk, cos, sin, interleaved=False)
    k_cache.flatten(1, 2).index_copy_(1, slots, qk[:, heads:].transpose(0, 1))
    v_cache.flatten(1, 2).index_copy_(1, slots, v.transpose(0, 1))
    return qk[:, :heads]


def _write_gqa(num_tokens: int) -> Case:
    heads, kv_heads, dim = 32, 4, 128
    qkv = _rows(num_tokens, heads + 2 * kv_heads, dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    cos, sin = (torch.randn(num_tokens, dim // 2, device="cuda") for _ in range(2))
    shape = (2, kv_heads, num_tokens // _PAGE + 16, _PAGE, dim)
    caches, others = (torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    slots = torch.randperm(num_tokens, device="cuda") + 5
    run = partial(rope_cache_write.rope_cache_write_gqa, q, k, v, cos, sin, slots, *caches, interleaved=False)
    unfused = partial(_unfused_gqa, qkv[:, : heads + kv_heads], v, cos, sin, slots, *others)

    def prove() -> None:
        caches.zero_()
        others.zero_()
        assert_bits("rope", run(), unfused())
        assert_bits("caches", caches, others)
        assert bool(others.any())

    return Case(
        op="rope_cache_write_gqa",
        shape=f"T{num_tokens} N{heads}/{kv_heads} D{dim}",
        run=run,
        prove=prove,
        num_bytes=4 * num_tokens * (heads + 2 * kv_heads) * dim + num_tokens * (4 * dim + 8),
        target=_COPY if num_tokens == 4096 else None,
        baseline=unfused,
        baseline_name="rope, index_copy x 2",
        variants=[(config, partial(run, config=config)) for config in rope_cache_write.CONFIGS],
        tune_key=("rope_cache_write_gqa", rope_cache_write.shape_class(num_tokens, heads, dim)),
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
        target=_COPY if num_rows == 4096 else None,
        baseline=partial(_silu_chain, gate_up),
        baseline_name="silu, mul",
        variants=[(config, partial(run, config=config)) for config in silu_mul.CONFIGS],
        tune_key=("silu_mul", silu_mul.shape_class(num_rows, inner)),
    )
