"""Kept positions of a compressed prompt: values against float64 and the definition, bits in any surroundings."""

import pytest
import torch

from moeyard_kernels.cpu.attn_prefill import key_scores, snapkv

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SHAPES = pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "length"),
    [(8, 2, 64, 32, 300), (3, 3, 24, 5, 64), (5, 1, 40, 17, 129), (4, 2, 16, 1, 40)],
)


def exact_scores(q: torch.Tensor, k: torch.Tensor, *, length: int, scale: float) -> torch.Tensor:
    """Return [Hkv, length - W] in float64, computed from the definition."""
    window, num_heads, _ = q.shape
    k = k[:, :length].double()
    found = torch.zeros(k.shape[0], length - window, dtype=torch.float64)
    for head in range(num_heads):
        keys = k[head // (num_heads // k.shape[0])]
        for row in range(window):
            seen = length - window + row + 1
            weights = (keys[:seen] @ q[row, head].double() * scale).softmax(0)
            found[head // (num_heads // k.shape[0])] += weights[: length - window]
    return found


def chosen_by(scores: list[float], *, budget: int, window: int) -> list[int]:
    """Return the positions that these scores keep, by one comparison after the other."""
    pooled = [max(scores[max(0, i - 3) : i + 4]) for i in range(len(scores))]
    best = sorted(range(len(scores)), key=lambda i: (-pooled[i], i))[: budget - window]
    return [*sorted(best), *range(len(scores), len(scores) + window)]


def tensors(
    heads: int, kv_heads: int, dim: int, window: int, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(length)
    return torch.randn(window, heads, dim).to(dtype) * 2, torch.randn(kv_heads, length, dim).to(dtype)


@DTYPES
@SHAPES
def test_scores_match_the_definition(
    heads: int, kv_heads: int, dim: int, window: int, length: int, dtype: torch.dtype
) -> None:
    q, k = tensors(heads, kv_heads, dim, window, length, dtype)
    found = key_scores(q, k, length=length, scale=dim**-0.5)
    wanted = exact_scores(q, k, length=length, scale=dim**-0.5)
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 1e-5


@SHAPES
def test_best_neighbourhoods_and_the_window_stay_in_order(
    heads: int, kv_heads: int, dim: int, window: int, length: int
) -> None:
    q, k = tensors(heads, kv_heads, dim, window, length, torch.float32)
    scores = key_scores(q, k, length=length, scale=0.3)
    for budget in (window, window + 1, length // 2, length - 1):
        kept = snapkv(q, k, length=length, scale=0.3, budget=budget)
        assert kept.tolist() == [chosen_by(row, budget=budget, window=window) for row in scores.tolist()]
        shared = snapkv(q, k, length=length, scale=0.3, budget=budget, shared=True)
        together = scores.double().sum(0)
        [all_heads] = shared.tolist()
        assert len(all_heads) == len(set(all_heads)) == budget
        # Sums in another order may differ in the last bit, so kept positions must only be as good as the definition's.
        pooled = torch.nn.functional.max_pool1d(together[None], 7, stride=1, padding=3)[0]
        wanted = chosen_by(together.tolist(), budget=budget, window=window)
        assert pooled[all_heads[: budget - window]].sum() >= pooled[wanted[: budget - window]].sum() - 1e-5


def test_lower_of_equal_positions_stay() -> None:
    q, k = torch.zeros(4, 2, 8), torch.zeros(2, 100, 8)
    kept = snapkv(q, k, length=100, scale=1.0, budget=10)
    assert kept.tolist() == [[0, 1, 2, 3, 4, 5, 96, 97, 98, 99]] * 2


@DTYPES
@SHAPES
def test_threads_and_later_keys_change_no_bit(
    heads: int, kv_heads: int, dim: int, window: int, length: int, dtype: torch.dtype
) -> None:
    q, k = tensors(heads, kv_heads, dim, window, length, dtype)
    wanted = key_scores(q, k, length=length, scale=0.2)
    longer = torch.cat((k, torch.randn(kv_heads, 150, dim).to(dtype)), 1)
    among_others = torch.randn(window + 9, heads, dim).to(dtype)
    among_others[5 : 5 + window] = q
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            again = key_scores(among_others[5 : 5 + window], longer, length=length, scale=0.2)
            assert torch.equal(again, wanted)
    finally:
        torch.set_num_threads(before)
