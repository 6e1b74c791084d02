"""Attention of several prompt chunks: the Triton kernel and its reference give the same bits for every chunking."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from tests.kernels.decode_cases import assert_same, relative
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.attention import attn_prefill_varlen as triton_kernel
from moeyard_kernels.attention.prefill_configs import PrefillConfig
from moeyard_kernels.common import launch
from moeyard_kernels.types.prefill_plan import TILE, PrefillPlan, plan_prefill

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE = DEVICE == "cuda"
NAN = float("nan")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# Query heads, key heads, Dk, Dv. The interpreter uses small shapes.
GQA, MLA = ((32, 8, 128, 128), (16, 16, 192, 128)) if NATIVE else ((2, 1, 32, 32), (1, 1, 48, 16))
WIDE = pytest.mark.parametrize(
    "shape", [GQA, MLA, *([(8, 2, 64, 64)] if NATIVE else [])], ids=lambda s: f"{s[0]}-{s[1]}h-d{s[2]}"
)


@dataclass(frozen=True)
class Prompt:
    """One sequence: q [L, Hq, Dk], k [L, Hkv, Dk], v [L, Hkv, Dv]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.q.shape[2]) ** -0.5


def make_prompt(length: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Prompt:
    heads, kv_heads, dim_k, dim_v = shape
    sizes = ((heads, dim_k), (kv_heads, dim_k), (kv_heads, dim_v))
    return Prompt(*(torch.randn(length, *size).to(DEVICE, dtype) for size in sizes))


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PrefillPlan, scale: float, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernel's output and LSE, written into poisoned memory."""
    with launch.checked():
        out, lse = triton_kernel.attn_prefill_varlen(q, k, v, plan=plan, scale=scale, return_lse=True, **options)
    assert lse is not None
    return out, lse


def run_chunks(
    prompt: Prompt, cuts: Sequence[int], window: int | None = None, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the prompt in chunks that end at `cuts`, one launch each. Keys after a chunk are NaN."""
    parts = []
    for begin, end in itertools.pairwise((0, *cuts)):
        k, v = (torch.cat((x[:end], torch.full_like(x[:70], NAN))) for x in (prompt.k, prompt.v))
        plan = plan_prefill([end - begin], [begin], window=window, device=DEVICE)
        parts.append(run(prompt.q[begin:end], k, v, plan, prompt.scale, **options))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def exact(prompt: Prompt, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE in float64, computed from the definition."""
    length, group = prompt.q.shape[0], prompt.q.shape[1] // prompt.k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (prompt.k, prompt.v))
    scores = torch.einsum("thd,lhd->htl", prompt.q.double(), k) * prompt.scale
    position = torch.arange(length, device=DEVICE)
    far = position[:, None] - position
    scores = scores.masked_fill((far < 0) | (far >= (window or length)), float("-inf"))
    return torch.einsum("htl,lhd->thd", scores.softmax(-1), v), scores.logsumexp(-1).T


def chain(prompt: Prompt, window: int | None) -> torch.Tensor:
    """Return what torch computes in the dtype of the inputs, one operation after the other."""
    length, group = prompt.q.shape[0], prompt.q.shape[1] // prompt.k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (prompt.k, prompt.v))
    scores = torch.bmm(prompt.q.transpose(0, 1), k.transpose(1, 2)) * prompt.scale
    position = torch.arange(length, device=DEVICE)
    far = position[:, None] - position
    scores = scores.masked_fill((far < 0) | (far >= (window or length)), float("-inf"))
    return torch.bmm(scores.float().softmax(-1).to(v.dtype), v).transpose(0, 1)


def pick(config: PrefillConfig, dtype: torch.dtype) -> PrefillConfig | None:
    """Return the config, or None for fp32 on a GPU, which has only the default."""
    return None if NATIVE and dtype == torch.float32 else config


@DTYPES
@WIDE
@pytest.mark.parametrize("window", [None, 50, *([1, 128, 700] if NATIVE else [])], ids=lambda w: f"window-{w}")
def test_chunks_and_configs_change_no_bit(
    shape: tuple[int, int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    length = (1500 if dtype == torch.bfloat16 else 230) if NATIVE else 140
    prompt = make_prompt(length, shape, dtype)
    whole = run_chunks(prompt, [length], window)
    wanted, wanted_lse = exact(prompt, window)
    assert relative(whole[0], wanted) <= (1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert relative(whole[0], wanted) <= relative(chain(prompt, window), wanted) or dtype == torch.float32
    assert (whole[1] - wanted_lse).abs().max() < 1e-4

    for size in (7, 64, 100, 1000) if NATIVE else (100,):
        cuts = [*range(size, length, size), length]
        assert_same(run_chunks(prompt, cuts, window), whole, f"chunks of {size}")
    assert_same(run_chunks(prompt, [1, 129, 130, length], window), whole, "odd chunks")
    # The interpreter ignores warps and stages.
    configs = triton_kernel.CONFIGS if NATIVE else triton_kernel.CONFIGS[4:6]
    for config in configs:
        if config.kernel == "hopper" and window:
            continue
        chosen = pick(config, dtype)
        assert_same(run_chunks(prompt, [length], window, config=chosen), whole, f"{config}")
        if NATIVE:
            assert_same(run_chunks(prompt, [100, 223, length], window, config=chosen), whole, f"{config} in chunks")


@pytest.mark.gpu  # too slow for the interpreter
@pytest.mark.parametrize("shape", [GQA, MLA], ids=["gqa", "mla"])
def test_every_position_alone(shape: tuple[int, int, int, int]) -> None:
    prompt = make_prompt(300, shape, torch.bfloat16)
    assert_same(run_chunks(prompt, range(1, 301)), run_chunks(prompt, [300]), "one by one")


def as_pages(
    chunks: Sequence[Prompt], ends: Sequence[int], page: int, spare: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (k cache, v cache, page table): pages in random order, NaN at unused positions."""
    counts = [-(-end // page) for end in ends]
    order = torch.randperm(sum(counts) + spare).tolist()
    table = torch.full((len(ends), max(counts, default=0) + 1), -1)
    caches = []
    for name in ("k", "v"):
        first = getattr(chunks[0], name)
        cache = torch.full((first.shape[1], len(order), page, first.shape[2]), NAN, dtype=first.dtype, device=DEVICE)
        at = 0
        for b, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
            table[b, : counts[b]] = torch.tensor(order[at : at + counts[b]], dtype=torch.int64)
            rows = getattr(chunk, name)
            for i in range(counts[b]):
                part = rows[i * page : min(end, (i + 1) * page)]
                cache[:, order[at + i], : part.shape[0]] = part.transpose(0, 1)
            at += counts[b]
        caches.append(cache)
    return caches[0], caches[1], table


@pytest.mark.parametrize(
    ("page", "dtype"),
    [*itertools.product((16, 64, 256), (torch.float32, torch.bfloat16))]
    if NATIVE
    else [(16, torch.float32), (128, torch.bfloat16)],
    ids=lambda x: f"page-{x}" if isinstance(x, int) else {torch.float32: "fp32", torch.bfloat16: "bf16"}[x],
)
@pytest.mark.parametrize("window", [None, 70], ids=["full", "window"])
def test_batch_over_pages_equals_each_chunk_alone(page: int, window: int | None, dtype: torch.dtype) -> None:
    scale = 3 if NATIVE else 1
    starts, q_lens = [0, 100 * scale, 33, 0, 64, 128 * scale], [70 * scale, 40, 0, 1, 65 * scale, 1]
    prompts = [make_prompt(start + n, GQA, dtype) for start, n in zip(starts, q_lens, strict=True)]
    ends = [start + n for start, n in zip(starts, q_lens, strict=True)]
    q = torch.cat([p.q[start:] for p, start in zip(prompts, starts, strict=True)])
    k, v, table = as_pages(prompts, ends, page, spare=3)
    plan = plan_prefill(q_lens, starts, page_table=table, page_size=page, window=window, device=DEVICE)
    got = run(q, k, v, plan, prompts[0].scale)
    rows = (torch.cat([getattr(p, name) for p in prompts]) for name in ("k", "v"))
    flat = run(q, *rows, plan_prefill(q_lens, starts, window=window, device=DEVICE), prompts[0].scale)
    assert_same(got, flat, "pages or rows")
    if NATIVE and not window and dtype == torch.bfloat16:
        k_rows, v_rows = (torch.cat([getattr(p, name) for p in prompts]) for name in ("k", "v"))
        plan_rows = plan_prefill(q_lens, starts, device=DEVICE)
        hopper = run(q, k_rows, v_rows, plan_rows, prompts[0].scale, config=triton_kernel.CONFIGS[0])
        assert_same(hopper, flat, "rows, by the Gluon kernel")
    at = 0
    for b, prompt in enumerate(prompts):
        alone = run(
            prompt.q[starts[b] :],
            prompt.k,
            prompt.v,
            plan_prefill([q_lens[b]], [starts[b]], window=window, device=DEVICE),
            prompt.scale,
        )
        assert_same((got[0][at : at + q_lens[b]], got[1][at : at + q_lens[b]]), alone, f"chunk {b} alone")
        at += q_lens[b]
    if not NATIVE:
        reference = ops.attn_prefill_varlen(q, k, v, plan=plan, scale=prompts[0].scale, return_lse=True)
        torch.testing.assert_close(got[0], reference[0], rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
        torch.testing.assert_close(got[1], reference[1], rtol=1e-5, atol=1e-5)
    for config in triton_kernel.CONFIGS if NATIVE else triton_kernel.CONFIGS[-1:]:
        if config.kernel == "hopper" and (window or page < 64):
            continue
        assert_same(run(q, k, v, plan, prompts[0].scale, config=pick(config, dtype)), got, f"{config}")


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
def test_strided_parts_and_a_shared_key_part(dtype: torch.dtype) -> None:
    heads, _, dim_k, dim_v = MLA
    first = triton_kernel.split_dim(dim_k)[0]
    length = 200
    product = torch.randn(length, heads, first + dim_v).to(DEVICE, dtype)
    latent = torch.randn(length, 512 + dim_k - first).to(DEVICE, dtype)
    q = torch.randn(length, 3 * heads, dim_k).to(DEVICE, dtype)[:, heads : 2 * heads]
    k, v, rope = product[..., :first], product[..., first:], latent[:, 512:]
    plan = plan_prefill([length], [0], device=DEVICE)
    whole = torch.cat((k, rope[:, None].expand(-1, heads, -1)), -1)
    wanted = run(q.contiguous(), whole, v.contiguous(), plan, 0.1)
    plain = (PrefillConfig(kernel="pointers", BM=64), PrefillConfig(kernel="descriptors", BM=64))
    for config in (*plain, triton_kernel.CONFIGS[0]):
        assert_same(run(q, k, v, plan, 0.1, k_rope=rope, config=config), wanted, f"{config}")
    if not NATIVE:
        from_door, none = ops.attn_prefill_varlen(q, k, v, plan=plan, scale=0.1, k_rope=rope)
        assert none is None
        assert torch.equal(from_door, ops.attn_prefill_varlen(q, whole, v, plan=plan, scale=0.1)[0])


def make_step(
    num_rows: int, shape: tuple[int, int, int, int], paged: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q of `num_rows`, and keys and values in 32 pages of 64 or 1024 rows, in bf16."""
    heads, kv_heads, dim_k, dim_v = shape
    sizes = (kv_heads, 32, 64) if paged else (1024, kv_heads)
    q, k, v = (torch.randn(*size) for size in ((num_rows, heads, dim_k), (*sizes, dim_k), (*sizes, dim_v)))
    return q.to(DEVICE, torch.bfloat16), k.to(DEVICE, torch.bfloat16), v.to(DEVICE, torch.bfloat16)


def plan_step(q_lens: Sequence[int], starts: Sequence[int], paged: bool) -> PrefillPlan:
    """Return a plan for `make_step` with up to 10 pages per chunk."""
    table = torch.randperm(32)[: 10 * len(q_lens)].view(-1, 10) if paged else None
    return plan_prefill(q_lens, starts, page_table=table, page_size=64 if paged else 0, device=DEVICE)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("config", [None, *triton_kernel.CONFIGS[:3]], ids=str)
@pytest.mark.parametrize("shape", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_spare_tiles_change_no_bit(paged: bool, shape: tuple[int, int, int, int], config: PrefillConfig | None) -> None:
    """A captured step (`StepInputs`) has unused rows, and tiles of an empty chunk."""
    q, k, v = make_step(300, shape, paged)
    plan = plan_step([200, 60, 0], [300, 0, 0], paged)
    spare = torch.tensor([[2, 0]] * 5, dtype=torch.int32, device=DEVICE)
    roomy = replace(plan, num_rows=300, tiles=torch.cat((plan.tiles, spare)))
    wanted = run(q[:260], k, v, plan, 0.1)
    got = run(q, k, v, roomy, 0.1, config=config)
    assert_same(tuple(x[:260] for x in got), wanted, f"{config}")


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, triton_kernel.CONFIGS[0], triton_kernel.CONFIGS[2]], ids=str)
@pytest.mark.parametrize("shape", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_graph_replay_with_other_chunks(
    paged: bool, shape: tuple[int, int, int, int], config: PrefillConfig | None
) -> None:
    q, k, v = make_step(260, shape, paged)

    def step(plan: PrefillPlan) -> tuple[torch.Tensor, ...]:
        return triton_kernel.attn_prefill_varlen(q, k, v, plan=plan, scale=0.1, return_lse=True, config=config)

    plan = plan_step([200, 60], [300, 0], paged)

    def refill() -> None:
        for x in (q, k, v):
            x.normal_()
        # The number of tiles stays the same.
        other = plan_step(*next(chunks), paged)
        for name in ("cu_q", "starts", "tiles", "page_table" if paged else "cu_kv"):
            getattr(plan, name).copy_(getattr(other, name))

    chunks = iter((([180, 80], [17, 500]), ([128, 132], [512, 0]), ([200, 60], [301, 1])))
    assert_replays(lambda: step(plan), refill)


def test_reference_follows_the_definition() -> None:
    prompts = [make_prompt(n, (4, 2, 32, 32), torch.float32) for n in (90, 30)]
    q = torch.cat((prompts[0].q[20:], prompts[1].q)).cpu()
    k, v = (torch.cat((getattr(prompts[0], n), getattr(prompts[1], n))).cpu() for n in ("k", "v"))
    out = ops.attn_prefill_varlen(q, k, v, plan=plan_prefill([70, 30], [20, 0]), scale=0.2, return_lse=True)
    for prompt, start, at in ((prompts[0], 20, slice(0, 70)), (prompts[1], 0, slice(70, 100))):
        keys, values = (x.cpu().transpose(0, 1).double().repeat_interleave(2, 0) for x in (prompt.k, prompt.v))
        scores = torch.einsum("thd,hld->thl", prompt.q[start:].cpu().double(), keys)
        mask = torch.arange(keys.shape[1]) > torch.arange(start, keys.shape[1])[:, None]
        scores = (scores * 0.2).masked_fill(mask[:, None], float("-inf"))
        wanted, lse = torch.einsum("thl,hld->thd", scores.softmax(-1), values), scores.logsumexp(-1)
        torch.testing.assert_close(out[0][at].double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out[1][at].double(), lse, rtol=1e-5, atol=1e-5)


def test_order_of_heads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = make_prompt(140, (4, 2, 32, 32), torch.bfloat16)
    whole = run_chunks(prompt, [140])
    assert triton_kernel._near(2, 4) == 2
    monkeypatch.setattr(triton_kernel, "_WAVE", 1)
    assert triton_kernel._near(2, 4) == 1
    assert_same(run_chunks(prompt, [140]), whole, "one key head at a time")


def test_large_and_equal_scores() -> None:
    prompt = make_prompt(150, GQA, torch.float32)
    spiky = Prompt(prompt.q * 30, prompt.k * 30, prompt.v)
    assert relative(run_chunks(spiky, [150])[0], exact(spiky, None)[0]) < 1e-3
    flat = Prompt(prompt.q * 0, prompt.k, torch.ones_like(prompt.v))
    assert torch.equal(run_chunks(flat, [150])[0], torch.ones_like(prompt.q[..., : prompt.v.shape[2]]))


def test_nothing_to_do() -> None:
    heads, kv_heads, dim_k, dim_v = GQA
    q, k = torch.zeros(0, heads, dim_k, device=DEVICE), torch.zeros(5, kv_heads, dim_k, device=DEVICE)
    for lens, starts in (([], []), ([0], [5]), ([0, 0], [2, 3])):
        out, lse = run(q, k, k[..., :dim_v], plan_prefill(lens, starts, device=DEVICE), 1.0)
        assert out.shape == (0, heads, dim_v)
        assert lse.shape == (0, heads)


def test_tiles_cover_every_row_once_and_long_ones_come_first() -> None:
    q_lens, starts = [300, 0, 1, 128, 129], [0, 7, 1000, 40, 0]
    tiles = plan_prefill(q_lens, starts).tiles.tolist()
    wanted = [(b, row) for b, n in enumerate(q_lens) for row in range(0, n, TILE)]
    assert sorted(map(tuple, tiles)) == wanted
    begins = [starts[b] + row for b, row in tiles]
    assert begins == sorted(begins, reverse=True)


def test_bad_arguments_are_named() -> None:
    q, k = torch.zeros(4, 4, 32), torch.zeros(6, 2, 32)
    cache, table = torch.zeros(2, 3, 16, 32), torch.tensor([[2, 9]])
    plan, paged = plan_prefill([4], [2]), plan_prefill([4], [2], page_table=table, page_size=16)

    def call(q: torch.Tensor, k: torch.Tensor, plan: PrefillPlan = plan, **options: object) -> None:
        ops.attn_prefill_varlen(q, k, k, **({"plan": plan, "scale": 1.0} | options))

    for message, function in (
        (r"k float32 \[2, 3, 16, 32\], v float32 \[2, 3, 16, 32\] do not fit a flat plan", lambda: call(q, cache)),
        (r"do not fit a paged plan", lambda: call(q, k, paged)),
        (r"D 32 of q float32 \[4, 4, 32\], Dk 16 of k float32 \[6, 2, 16\], Dr 0", lambda: call(q, k[..., :16])),
        (r"3 query heads over 2 key heads", lambda: call(q[:, :3], k)),
        (
            r"k bfloat16 \[6, 2, 32\], expected float32 \[\.\.\., Dk\] for q float32 \[4, 4, 32\]",
            lambda: call(q, k.bfloat16()),
        ),
        (r"strides \(64, 1, 2\) is not contiguous", lambda: call(q, k.transpose(1, 2).contiguous().transpose(1, 2))),
        (r"plan\.num_rows 4, T 3 of q float32 \[3, 4, 32\], expected plan\.num_rows == T", lambda: call(q[:3], k)),
        (r"the plan is for 6 rows of keys, k is float32 \[5, 2, 32\]", lambda: call(q, k[:5])),
        (r"pages of 16, k is float32 \[2, 3, 8, 32\]", lambda: call(q, cache[:, :, :8], paged)),
        (r"contiguous only", lambda: call(q, cache.transpose(0, 1).contiguous().transpose(0, 1), paged)),
        (r"scale 0\.0, expected scale > 0", lambda: call(q, k, scale=0.0)),
        (
            r"k_rope float32 \[5, 16\], plan\.page_size 0, k\.shape torch\.Size\(\[6, 2, 32\]\), L 5 of",
            lambda: call(q, k, k_rope=torch.zeros(5, 16)),
        ),
        (r"page_table holds -1", lambda: plan_prefill([4], [2], page_table=-table // 9, page_size=16)),
        (r"6 positions exceed 2 pages of 2", lambda: plan_prefill([4], [2], page_table=table, page_size=2)),
        (r"page_size 24 is no power of two", lambda: plan_prefill([4], [2], page_table=table, page_size=24)),
        (r"q_lens \[4\] and starts \[\] do not fit", lambda: plan_prefill([4], [])),
        (r"window 0 is not positive", lambda: plan_prefill([4], [2], window=0)),
    ):
        with pytest.raises(ValueError, match=message):
            function()
    beyond = plan_prefill([4], [20], page_table=table, page_size=16)
    with pytest.raises(ValueError, match="names page 9, k is"):
        call(q, cache, beyond)


def test_kernel_refuses_unsupported_shapes() -> None:
    plan = plan_prefill([4], [2], device=DEVICE)
    for dim_k, dim_v, message in ((40, 32, "head dimension 40"), (32, 48, "value dimension 48")):
        q, k, v = (torch.zeros(n, 2, d, device=DEVICE) for n, d in ((4, dim_k), (6, dim_k), (6, dim_v)))
        with pytest.raises(ValueError, match=message):
            run(q, k, v, plan, 1.0)
    cache = torch.zeros(2, 3, 16, 32, device=DEVICE)
    beyond = plan_prefill([4], [30], page_table=torch.tensor([[2, 0, 9]]), page_size=16, device=DEVICE)
    with pytest.raises(ValueError, match=r"page_table int32 \[1, 3\] holds 0 to 9, outside 0 to 2"):
        run(torch.zeros(4, 4, 32, device=DEVICE), cache, cache, beyond, 1.0)
