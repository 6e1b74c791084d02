"""CPU plans of steps: row layout, padding, entries, decode plans."""

from dataclasses import dataclass, field

import pytest
import torch

from moeyard_kernels.cpu.linear import padded_rows
from moeyard_kernels.cpu.plan import CpuPlan


@dataclass
class Chunk:
    """A `ChunkRows`."""

    start: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    prompt: bool
    state_slot: int = -1
    restored: int = -1
    snapshots: tuple[tuple[int, int], ...] = ()
    dropped: int = 0
    compaction: "Compaction | None" = None


@dataclass
class Compaction:
    """A `CompactionRows`."""

    kept: int
    window: int
    pages: tuple[int, ...]


@dataclass
class Step:
    """A `StepRows`."""

    prefill: tuple[Chunk, ...] = ()
    decode: tuple[Chunk, ...] = ()
    sample_rows: tuple[int, ...] = field(default=())


def plan(step: Step, *, page_size: int, window: int | None = None) -> CpuPlan:
    return CpuPlan(step, page_size=page_size, windows=(window,))


def test_rows_of_a_mixed_step() -> None:
    step = Step(
        prefill=(Chunk(0, (11, 12, 13), (5,), True), Chunk(6, (14, 15, 16), (2, 9, 4), True)),
        decode=(Chunk(9, (17,), (7, 1, 3), False), Chunk(3, (18, 19), (6, 8), False)),
        sample_rows=(5, 6, 7, 8),
    )
    done = plan(step, page_size=4)
    assert (done.num_tokens, done.num_prompt, done.num_decode, done.num_decode_rows) == (9, 6, 3, 4)
    assert done.num_rows == padded_rows(10) == 12
    assert done.token_ids.tolist() == [11, 12, 13, 14, 15, 16, 17, 18, 19, 0, 0, 0]
    assert done.positions.tolist() == [0, 1, 2, 6, 7, 8, 9, 3, 4, 0, 0, 0]
    assert done.entries.tolist() == [20, 21, 22, 9 * 4 + 2, 9 * 4 + 3, 4 * 4, 3 * 4 + 1, 6 * 4 + 3, 8 * 4]
    assert [(s.begin, s.end, s.start) for s in done.segments] == [(0, 3, 0), (3, 6, 6)]
    assert done.segments[1].pages.tolist() == [2, 9, 4] + [4] * 13  # 64 positions
    assert done.num_sampled == 4
    assert done.sample_rows.tolist() == [5, 6, 7, 8], "several rows of one chunk may be sampled"
    decode = done.decode[None]
    assert decode.num_rows == 3
    # Each row's first block starts with its own pages.
    first_pages = decode.page_ids.view(-1, 16)[:, :3].tolist()
    assert [pages[:2] for pages in first_pages] == [[7, 1], [6, 6], [6, 8]]
    assert (decode.mask == 0).sum((1, 2)).tolist() == [10, 4, 5]


def test_rows_after_dropped_positions() -> None:
    step = Step(
        prefill=(Chunk(6, (14, 15, 16), (2, 9, 4), True, compaction=Compaction(kept=5, window=2, pages=(8, 6, 1))),),
        decode=(
            Chunk(13, (17,), (7, 3), False, dropped=6),
            Chunk(20, (18, 19), (5, 0, 12), False, dropped=12),
            Chunk(2, (20,), (10,), False),
        ),
    )
    done = plan(step, page_size=4)
    assert done.positions.tolist()[:7] == [6, 7, 8, 13, 20, 21, 2], "positions set the rotation"
    assert done.entries.tolist()[3:] == [3 * 4 + 3, 12 * 4, 12 * 4 + 1, 10 * 4 + 2]
    assert (done.decode[None].mask == 0).sum((1, 2)).tolist() == [8, 9, 10, 3], "rows attend to kept positions"
    [kept] = [segment.kept for segment in done.segments]
    assert kept is not None
    assert (kept.length, kept.count, kept.window) == (9, 5, 2)
    assert kept.entries.tolist() == [32, 33, 34, 35, 24]


def test_sampled_rows_are_padded() -> None:
    done = plan(Step(decode=(Chunk(9, (1,), (0, 1, 2), False),), sample_rows=(0,)), page_size=4)
    assert done.num_sampled == 1
    assert done.sample_rows.tolist() == [0] * padded_rows(1)


def test_every_window_has_a_plan() -> None:
    step = Step(decode=(Chunk(9, (1,), (0, 1, 2), False),))
    done = CpuPlan(step, page_size=4, windows=(3, None))
    assert [int((done.decode[w].mask == 0).sum()) for w in (3, None)] == [3, 10]


def test_empty_step() -> None:
    done = plan(Step(), page_size=16)
    assert (done.num_tokens, done.num_rows, done.num_sampled) == (0, 0, 0)
    assert done.sample_rows.shape == (0,)


def test_rotation_is_looked_up_once() -> None:
    table = torch.randn(20, 6)
    done = plan(Step(decode=(Chunk(9, (1,), (0, 1, 2), False),)), page_size=4)
    cos, sin = done.rotation(table)
    assert torch.equal(torch.cat((cos, sin), 1)[0], table[9])
    assert done.rotation(table)[0] is cos
    assert not torch.equal(done.rotation(table + 1)[0], cos)


@pytest.mark.parametrize("prefill", [0, 1, 15, 16, 17, 63, 64, 65, 500, 700])
@pytest.mark.parametrize("decode", [0, 1, 3, 4, 17])
def test_padded_decode_rows_are_inside(prefill: int, decode: int) -> None:
    pages = tuple(range(50))
    step = Step(
        prefill=(Chunk(0, (1,) * prefill, pages, True),) if prefill else (),
        decode=tuple(Chunk(5, (1,), pages, False) for _ in range(decode)),
    )
    done = plan(step, page_size=16)
    assert done.num_decode_rows % 4 == 0
    assert done.num_decode <= done.num_decode_rows < done.num_decode + 4
    assert done.num_prompt + done.num_decode_rows <= done.num_rows == padded_rows(done.num_rows)
