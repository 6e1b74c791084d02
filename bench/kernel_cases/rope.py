"""Bench of rotary embedding, alone and with a step's writes into its pages, head norms included."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from kernel_cases.case import Case, Target, assert_bits
from kernel_cases.model_steps import Grouped, Latent, ModelStep
from moeyard_kernels import ops
from moeyard_kernels.attention import rope, rope_cache_write
from moeyard_kernels.elementwise.rms_norm import NUM_WARPS

OPS = ("rope", "rope_cache_write_mla", "rope_cache_write_gqa")
_EPS = 1e-6
_COPY = Target("copy", 0.8)
_PAGE = 64


def cases() -> Iterator[Case]:
    """Yield prompt shapes and decode steps.

    The shapes with head norms are Qwen3-30B-A3B and Qwen3-235B-A22B, those with the norm of latents DeepSeek-V2-Lite.
    """
    for num_tokens in (4096, 64, 1):
        yield _rope(num_tokens, 32, 128, interleaved=False)
        yield _rope(num_tokens, 128, 64, interleaved=True)
        yield _write_mla(num_tokens, 128)
        yield _write_gqa(num_tokens)
    for num_tokens in (1, 8, 64):
        yield _norm_write_mla(num_tokens, 16)
    for num_tokens in (1, 8, 64, 4096):
        for heads in (32, 64):
            yield _norm_write_gqa(num_tokens, heads, 4, 128)


def model_cases(models: Sequence[ModelStep], rows: Sequence[int]) -> Iterator[Case]:
    """Yield the op that rotates a model's queries and keys and writes its pages."""
    for model in models:
        for kind in model.attention:
            for num_tokens in rows:
                if isinstance(kind, Latent):
                    write = _write_mla if kind.query_rank else _norm_write_mla
                    yield write(num_tokens, kind.heads, interleaved=kind.interleaved)
                elif isinstance(kind, Grouped) and kind.normed:
                    dtype = torch.float32 if model.fp32_norms else torch.bfloat16
                    yield _norm_write_gqa(num_tokens, kind.heads, kind.kv_heads, kind.dim, kind.rotated, dtype)
                elif isinstance(kind, Grouped):
                    yield _write_gqa(num_tokens, kind.heads, kind.kv_heads)


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


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
        wanted = ops.rope.reference(x[some].cpu(), cos[some].cpu(), sin[some].cpu(), interleaved=interleaved)
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
    q: torch.Tensor,
    kv_a: torch.Tensor,
    k_rope: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    interleaved: bool,
) -> torch.Tensor:
    rotated = ops.rope(k_rope.unsqueeze(1), cos, sin, interleaved=interleaved).squeeze(1)
    cache.flatten(0, 1).index_copy_(0, slots, torch.cat((kv_a, rotated), 1))
    return ops.rope(q, cos, sin, interleaved=interleaved)


def _write_mla(num_tokens: int, heads: int, *, interleaved: bool = True) -> Case:
    latent, dim = 512, 64
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
        target=_COPY if num_tokens >= 4096 else None,
        baseline=unfused,
        baseline_name="rope x 2, cat, index_copy",
        variants=[(config, partial(run, config=config)) for config in rope_cache_write.CONFIGS],
        tune_key=("rope_cache_write_mla", rope_cache_write.shape_class(num_tokens, heads, dim)),
    )


def _norm_then_write(
    q: torch.Tensor, kv_a: torch.Tensor, *rest: torch.Tensor, kv_norm: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    kv_a = ops.rms_norm(kv_a, kv_norm, _EPS)
    return rope_cache_write.rope_cache_write_mla(q, kv_a, *rest, interleaved=interleaved)


def _norm_write_mla(num_tokens: int, heads: int, *, interleaved: bool = True) -> Case:
    latent, dim = 512, 64
    q, kv_a, k_rope = _rows(num_tokens, heads * (128 + dim) + latent + dim).split_with_sizes(
        (heads * (128 + dim), latent, dim), 1
    )
    q = q.view(num_tokens, heads, 128 + dim)[:, :, 128:]
    cos, sin = torch.randn(num_tokens, dim, device="cuda").chunk(2, 1)
    shape = (num_tokens // _PAGE + 16, _PAGE, latent + dim)
    cache, other = (torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    inputs = q, kv_a, k_rope, cos, sin, torch.randperm(num_tokens, device="cuda") + 5
    kv_norm = _rows(latent)
    run = partial(
        rope_cache_write.rope_cache_write_mla, *inputs, cache, interleaved=interleaved, kv_norm=kv_norm, eps=_EPS
    )
    chain = partial(_norm_then_write, *inputs, other, kv_norm=kv_norm, interleaved=interleaved)
    configs = [config for config in rope_cache_write.CONFIGS if config.num_warps == NUM_WARPS]

    def prove() -> None:
        other.zero_()
        wanted = chain()
        for config in (None, *configs):
            cache.zero_()
            assert_bits(f"norm, then rotation, {config}", run(config=config), wanted)
            assert_bits(f"cache, {config}", cache, other)

    return Case(
        op="rope_cache_write_mla",
        shape=f"T{num_tokens} N{heads} Dr{dim} R{latent}{' interleaved' if interleaved else ''} normed",
        run=run,
        prove=prove,
        num_bytes=4 * num_tokens * (heads * dim + latent + dim) + num_tokens * (4 * dim + 8),
        baseline=chain,
        baseline_name="rms_norm, rope with cache write",
        variants=[(config, partial(run, config=config)) for config in configs],
        tune_key=("rope_cache_write_mla", rope_cache_write.shape_class(num_tokens, heads, dim, normed=True)),
    )


def _unfused_gqa(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    heads = qk.shape[1] - v.shape[1]
    qk = ops.rope(qk, cos, sin, interleaved=False)
    k_cache.flatten(1, 2).index_copy_(1, slots, qk[:, heads:].transpose(0, 1))
    v_cache.flatten(1, 2).index_copy_(1, slots, v.transpose(0, 1))
    return qk[:, :heads]


def _norms_first(
    q: torch.Tensor, k: torch.Tensor, *rest: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor
) -> torch.Tensor:
    q, k = ops.rms_norm(q, q_norm, _EPS), ops.rms_norm(k, k_norm, _EPS)
    return rope_cache_write.rope_cache_write_gqa(q, k, *rest, interleaved=False)


def _norm_write_gqa(
    num_tokens: int, heads: int, kv_heads: int, dim: int, rotated: int = 128, norm_dtype: torch.dtype = torch.bfloat16
) -> Case:
    q, k, v = _rows(num_tokens, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), 1)
    cos, sin = torch.randn(num_tokens, rotated, device="cuda").chunk(2, 1)
    shape = (2, kv_heads, num_tokens // _PAGE + 16, _PAGE, dim)
    caches, others = (torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    inputs = q, k, v, cos, sin, torch.randperm(num_tokens, device="cuda") + 5
    q_norm, k_norm = _rows(dim).to(norm_dtype), _rows(dim).to(norm_dtype)
    part = "" if rotated == dim else f" rotated {rotated}"
    write = rope_cache_write.rope_cache_write_gqa
    run = partial(write, *inputs, *caches, interleaved=False, q_norm=q_norm, k_norm=k_norm, eps=_EPS)
    chain = partial(_norms_first, *inputs, *others, q_norm=q_norm, k_norm=k_norm)

    def prove() -> None:
        others.zero_()
        wanted = chain()
        for config in (None, *rope_cache_write.normed_configs(dim)):
            caches.zero_()
            assert_bits(f"norms, then rotation, {config}", run(config=config), wanted)
            assert_bits(f"caches, {config}", caches, others)

    return Case(
        op="rope_cache_write_gqa",
        shape=f"T{num_tokens} N{heads}/{kv_heads} D{dim}{part} normed",
        run=run,
        prove=prove,
        num_bytes=4 * num_tokens * (heads + 2 * kv_heads) * dim + num_tokens * (4 * rotated + 8),
        target=_COPY if num_tokens >= 4096 else None,
        baseline=chain,
        baseline_name="rms_norm x 2, rope with cache write",
        variants=[(config, partial(run, config=config)) for config in rope_cache_write.normed_configs(dim)],
        tune_key=("rope_cache_write_gqa", rope_cache_write.shape_class(num_tokens, heads, dim, normed=True)),
    )


def _write_gqa(num_tokens: int, heads: int = 32, kv_heads: int = 4) -> Case:
    dim = 128
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
        target=_COPY if num_tokens >= 4096 else None,
        baseline=unfused,
        baseline_name="rope, index_copy x 2",
        variants=[(config, partial(run, config=config)) for config in rope_cache_write.CONFIGS],
        tune_key=("rope_cache_write_gqa", rope_cache_write.shape_class(num_tokens, heads, dim)),
    )
