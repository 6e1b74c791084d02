"""Bench of latent decode attention: DeepSeek-V2-Lite (16 heads), Kimi-K2 (64), DeepSeek-V3 (128); pages of 64."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernel_cases.case import Case, Target, assert_bits
from kernel_cases.model_steps import DECODE_ROWS, Latent, ModelStep
from moeyard_kernels import ops
from moeyard_kernels.attention import mla_decode as kernel
from moeyard_kernels.types.decode_tables import DecodeTables

OPS: tuple[str, ...] = ("mla_decode", "attn_combine")

_RANK, _ROPE, _PAGE = 512, 64, 64
_SCALE = (128 + 64) ** -0.5
# Contexts of the rows of models: one split, and several.
LENGTHS = (512, 8192)
# Heads, sequences, queries each, context, target.
_SHAPES = (
    *((16, 64, 1, length, Target("copy", 0.8)) for length in (4096, 8192, 16384, 32768)),
    *((64, 64, 1, length, Target("copy", 0.6)) for length in (4096, 8192, 16384, 32768)),
    *((128, 64, 1, length, Target("tflops", 400)) for length in (4096, 8192, 16384, 32768)),
    # Half of the copy shares of the same heads at B = 64 and 32k (87, 73, 45 %; one H200, 2026-11-20).
    (16, 1, 1, 65536, Target("copy", 0.435)),
    (64, 1, 1, 65536, Target("copy", 0.365)),
    (128, 1, 1, 65536, Target("copy", 0.225)),
    # One split, whose time is latency: DeepSeek-V2-Lite.
    (16, 1, 1, 256, None),
    (16, 8, 1, 256, None),
    (16, 8, 4, 8192, None),
    (128, 8, 4, 8192, None),
)


def prove_rows(
    op: str,
    attend: Callable[[slice, DecodeTables], tuple[torch.Tensor, torch.Tensor]],
    exact: Callable[[int, int, int], torch.Tensor],
    tables: DecodeTables,
) -> None:
    """Raise AssertionError unless rows have the same bits alone and in the batch, near the float64 result.

    attend(rows, tables of those rows) -> (out, lse); exact(sequence, row, length) -> [Hq, Dv] float64.
    """
    whole, count = attend(slice(None), tables), tables.num_queries
    for b in (0, tables.num_sequences - 1):
        row = b * count + count - 1
        one = DecodeTables(
            page_table=tables.page_table[b : b + 1].contiguous(),
            kv_lens=tables.kv_lens[b, -1:].contiguous(),
            page_size=tables.page_size,
        )
        alone = attend(slice(row, row + 1), one)
        assert_bits(f"{op} alone", alone, (whole[0][row : row + 1], whole[1][row : row + 1]))
        wanted = exact(b, row, int(one.kv_lens[0]))
        error = ((whole[0][row].double() - wanted).norm() / wanted.norm()).item()
        assert error <= 1e-2, f"{op}: relative error {error:.1e}"


def cases() -> Iterator[Case]:
    """Yield every shape of the table, then others of interest."""
    for shape in _SHAPES:
        yield decode_case(*shape)
    for batch, splits, heads in ((64, 32, 64), (1, 64, 16)):
        yield _combine(batch, splits, heads)


def model_cases(models: Sequence[ModelStep], rows: Sequence[int]) -> Iterator[Case]:
    """Yield one row per sequence, behind short and long contexts."""
    for kind in dict.fromkeys(kind for model in models for kind in model.attention):
        for batch in rows:
            if isinstance(kind, Latent) and batch in DECODE_ROWS:
                for length in LENGTHS:
                    yield decode_case(kind.heads, batch, 1, length, None)


def _torch_chain(q: torch.Tensor, r: torch.Tensor, cache: torch.Tensor, batch: int) -> torch.Tensor:
    """Attend to contiguous keys, without pages: less than the op does."""
    keys = cache.view(batch, -1, _RANK + _ROPE)
    joined = torch.cat((q, r), -1).view(batch, -1, _RANK + _ROPE)
    p = (torch.bmm(joined, keys.transpose(1, 2)) * _SCALE).softmax(-1)
    return torch.bmm(p, keys[..., :_RANK])


def decode_case(heads: int, batch: int, queries: int, length: int, target: Target | None) -> Case:
    """Return latent attention of `queries` rows of each of `batch` sequences behind `length` positions."""
    pages = length // _PAGE
    cache = torch.randn(batch * pages, _PAGE, _RANK + _ROPE, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(batch * queries, heads, _RANK, device="cuda", dtype=torch.bfloat16)
    r = torch.randn(batch * queries, heads, _ROPE, device="cuda", dtype=torch.bfloat16)
    lens = (length - torch.arange(queries, device="cuda").flip(0)).repeat(batch, 1).int()
    table = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
    tables = DecodeTables(page_table=table, kv_lens=lens, page_size=_PAGE)

    def attend(rows: slice, some: DecodeTables) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.mla_decode(q[rows], r[rows], cache, tables=some, scale=_SCALE)

    def exact(b: int, row: int, length: int) -> torch.Tensor:
        keys = cache[tables.page_table[b].long()].flatten(0, 1)[:length].double()
        scores = torch.cat((q[row], r[row]), -1).double() @ keys.T * _SCALE
        return scores.softmax(-1) @ keys[:, :_RANK]

    # Tables and keys do not change during the timing.
    run = partial(kernel.mla_decode, q, r, cache, tables=tables, scale=_SCALE, static_tables=True, static_keys=True)

    return Case(
        op="mla_decode",
        shape=f"B{batch} Q{queries} H{heads} L{length}",
        run=run,
        prove=partial(prove_rows, "mla_decode", attend, exact, tables),
        num_bytes=cache.numel() * 2 + 2 * (2 * q.numel() + r.numel()),
        num_flops=2 * batch * queries * heads * length * (2 * _RANK + _ROPE),
        target=target,
        baseline=partial(_torch_chain, q, r, cache, batch),
        baseline_name="torch bmm, softmax, bmm",
        variants=tuple((config, partial(run, config=config)) for config in kernel.configs_for(queries * heads)),
        tune_key=("mla_decode", kernel.shape_class(queries * heads, batch)),
    )


def _combine_chain(parts: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return (lse.softmax(1).unsqueeze(-1) * parts).sum(1).bfloat16()


def _combine(batch: int, splits: int, heads: int) -> Case:
    parts = torch.randn(batch, splits, heads, _RANK, device="cuda")
    lse = torch.randn(batch, splits, heads, device="cuda")

    def prove() -> None:
        whole = ops.attn_combine(parts, lse)
        last = slice(batch - 1, batch)
        assert_bits("attn_combine alone", ops.attn_combine(parts[last], lse[last]), (whole[0][last], whole[1][last]))
        weights = (lse[last].double() - lse[last].double().logsumexp(1, keepdim=True)).exp()
        wanted = (weights.unsqueeze(-1) * parts[last].double()).sum(1)
        error = ((whole[0][last].double() - wanted).norm() / wanted.norm()).item()
        assert error <= 4e-3, f"attn_combine: relative error {error:.1e}"

    return Case(
        op="attn_combine",
        shape=f"B{batch} S{splits} H{heads} D{_RANK}",
        run=partial(ops.attn_combine, parts, lse),
        prove=prove,
        num_bytes=4 * parts.numel() + 2 * batch * heads * _RANK,
        baseline=partial(_combine_chain, parts, lse),
        baseline_name="torch softmax, mul, sum",
    )
