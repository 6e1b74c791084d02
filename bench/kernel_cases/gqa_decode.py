"""Bench of grouped decode attention: 32 query heads over 4 key heads of 128 (Qwen3-30B-A3B), 32 over 8 (Mixtral)."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from kernel_cases.case import Case, Target
from kernel_cases.mla_decode import LENGTHS, prove_rows
from kernel_cases.model_steps import DECODE_ROWS, Grouped, ModelStep
from moeyard_kernels import ops
from moeyard_kernels.attention import gqa_decode as kernel
from moeyard_kernels.types.decode_tables import GQA_SPLIT, DecodeTables

OPS: tuple[str, ...] = ("gqa_decode",)

_PAGE = 64
_MODELS = ((32, 4), (64, 4), (32, 8))
# Query heads, key heads, sequences, queries each, context, target, and the width of a head if it is not 128.
_SHAPES: tuple[tuple[Any, ...], ...] = (
    (32, 4, 64, 1, 8192, Target("copy", 0.8)),
    (32, 4, 64, 1, 2048, None),
    (32, 8, 64, 1, 8192, None),
    (32, 4, 1, 1, 65536, None),
    # Several splits, whose programs leave multiprocessors free.
    *((*heads, batch, 1, length, None) for heads in _MODELS for batch, length in ((1, 1024), (2, 8192), (8, 1024))),
    (32, 4, 8, 4, 8192, None),
    # One split, whose time is latency: Qwen3-30B-A3B, Qwen3-235B-A22B, Mixtral.
    *((*heads, batch, 1, length, None) for heads in _MODELS for batch in (1, 8, 64) for length in (128, 256, 512)),
    # Qwen3.5-35B-A3B.
    *((16, 2, batch, 1, length, None, 256) for batch in (1, 64) for length in (256, 8192)),
)


def cases() -> Iterator[Case]:
    """Yield the shape of the table, then others of interest."""
    for shape in _SHAPES:
        yield decode_case(*shape)


def model_cases(models: Sequence[ModelStep], rows: Sequence[int]) -> Iterator[Case]:
    """Yield one row per sequence, behind short and long contexts."""
    for kind in dict.fromkeys(kind for model in models for kind in model.attention):
        for batch in rows:
            if isinstance(kind, Grouped) and batch in DECODE_ROWS:
                for length in LENGTHS:
                    yield decode_case(kind.heads, kind.kv_heads, batch, 1, length, None, kind.dim)


def _torch_chain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int) -> torch.Tensor:
    """Attend to contiguous keys, without pages or a mask between the queries: less than the op does."""
    dim = k.shape[-1]
    keys, values = (x.view(x.shape[0] * batch, -1, dim) for x in (k, v))
    queries = len(q) // batch
    grouped = q.view(batch, queries, k.shape[0], -1, dim).permute(2, 0, 1, 3, 4).reshape(len(keys), -1, dim)
    p = (torch.bmm(grouped, keys.transpose(1, 2)) * dim**-0.5).softmax(-1)
    return torch.bmm(p, values)


def decode_case(
    heads: int, kv_heads: int, batch: int, queries: int, length: int, target: Target | None, dim: int = 128
) -> Case:
    """Return grouped attention of `queries` rows of each of `batch` sequences behind `length` positions."""
    pages, scale = length // _PAGE, dim**-0.5
    k = torch.randn(kv_heads, batch * pages, _PAGE, dim, device="cuda", dtype=torch.bfloat16)
    v = torch.randn_like(k)
    q = torch.randn(batch * queries, heads, dim, device="cuda", dtype=torch.bfloat16)
    lens = (length - torch.arange(queries, device="cuda").flip(0)).repeat(batch, 1).int()
    table = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
    tables = DecodeTables(page_table=table, kv_lens=lens, page_size=_PAGE)
    rows = queries * heads // kv_heads

    def attend(only: slice, some: DecodeTables) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.gqa_decode(q[only], k, v, tables=some, scale=scale)

    def exact(b: int, row: int, length: int) -> torch.Tensor:
        page_ids = tables.page_table[b].long()
        keys, values = (x[:, page_ids].flatten(1, 2)[:, :length].double() for x in (k, v))
        grouped = q[row].double().view(kv_heads, -1, dim)
        return ((grouped @ keys.transpose(1, 2) * scale).softmax(-1) @ values).flatten(0, 1)

    spread = kernel.spread_of(rows, batch, tables.max_splits(GQA_SPLIT), kv_heads)
    # The tables do not change during the timing.
    run = partial(kernel.gqa_decode, q, k, v, tables=tables, scale=scale, static_tables=True)

    return Case(
        op="gqa_decode",
        shape=f"B{batch} Q{queries} H{heads}/{kv_heads} L{length}{'' if dim == 128 else f' D{dim}'}",
        run=run,
        prove=partial(prove_rows, "gqa_decode", attend, exact, tables),
        num_bytes=k.numel() * 4 + 4 * q.numel(),
        num_flops=4 * batch * queries * heads * length * dim,
        target=target,
        baseline=partial(_torch_chain, q, k, v, batch),
        baseline_name="torch bmm, softmax, bmm",
        # Not all configs fit with wider heads.
        variants=tuple((config, partial(run, config=config)) for config in kernel.configs_for(rows) if dim == 128),
        tune_key=("gqa_decode", kernel.shape_class(rows, dim, batch, spread)),
    )
