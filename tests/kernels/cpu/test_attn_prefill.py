"""Prompt attention: values against float64 and the eager chain of transformers, equal bits for every chunking."""

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import eager_attention_forward

from moeyard_kernels.cpu.attn_prefill import attn_prefill

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, start: int, scale: float, window: int | None
) -> torch.Tensor:
    """Return [T, Hq, Dv] in float64, computed from the definition."""
    group = q.shape[1] // k.shape[0]
    k, v = k.double().repeat_interleave(group, 0), v.double().repeat_interleave(group, 0)
    scores = torch.einsum("thd,hld->htl", q.double(), k) * scale
    scores = scores.masked_fill(hidden(q.shape[0], k.shape[1], start=start, window=window), float("-inf"))
    return torch.einsum("htl,hld->thd", scores.softmax(-1), v)


def hidden(num_queries: int, num_keys: int, *, start: int, window: int | None) -> torch.Tensor:
    query, key = torch.arange(start, start + num_queries)[:, None], torch.arange(num_keys)
    return (key > query) | (key <= query - (window or num_keys))


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None) -> torch.Tensor:
    """Return what transformers computes for a whole prompt in the dtype of its inputs."""
    module = torch.nn.Module()
    module.num_key_value_groups = q.shape[1] // k.shape[0]
    mask = torch.zeros(1, 1, q.shape[0], k.shape[1], dtype=q.dtype)
    mask = mask.masked_fill(hidden(q.shape[0], k.shape[1], start=0, window=window), torch.finfo(q.dtype).min)
    return eager_attention_forward(module.eval(), q.transpose(0, 1)[None], k[None], v[None], mask, scale)[0][0]


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 20, 64, 130], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dim_v"), [(8, 2, 64, 64), (3, 3, 24, 16), (5, 1, 40, 33)])
def test_chunks_change_no_bit(
    heads: int, kv_heads: int, dim: int, dim_v: int, window: int | None, dtype: torch.dtype
) -> None:
    length, behind = 300, 37
    q = torch.randn(length, heads, dim).to(dtype)
    k = torch.randn(kv_heads, length + behind, dim).to(dtype)
    v = torch.randn(kv_heads, length + behind, dim_v).to(dtype)
    args = {"scale": dim**-0.5, "window": window}
    whole = attn_prefill(q, k, v, start=0, **args)
    assert whole.shape == (length, heads, dim_v)
    assert whole.dtype == dtype

    wanted = exact(q, k, v, start=0, **args)
    error = (whole.double() - wanted).abs().max()
    if dtype == torch.float32:
        assert error < 5e-6
    else:
        theirs = eager(q, k[:, :length], v[:, :length], **args)
        assert error <= (theirs.double() - wanted).abs().max()

    for chunk in (7, 16, 64, 100):
        parts = []
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            # Keys after the chunk may exist and hold anything.
            known = end + (start // chunk * 13) % (behind + 1)
            keys, values = k[:, :known].clone(), v[:, :known].clone()
            keys[:, end:], values[:, end:] = 9.0, -5.0
            parts.append(attn_prefill(q[start:end], keys, values, start=start, **args))
        assert torch.equal(torch.cat(parts), whole), f"chunks of {chunk}"
    for position in (0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 299):
        one = attn_prefill(q[position : position + 1], k, v, start=position, **args)
        assert torch.equal(one[0], whole[position]), f"position {position} alone"


@DTYPES
def test_tiles_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(200, 4, 32).to(dtype), torch.randn(2, 200, 32).to(dtype), torch.randn(2, 200, 32).to(dtype)
    whole = attn_prefill(q, k, v, start=0, scale=0.2)
    for budget in (1, 4 * 256 * 48):
        monkeypatch.setattr("moeyard_kernels.cpu.attn_prefill._MAX_SCORES", budget)
        assert torch.equal(attn_prefill(q, k, v, start=0, scale=0.2), whole)


def test_large_scores_and_no_queries() -> None:
    q, k, v = torch.randn(70, 2, 16) * 60, torch.randn(2, 70, 16) * 60, torch.randn(2, 70, 16)
    out = attn_prefill(q, k, v, start=0, scale=1.0)
    torch.testing.assert_close(out.double(), exact(q, k, v, start=0, scale=1.0, window=None), rtol=1e-3, atol=1e-3)
    assert attn_prefill(q[:0], k, v, start=3, scale=1.0).shape == (0, 2, 16)
