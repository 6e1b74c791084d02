"""Steps as tensors: row layout, padding, slots, plans; and the pools that the slots point into."""

from pathlib import Path

import pytest
import torch
from tests.checkpoints import VOCAB_SIZE, make_checkpoint

from moeyard_kernels.ops import padded_rows
from moeyard_worker.engine.batch import build_batch
from moeyard_worker.engine.verify import greedy_tokens, local_runner
from moeyard_worker.models.decoder import make_pool
from moeyard_worker.models.model_config import load_model_config
from moeyard_worker.scheduling.step import Chunk, Step
from moeyard_worker.state.pools import KvPool, LatentPool


def chunk(start: int, ids: tuple[int, ...], pages: tuple[int, ...], *, prompt: bool, num_sampled: int = 1) -> Chunk:
    return Chunk(key=(b"", ""), start=start, token_ids=ids, pages=pages, prompt=prompt, num_sampled=num_sampled)


def test_rows_of_a_mixed_step() -> None:
    step = Step(
        prefill=(
            chunk(0, (11, 12, 13), (5,), prompt=True, num_sampled=0),
            chunk(6, (14, 15, 16), (2, 9, 4), prompt=True),
        ),
        decode=(chunk(9, (17,), (7, 1, 3), prompt=False), chunk(3, (18, 19), (6, 8), prompt=False)),
    )
    batch = build_batch(step, page_size=4, window=None)
    assert (batch.num_tokens, batch.num_prefill, batch.num_decode, batch.num_decode_rows) == (9, 6, 3, 4)
    assert batch.num_rows == padded_rows(10) == 12
    assert batch.token_ids.tolist() == [11, 12, 13, 14, 15, 16, 17, 18, 19, 0, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 6, 7, 8, 9, 3, 4, 0, 0, 0]
    assert batch.slots.tolist() == [20, 21, 22, 9 * 4 + 2, 9 * 4 + 3, 4 * 4, 3 * 4 + 1, 6 * 4 + 3, 8 * 4]
    assert [(s.begin, s.end, s.start) for s in batch.segments] == [(0, 3, 0), (3, 6, 6)]
    assert batch.segments[1].pages.tolist() == [2, 9, 4] + [4] * 13  # 64 positions
    assert batch.num_sampled == 3
    assert batch.sample_rows.tolist() == [5, 6, 8, 0]
    assert batch.plan.num_rows == 3
    # Each row's first block starts with its own pages.
    first_pages = batch.plan.page_ids.view(-1, 16)[:, :3].tolist()
    assert [pages[:2] for pages in first_pages] == [[7, 1], [6, 6], [6, 8]]
    seen = (batch.plan.mask == 0).sum((1, 2)).tolist()
    assert seen == [10, 4, 5]


def test_window_reaches_the_plan() -> None:
    step = Step(decode=(chunk(9, (1,), (0, 1, 2), prompt=False),))
    assert int((build_batch(step, page_size=4, window=3).plan.mask == 0).sum()) == 3


def test_empty_step() -> None:
    batch = build_batch(Step.empty(), page_size=16, window=None)
    assert (batch.num_tokens, batch.num_rows, batch.num_sampled) == (0, 0, 0)
    assert batch.sample_rows.shape == (0,)


@pytest.mark.parametrize("prefill", [0, 1, 15, 16, 17, 63, 64, 65, 500, 700])
@pytest.mark.parametrize("decode", [0, 1, 3, 4, 17])
def test_padded_decode_rows_are_inside(prefill: int, decode: int) -> None:
    pages = tuple(range(50))
    step = Step(
        prefill=(chunk(0, (1,) * prefill, pages, prompt=True),) if prefill else (),
        decode=tuple(chunk(5, (1,), pages, prompt=False) for _ in range(decode)),
    )
    batch = build_batch(step, page_size=16, window=None)
    assert batch.num_decode_rows % 4 == 0
    assert batch.num_decode <= batch.num_decode_rows < batch.num_decode + 4
    assert batch.num_prefill + batch.num_decode_rows <= batch.num_rows == padded_rows(batch.num_rows)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pools_cost_what_the_spec_says(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    config = load_model_config(make_checkpoint(tmp_path, family))
    pool = make_pool(config, num_pages=6, page_size=8, dtype=dtype)
    tensors = [pool.k, pool.v] if isinstance(pool, KvPool) else [pool.rows]
    assert sum(t.numel() * t.itemsize for t in tensors) == 48 * config.state_spec(dtype.itemsize).bytes_per_token
    assert all(not t.any() for t in tensors)


def test_pools_store_and_read_by_page(tmp_path: Path) -> None:
    slots, pages = torch.tensor([9, 4, 5]), torch.tensor([2, 1])
    kv = make_pool(
        load_model_config(make_checkpoint(tmp_path / "a", "qwen3_moe")), num_pages=3, page_size=4, dtype=torch.float32
    )
    assert isinstance(kv, KvPool)
    k, v = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    kv.layer(1).write(slots, k, v)
    for got, wrote in zip(kv.layer(1).read(pages), (k, v), strict=True):
        assert got.shape == (2, 8, 16)
        for row, place in enumerate((1, 4, 5)):
            assert torch.equal(got[:, place], wrote[row])
    assert not kv.k[[0, 2]].any()
    latent = make_pool(
        load_model_config(make_checkpoint(tmp_path / "b", "deepseek_v3")), num_pages=3, page_size=4, dtype=torch.float32
    )
    assert isinstance(latent, LatentPool)
    rows = torch.randn(3, 40)
    latent.layer(0).write(slots, rows)
    assert torch.equal(latent.layer(0).read(pages)[[1, 4, 5]], rows)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_page_size_does_not_show(tmp_path: Path, family: str) -> None:
    directory = make_checkpoint(tmp_path, family)
    prompt = torch.randint(VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    results = [
        greedy_tokens(
            local_runner(directory, dtype=torch.float32, num_pages=128 // size, page_size=size),
            prompt,
            10,
            chunk_size=40,
        )
        for size in (1, 8, 64)
    ]
    for tokens, logits in results[1:]:
        assert tokens == results[0][0]
        assert torch.equal(logits, results[0][1])
