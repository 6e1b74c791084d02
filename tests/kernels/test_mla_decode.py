"""The latent decode kernel: values and log-sum-exps against float64, equal bits in every batch, page size and tile."""

import dataclasses

import pytest
import torch
from tests.kernels.decode_cases import DEVICE, Paged, assert_same, exact, paged, relative, torch_chain
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.attention import mla_decode as kernel
from moeyard_kernels.common.launch import checked
from moeyard_kernels.types.decode_tables import DecodeTables, mla_split

GPU = DEVICE == "cuda"
# A GPU has the real splits by number of heads. The interpreter has short ones, because cost grows with the blocks.
SPLIT = mla_split(64) if GPU else 128
REAL_SPLIT: dict[str, object] = {} if GPU else {"split": SPLIT}
LENS = [1, 63, 64, 65, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 70, *((511, 512, 513) if GPU else ())]
SHAPES = (
    [(16, 512, 64, 64), (64, 512, 64, 64), (128, 512, 64, 64), (16, 512, 64, 16), (20, 256, 32, 32), (5, 48, 16, 16)]
    if GPU
    else [(4, 32, 16, 16), (5, 20, 8, 64)]
)
BY_SHAPE = pytest.mark.parametrize(("heads", "rank", "rope", "page"), SHAPES, ids=lambda n: str(n))


def queries(rows: int, heads: int, rank: int, rope: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.randn(rows, heads, rank).to(DEVICE, dtype),
        torch.randn(rows, heads, rope).to(DEVICE, dtype),
    )


def attend(
    q: tuple[torch.Tensor, torch.Tensor], cache: torch.Tensor, tables: DecodeTables, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = cache.shape[-1] ** -0.5
    return kernel.mla_decode(*q, cache, tables=tables, scale=scale, **{**REAL_SPLIT, **options})  # type: ignore[arg-type]


def sequences(
    lens: list[int], rank: int, rope: int, page: int, dtype: torch.dtype, window: int | None = None
) -> tuple[Paged, torch.Tensor]:
    held = paged(lens, page, heads=1, dims=(rank + rope,), dtype=dtype, window=window)
    return held, held.caches[0][0]


def test_few_heads_have_short_splits() -> None:
    """The split is part of the answer, for every batch."""
    assert [mla_split(heads) for heads in (5, 16, 17, 64, 128)] == [512, 512, 1024, 1024, 1024]


@BY_SHAPE
@pytest.mark.parametrize("window", [None, 100], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_values(heads: int, rank: int, rope: int, page: int, window: int | None, dtype: torch.dtype) -> None:
    if GPU and dtype == torch.float32 and heads > 16:
        pytest.skip("one shape of this width in fp32 is enough, because it compiles slowly")
    lens = [*LENS, 0]
    held, cache = sequences(lens, rank, rope, page, dtype, window)
    q = queries(len(lens), heads, rank, rope, dtype)
    out, lse = attend(q, cache, held.tables(torch.tensor(lens), window=window))
    assert out.dtype == dtype
    assert (out[-1] == 0).all()
    assert (lse[-1] == float("-inf")).all()
    joined = torch.cat(q, -1)
    worst, chain_worst = 0.0, 0.0
    for row, length in enumerate(LENS):
        keys = held.of(0, row, length)
        wanted, wanted_lse = exact(joined[row], keys, keys[..., :rank], scale=(rank + rope) ** -0.5, window=window)
        worst = max(worst, relative(out[row], wanted))
        torch.testing.assert_close(lse[row].double().cpu(), wanted_lse, rtol=0, atol=1e-5)
        chain = torch_chain(joined[row], keys, keys[..., :rank], scale=(rank + rope) ** -0.5, window=window)
        chain_worst = max(chain_worst, relative(chain, wanted))
    assert worst <= ((5e-6 if GPU else 2e-6) if dtype == torch.float32 else min(1e-2, chain_worst))


@BY_SHAPE
def test_batch_and_pages_change_no_bit(heads: int, rank: int, rope: int, page: int) -> None:
    held, cache = sequences(LENS, rank, rope, page, torch.bfloat16)
    q = queries(len(LENS), heads, rank, rope, torch.bfloat16)
    whole = attend(q, cache, held.tables(torch.tensor(LENS)))
    moved = held.moved()
    assert_same(attend(q, moved.caches[0][0], moved.tables(torch.tensor(LENS))), whole, "other pages")
    groups = [[r] for r in range(len(LENS))] if GPU else [[0], [5], [7]]
    if GPU:
        groups += [[r % len(LENS) for r in range(64)]]
    for rows in [*groups, [3, 2, 7, 0]]:
        tables = held.tables(torch.tensor(LENS)[rows], rows)
        got = attend((q[0][rows], q[1][rows]), cache, tables)
        assert_same(got, (whole[0][rows], whole[1][rows]), f"rows {rows}")


@pytest.mark.gpu  # too slow for the interpreter
@pytest.mark.parametrize("heads", [16, 64], ids=lambda h: f"heads-{h}")
def test_row_alone_equals_the_row_among_4096(heads: int) -> None:
    lens = [1 + 37 * i % 400 for i in range(64)]
    held, cache = sequences(lens, 512, 64, 64, torch.bfloat16)
    q = queries(4096, heads, 512, 64, torch.bfloat16)
    rows = [i % 64 for i in range(4096)]
    whole = attend(q, cache, held.tables(torch.tensor(lens)[rows], rows))
    for row in (0, 63, 2000, 4095):
        tables = held.tables(torch.tensor(lens)[[row % 64]], [row % 64])
        alone = attend((q[0][row : row + 1], q[1][row : row + 1]), cache, tables)
        assert_same(alone, (whole[0][row : row + 1], whole[1][row : row + 1]), f"row {row}")


@BY_SHAPE
@pytest.mark.parametrize("window", [None, 100], ids=lambda w: f"window-{w}")
def test_queries_of_a_sequence_change_no_bit(heads: int, rank: int, rope: int, page: int, window: int | None) -> None:
    ends = [70, SPLIT + 3, 2 * SPLIT + 64]
    # numpy's sums depend on the tile, a GPU's do not.
    options = {} if GPU else {"config": kernel.CONFIGS[-1]}
    # The first of up to 16 queries sees 15 positions less at the end and more below.
    held, cache = sequences(ends, rank, rope, page, torch.bfloat16, window and window + 4 + 11 * GPU)
    for count in (2, 5, 16) if GPU else (5,):
        # Ascending lengths, and a padding row.
        lens = torch.tensor(ends)[:, None] - torch.arange(count).flip(0)
        lens[0, 1] = 0
        q = queries(len(ends) * count, heads, rank, rope, torch.bfloat16)
        out, lse = attend(q, cache, held.tables(lens, window=window), **options)
        for row in range(len(ends) * count) if GPU else (1, 3, 6, 14):
            tables = held.tables(lens.flatten()[row : row + 1], [row // count], window=window)
            alone = attend((q[0][row : row + 1], q[1][row : row + 1]), cache, tables, **options)
            assert_same(alone, (out[row : row + 1], lse[row : row + 1]), f"query {row} of {count}")


@BY_SHAPE
@pytest.mark.parametrize("count", [1, 3, 16] if GPU else [2])
def test_configs_agree(count: int, heads: int, rank: int, rope: int, page: int) -> None:
    """Compare bits. The interpreter gets values with exact sums, because numpy's sums depend on the tile."""
    held, cache = sequences(LENS[2:], rank, rope, page, torch.bfloat16)
    lens = torch.tensor(LENS[2:])[:, None] - torch.arange(count)
    q = queries(lens.numel(), heads, rank, rope, torch.bfloat16)
    if not GPU:
        cache = cache.mul(2).round()
        q = (q[0] * 0, q[1] * 0)
    configs = [config for config in kernel.CONFIGS if GPU or config.kernel == "triton"]
    results = [attend(q, cache, held.tables(lens), config=config) for config in configs]
    for config, result in zip(configs, results, strict=True):
        assert_same(result, results[0], str(config))
        # No launch comes before, so no value is written late.
        static = attend(q, cache, held.tables(lens), config=config, static_tables=True, static_keys=True)
        assert_same(static, results[0], f"{config}, static")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("longest", [500, 3000], ids=["one split", "splits"])
@pytest.mark.parametrize("config", kernel.configs_for(16) if GPU else (), ids=str)
def test_queries_and_latents_of_launches_before_are_complete(
    config: kernel.LatentConfig, longest: int, rows: int
) -> None:
    """Launches overlap: cache write, product of heads, and attention that reads old values early."""
    lens = [1 + 67 * i % longest for i in range(rows)]
    held, cache = sequences(lens, 512, 64, 64, torch.bfloat16)
    tables = held.tables(torch.tensor(lens))
    down = torch.randn(rows, 16 * 192 + 576).to(DEVICE, torch.bfloat16)
    weight = (torch.randn(16, 512, 128, device=DEVICE) / 16).bfloat16()
    position = torch.tensor(lens, device=DEVICE) - 1
    slots = held.table[torch.arange(rows, device=DEVICE), position // 64].long() * 64 + position % 64
    cos, sin = torch.randn(rows, 64, device=DEVICE).chunk(2, 1)
    scale = torch.ones(rows, device=DEVICE)
    torch.cuda.synchronize()

    def step() -> tuple[torch.Tensor, ...]:
        q, latent, k = ops.scale_rows_(down.clone(), scale).split((16 * 192, 512, 64), 1)
        q_nope, q_rope = q.view(rows, 16, 192).split((128, 64), 2)
        rotated = ops.rope_cache_write_mla(q_rope, latent, k, cos, sin, slots, cache, interleaved=True)
        q_latent = ops.head_linear(q_nope, weight, static_weight=True)
        static = {"static_tables": True, "static_keys": True, "config": config}
        return kernel.mla_decode(q_latent, rotated, cache, tables=tables, scale=0.1, **static)  # type: ignore[arg-type]

    assert_replays(step, lambda: down.copy_(torch.randn_like(down)))


def test_up_to_160_splits() -> None:
    split, lens = 64, [160 * 64, 159 * 64 + 1, 7, 0] if GPU else [160 * 64, 7, 0]
    held, cache = sequences(lens, 32, 16, 64, torch.bfloat16)
    q = queries(len(lens), 4, 32, 16, torch.bfloat16)
    out, lse = attend(q, cache, held.tables(torch.tensor(lens)), split=split)
    for row, length in enumerate(lens[:-1]):
        keys = held.of(0, row, length)
        wanted, wanted_lse = exact(torch.cat(q, -1)[row], keys, keys[..., :32], scale=48**-0.5)
        assert relative(out[row], wanted) <= 1e-2
        torch.testing.assert_close(lse[row].double().cpu(), wanted_lse, rtol=0, atol=1e-5)
    short = attend((q[0][-2:], q[1][-2:]), cache, held.tables(torch.tensor(lens[-2:]), [-2, -1]), split=split)
    assert_same(short, (out[-2:], lse[-2:]), "the short rows alone")


def test_narrow_table_needs_no_merge() -> None:
    held, cache = sequences([70, 9, 0], 32, 16, 16, torch.bfloat16)
    q, lens = queries(3, 4, 32, 16, torch.bfloat16), torch.tensor([70, 9, 0])
    tables = held.tables(lens)
    assert tables.max_splits(128) == 1
    wide = DecodeTables(
        page_table=torch.cat((tables.page_table, tables.page_table), 1), kv_lens=tables.kv_lens, page_size=16
    )
    assert wide.max_splits(128) == 2
    assert_same(attend(q, cache, tables, split=128), attend(q, cache, wide, split=128), "merged or not")


def test_op_accepts_tables() -> None:
    held, cache = sequences([70, 9, 0], 32, 16, 16, torch.float32)
    q, tables = queries(3, 4, 32, 16, torch.float32), held.tables(torch.tensor([70, 9, 0]))
    out, lse = ops.mla_decode(*q, cache, tables=tables, scale=0.2)
    got = kernel.mla_decode(*q, cache, tables=tables, scale=0.2)
    torch.testing.assert_close(got, (out, lse), rtol=2e-6, atol=2e-6)
    none = DecodeTables(page_table=tables.page_table[:0], kv_lens=tables.kv_lens[:0], page_size=16)
    assert kernel.mla_decode(q[0][:0], q[1][:0], cache, tables=none, scale=0.2)[0].shape == (0, 4, 32)
    assert ops.mla_decode(q[0][:0], q[1][:0], cache, tables=none, scale=0.2)[0].shape == (0, 4, 32)


def test_bad_arguments_are_named() -> None:
    held, cache = sequences([70, 9], 32, 16, 16, torch.bfloat16)
    q, tables = queries(2, 4, 32, 16, torch.bfloat16), held.tables(torch.tensor([70, 9]))
    with pytest.raises(
        ValueError, match=r"tables\.num_rows 2, T 1 of q_latent bfloat16 \[1, 4, 32\], expected tables\.num_rows == T"
    ):
        ops.mla_decode(q[0][:1], q[1][:1], cache, tables=tables, scale=1.0)
    with pytest.raises(ValueError, match=r"scale 0\.0, expected scale > 0"):
        ops.mla_decode(*q, cache, tables=tables, scale=0.0)
    with pytest.raises(ValueError, match=r"q_rope bfloat16 \[2, 4, 16\] with strides .* is not contiguous"):
        ops.mla_decode(q[0], q[1].transpose(1, 2).contiguous().transpose(1, 2), cache, tables=tables, scale=1.0)
    with pytest.raises(ValueError, match=r"latent_cache bfloat16 \[17, 16, 48\]"):
        ops.mla_decode(q[0], q[1][..., :5].contiguous(), cache, tables=tables, scale=1.0)
    with pytest.raises(ValueError, match=r"q_rope bfloat16 \[2, 3, 16\]"):
        ops.mla_decode(q[0], q[1][:, :3].contiguous(), cache, tables=tables, scale=1.0)
    # The references check the content of tables on a CPU. The kernels do it on a GPU within `checked`.
    host = DecodeTables(page_table=tables.page_table.cpu(), kv_lens=tables.kv_lens.cpu(), page_size=16)
    on_host = (q[0].cpu(), q[1].cpu(), cache.cpu())
    for what, change in (
        (r"kv_lens holds 9 to 113, outside 0 to 112", {"kv_lens": torch.tensor([113, 9], dtype=torch.int32)}),
        (r"kv_lens holds -3 to 9, outside 0 to 112", {"kv_lens": torch.tensor([-3, 9], dtype=torch.int32)}),
        (r"page_table\[0\] holds -\d+ to .*, outside 0 to 16", {"page_table": host.page_table - 20}),
        (r"page_table\[0\] holds \d+ to .*, outside 0 to 16", {"page_table": host.page_table + 77}),
    ):
        with pytest.raises(ValueError, match=what):
            ops.mla_decode(*on_host, tables=dataclasses.replace(host, **change), scale=1.0)
    with checked():
        long = held.tables(torch.tensor([70, 16 * tables.page_table.shape[1] + 1]))
        with pytest.raises(ValueError, match=r"kv_lens int32 \[2\] holds 70 to 113, outside 0 to 112"):
            kernel.mla_decode(*q, cache, tables=long, scale=1.0)
        with pytest.raises(ValueError, match=r"page_table int32 \[2, 7\] holds .* outside 0 to 3"):
            kernel.mla_decode(*q, cache[:4].contiguous(), tables=tables, scale=1.0)


def test_tables_are_checked() -> None:
    table, lens = torch.zeros(2, 5, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="page_size 24 does not divide 64"):
        DecodeTables(page_table=table, kv_lens=lens, page_size=24)
    with pytest.raises(ValueError, match="window 0 is not positive"):
        DecodeTables(page_table=table, kv_lens=lens, page_size=16, window=0)
    with pytest.raises(ValueError, match=r"page_table: expected contiguous int32 .*, got torch.int64 \[2, 5\]"):
        DecodeTables(page_table=table.long(), kv_lens=lens, page_size=16)
    with pytest.raises(ValueError, match=r"kv_lens: expected int32 \[2\] or \[2, queries\], got torch.int32 \[1\]"):
        DecodeTables(page_table=table, kv_lens=lens[:1], page_size=16)
    with pytest.raises(ValueError, match=r"kv_lens: \[2, 17\], expected contiguous, 1 to 16 queries"):
        DecodeTables(page_table=table, kv_lens=table.new_ones(2, 17), page_size=16)


@pytest.mark.gpu
def test_graph_reads_new_tables() -> None:
    held, cache = sequences([3000, 2000], 512, 64, 64, torch.bfloat16)
    q, tables = queries(2, 16, 512, 64, torch.bfloat16), held.tables(torch.tensor([3000, 0]))
    attend(q, cache, tables)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(q, cache, tables)
    for lens in ([3000, 2000], [1, 1025], [0, 0]):
        tables.kv_lens.copy_(torch.tensor(lens))
        tables.page_table.copy_(held.table)
        graph.replay()
        assert_same((out, lse), attend(q, cache, held.tables(torch.tensor(lens))), str(lens))
