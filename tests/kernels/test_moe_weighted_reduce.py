"""The weighted reduce: reference and Triton kernel equal exact rational arithmetic, bit for bit."""

import itertools
import random
from fractions import Fraction

import pytest
import torch
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.common.tuning import RowConfig
from moeyard_kernels.experts import moe_weighted_reduce as triton_kernel
from moeyard_kernels.ops import experts as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def round_to_fp32(exact: Fraction) -> float:
    """Return the fp32 value nearest to `exact`, ties to even, computed with integers."""
    magnitude = abs(exact)
    # floor(log2(magnitude)) is this or one less. fp32 has 24 bits, and steps of at least 2^-149.
    top = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    top -= magnitude < Fraction(2) ** top
    unit = Fraction(2) ** max(top - 23, -149)
    steps, rest = divmod(magnitude, unit)
    if rest * 2 > unit or (rest * 2 == unit and steps % 2):
        steps += 1
    value = float(steps * unit)
    return -value if exact < 0 else value


def exact_chain(x: torch.Tensor, w: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    """Return [T, H] fp32 of the documented chain, one Fraction at a time."""
    out = torch.empty(x.shape[0], x.shape[2])
    for t, h in itertools.product(range(x.shape[0]), range(x.shape[2])):
        acc = 0.0
        for k in range(x.shape[1]):
            acc = round_to_fp32(Fraction(w[t, k].item()) * Fraction(x[t, k, h].item()) + Fraction(acc))
        if shared is not None:
            acc = round_to_fp32(Fraction(acc) + Fraction(shared[t, h].item()))
        out[t, h] = acc
    return out


def run_kernel(
    x: torch.Tensor,
    w: torch.Tensor,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    config: RowConfig | None = None,
) -> torch.Tensor:
    x, w = x.to(DEVICE), w.to(DEVICE)
    shared = None if shared is None else shared.to(DEVICE)
    residual = None if residual is None else residual.to(DEVICE)
    return triton_kernel.moe_weighted_reduce(x, w, shared, residual, config=config).cpu()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("with_shared", [False, True], ids=["routed", "shared"])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden"),
    [(2, 1, 40), (1, 2, 33), (3, 3, 1), (1, 4, 257), (2, 5, 31), (1, 6, 64), (1, 7, 17), (1, 8, 1025)],
    ids=lambda n: str(n),
)
def test_kernel_and_reference_equal_the_exact_chain(
    num_tokens: int, top_k: int, hidden: int, with_shared: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(num_tokens, top_k, hidden).to(dtype)
    w = torch.rand(num_tokens, top_k)
    shared = torch.randn(num_tokens, hidden).to(dtype) if with_shared else None
    from_kernel = run_kernel(x, w, shared)
    from_reference = ops.moe_weighted_reduce(x, w, shared)
    wanted = exact_chain(x, w, shared).to(dtype)
    assert from_kernel.dtype == from_reference.dtype == dtype
    assert torch.equal(bits(from_kernel), bits(wanted))
    assert torch.equal(bits(from_reference), bits(wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("with_shared", [False, True], ids=["routed", "shared"])
def test_residual_is_added_to_the_rounded_sum(with_shared: bool, dtype: torch.dtype) -> None:
    x, w, residual = torch.randn(3, 8, 300).to(dtype), torch.rand(3, 8), torch.randn(3, 300).to(dtype)
    shared = torch.randn(3, 300).to(dtype) if with_shared else None
    fused = run_kernel(x, w, shared, residual)
    assert torch.equal(bits(fused), bits(residual + run_kernel(x, w, shared)))
    assert torch.equal(bits(fused), bits(ops.moe_weighted_reduce(x, w, shared, residual)))


@pytest.mark.parametrize("config", triton_kernel.CONFIGS, ids=str)
def test_every_config_gives_the_same_bits(config: RowConfig) -> None:
    x, w, shared = torch.randn(1, 3, 300).bfloat16(), torch.rand(1, 3), torch.randn(1, 300).bfloat16()
    wanted = ops.moe_weighted_reduce(x, w, shared)
    assert torch.equal(bits(run_kernel(x, w, shared, config=config)), bits(wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [2048, 7168])
def test_row_is_the_same_in_every_batch(hidden: int) -> None:
    x, w, shared = torch.randn(4096, 8, hidden).bfloat16(), torch.rand(4096, 8), torch.randn(4096, hidden).bfloat16()
    whole = run_kernel(x, w, shared)
    for rows in (slice(0, 1), slice(4095, 4096), slice(17, 81)):
        part = run_kernel(x[rows], w[rows], shared[rows])
        assert torch.equal(bits(part), bits(whole[rows]))
        assert torch.equal(bits(part), bits(ops.moe_weighted_reduce(x[rows], w[rows], shared[rows])))


def near_powers_of_two(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Return pairs of integers below 2^24 whose product differs from 2^47 by less than 2^17, but is not 2^47."""
    pairs = []
    while len(pairs) < count:
        m = rng.randrange(2**23 + 1, 2**24)
        for n in (2**47 // m, 2**47 // m + 1):
            if 2**23 < n < 2**24 and 0 < abs(m * n - 2**47) < 2**17:
                pairs.append((m, n))
    return pairs


@pytest.mark.parametrize("scale", [0, -40, 60, -126], ids=["at-1", "at-2^-40", "at-2^60", "subnormal"])
def test_sums_near_a_midpoint_round_once(scale: int, request: pytest.FixtureRequest) -> None:
    rng = random.Random(request.node.name)
    cases, weights = [], []
    for m, n in near_powers_of_two(rng, 64):
        # The accumulator is `start`. The product is half of its last place, plus or minus a bit that fp64 cannot hold.
        start = rng.choice((1, -1)) * (2**23 + rng.randrange(2**23))
        half = scale - 23 - 1 - 47
        w, x = m * 2.0 ** (half // 2), rng.choice((1, -1)) * n * 2.0 ** (half - half // 2)
        cases.append([start * 2.0 ** (scale - 23), x, rng.random() * 2.0**scale])
        weights.append([1.0, w, rng.random()])
    x, w = torch.tensor(cases).unsqueeze(2), torch.tensor(weights)
    once = exact_chain(x[:, :2], w[:, :2], None)
    twice = torch.addcmul(x[:, 0].double(), w[:, 1:2].double(), x[:, 1].double()).float()
    assert not torch.equal(once, twice), "these cases do not test double rounding"
    assert torch.equal(bits(ops.moe_weighted_reduce(x[:, :2], w[:, :2])), bits(once))
    assert torch.equal(bits(ops.moe_weighted_reduce(x, w)), bits(exact_chain(x, w, None)))
    # The kernel gets all 64 columns in one token, because it costs per program. The weight moves to the column's data.
    wide = torch.stack((x[:, 0, 0], w[:, 1])).unsqueeze(0)
    same_weight = torch.tensor([[1.0, x[0, 1, 0].item()]])
    assert torch.equal(bits(run_kernel(wide, same_weight, None)), bits(exact_chain(wide, same_weight, None)))
    assert torch.equal(bits(ops.moe_weighted_reduce(wide, same_weight)), bits(exact_chain(wide, same_weight, None)))


def test_wide_range_of_magnitudes() -> None:
    column, pair = torch.randint(-75, 30, (1, 1, 150)), torch.randint(-15, 16, (2, 4, 150))
    x = torch.randn(2, 4, 150) * torch.exp2((column + pair).float())
    w = torch.rand(2, 4) * torch.exp2(torch.randint(-60, -50, (2, 4)).float())
    x[:, :, ::7] = 0
    wanted = exact_chain(x, w, None)
    assert ((wanted != 0) & (wanted.abs() < 2.0**-126)).any(), "no subnormal sum among the cases"
    assert torch.equal(bits(ops.moe_weighted_reduce(x, w)), bits(wanted))
    if DEVICE == "cpu":  # a GPU gives the same unless it flushes subnormals
        assert torch.equal(bits(run_kernel(x, w, None)), bits(wanted))


def test_chain_to_odd_equals_the_quick_one_and_carries_infinities() -> None:
    x, w = torch.randn(4, 6, 50).double(), torch.rand(4, 6, 1).double()
    x, w = x.float().double(), w.float().double()
    assert torch.equal(reference._chain(w, x), reference._chain_to_odd(w, x))
    x[0, 2, 0], x[1, 3, 1], x[2, 0, 2], x[2, 1, 2] = float("inf"), float("nan"), float("inf"), float("-inf")
    for chain in (reference._chain, reference._chain_to_odd):
        out = chain(w, x)
        assert out[0, 0] == float("inf")
        assert out[1, 1].isnan()
        assert out[2, 2].isnan()
        assert out.isfinite().sum() == out.numel() - 3


def test_pieces_and_neighbours_change_no_bit() -> None:
    x, w, shared = torch.randn(150, 4, 512), torch.rand(150, 4), torch.randn(150, 512)
    whole = ops.moe_weighted_reduce(x, w, shared)
    for t in (0, 63, 64, 149):
        assert torch.equal(ops.moe_weighted_reduce(x[t : t + 1], w[t : t + 1], shared[t : t + 1]), whole[t : t + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_tokens(dtype: torch.dtype) -> None:
    x, w = torch.zeros(0, 4, 8, dtype=dtype), torch.zeros(0, 4)
    assert run_kernel(x, w, None).shape == ops.moe_weighted_reduce(x, w).shape == (0, 8)


def test_order_of_experts_is_the_callers() -> None:
    x, w = torch.randn(8, 4, 64), torch.rand(8, 4)
    turned = ops.moe_weighted_reduce(x.flip(1), w.flip(1))
    assert not torch.equal(turned, ops.moe_weighted_reduce(x, w))
    torch.testing.assert_close(turned, ops.moe_weighted_reduce(x, w))


def test_kernel_refuses_too_large_grids() -> None:
    x = torch.empty(1).expand(1, 1, 65536 * 1024)
    with pytest.raises(ValueError, match=r"\[1, 1, 67108864\] exceeds the grid"):
        triton_kernel.moe_weighted_reduce(x, torch.ones(1, 1), config=RowConfig(BLOCK=1024))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 65])
def test_graph_replay(num_tokens: int) -> None:
    x, shared, residual = (
        torch.randn(*shape, device=DEVICE).bfloat16()
        for shape in ((num_tokens, 8, 2048), (num_tokens, 2048), (num_tokens, 2048))
    )
    w = torch.rand(num_tokens, 8, device=DEVICE)
    assert_replays(
        lambda: (ops.moe_weighted_reduce(x, w, shared, residual), ops.moe_weighted_reduce(x, w)),
        lambda: (x.normal_(), w.uniform_(), shared.normal_(), residual.normal_()),
    )


def test_bad_arguments_are_named() -> None:
    x, w = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"partial float16 \[2, 3, 4\], expected float32 or bfloat16 \[T, K, H\]"):
        ops.moe_weighted_reduce(x.half(), w)
    with pytest.raises(
        ValueError, match=r"weights float32 \[2, 2\], expected float32 \[2, 3\] for partial float32 \[2, 3, 4\]"
    ):
        ops.moe_weighted_reduce(x, w[:, :2])
    with pytest.raises(
        ValueError, match=r"shared float32 \[1, 4\], expected float32 \[2, 4\] for partial float32 \[2, 3, 4\]"
    ):
        ops.moe_weighted_reduce(x, w, torch.zeros(1, 4))
    with pytest.raises(
        ValueError, match=r"residual bfloat16 \[2, 4\], expected float32 \[2, 4\] for partial float32 \[2, 3, 4\]"
    ):
        ops.moe_weighted_reduce(x, w, None, torch.zeros(2, 4).bfloat16())
    with pytest.raises(ValueError, match=r"partial float32 \[2, 3, 4\] with strides .* is not contiguous"):
        triton_kernel.moe_weighted_reduce(torch.zeros(3, 2, 4).transpose(0, 1), w)
