"""Bench of latent decode attention: DeepSeek-V2-Lite (16 heads), Kimi-K2 (64), DeepSeek-V3 (128); pages of 64."""

from collections.abc import Iterator
from functools import partial

import torch

from moeyard_kernels import mla_decode as kernel
from moeyard_kernels import ops
from moeyard_kernels.bench.case import Case, Target, assert_bits
from moeyard_kernels.decode_plan import DecodeTables
from moeyard_kernels.tuning import Config

OPS: tuple[str, ...] = ("mla_decode",)

_RANK, _ROPE, _PAGE = 512, 64, 64
_SCALE = (128 + 64) ** -0.5
# Heads, sequences, queries each, context, target.
_SHAPES = (
    *((16, 64, 1, length, Target("copy", 0.8)) for length in (4096, 8192, 16384, 32768)),
    *((64, 64, 1, length, Target("copy", 0.6)) for length in (4096, 8192, 16384, 32768)),
    *((128, 64, 1, length, Target("tflops", 400)) for length in (4096, 8192, 16384, 32768)),
    (16, 1, 1, 65536, Target("copy", 0.4)),
    (64, 1, 1, 65536, Target("copy", 0.3)),
    (128, 1, 1, 65536, None),
    (16, 8, 4, 8192, None),
    (128, 8, 4, 8192, None),
)


def assert_rows_alone(
    what: str, whole: tuple[torch.Tensor, torch.Tensor], alone: tuple[torch.Tensor, torch.Tensor], rows: slice
) -> None:
    """Raise AssertionError unless (out, lse) of some rows run alone are those of the batch, and are finite."""
    assert_bits(f"{what} alone", alone, (whole[0][rows], whole[1][rows]))
    assert alone[0].isfinite().all(), f"{what}: not finite"


def cases() -> Iterator[Case]:
    """Every shape of the table, then others of interest."""
    for shape in _SHAPES:
        yield _case(*shape)


def _case(heads: int, batch: int, queries: int, length: int, target: Target | None) -> Case:
    pages = length // _PAGE
    cache = torch.randn(batch * pages, _PAGE, _RANK + _ROPE, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(batch * queries, heads, _RANK, device="cuda", dtype=torch.bfloat16)
    r = torch.randn(batch * queries, heads, _ROPE, device="cuda", dtype=torch.bfloat16)
    lens = (length - torch.arange(queries, device="cuda").flip(0)).repeat(batch, 1).int()
    table = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
    tables = DecodeTables(page_table=table, kv_lens=lens, page_size=_PAGE)

    def gate() -> None:
        whole = ops.mla_decode(q, r, cache, plan=tables, scale=_SCALE, return_lse=True)
        count = tables.num_queries
        for b in (0, tables.num_sequences - 1):
            row = b * count + count - 1
            one = DecodeTables(
                page_table=tables.page_table[b : b + 1].contiguous(),
                kv_lens=tables.kv_lens[b, -1:].contiguous(),
                page_size=_PAGE,
            )
            rows = slice(row, row + 1)
            alone = ops.mla_decode(q[rows], r[rows], cache, plan=one, scale=_SCALE, return_lse=True)
            assert_rows_alone("mla_decode", whole, alone, rows)
            keys = cache[tables.page_table[b].long()].flatten(0, 1)[: int(one.kv_lens[0])].double()
            scores = torch.cat((q[row], r[row]), -1).double() @ keys.T * _SCALE
            wanted = scores.softmax(-1) @ keys[:, :_RANK]
            error = ((whole[0][row].double() - wanted).norm() / wanted.norm()).item()
            assert error <= 1e-2, f"mla_decode: relative error {error:.1e}"

    def chain() -> torch.Tensor:
        # Keys one after the other, without pages: less than the op does.
        keys = cache.view(batch, -1, _RANK + _ROPE)
        joined = torch.cat((q, r), -1).view(batch, -1, _RANK + _ROPE)
        p = (torch.bmm(joined, keys.transpose(1, 2)) * _SCALE).softmax(-1)
        return torch.bmm(p, keys[..., :_RANK])

    def run(config: Config | None = None) -> object:
        return kernel.mla_decode(q, r, cache, tables=tables, scale=_SCALE, config=config)

    return Case(
        op="mla_decode",
        shape=f"B{batch} Q{queries} H{heads} L{length}",
        run=run,
        gate=gate,
        num_bytes=cache.numel() * 2 + 2 * (2 * q.numel() + r.numel()),
        num_flops=2 * batch * queries * heads * length * (2 * _RANK + _ROPE),
        target=target,
        baseline=chain,
        baseline_name="torch bmm, softmax, bmm",
        variants=tuple((config, partial(run, config)) for config in kernel.configs_for(queries * heads)),
        tune_key=("mla_decode", kernel.shape_class(queries * heads, batch)),
    )
