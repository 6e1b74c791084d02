"""The grouped decode kernel: values and log-sum-exps against float64, equal bits in every batch, page size and tile."""

import pytest
import torch
from tests.kernels.decode_cases import DEVICE, Paged, assert_same, exact, paged, relative, torch_chain
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.attention import gqa_decode as kernel
from moeyard_kernels.common.launch import checked
from moeyard_kernels.types.decode_tables import GQA_SPLIT, DecodeTables

GPU = DEVICE == "cuda"
# A GPU has the real split. The interpreter has a short one, because a program's cost grows with its blocks.
SPLIT = GQA_SPLIT if GPU else 128
LENS = [1, 63, 64, 65, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 70]
# Query heads, key heads, width of keys, width of values, page.
SHAPES = (
    [(32, 4, 128, 128, 64), (32, 8, 128, 128, 16), (16, 16, 64, 64, 32), (6, 2, 96, 40, 16)]
    if GPU
    else [(6, 2, 24, 40, 16)]
)
BY_SHAPE = pytest.mark.parametrize(("heads", "kv_heads", "dim", "dim_v", "page"), SHAPES, ids=lambda n: str(n))
WINDOWS = pytest.mark.parametrize("window", [None, 100], ids=lambda w: f"window-{w}")
# numpy's sums depend on the tile, a GPU's do not.
ONE_TILE = {} if GPU else {"config": kernel.CONFIGS[0]}


def attend(q: torch.Tensor, held: Paged, tables: DecodeTables, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    scale = q.shape[2] ** -0.5
    return kernel.gqa_decode(q, *held.caches, tables=tables, scale=scale, **{"split": SPLIT, **options})  # type: ignore[arg-type]


def queries(rows: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, heads, dim).to(DEVICE, dtype)


@BY_SHAPE
@WINDOWS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_values(
    heads: int, kv_heads: int, dim: int, dim_v: int, page: int, window: int | None, dtype: torch.dtype
) -> None:
    held = paged([*LENS, 0], page, heads=kv_heads, dims=(dim, dim_v), dtype=dtype, window=window)
    q = queries(len(LENS) + 1, heads, dim, dtype)
    out, lse = attend(q, held, held.tables(torch.tensor([*LENS, 0]), window=window))
    assert out.dtype == dtype
    assert (out[-1] == 0).all()
    assert (lse[-1] == float("-inf")).all()
    worst, chain_worst = 0.0, 0.0
    for row, length in enumerate(LENS):
        keys, values = held.of(0, row, length), held.of(1, row, length)
        wanted, wanted_lse = exact(q[row], keys, values, scale=dim**-0.5, window=window)
        worst = max(worst, relative(out[row], wanted))
        torch.testing.assert_close(lse[row].double().cpu(), wanted_lse, rtol=0, atol=1e-5)
        chain = torch_chain(q[row], keys, values, scale=dim**-0.5, window=window)
        chain_worst = max(chain_worst, relative(chain, wanted))
    assert worst <= ((5e-6 if GPU else 2e-6) if dtype == torch.float32 else min(1e-2, chain_worst))


@BY_SHAPE
def test_batch_and_pages_change_no_bit(heads: int, kv_heads: int, dim: int, dim_v: int, page: int) -> None:
    held = paged(LENS, page, heads=kv_heads, dims=(dim, dim_v), dtype=torch.bfloat16)
    q = queries(len(LENS), heads, dim)
    whole = attend(q, held, held.tables(torch.tensor(LENS)))
    moved = held.moved()
    assert_same(attend(q, moved, moved.tables(torch.tensor(LENS))), whole, "other pages")
    groups = [[r] for r in range(len(LENS))] if GPU else [[0], [5], [7]]
    if GPU:
        groups += [[r % len(LENS) for r in range(64)]]
    for rows in [*groups, [3, 2, 7, 0]]:
        got = attend(q[rows], held, held.tables(torch.tensor(LENS)[rows], rows))
        assert_same(got, (whole[0][rows], whole[1][rows]), f"rows {rows}")


@pytest.mark.gpu  # too slow for the interpreter
def test_row_alone_equals_the_row_among_4096() -> None:
    lens = [1 + 37 * i % 400 for i in range(64)]
    held = paged(lens, 64, heads=4, dims=(128, 128), dtype=torch.bfloat16)
    q = queries(4096, 32, 128)
    rows = [i % 64 for i in range(4096)]
    whole = attend(q, held, held.tables(torch.tensor(lens)[rows], rows))
    for row in (0, 63, 2000, 4095):
        alone = attend(q[row : row + 1], held, held.tables(torch.tensor(lens)[[row % 64]], [row % 64]))
        assert_same(alone, (whole[0][row : row + 1], whole[1][row : row + 1]), f"row {row}")


@BY_SHAPE
@WINDOWS
def test_queries_of_a_sequence_change_no_bit(
    heads: int, kv_heads: int, dim: int, dim_v: int, page: int, window: int | None
) -> None:
    ends = [70, SPLIT + 3, 2 * SPLIT + 64]
    # The first of up to 16 queries sees 15 positions less at the end and more below.
    reach = window and window + 4 + 11 * GPU
    held = paged(ends, page, heads=kv_heads, dims=(dim, dim_v), dtype=torch.bfloat16, window=reach)
    for count in (2, 5, 16) if GPU else (5,):
        # Ascending lengths, and a padding row.
        lens = torch.tensor(ends)[:, None] - torch.arange(count).flip(0)
        lens[0, 1] = 0
        q = queries(len(ends) * count, heads, dim)
        out, lse = attend(q, held, held.tables(lens, window=window), **ONE_TILE)
        for row in range(len(ends) * count) if GPU else (1, 3, 6, 14):
            tables = held.tables(lens.flatten()[row : row + 1], [row // count], window=window)
            alone = attend(q[row : row + 1], held, tables, **ONE_TILE)
            assert_same(alone, (out[row : row + 1], lse[row : row + 1]), f"query {row} of {count}")


@BY_SHAPE
@pytest.mark.parametrize("count", [1, 3, 16] if GPU else [2])
def test_configs_agree(count: int, heads: int, kv_heads: int, dim: int, dim_v: int, page: int) -> None:
    """Compare bits. The interpreter gets values with exact sums, because numpy's sums depend on the tile."""
    held = paged(LENS[2:], page, heads=kv_heads, dims=(dim, dim_v), dtype=torch.bfloat16)
    lens = torch.tensor(LENS[2:])[:, None] - torch.arange(count)
    q = queries(lens.numel(), heads, dim)
    if not GPU:
        held.caches[1].mul_(2).round_()
        q = q * 0
    # In the interpreter, configs differ only in the tile if pages are not blocks.
    configs = kernel.CONFIGS if GPU else kernel.CONFIGS[:6]
    results = [attend(q, held, held.tables(lens), config=config) for config in configs]
    for config, result in zip(configs, results, strict=True):
        assert_same(result, results[0], str(config))


@pytest.mark.sampled(0)
@WINDOWS
@pytest.mark.parametrize("splits", [1, 2], ids=["one split", "two splits"])
def test_page_ids_loaded_at_once(splits: int, window: int | None) -> None:
    """Blocks are pages, from a split's last block to all of it, some under a window. No id past a table is read."""
    lens = [1, 64, 65, SPLIT - 1, SPLIT] if splits == 1 else [3, SPLIT, SPLIT + 1, 2 * SPLIT]
    held = paged(lens, 64, heads=2, dims=(32, 16), dtype=torch.bfloat16, slack=0, window=window)
    tables = held.tables(torch.tensor(lens), window=window)
    assert tables.max_splits(SPLIT) == splits
    q = queries(len(lens), 4, 32)
    plain = attend(q, held, tables, config=kernel.CONFIGS[0])
    for config in kernel.configs_for(2) if GPU else (kernel.CONFIGS[6], kernel.default_config(2, "free")):
        for static in (False, True):
            assert_same(attend(q, held, tables, config=config, static_tables=static), plain, f"{config}, {static}")
    assert_same(attend(q, held, tables), plain, "default")
    for row, length in enumerate(lens):
        scale = 32**-0.5
        wanted, _ = exact(q[row], held.of(0, row, length), held.of(1, row, length), scale=scale, window=window)
        assert relative(plain[0][row], wanted) <= 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "longest"), [(1, 512), (8, 512), (64, 512), (1, 8000), (7, 2000), (64, 2000)])
@pytest.mark.parametrize("static", [False, True], ids=["any", "static"])
def test_queries_and_keys_of_the_launch_before_are_complete(rows: int, longest: int, static: bool) -> None:
    """Launches overlap in a chain of cache write, attention and product, with one split and several."""
    lens = [longest - 12 - 67 * i % (longest - 12) for i in range(rows)]
    held = paged(lens, 64, heads=4, dims=(128, 128), dtype=torch.bfloat16, slack=0)
    tables = held.tables(torch.tensor(lens))
    qkv, weight = queries(rows, 40, 128), (torch.randn(2048, 4096, device=DEVICE) / 64).bfloat16()
    position = torch.tensor(lens, device=DEVICE) - 1
    slots = held.table[torch.arange(rows, device=DEVICE), position // 64].long() * 64 + position % 64
    cos, sin = torch.randn(rows, 128, device=DEVICE).chunk(2, 1)
    scale = torch.ones(rows, device=DEVICE)
    torch.cuda.synchronize()

    def step() -> tuple[torch.Tensor, ...]:
        q, k, v = ops.scale_rows_(qkv.flatten(1).clone(), scale).view(qkv.shape).split((32, 4, 4), 1)
        q = ops.rope_cache_write_gqa(q, k, v, cos, sin, slots, *held.caches, interleaved=False)
        out, lse = ops.gqa_decode(q, *held.caches, tables=tables, scale=128**-0.5, static_tables=static)
        return out, lse, ops.linear(out.flatten(1), weight, static_weight=True)

    assert_replays(step, lambda: qkv.copy_(torch.randn_like(qkv)))


@pytest.mark.gpu  # too slow for the interpreter
def test_up_to_160_splits() -> None:
    lens = [160 * 64, 159 * 64 + 1, 7, 0]
    held = paged(lens, 64, heads=2, dims=(64, 64), dtype=torch.bfloat16)
    q = queries(len(lens), 4, 64)
    out, lse = attend(q, held, held.tables(torch.tensor(lens)), split=64)
    for row, length in enumerate(lens[:-1]):
        wanted, wanted_lse = exact(q[row], held.of(0, row, length), held.of(1, row, length), scale=0.125)
        assert relative(out[row], wanted) <= 1e-2
        torch.testing.assert_close(lse[row].double().cpu(), wanted_lse, rtol=0, atol=1e-5)


def test_op_accepts_tables() -> None:
    held = paged([70, 9, 0], 16, heads=2, dims=(32, 32), dtype=torch.float32)
    q, tables = queries(3, 4, 32, torch.float32), held.tables(torch.tensor([70, 9, 0]))
    out, lse = ops.gqa_decode(q, *held.caches, tables=tables, scale=0.2)
    got = kernel.gqa_decode(q, *held.caches, tables=tables, scale=0.2)
    torch.testing.assert_close(got, (out, lse), rtol=2e-6, atol=2e-6)
    none = DecodeTables(page_table=tables.page_table[:0], kv_lens=tables.kv_lens[:0], page_size=16)
    assert kernel.gqa_decode(q[:0], *held.caches, tables=none, scale=0.2)[0].shape == (0, 4, 32)


def test_bad_arguments_are_named() -> None:
    held = paged([70, 9], 16, heads=2, dims=(32, 32), dtype=torch.bfloat16)
    q, tables = queries(2, 4, 32), held.tables(torch.tensor([70, 9]))
    with pytest.raises(
        ValueError, match=r"tables\.num_rows 2, T 1 of q bfloat16 \[1, 4, 32\], expected tables\.num_rows == T"
    ):
        ops.gqa_decode(q[:1], *held.caches, tables=tables, scale=1.0)
    with pytest.raises(ValueError, match=r"scale -1\.0, expected scale > 0"):
        ops.gqa_decode(q, *held.caches, tables=tables, scale=-1.0)
    v = held.caches[1].transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match=r"v_cache bfloat16 .* with strides .* is not contiguous"):
        ops.gqa_decode(q, held.caches[0], v, tables=tables, scale=1.0)
    odd = queries(2, 3, 32)
    with pytest.raises(
        ValueError, match=r"Hkv 2 of k_cache bfloat16 \[2, 17, 16, 32\], Hq 3 of q bfloat16 \[2, 3, 32\]"
    ):
        ops.gqa_decode(odd, *held.caches, tables=tables, scale=1.0)
    with pytest.raises(ValueError, match=r"k_cache float32 \[2, 17, 16, 32\]"):
        ops.gqa_decode(q, held.caches[0].float(), held.caches[1], tables=tables, scale=1.0)
    with checked():
        long = held.tables(torch.tensor([70, 16 * tables.page_table.shape[1] + 1]))
        with pytest.raises(ValueError, match=r"kv_lens int32 \[2\] holds 70 to 113, outside 0 to 112"):
            kernel.gqa_decode(q, *held.caches, tables=long, scale=1.0)


@pytest.mark.gpu
def test_graph_reads_new_tables() -> None:
    held = paged([3000, 2000], 64, heads=4, dims=(128, 128), dtype=torch.bfloat16)
    q, tables = queries(2, 32, 128), held.tables(torch.tensor([3000, 0]))
    attend(q, held, tables)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(q, held, tables)
    for lens in ([3000, 2000], [1, 513], [0, 0]):
        tables.kv_lens.copy_(torch.tensor(lens))
        graph.replay()
        assert_same((out, lse), attend(q, held, held.tables(torch.tensor(lens))), str(lens))


def test_padding_row_under_a_window_reads_no_page() -> None:
    """In a table of one split every sequence is a work item, even with length 0. An unread table entry may be far
    out of range."""
    held = paged([70, 64], 64, heads=2, dims=(16, 16), dtype=torch.bfloat16, slack=0, window=40)
    q = torch.randn(2, 4, 16).to(DEVICE, torch.bfloat16)
    for lens, seen in (([70, 0], 0), ([0, 64], 1)):
        out, lse = attend(q, held, held.tables(torch.tensor(lens), window=40))
        alone, _ = attend(q[seen : seen + 1], held, held.tables(torch.tensor(lens)[[seen]], [seen], window=40))
        assert torch.equal(out[seen], alone[0])
        assert not out[1 - seen].any()
        assert (lse[1 - seen] == -torch.inf).all()


def test_queries_of_one_sequence_on_both_sides_of_a_block() -> None:
    """A block that one query sees and another does not leaves the other's sums unchanged."""
    held, q = paged([66], 16, heads=1, dims=(32, 32), dtype=torch.float32), queries(4, 2, 32, torch.float32)
    lens = torch.tensor([63, 64, 65, 66])
    out, lse = attend(q, held, held.tables(lens[None]), **ONE_TILE)
    for row in range(4):
        alone = attend(q[[row]], held, held.tables(lens[[row]], [0]), **ONE_TILE)
        assert_same(alone, (out[[row]], lse[[row]]), f"query {row}")


def test_cache_with_another_page_size_is_refused() -> None:
    held = paged([64], 16, heads=1, dims=(32, 32), dtype=torch.float32, slack=0)
    cache = held.caches[0].new_zeros(1, 4, 32, 32)
    with pytest.raises(ValueError, match=r"tables\.page_size 16, page 32 of k_cache float32 \[1, 4, 32, 32\]"):
        ops.gqa_decode(
            queries(1, 2, 32, torch.float32), cache, cache, tables=held.tables(torch.tensor([64])), scale=1.0
        )
