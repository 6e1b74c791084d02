"""Bench of a decode step's rotation, cache write and attention: one launch or two, by config."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from kernel_cases.case import Case, assert_bits
from kernel_cases.model_steps import DECODE_ROWS, Grouped, ModelStep
from moeyard_kernels.attention import rope_gqa_decode as kernel
from moeyard_kernels.types.decode_tables import DecodeTables

OPS = ("rope_gqa_decode",)

_PAGE, _DIM = 64, 128
# Query heads, key heads, whether heads are normalised: Qwen3-30B-A3B, Qwen3-235B-A22B, Mixtral.
_MODELS = ((32, 4, True), (64, 4, True), (32, 8, False))


def cases() -> Iterator[Case]:
    """Yield few rows behind few keys, whose time is latency, then many."""
    for heads, kv_heads, normed in _MODELS:
        for batch, length in ((1, 192), (1, 512), (8, 192), (64, 192)):
            yield _case(heads, kv_heads, batch, length, normed=normed)


def model_cases(models: Sequence[ModelStep], rows: Sequence[int]) -> Iterator[Case]:
    """Yield models that one launch can serve: fully rotated heads of 128. Others take the two launches of the chain."""
    for kind in dict.fromkeys(kind for model in models for kind in model.attention):
        for batch in rows:
            if isinstance(kind, Grouped) and kind.dim == kind.rotated == _DIM and batch in DECODE_ROWS:
                yield _case(kind.heads, kind.kv_heads, batch, 192, normed=kind.normed)


def _case(heads: int, kv_heads: int, batch: int, length: int, *, normed: bool) -> Case:
    pages, scale, group = -(-length // _PAGE), _DIM**-0.5, heads // kv_heads
    shape = (2, kv_heads, batch * pages, _PAGE, _DIM)
    caches = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
    lens = torch.full((batch,), length, device="cuda", dtype=torch.int32)
    tables = DecodeTables(page_table=table, kv_lens=lens, page_size=_PAGE)
    qkv = torch.randn(batch, heads + 2 * kv_heads, _DIM, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    cos, sin = torch.randn(batch, _DIM, device="cuda").chunk(2, 1)
    slots = table[:, (length - 1) // _PAGE].long() * _PAGE + (length - 1) % _PAGE
    norms = torch.randn(2, _DIM, device="cuda", dtype=torch.bfloat16)
    named = {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6} if normed else {}
    # Tables and older keys do not change during the timing.
    run = partial(
        kernel.rope_gqa_decode,
        q,
        k,
        v,
        cos,
        sin,
        slots,
        *caches,
        tables=tables,
        scale=scale,
        interleaved=False,
        static_tables=True,
        lone_rows=True,
        **named,  # type: ignore[arg-type]
    )

    def prove() -> None:
        for at in (length, length - 63, 1):
            lens.fill_(at)
            slots.copy_(table[:, (at - 1) // _PAGE].long() * _PAGE + (at - 1) % _PAGE)
            before = caches.clone()
            wanted, written = run(config=kernel.CHAIN), caches.clone()
            for config in kernel.configs_for(group):
                caches.copy_(before)
                assert_bits(f"{at} keys, {config}", run(config=config), wanted)
                assert_bits(f"{at} keys, caches, {config}", caches, written)
        lens.fill_(length)
        slots.copy_(table[:, (length - 1) // _PAGE].long() * _PAGE + (length - 1) % _PAGE)

    return Case(
        op="rope_gqa_decode",
        shape=f"B{batch} H{heads}/{kv_heads} L{length}{' normed' if normed else ''}",
        run=run,
        prove=prove,
        num_bytes=caches.numel() * 2 + 2 * (qkv.numel() + q.numel()),
        num_flops=4 * batch * heads * length * _DIM,
        baseline=partial(run, config=kernel.CHAIN),
        baseline_name="rope_cache_write_gqa, gqa_decode",
        variants=tuple((config, partial(run, config=config)) for config in kernel.configs_for(group)),
        tune_key=("rope_gqa_decode", kernel.shape_class(group, _DIM, batch)),
    )
