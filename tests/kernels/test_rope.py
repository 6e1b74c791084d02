"""Rotary embedding against the functions of the Hugging Face models."""

import pytest
import torch
from tests.kernels.graphs import assert_replays
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

from moeyard_kernels import ops
from moeyard_kernels.attention import rope as triton_kernel
from moeyard_kernels.common.tuning import RowConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def angles(num_tokens: int, dim: int) -> torch.Tensor:
    return torch.outer(torch.arange(num_tokens).float(), 10000.0 ** -(torch.arange(0, dim, 2) / dim))


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dim", [2, 10, 64])
def test_equals_transformers(dim: int, interleaved: bool, dtype: torch.dtype) -> None:
    x = torch.randn(9, 3, dim).to(dtype)
    phase = angles(9, dim)
    cos, sin = phase.cos().to(dtype), phase.sin().to(dtype)
    theirs = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    wanted, _ = theirs(x[None], x[None], cos.repeat(1, 2)[None], sin.repeat(1, 2)[None], unsqueeze_dim=2)
    assert torch.equal(ops.rope(x, cos, sin, interleaved=interleaved), wanted[0])
    assert torch.equal(ops.rope(x, cos.repeat(1, 2), sin.repeat(1, 2), interleaved=interleaved), wanted[0])


@DTYPES
def test_equals_deepseek_v2_up_to_the_order_of_pairs(dtype: torch.dtype) -> None:
    x, phase = torch.randn(9, 3, 16).to(dtype), angles(9, 16)
    wanted, _ = apply_rotary_emb(
        x.transpose(0, 1)[None], x.transpose(0, 1)[None], torch.polar(torch.ones_like(phase), phase)[None]
    )
    wanted = wanted[0].transpose(0, 1)
    y = ops.rope(x, phase.cos(), phase.sin(), interleaved=True)
    assert y.dtype == dtype
    halves = torch.cat((wanted[..., 0::2], wanted[..., 1::2]), -1)
    # Their complex product may fuse one of its two products. bf16 rounds that away except in rare half-way cases.
    torch.testing.assert_close(y, halves, rtol=0, atol=1e-6 if dtype == torch.float32 else 2.0**-7)


@DTYPES
def test_rows_are_independent(dtype: torch.dtype) -> None:
    x, phase = torch.randn(40, 5, 24).to(dtype), angles(40, 24)
    whole = ops.rope(x, phase.cos(), phase.sin(), interleaved=True)
    for t in (0, 17, 39):
        row = slice(t, t + 1)
        assert torch.equal(ops.rope(x[row], phase[row].cos(), phase[row].sin(), interleaved=True), whole[row])
    assert ops.rope(x[:0], phase[:0].cos(), phase[:0].sin(), interleaved=False).shape == (0, 5, 24)


def run_kernel(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, config: RowConfig | None = None
) -> torch.Tensor:
    x, cos, sin = x.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE)
    return triton_kernel.rope(x, cos, sin, interleaved=interleaved, config=config).cpu()


@pytest.mark.sampled(1)
@DTYPES
@pytest.mark.parametrize("angle_dtype", [torch.float32, torch.bfloat16], ids=["angles-fp32", "angles-bf16"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(("num_heads", "dim"), [(3, 2), (1, 10), (9, 64)], ids=lambda n: str(n))
def test_kernel_equals_the_reference_bit_for_bit(
    num_heads: int, dim: int, interleaved: bool, angle_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    count = 2 if DEVICE == "cpu" else 300
    x, phase = torch.randn(count, num_heads, dim).to(dtype), angles(count, dim) + 0.3
    cos, sin = phase.cos().to(angle_dtype), phase.sin().to(angle_dtype)
    wanted = ops.rope(x, cos, sin, interleaved=interleaved)
    assert torch.equal(run_kernel(x, cos, sin, interleaved), wanted)
    wide = torch.cat((cos, sin), 1)
    wide_x = torch.cat((torch.zeros(count, num_heads, 16).to(dtype), x), 2)
    assert torch.equal(run_kernel(wide_x[:, :, 16:], wide[:, : dim // 2], wide[:, dim // 2 :], interleaved), wanted)
    assert run_kernel(x[:0], cos[:0], sin[:0], interleaved).shape == (0, num_heads, dim)


@pytest.mark.parametrize("config", triton_kernel.CONFIGS, ids=str)
def test_every_config_gives_the_same_bits(config: RowConfig) -> None:
    # Tokens have several blocks each with most configs.
    x, phase = torch.randn(2, 9, 24).bfloat16(), angles(3, 24)[1:]
    for interleaved in (False, True):
        wanted = ops.rope(x, phase.cos(), phase.sin(), interleaved=interleaved)
        assert torch.equal(run_kernel(x, phase.cos(), phase.sin(), interleaved, config), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 65])
def test_graph_replay(num_tokens: int) -> None:
    x, (cos, sin) = (
        torch.randn(num_tokens, 32, 128).to(DEVICE, torch.bfloat16),
        torch.randn(2, num_tokens, 64).to(DEVICE),
    )

    def step() -> tuple[torch.Tensor, ...]:
        return tuple(ops.rope(x, cos, sin, interleaved=interleaved) for interleaved in (False, True))

    assert_replays(step, lambda: (x.normal_(), cos.normal_(), sin.normal_()))


def test_tensors_beyond_the_grid_are_refused() -> None:
    x, angle = torch.zeros(1, 1, 16).expand(1 << 31, 1, 16), torch.zeros(1, 8).expand(1 << 31, 8)
    with pytest.raises(ValueError, match=r"rope: \[2147483648, 1, 16\] exceeds the grid"):
        triton_kernel.rope(x, angle, angle, interleaved=False)


def test_bad_arguments_are_named() -> None:
    x, cos = torch.zeros(2, 3, 4), torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"x float32 \[2, 3, 5\], expected float32 or bfloat16 \[T, heads, 2 half\]"):
        ops.rope(torch.zeros(2, 3, 5), cos, cos, interleaved=False)
    with pytest.raises(ValueError, match=r"Dc 3 of cos float32 \[2, 3\], half 2 of x float32 \[2, 3, 4\]"):
        ops.rope(x, torch.zeros(2, 3), torch.zeros(2, 3), interleaved=False)
    with pytest.raises(ValueError, match=r"sin float32 \[2, 4\], expected float32 \[2, 2\] for cos float32 \[2, 2\]"):
        ops.rope(x, cos, torch.zeros(2, 4), interleaved=False)
    with pytest.raises(ValueError, match=r"x float32 \[2, 3, 4\] with strides \(1, 8, 2\) is not contiguous"):
        triton_kernel.rope(torch.zeros(3, 4, 2).permute(2, 0, 1), cos, cos, interleaved=False)
