"""Scores that a prompt's last queries give its keys: kernel and reference against float64, bits in any surroundings."""

import pytest
import torch
from tests.kernels.cpu.test_snapkv import chosen_by, exact_scores

from moeyard_kernels import ops
from moeyard_kernels.attention import snapkv_scores as triton_kernel
from moeyard_kernels.common.snapkv import best, sum_rows
from moeyard_kernels.cpu.attn_prefill import key_scores, snapkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# Query heads, key heads, dimension of a key, its part that all heads share, window, length.
SHAPES = pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "shared", "window", "length"),
    [
        (8, 2, 64, 0, 32, 300),
        (3, 3, 48, 16, 5, 64),
        (5, 1, 32, 0, 17, 129),
        (4, 2, 16, 0, 1, 40),
        # Several splits, where only some queries see the last.
        (2, 1, 16, 0, 40, 1040),
        (2, 2, 48, 16, 3, 1025),
    ],
)


def tensors(
    heads: int, kv_heads: int, dim: int, window: int, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(window, heads, dim).to(dtype) * 2, torch.randn(kv_heads, length, dim).to(dtype)


def scores(q: torch.Tensor, k: torch.Tensor, *, shared: int = 0, **arguments: object) -> torch.Tensor:
    """Run the kernel with `k` [Hkv, N, D]. All heads share the last `shared` values of head 0."""
    q, k = q.to(DEVICE), k.to(DEVICE)
    if shared:
        arguments["k_rope"] = k[0, :, -shared:]
        k = k[..., :-shared]
    arguments = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    return triton_kernel.snapkv_scores(q, k, **arguments).cpu()  # type: ignore[arg-type]


def one_for_all(k: torch.Tensor, shared: int) -> torch.Tensor:
    if shared:
        k[..., -shared:] = k[0, :, -shared:]
    return k


@DTYPES
@SHAPES
def test_scores_match_the_definition(
    heads: int, kv_heads: int, dim: int, shared: int, window: int, length: int, dtype: torch.dtype
) -> None:
    q, k = tensors(heads, kv_heads, dim, window, length, dtype)
    k = one_for_all(k, shared)
    wanted = exact_scores(q, k, length=length, scale=dim**-0.5)
    found = scores(q, k, shared=shared, length=length, scale=dim**-0.5)
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 1e-5
    reference = ops.snapkv_scores(q, k, length=length, scale=dim**-0.5)
    assert (reference - wanted).abs().max() < 1e-5
    assert (found - key_scores(q, k, length=length, scale=dim**-0.5)).abs().max() < 1e-5


@SHAPES
def test_kept_positions_equal_those_of_a_cpu(
    heads: int, kv_heads: int, dim: int, shared: int, window: int, length: int
) -> None:
    q, k = tensors(heads, kv_heads, dim, window, length, torch.float32)
    k = one_for_all(k, shared)
    found = scores(q, k, shared=shared, length=length, scale=0.3)
    for budget in (window, window + 1, length // 2, length - 1):
        if budget < window:
            continue
        kept = best(found, length=length, budget=budget)
        assert kept.tolist() == [chosen_by(row, budget=budget, window=window) for row in found.tolist()]
        assert torch.equal(kept, snapkv(q, k, length=length, scale=0.3, budget=budget))
        together = best(sum_rows(found)[None], length=length, budget=budget)
        assert torch.equal(together, snapkv(q, k, length=length, scale=0.3, budget=budget, shared=True))


@pytest.mark.sampled(0)
@DTYPES
@SHAPES
def test_placement_of_keys_changes_no_bit(
    heads: int,
    kv_heads: int,
    dim: int,
    shared: int,
    window: int,
    length: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys are in pages of any order among pages of NaN, the window is among other rows, and heads run one by one."""
    q, k = tensors(heads, kv_heads, dim, window, length, dtype)
    k = one_for_all(k, shared)
    wanted = scores(q, k, shared=shared, length=length, scale=0.2)
    places = torch.randperm(length + 70)[:length]
    scattered = torch.full((kv_heads, length + 70, dim), float("nan"), dtype=dtype)
    scattered[:, places] = k
    among_others = torch.randn(window + 9, heads, dim).to(dtype)
    among_others[5 : 5 + window] = q
    again = scores(
        among_others[5 : 5 + window],
        scattered,
        shared=shared,
        length=length,
        scale=0.2,
        rows=torch.cat((places, torch.zeros(9, dtype=torch.int64))),
    )
    assert torch.equal(again, wanted)
    monkeypatch.setattr(triton_kernel, "_MAX_PARTIAL", 1)
    assert torch.equal(scores(q, k, shared=shared, length=length, scale=0.2), wanted)


def test_large_scores_do_not_overflow() -> None:
    q, k = torch.full((4, 1, 16), 60.0), torch.randn(1, 100, 16) * 60
    found = scores(q, k, length=100, scale=1.0)
    assert (found - exact_scores(q, k, length=100, scale=1.0)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(4, 3, 32)}, r"Hkv 2 of k float32 \[2, 40, 32\], Hq 3 of q float32 \[4, 3, 32\]"),
        ({"q": torch.zeros(4, 4, 16)}, r"D 16 of q float32 \[4, 4, 16\], Dk 32 of k float32 \[2, 40, 32\], Dr 0"),
        ({"length": 4}, r"W 4 of q float32 \[4, 4, 32\], length 4, expected 1 <= W < length"),
        ({"length": 41}, r"length 41, rows None, N 40 of k float32 \[2, 40, 32\], known 0"),
        ({"rows": torch.zeros(39, dtype=torch.int64)}, r"length 40, rows int64 \[39\], N 40 of k .*, known 39"),
        ({"rows": torch.zeros(40, dtype=torch.int32)}, r"rows int32 \[40\], expected int64 \[known\]"),
        ({"k": torch.zeros(2, 40, 32).bfloat16()}, r"k bfloat16 \[2, 40, 32\], expected float32 \[Hkv, N, Dk\] for q"),
        ({"k": torch.zeros(2, 32, 40).transpose(1, 2)}, "not contiguous in its last dimension"),
        ({"k_rope": torch.zeros(39, 16)}, r"k_rope float32 \[39, 16\], expected float32 \[40, Dr\] for k"),
        ({"scale": 0.0}, r"scale 0\.0, expected scale > 0"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(changes: dict[str, object], message: str) -> None:
    arguments = {"q": torch.zeros(4, 4, 32), "k": torch.zeros(2, 40, 32), "length": 40, "scale": 1.0, **changes}
    q, k = arguments.pop("q"), arguments.pop("k")
    with pytest.raises(ValueError, match=message):
        ops.snapkv_scores(q, k, **arguments)  # type: ignore[arg-type]


def test_arguments_that_only_the_kernel_refuses() -> None:
    with pytest.raises(ValueError, match=r"rows int64 .* holds 0 to 40, outside 0 to 39"):
        triton_kernel.snapkv_scores(
            torch.zeros(1, 2, 16), torch.zeros(2, 40, 16), length=3, scale=1.0, rows=torch.tensor([0, 40, 3])
        )
    with pytest.raises(ValueError, match="expected 32 and 16 wide"):
        triton_kernel.snapkv_scores(
            torch.zeros(1, 2, 48), torch.zeros(2, 40, 16), length=3, scale=1.0, k_rope=torch.zeros(40, 32)
        )
