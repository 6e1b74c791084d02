"""Bench of prompt attention: one long prompt (GQA, rows and pages; MLA), and the chunks of a busy step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_cases.case import Case, Target, assert_bits
from kernel_cases.model_steps import DIM_V, NOPE, PROMPT_ROWS, ROPE, Grouped, Latent, ModelStep
from moeyard_kernels.attention import attn_prefill_varlen as kernel
from moeyard_kernels.types.prefill_plan import PrefillPlan, plan_prefill

OPS: tuple[str, ...] = ("attn_prefill_varlen",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Heads and dimensions, the chunks (length, start) of a step, and the page size (0: contiguous rows).

    rope: all heads share the last `rope` values of a key, as when keys are decompressed from latents.
    """

    name: str
    heads: int
    kv_heads: int
    dim_k: int
    dim_v: int
    chunks: tuple[tuple[int, int], ...]
    page: int = 0
    rope: int = 0
    target: Target | None = None
    # Whether this shape decides configs. Others of its class are only timed.
    tuned: bool = True

    @property
    def num_keys(self) -> int:
        return sum(length + start for length, start in self.chunks)

    @property
    def num_pairs(self) -> float:
        """Visible (query, key) pairs. A causal square counts as half, as is usual."""
        return sum(length * (start + length / 2) for length, start in self.chunks)


_LONG = ((16384, 0),)
_MIXED = ((2048, 30720), (4096, 0), (1024, 7168), (512, 512), (37, 1000), (1, 4095))
SHAPES = (
    Shape(name="GQA 16k", heads=32, kv_heads=8, dim_k=128, dim_v=128, chunks=_LONG, target=Target("tflops", 400)),
    Shape(
        name="GQA 16k pages",
        heads=32,
        kv_heads=8,
        dim_k=128,
        dim_v=128,
        chunks=_LONG,
        page=64,
        target=Target("tflops", 400),
    ),
    Shape(name="MLA 16k", heads=16, kv_heads=16, dim_k=192, dim_v=128, chunks=_LONG, target=Target("tflops", 330)),
    Shape(
        name="MLA 16k 64h",
        heads=64,
        kv_heads=64,
        dim_k=192,
        dim_v=128,
        chunks=_LONG,
        target=Target("tflops", 330),
        tuned=False,
    ),
    Shape(name="GQA mixed pages", heads=32, kv_heads=4, dim_k=128, dim_v=128, chunks=_MIXED, page=64, tuned=False),
    Shape(name="MLA mixed", heads=16, kv_heads=16, dim_k=192, dim_v=128, chunks=_MIXED, tuned=False),
    Shape(name="GQA few rows", heads=32, kv_heads=4, dim_k=128, dim_v=128, chunks=((256, 7936),), page=64),
    Shape(name="MLA few rows", heads=16, kv_heads=16, dim_k=192, dim_v=128, chunks=((256, 7936),)),
    Shape(name="GQA d64 16k", heads=32, kv_heads=8, dim_k=64, dim_v=64, chunks=_LONG),
)

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, PrefillPlan]


def _inputs(shape: Shape) -> Inputs:
    """Return q, keys, values and the shared part of keys in the layout of the shape, and the plan."""
    torch.manual_seed(0)
    lens, starts = [n for n, _ in shape.chunks], [start for _, start in shape.chunks]
    q = torch.randn(sum(lens), shape.heads, shape.dim_k, device="cuda", dtype=torch.bfloat16)
    if not shape.page:
        plan = plan_prefill(lens, starts, device="cuda")
        if not shape.rope:
            return q, *_randn(shape, shape.num_keys, shape.kv_heads), None, plan
        # Views of one product's result, and of a latent's rows.
        nope, width = shape.dim_k - shape.rope, shape.dim_k - shape.rope + shape.dim_v
        kv = torch.randn(shape.num_keys, shape.kv_heads, width, device="cuda", dtype=torch.bfloat16)
        rows = torch.randn(shape.num_keys, 512 + shape.rope, device="cuda", dtype=torch.bfloat16)
        return q, kv[..., :nope], kv[..., nope:], rows[:, 512:], plan
    counts = [-(-(n + start) // shape.page) for n, start in shape.chunks]
    order = torch.randperm(sum(counts)).split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    plan = plan_prefill(lens, starts, page_table=table, page_size=shape.page, device="cuda")
    return q, *_randn(shape, shape.kv_heads, sum(counts), shape.page), None, plan


def _randn(shape: Shape, *sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.randn(*sizes, d, device="cuda", dtype=torch.bfloat16) for d in (shape.dim_k, shape.dim_v))
    return k, v


def _configs(shape: Shape) -> tuple[kernel.PrefillConfig, ...]:
    """Return all configs but the default. With wider heads not all of them fit."""
    return kernel.CONFIGS if shape.dim_k <= 192 else ()


def _prove(shape: Shape) -> None:
    """Prove on short lengths: chunks = whole, alone = in a batch, every config = every other, near float64."""
    small = replace(shape, chunks=((700, 0), (1, 300), (333, 129)))
    q, k, v, k_rope, plan = _inputs(small)
    scale = shape.dim_k**-0.5
    whole, _ = kernel.attn_prefill_varlen(q, k, v, plan=plan, scale=scale, k_rope=k_rope)
    for config in _configs(shape):
        got, _ = kernel.attn_prefill_varlen(q, k, v, plan=plan, scale=scale, k_rope=k_rope, config=config)
        assert_bits(f"{config}", got, whole)
    row = 0
    for b, (length, start) in enumerate(small.chunks):
        keys, values = _keys_of(small, b, k, plan), _keys_of(small, b, v, plan)
        shared = None if k_rope is None else _keys_of(small, b, k_rope, plan)
        for begin in range(0, length, 100):
            end = min(begin + 100, length)
            alone, _ = kernel.attn_prefill_varlen(
                q[row + begin : row + end],
                keys[: start + end],
                values[: start + end],
                plan=plan_prefill([end - begin], [start + begin], device="cuda"),
                scale=scale,
                k_rope=None if shared is None else shared[: start + end],
            )
            assert_bits(f"chunk {b} from {begin} alone", alone, whole[row + begin : row + end])
        group = shape.heads // shape.kv_heads
        if shared is not None:
            keys = torch.cat((keys, shared.unsqueeze(1).expand(-1, shape.kv_heads, -1)), 2)
        scores = torch.einsum("thd,lhd->htl", q[row : row + length].double(), keys.double().repeat_interleave(group, 1))
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(start + 1)
        p = (scores * scale).masked_fill(hidden, float("-inf")).softmax(-1)
        wanted = torch.einsum("htl,lhd->thd", p, values.double().repeat_interleave(group, 1))
        error = (whole[row : row + length].double() - wanted).norm() / wanted.norm()
        assert error < 1e-2, f"chunk {b}: {error:.1e} from float64"
        row += length


def _keys_of(shape: Shape, b: int, x: torch.Tensor, plan: PrefillPlan) -> torch.Tensor:
    """Return keys or values of chunk b as contiguous rows [L, Hkv, D]."""
    length, start = shape.chunks[b]
    if plan.page_table is not None:
        pages = plan.page_table[b, : -(-(length + start) // shape.page)].long()
        return x.index_select(1, pages).flatten(1, 2).transpose(0, 1)[: length + start].contiguous()
    first = sum(n + s for n, s in shape.chunks[:b])
    return x[first : first + length + start]


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _baseline(shape: Shape, q: torch.Tensor) -> partial[torch.Tensor]:
    """Return torch's flash attention over a whole prompt, with key heads repeated before."""
    k, v = _randn(shape, 1, shape.kv_heads, shape.num_keys)
    group = shape.heads // shape.kv_heads
    return partial(_sdpa, q.transpose(0, 1)[None], k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))


def cases() -> Iterator[Case]:
    yield from map(_case, SHAPES)


def model_cases(models: Sequence[ModelStep], rows: Sequence[int]) -> Iterator[Case]:
    """Yield one prompt of each number of rows, over pages or, with latent attention, over its decompressed keys."""
    for kind in dict.fromkeys(kind for model in models for kind in model.attention):
        for num_rows in rows:
            if num_rows not in PROMPT_ROWS:
                continue
            name, chunks = f"T{num_rows}", ((num_rows, 0),)
            if isinstance(kind, Grouped):
                yield _case(
                    Shape(
                        name=f"{name} pages",
                        heads=kind.heads,
                        kv_heads=kind.kv_heads,
                        dim_k=kind.dim,
                        dim_v=kind.dim,
                        chunks=chunks,
                        page=64,
                    )
                )
            elif isinstance(kind, Latent):
                yield _case(
                    Shape(
                        name=f"{name} decompressed",
                        heads=kind.heads,
                        kv_heads=kind.heads,
                        dim_k=NOPE + ROPE,
                        dim_v=DIM_V,
                        chunks=chunks,
                        rope=ROPE,
                    )
                )


def _case(shape: Shape) -> Case:
    q, k, v, k_rope, plan = _inputs(shape)
    run = partial(kernel.attn_prefill_varlen, q, k, v, plan=plan, scale=shape.dim_k**-0.5, k_rope=k_rope)
    # One prompt from its start.
    whole = len(shape.chunks) == 1 and shape.chunks[0][1] == 0 and (shape.chunks != _LONG or not shape.page)
    dims = shape.heads * (shape.dim_k + shape.dim_v)
    key_values = shape.kv_heads * (shape.dim_k - shape.rope + shape.dim_v) + shape.rope
    return Case(
        op="attn_prefill_varlen",
        shape=f"{shape.name}: {shape.heads}/{shape.kv_heads} heads, {shape.dim_k}/{shape.dim_v}",
        run=run,
        prove=partial(_prove, shape),
        num_bytes=2 * (q.shape[0] * dims + shape.num_keys * key_values),
        num_flops=int(2 * dims * shape.num_pairs),
        target=shape.target,
        baseline=_baseline(shape, q) if whole else None,
        baseline_name="torch sdpa" if whole else "",
        variants=[(config, partial(run, config=config)) for config in _configs(shape) if shape.tuned],
        tune_key=("attn_prefill_varlen", kernel.shape_class(q, v, plan)),
    )
