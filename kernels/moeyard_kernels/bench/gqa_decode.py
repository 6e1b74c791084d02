"""Bench of grouped decode attention: 32 query heads over 4 key heads of 128 (Qwen3-30B-A3B), 32 over 8 (Mixtral)."""

from collections.abc import Iterator
from functools import partial

import torch

from moeyard_kernels import ops
from moeyard_kernels.attention import gqa_decode as kernel
from moeyard_kernels.bench.case import Case, Target
from moeyard_kernels.bench.mla_decode import prove_rows
from moeyard_kernels.types.decode_tables import GQA_SPLIT, DecodeTables

OPS: tuple[str, ...] = ("gqa_decode",)

_PAGE, _DIM = 64, 128
_SCALE = _DIM**-0.5
_MODELS = ((32, 4), (64, 4), (32, 8))
# Query heads, key heads, sequences, queries each, context, target.
_SHAPES = (
    (32, 4, 64, 1, 8192, Target("copy", 0.8)),
    (32, 4, 64, 1, 2048, None),
    (32, 8, 64, 1, 8192, None),
    (32, 4, 1, 1, 65536, None),
    (32, 4, 8, 4, 8192, None),
    # One split, whose time is latencies: Qwen3-30B-A3B, Qwen3-235B-A22B, Mixtral.
    *((*heads, batch, 1, length, None) for heads in _MODELS for batch in (1, 8, 64) for length in (128, 256, 512)),
)


def cases() -> Iterator[Case]:
    """The shape of the table, then others of interest."""
    for shape in _SHAPES:
        yield _case(*shape)


def _torch_chain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int) -> torch.Tensor:
    """Keys one after the other, without pages, and without the mask between the queries: less than the op does."""
    keys, values = (x.view(x.shape[0] * batch, -1, _DIM) for x in (k, v))
    queries = len(q) // batch
    grouped = q.view(batch, queries, k.shape[0], -1, _DIM).permute(2, 0, 1, 3, 4).reshape(len(keys), -1, _DIM)
    p = (torch.bmm(grouped, keys.transpose(1, 2)) * _SCALE).softmax(-1)
    return torch.bmm(p, values)


def _case(heads: int, kv_heads: int, batch: int, queries: int, length: int, target: Target | None) -> Case:
    pages = length // _PAGE
    k = torch.randn(kv_heads, batch * pages, _PAGE, _DIM, device="cuda", dtype=torch.bfloat16)
    v = torch.randn_like(k)
    q = torch.randn(batch * queries, heads, _DIM, device="cuda", dtype=torch.bfloat16)
    lens = (length - torch.arange(queries, device="cuda").flip(0)).repeat(batch, 1).int()
    table = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
    tables = DecodeTables(page_table=table, kv_lens=lens, page_size=_PAGE)
    rows = queries * heads // kv_heads

    def attend(only: slice, some: DecodeTables) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.gqa_decode(q[only], k, v, tables=some, scale=_SCALE)

    def exact(b: int, row: int, length: int) -> torch.Tensor:
        page_ids = tables.page_table[b].long()
        keys, values = (x[:, page_ids].flatten(1, 2)[:, :length].double() for x in (k, v))
        grouped = q[row].double().view(kv_heads, -1, _DIM)
        return ((grouped @ keys.transpose(1, 2) * _SCALE).softmax(-1) @ values).flatten(0, 1)

    one_split = tables.max_splits(GQA_SPLIT) == 1
    # What is timed reads tables that nobody writes.
    run = partial(kernel.gqa_decode, q, k, v, tables=tables, scale=_SCALE, static_tables=one_split)

    return Case(
        op="gqa_decode",
        shape=f"B{batch} Q{queries} H{heads}/{kv_heads} L{length}",
        run=run,
        prove=partial(prove_rows, "gqa_decode", attend, exact, tables),
        num_bytes=k.numel() * 4 + 4 * q.numel(),
        num_flops=4 * batch * queries * heads * length * _DIM,
        target=target,
        baseline=partial(_torch_chain, q, k, v, batch),
        baseline_name="torch bmm, softmax, bmm",
        variants=tuple((config, partial(run, config=config)) for config in kernel.configs_for(rows)),
        tune_key=("gqa_decode", kernel.shape_class(rows, _DIM, batch, one_split=one_split)),
    )
