"""Bench of the weights of a prompt's last 32 queries for its keys: 32k positions, Qwen3-30B-A3B and DeepSeek-V3."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kernel_cases.case import Case, assert_bits
from moeyard_kernels.attention import snapkv_scores as kernel

OPS: tuple[str, ...] = ("snapkv_scores",)
_WINDOW, _DIM, _ROPE = 32, 128, 64


def _inputs(heads: int, kv_heads: int, length: int, *, latent: bool) -> dict[str, Any]:
    """Return keys in randomly ordered pages, or as latent attention decompresses them beside the values."""
    torch.manual_seed(length)
    scale = (_DIM + _ROPE * latent) ** -0.5
    q = torch.randn(_WINDOW, heads, _DIM + _ROPE * latent, device="cuda", dtype=torch.bfloat16)
    if latent:
        kv = torch.randn(length, heads, 2 * _DIM, device="cuda", dtype=torch.bfloat16)
        k_rope = torch.randn(length, _ROPE, device="cuda", dtype=torch.bfloat16)
        return {"q": q, "k": kv[..., :_DIM].transpose(0, 1), "k_rope": k_rope, "length": length, "scale": scale}
    k = torch.randn(kv_heads, length, _DIM, device="cuda", dtype=torch.bfloat16)
    rows = torch.randperm(length, device="cuda")
    return {"q": q, "k": k, "rows": rows, "length": length, "scale": scale}


def _chain(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    length: int,
    scale: float,
    rows: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute the weights in torch, with all scores in memory."""
    keys = k if rows is None else k[:, rows]
    if k_rope is not None:
        keys = torch.cat((keys, k_rope.expand(k.shape[0], -1, -1)), 2)
    queries = q.transpose(0, 1).reshape(k.shape[0], -1, q.shape[2])
    if dtype is not None:
        keys, queries = keys.to(dtype), queries.to(dtype)
    scores = (queries @ keys.transpose(1, 2)).to(dtype or torch.float32).mul_(scale).view(q.shape[1], len(q), length)
    hidden = torch.arange(length, device=q.device) > torch.arange(length - len(q), length, device=q.device)[:, None]
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)[..., : length - len(q)]
    return weights.reshape(k.shape[0], -1, length - len(q)).sum(1)


def _prove(heads: int, kv_heads: int, *, latent: bool) -> None:
    """Prove on a short length: equal bits with other pages and other heads, near float64."""
    given = _inputs(heads, kv_heads, 2100, latent=latent)
    whole = kernel.snapkv_scores(**given)
    exact = _chain(**given, dtype=torch.float64)
    error = (whole.double() - exact).norm() / exact.norm()
    assert error < 1e-4, f"{error:.1e} from float64"
    order = torch.randperm(2100, device="cuda")
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(2100, device="cuda")
    moved: dict[str, Any] = {name: given[name].index_select(-2, order) for name in ("k", "k_rope") if name in given}
    rows = inverse if given.get("rows") is None else inverse[given["rows"]]
    assert_bits("keys elsewhere", kernel.snapkv_scores(**{**given, **moved, "rows": rows}), whole)
    group = heads // kv_heads
    alone = kernel.snapkv_scores(**{**given, "q": given["q"][:, -group:], "k": given["k"][-1:]})
    assert_bits("a head alone", alone, whole[-1:])


def cases() -> Iterator[Case]:
    for name, heads, kv_heads, latent in (("Qwen3-30B-A3B", 32, 4, False), ("DeepSeek-V3", 128, 128, True)):
        given = _inputs(heads, kv_heads, 32768, latent=latent)
        run = partial(kernel.snapkv_scores, **given)
        dim = given["q"].shape[2]
        yield Case(
            op="snapkv_scores",
            shape=f"{name}: {heads}/{kv_heads} heads of {dim}, 32k keys, 32 queries",
            run=run,
            prove=partial(_prove, heads, kv_heads, latent=latent),
            num_bytes=2 * given["k"].numel() + 4 * kv_heads * 32768,
            num_flops=4 * heads * _WINDOW * 32768 * dim,
            baseline=partial(_chain, **given),
            baseline_name="torch bmm, softmax, sum",
        )
