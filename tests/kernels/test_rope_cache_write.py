"""Rotation fused with the cache write: one launch equals `rope` and a copy, bit for bit, for both kinds of cache."""

import pytest
import torch
from kernel_cases.case import assert_bits
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.attention import rope_cache_write as triton_kernel
from moeyard_kernels.common.launch import checked
from moeyard_kernels.common.tuning import RowConfig
from moeyard_kernels.elementwise import rms_norm as norm_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
ANGLES = pytest.mark.parametrize("angle_dtype", [torch.float32, torch.bfloat16], ids=["angles-fp32", "angles-bf16"])
LAYOUT = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
PAGE = 16


def angles(num_tokens: int, half: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    phase = torch.randn(num_tokens, half)
    return phase.cos().to(dtype), phase.sin().to(dtype)


def slots_for(num_tokens: int, num_pages: int) -> torch.Tensor:
    slots = torch.randperm(num_pages * PAGE)[:num_tokens]
    slots[1::3] = -1
    return slots


def run_gqa(args: list[torch.Tensor], interleaved: bool, config: RowConfig | None = None) -> list[torch.Tensor]:
    on_device = [x.to(DEVICE, copy=True) if x.is_contiguous() else x.to(DEVICE) for x in args]
    out = triton_kernel.rope_cache_write_gqa(*on_device, interleaved=interleaved, config=config)
    return [x.cpu() for x in (out, *on_device[-2:])]


@pytest.mark.sampled(1)
@DTYPES
@ANGLES
@LAYOUT
@pytest.mark.parametrize(("num_q", "num_kv", "dim"), [(4, 1, 10), (9, 3, 32)], ids=lambda n: str(n))
def test_gqa_equals_rope_and_a_copy(
    num_q: int, num_kv: int, dim: int, interleaved: bool, angle_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    count = 3 if DEVICE == "cpu" else 200
    qkv = torch.randn(count, num_q + 2 * num_kv, dim).to(dtype)
    q, k, v = qkv[:, :num_q], qkv[:, num_q : num_q + num_kv], qkv[:, num_q + num_kv :]
    cos, sin = angles(count, dim // 2, angle_dtype)
    slots = slots_for(count, 20)
    caches = [torch.full((num_kv, 20, PAGE, dim), 7.0).to(dtype) for _ in range(2)]
    got = run_gqa([q, k, v, cos, sin, slots, *caches], interleaved)
    wanted = [cache.clone() for cache in caches]
    rotated = ops.rope(k, cos, sin, interleaved=interleaved)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[0][:, slot // PAGE, slot % PAGE] = rotated[t]
            wanted[1][:, slot // PAGE, slot % PAGE] = v[t]
    assert torch.equal(got[0], ops.rope(q, cos, sin, interleaved=interleaved))
    assert torch.equal(got[1], wanted[0])
    assert torch.equal(got[2], wanted[1])
    out = ops.rope_cache_write_gqa(q, k, v, cos, sin, slots, *caches, interleaved=interleaved)
    assert all(torch.equal(a, b) for a, b in zip((out, *caches), got, strict=True))


def normed_inputs(
    count: int, num_q: int, num_kv: int, dim: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return device inputs: q, k, v as slices of one product of many magnitudes, angles, slots, caches, norms."""
    qkv = torch.randn(count, num_q + 2 * num_kv, dim) * torch.exp2(torch.randint(-9, 9, (count, 1, 1)).float())
    rows = qkv.to(DEVICE, dtype).split((num_q, num_kv, num_kv), 1)
    others = (*angles(count, dim // 2, torch.float32), slots_for(count, count // PAGE + 2))
    caches = (torch.full((num_kv, count // PAGE + 2, PAGE, dim), 7.0).to(DEVICE, dtype) for _ in range(2))
    norms = torch.randn(2, dim).to(DEVICE, dtype)
    return [*rows, *(x.to(DEVICE) for x in others), *caches], (norms[0], norms[1])


def written(args: list[torch.Tensor], config: RowConfig | None = None, **options: object) -> tuple[torch.Tensor, ...]:
    """Return the kernel's result and its new caches."""
    caches = [cache.clone() for cache in args[-2:]]
    out = triton_kernel.rope_cache_write_gqa(*args[:-2], *caches, config=config, **options)  # type: ignore[arg-type]
    return out, *caches


def norms_first(args: list[torch.Tensor], norms: tuple[torch.Tensor, torch.Tensor], **options: object):  # type: ignore[no-untyped-def]
    """Run the chain: two norms, then rotation and cache write."""
    q, k = (norm_kernel.rms_norm(x, weight, 1e-6) for x, weight in zip(args[:2], norms, strict=True))
    return written([q, k, *args[2:]], **options)


@DTYPES
@LAYOUT
@pytest.mark.parametrize(
    ("num_q", "num_kv", "dim"),
    [(4, 1, 16), (9, 3, 128), *([(64, 4, 128), (8, 8, 64), (5, 2, 256), (3, 1, 48)] if DEVICE == "cuda" else [])],
    ids=lambda n: str(n),
)
def test_fused_head_norms_equal_the_chain(
    num_q: int, num_kv: int, dim: int, interleaved: bool, dtype: torch.dtype
) -> None:
    args, norms = normed_inputs(3 if DEVICE == "cpu" else 3000, num_q, num_kv, dim, dtype)
    wanted = norms_first(args, norms, interleaved=interleaved)
    named = {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6, "interleaved": interleaved}
    assert_bits("one launch", written(args, **named), wanted)
    if DEVICE == "cuda":
        for config in triton_kernel.normed_configs(dim):
            assert_bits(str(config), written(args, config, **named), wanted)
        alone = [x[17:18] for x in args[:-2]]
        got = triton_kernel.rope_cache_write_gqa(*alone, *(x.clone() for x in args[-2:]), **named)  # type: ignore[arg-type]
        assert_bits("a row alone", got, wanted[0][17:18])


@pytest.mark.sampled(1)
@DTYPES
@LAYOUT
@pytest.mark.parametrize("fp32_norms", [None, False, True], ids=["plain", "norms", "fp32-norms"])
@pytest.mark.parametrize(
    ("num_q", "num_kv", "dim", "turned"), [(3, 1, 48, 12), (8, 2, 256, 64), (5, 2, 32, 16)], ids=lambda n: str(n)
)
def test_part_of_a_head_is_rotated(
    num_q: int, num_kv: int, dim: int, turned: int, fp32_norms: bool | None, interleaved: bool, dtype: torch.dtype
) -> None:
    """The other values stay, normalised or not, in kernel and reference."""
    args, norms = normed_inputs(3 if DEVICE == "cpu" else 3000, num_q, num_kv, dim, dtype)
    q, k, v, cos, sin, slots, *caches = args
    cos, sin = cos[:, : turned // 2], sin[:, : turned // 2]
    named: dict[str, object] = {}
    plain_q, plain_k = q, k
    if fp32_norms is not None:
        weights = [weight.float() + 0.01 if fp32_norms else weight for weight in norms]
        named = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6}
        plain_q, plain_k = (norm_kernel.rms_norm(x, weight, 1e-6) for x, weight in zip((q, k), weights, strict=True))

    def chain(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((ops.rope(x[..., :turned], cos, sin, interleaved=interleaved), x[..., turned:]), 2)

    wanted = [cache.clone().flatten(1, 2) for cache in caches]
    written_at = slots >= 0
    wanted[0][:, slots[written_at]] = chain(plain_k)[written_at].transpose(0, 1)
    wanted[1][:, slots[written_at]] = v[written_at].transpose(0, 1)
    got = written([q, k, v, cos, sin, slots, *caches], interleaved=interleaved, **named)
    whole = chain(plain_q), *(x.view(cache.shape) for x, cache in zip(wanted, caches, strict=True))
    assert_bits("one launch", got, whole)
    ours = [x.cpu().clone() for x in caches]
    named = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in named.items()}
    out = ops.rope_cache_write_gqa(
        *(x.cpu() for x in (q, k, v, cos, sin, slots)),
        *ours,
        interleaved=interleaved,
        **named,  # type: ignore[arg-type]
    )
    for mine, theirs in zip((out, *ours), whole, strict=True):
        # Sums of squares in another order change a few roundings.
        scale = theirs.double().cpu().norm()
        assert (mine.double() - theirs.double().cpu()).norm() <= (2e-3 if dtype == torch.bfloat16 else 1e-6) * scale


def test_rotation_wider_than_a_head_is_refused() -> None:
    args, _ = normed_inputs(2, 2, 1, 16, torch.float32)
    cos = torch.randn(2, 12, device=DEVICE)
    with pytest.raises(ValueError, match=r"Dc 12 of cos float32 \[2, 12\], D 16 of q float32 \[2, 2, 16\]"):
        ops.rope_cache_write_gqa(*args[:3], cos, cos, *args[5:], interleaved=False)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 65])
def test_graph_replay_with_norms(count: int) -> None:
    args, norms = normed_inputs(count, 32, 4, 128, torch.bfloat16)
    named = {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6, "interleaved": False}
    assert_replays(lambda: written(args, **named), lambda: [x.normal_() for x in args[:3]])


def test_reference_normalises_like_rms_norm() -> None:
    args, norms = normed_inputs(5, 4, 2, 12, torch.bfloat16)
    args = [x.cpu() for x in args]
    q, k = (ops.rms_norm(x, weight.cpu(), 1e-6) for x, weight in zip(args[:2], norms, strict=True))
    wanted = [x.clone() for x in args[-2:]]
    got = [x.clone() for x in args[-2:]]
    out = ops.rope_cache_write_gqa(q, k, *args[2:-2], *wanted, interleaved=False)
    options = {"q_norm": norms[0].cpu(), "k_norm": norms[1].cpu(), "eps": 1e-6}
    assert_bits("one call", ops.rope_cache_write_gqa(*args[:-2], *got, interleaved=False, **options), out)
    assert_bits("caches", got, wanted)


def test_tiles_that_sum_heads_in_another_order_are_refused() -> None:
    assert set(triton_kernel.normed_configs(128)) == set(triton_kernel.CONFIGS)
    assert all(c.num_warps <= c.BLOCK // 4 for c in triton_kernel.normed_configs(64))
    assert {c.num_warps for c in triton_kernel.normed_configs(256)} == {4}
    args, norms = normed_inputs(1, 2, 1, 64, torch.float32)
    config = RowConfig(BLOCK=8, num_warps=4)
    with pytest.raises(ValueError, match=r"RowConfig\(.*BLOCK=8\) does not sum heads of 64 as rms_norm does"):
        written(args, config, q_norm=norms[0], k_norm=norms[1], eps=1e-6, interleaved=False)


def run_mla(args: list[torch.Tensor], interleaved: bool, config: RowConfig | None = None) -> list[torch.Tensor]:
    on_device = [x.to(DEVICE, copy=True) if x.is_contiguous() else x.to(DEVICE) for x in args]
    out = triton_kernel.rope_cache_write_mla(*on_device, interleaved=interleaved, config=config)
    return [x.cpu() for x in (out, on_device[-1])]


def mla_inputs(
    count: int, heads: int, latent: int, dim: int, dtype: torch.dtype, angle_dtype: torch.dtype
) -> list[torch.Tensor]:
    q = torch.randn(count, heads, 24 + dim).to(dtype)[:, :, 24:]
    rows = torch.randn(count, 8 + latent + dim).to(dtype)
    cache = torch.full((20, PAGE, latent + dim), 7.0).to(dtype)
    slots = slots_for(count, 20)
    return [q, rows[:, 8 : 8 + latent], rows[:, 8 + latent :], *angles(count, dim // 2, angle_dtype), slots, cache]


@pytest.mark.sampled(1)
@DTYPES
@ANGLES
@LAYOUT
@pytest.mark.parametrize(("heads", "latent", "dim"), [(5, 20, 10), (16, 64, 32)], ids=lambda n: str(n))
def test_mla_equals_rope_and_a_copy(
    heads: int, latent: int, dim: int, interleaved: bool, angle_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    args = mla_inputs(3 if DEVICE == "cpu" else 200, heads, latent, dim, dtype, angle_dtype)
    got = run_mla(args, interleaved)
    q, kv_a, k_rope, cos, sin, slots, cache = args
    wanted = cache.clone()
    rotated = ops.rope(k_rope.unsqueeze(1), cos, sin, interleaved=interleaved).squeeze(1)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot // PAGE, slot % PAGE] = torch.cat((kv_a[t], rotated[t]))
    assert torch.equal(got[0], ops.rope(q, cos, sin, interleaved=interleaved))
    assert torch.equal(got[1], wanted)
    out = ops.rope_cache_write_mla(*args, interleaved=interleaved)
    assert torch.equal(out, got[0])
    assert torch.equal(cache, wanted)


@DTYPES
@pytest.mark.parametrize("fp32_norm", [False, True], ids=["norm", "fp32-norm"])
@pytest.mark.parametrize(("heads", "latent", "dim"), [(5, 20, 10), (16, 512, 64)], ids=lambda n: str(n))
def test_fused_latent_norm_equals_the_chain(
    heads: int, latent: int, dim: int, fp32_norm: bool, dtype: torch.dtype
) -> None:
    """Kernel and reference agree. By default the norm is a separate launch."""
    count = 3 if DEVICE == "cpu" else 500
    q, kv_a, *rest, cache = mla_inputs(count, heads, latent, dim, dtype, torch.float32)
    if DEVICE == "cuda":
        cache = torch.full((count // PAGE + 2, PAGE, latent + dim), 7.0).to(dtype)
        rest[-1] = slots_for(count, count // PAGE + 2)
    kv_a = kv_a * torch.exp2(torch.randint(-9, 9, (count, 1)).float()).to(dtype)
    weight = torch.randn(latent).to(torch.float32 if fp32_norm else dtype)
    q, kv_a, *rest = (x.to(DEVICE) for x in (q, kv_a, *rest))
    named = {"kv_norm": weight.to(DEVICE), "eps": 1e-6, "interleaved": True}
    caches = [cache.to(DEVICE, copy=True) for _ in range(2)]
    latents = norm_kernel.rms_norm(kv_a, named["kv_norm"], 1e-6)
    wanted = triton_kernel.rope_cache_write_mla(q, latents, *rest, caches[0], interleaved=True)
    for config in (None, *(c for c in triton_kernel.CONFIGS if c.num_warps == norm_kernel.NUM_WARPS)):
        caches[1].fill_(7.0)
        got = triton_kernel.rope_cache_write_mla(q, kv_a, *rest, caches[1], config=config, **named)
        assert_bits(str(config), (got, caches[1]), (wanted, caches[0]))
    ours = [cache.clone() for _ in range(2)]
    *args, weight = (x.cpu() for x in (q, kv_a, *rest, weight))
    out = ops.rope_cache_write_mla(*args, ours[0], interleaved=True, kv_norm=weight, eps=1e-6)
    args[1] = ops.rms_norm(args[1], weight, 1e-6)
    assert_bits("reference", (out, ours[0]), (ops.rope_cache_write_mla(*args, ours[1], interleaved=True), ours[1]))
    with pytest.raises(ValueError, match=r"RowConfig\(.*\) does not sum latents as rms_norm does, with 4 warps"):
        triton_kernel.rope_cache_write_mla(q, kv_a, *rest, caches[1], config=RowConfig(BLOCK=8, num_warps=2), **named)


@pytest.mark.parametrize("config", triton_kernel.CONFIGS, ids=str)
def test_every_config_gives_the_same_bits(config: RowConfig) -> None:
    args = mla_inputs(1, 9, 20, 24, torch.bfloat16, torch.float32)
    for interleaved in (False, True):
        plain = run_mla(args, interleaved)
        assert all(torch.equal(a, b) for a, b in zip(run_mla(args, interleaved, config), plain, strict=True))


def test_caches_may_have_any_strides() -> None:
    q, kv, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    cos, sin = angles(3, 4, torch.float32)
    slots = torch.tensor([17, 0, 5])
    plain = [torch.zeros(2, 2, PAGE, 8, device=DEVICE) for _ in range(2)]
    other = [torch.zeros(2, PAGE, 2, 8, device=DEVICE).permute(2, 0, 1, 3) for _ in range(2)]
    inputs = [x.to(DEVICE) for x in (q, kv, v, cos, sin, slots)]
    for caches in (plain, other):
        triton_kernel.rope_cache_write_gqa(*inputs, *caches, interleaved=False)
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    assert bool(plain[0].any())


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 65])
def test_graph_replay_of_both_ops(count: int) -> None:
    *rows, slots, cache = (
        x.contiguous().to(DEVICE) for x in mla_inputs(count, 16, 64, 32, torch.bfloat16, torch.float32)
    )
    cos, sin = rows[3:]
    qkv = torch.randn(count, 8, 32).to(DEVICE, torch.bfloat16)
    caches = [torch.zeros(2, 20, PAGE, 32, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]

    def step() -> tuple[torch.Tensor, ...]:
        q, k, v = qkv.split((4, 2, 2), 1)
        for held in (cache, *caches):
            held.zero_()
        outs = (
            ops.rope_cache_write_mla(*rows, slots, cache, interleaved=True),
            ops.rope_cache_write_gqa(q, k, v, cos, sin, slots, *caches, interleaved=False),
        )
        return *outs, *(held.clone() for held in (cache, *caches))

    def refill() -> None:
        for x in (*rows, qkv):
            x.normal_()
        slots.copy_(slots_for(count, 20))

    assert_replays(step, refill)


def test_no_tokens() -> None:
    args = mla_inputs(0, 4, 16, 8, torch.float32, torch.float32)
    assert run_mla(args, True)[0].shape == (0, 4, 8)
    assert ops.rope_cache_write_mla(*args, interleaved=True).shape == (0, 4, 8)


def test_bad_arguments_are_named() -> None:
    args = mla_inputs(2, 4, 16, 8, torch.float32, torch.float32)
    names = ("q_rope", "kv_a", "k_rope", "cos", "sin", "slot_mapping", "cache")

    def refused(message: str, **changes: torch.Tensor) -> None:
        given = dict(zip(names, args, strict=True)) | changes
        with pytest.raises(ValueError, match=message):
            ops.rope_cache_write_mla(**given, interleaved=True)

    refused(
        r"kv_a float32 \[3, 16\], expected float32 \[2, R\] for q_rope float32 \[2, 4, 8\]", kv_a=torch.zeros(3, 16)
    )
    refused(
        r"k_rope float32 \[2, 6\], expected float32 \[2, 8\] for q_rope float32 \[2, 4, 8\]", k_rope=torch.zeros(2, 6)
    )
    refused(r"slot_mapping int32 \[2\], expected int64 \[2\]", slot_mapping=args[5].int())
    refused(r"cache float32 \[20, 16, 23\]", cache=torch.zeros(20, PAGE, 23))
    refused(r"slot_mapping .* holds 3 to 320, outside -1 to 319", slot_mapping=torch.tensor([3, 320]))
    args[5] = torch.tensor([-2, 0])
    with checked(), pytest.raises(ValueError, match=r"slot_mapping int64 \[2\] holds -2 to 0, outside -1 to 319"):
        triton_kernel.rope_cache_write_mla(*(x.to(DEVICE) for x in args), interleaved=True)
    q, cos, cache = torch.zeros(2, 4, 8), torch.zeros(2, 4), torch.zeros(2, 3, PAGE, 8)
    with pytest.raises(ValueError, match=r"k_cache float32 \[2, 3, 16, 8\]"):
        ops.rope_cache_write_gqa(q, q, q, cos, cos, torch.zeros(2).long(), cache, cache, interleaved=False)
    with pytest.raises(
        ValueError, match=r"v float32 \[2, 2, 8\], expected float32 \[2, 4, 8\] for k float32 \[2, 4, 8\]"
    ):
        ops.rope_cache_write_gqa(q, q, q[:, :2], cos, cos, torch.zeros(2).long(), cache, cache, interleaved=False)
    cache = torch.zeros(4, 3, PAGE, 8)
    with pytest.raises(
        ValueError, match=r"q_norm float32 \[8\], k_norm None, expected \(q_norm is None\) == \(k_norm is None\)"
    ):
        ops.rope_cache_write_gqa(q, q, q, cos, cos, args[5], cache, cache, interleaved=False, q_norm=q[0, 0])
    norms = {"q_norm": q[0, 0], "k_norm": q[0, 0, :4]}
    with pytest.raises(ValueError, match=r"k_norm float32 \[4\], expected float32 \[8\] for q float32 \[2, 4, 8\]"):
        ops.rope_cache_write_gqa(q, q, q, cos, cos, args[5], cache, cache, interleaved=False, **norms)


def test_first_slot_of_the_cache_is_written() -> None:
    q, k, v = (torch.randn(2, 2, 8) for _ in range(3))
    caches = [torch.zeros(2, 1, PAGE, 8) for _ in range(2)]
    *_, v_cache = run_gqa([q, k, v, *angles(2, 4, torch.float32), torch.tensor([0, -1]), *caches], False)
    assert torch.equal(v_cache[:, 0, 0], v[0])
