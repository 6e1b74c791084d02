"""The gated delta rule on a CPU: values against the rule in float64, and bits that do not depend on the batch."""

import pytest
import torch

from moeyard_kernels.cpu.delta import CHUNK, DeltaRows, chunk_delta_rule, step_delta_rule
from moeyard_kernels.ops.elementwise import gated_rms_norm, rows_apart
from moeyard_kernels.ops.linear_attention import causal_conv1d, gated_delta_rule

# Key heads, value heads, Dk, Dv. The last is Qwen3-Next's, with a quarter of its heads.
HEADS = [(2, 4, 16, 16), (1, 3, 18, 10), (4, 4, 64, 32), (4, 8, 128, 128)]
SLOTS = [3, 1, 8, 0, 5, 2, 7]


# These have a rate for each row of the state. The last is Kimi-Linear's with an eighth of its heads.
BY_ROW = [(2, 2, 16, 8, True), (3, 3, 18, 10, True), (4, 4, 128, 128, True)]


def make_inputs(length: int, heads: tuple[int, ...], seed: int) -> tuple[torch.Tensor, ...]:
    """Return q, k, v, g, beta of `length` positions. Some heads (or rows) forget at once, some hardly."""
    num_k, num_v, k_dim, v_dim = heads[:4]
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(length, num_k, k_dim, generator=generator) for _ in range(2))
    v = torch.randn(length, num_v, v_dim, generator=generator)
    rates = (num_v, k_dim) if heads[4:] else (num_v,)
    g = -torch.rand(length, *rates, generator=generator) * torch.logspace(-3, 1.5, rates[-1])
    beta = torch.rand(length, num_v, generator=generator)
    return q / q.norm(dim=-1, keepdim=True) * k_dim**-0.5, k / k.norm(dim=-1, keepdim=True), v, g, beta


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("heads", HEADS + BY_ROW, ids=str)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
def test_chunks_compute_the_rule(heads: tuple[int, ...], length: int, seed: int) -> None:
    inputs = make_inputs(length, heads, seed)
    state = torch.randn(heads[1], *heads[2:4], generator=torch.Generator().manual_seed(seed + 1))
    kept = state.clone()
    out = chunk_delta_rule(DeltaRows(*inputs), kept)
    wanted, left = gated_delta_rule(*inputs, state.double())
    assert relative(out, wanted) < 1e-5
    assert relative(kept, left) < 1e-5


@pytest.mark.parametrize("heads", [(1, 2, 16, 16), (2, 2, 16, 16, True)], ids=str)
def test_long_prompts_keep_their_precision(heads: tuple[int, ...], seed: int) -> None:
    inputs = make_inputs(4096, heads, seed)
    out = chunk_delta_rule(DeltaRows(*inputs), torch.zeros(2, 16, 16))
    wanted, _ = gated_delta_rule(*inputs, torch.zeros(2, 16, 16, dtype=torch.float64))
    assert relative(out, wanted) < 1e-5


@pytest.mark.parametrize("heads", HEADS + BY_ROW, ids=str)
def test_prompt_chunks_change_no_bit(heads: tuple[int, ...], seed: int) -> None:
    inputs = make_inputs(500, heads, seed)
    first = torch.randn(heads[1], *heads[2:4], generator=torch.Generator().manual_seed(seed))
    whole = first.clone()
    out = chunk_delta_rule(DeltaRows(*inputs), whole)
    for cut in (CHUNK, 3 * CHUNK, 5 * CHUNK):
        kept = first.clone()
        parts = [chunk_delta_rule(DeltaRows(*(x[i : i + cut] for x in inputs)), kept) for i in range(0, 500, cut)]
        assert torch.equal(torch.cat(parts), out), cut
        assert torch.equal(kept, whole), cut
    # Later positions of a chunk do not affect earlier ones.
    assert torch.equal(chunk_delta_rule(DeltaRows(*(x[:470] for x in inputs)), first.clone()), out[:470])


@pytest.mark.parametrize("heads", HEADS + BY_ROW, ids=str)
def test_steps_compute_the_rule_in_any_batch(heads: tuple[int, ...], seed: int) -> None:
    q, k, v, g, beta = make_inputs(len(SLOTS), heads, seed)
    decay, slots = g.exp() if heads[4:] else g.exp().unsqueeze(-1), torch.tensor(SLOTS)
    states = torch.randn(9, heads[1], *heads[2:4], generator=torch.Generator().manual_seed(seed))
    together, alone = states.clone(), states.clone()
    out = step_delta_rule(DeltaRows(q, k, v, decay, beta), together, slots, slots)
    for i, slot in enumerate(SLOTS):
        one = slice(i, i + 1)
        mine = step_delta_rule(DeltaRows(q[one], k[one], v[one], decay[one], beta[one]), alone, slots[one], slots[one])
        assert torch.equal(mine, out[one])
        wanted, left = gated_delta_rule(q[one], k[one], v[one], g[one], beta[one], states[slot].double())
        assert relative(mine, wanted) < 1e-5
        assert relative(alone[slot], left) < 1e-5
    assert torch.equal(alone, together)
    unnamed = [i for i in range(9) if i not in SLOTS]
    assert torch.equal(together[unnamed], states[unnamed])
    # Other slots keep their content when results are written for two rows or for one.
    for count in (2, 1):
        some, others, apart = slice(count), torch.tensor(unnamed[:count]), states.clone()
        inputs = (each[some] for each in (q, k, v, decay, beta))
        assert torch.equal(step_delta_rule(DeltaRows(*inputs), apart, slots[some], others), out[some])
        assert torch.equal(apart[others], together[slots[some]])
        assert torch.equal(apart[slots], states[slots])


@pytest.mark.parametrize("size", [2, 4])
def test_convolution(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(20, 7, generator=generator), torch.randn(7, size, generator=generator)
    before = torch.randn(size - 1, 7, generator=generator)
    out = causal_conv1d(x, weight, before)
    inputs = torch.cat((before, x)).double()
    wanted = torch.nn.functional.conv1d(inputs.t()[None], weight.double()[:, None], groups=7)[0].t()
    assert relative(out, wanted) < 1e-6
    for i in range(20):
        assert torch.equal(causal_conv1d(x[i : i + 1], weight, torch.cat((before, x))[i : i + size - 1])[0], out[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_gated_norm(dtype: torch.dtype, sigmoid: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, gate = (torch.randn(9, *shape, generator=generator).to(dtype) for shape in ((3, 10), (30,)))
    weight = torch.rand(10, generator=generator).to(dtype)
    out = gated_rms_norm.reference(x, gate, weight, 1e-6, sigmoid=sigmoid)
    wide, opened = x.double(), gate.double().sigmoid() * (1 if sigmoid else gate.double())
    wanted = (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()).flatten(1) * opened
    assert out.dtype == dtype
    assert relative(out, wanted) < (1e-6 if dtype == torch.float32 else 2e-2)
    for i in range(9):
        assert torch.equal(
            gated_rms_norm.reference(x[i : i + 1], gate[i : i + 1], weight, 1e-6, sigmoid=sigmoid)[0], out[i]
        )


def test_elementwise_functions_ignore_neighbour_rows(seed: int) -> None:
    x = torch.randn(33, 13, generator=torch.Generator().manual_seed(seed)) * 3
    for function in (torch.sigmoid, torch.nn.functional.silu, torch.nn.functional.softplus, torch.exp):
        whole = function(rows_apart(x))
        for count in (1, 2, 5, 8):
            assert torch.equal(function(rows_apart(x[4 : 4 + count])), whole[4 : 4 + count])
