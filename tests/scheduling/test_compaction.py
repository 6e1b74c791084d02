"""Compressed prompts: a sequence with two lengths, pages that are allocated and freed, and reusable prefixes."""

from dataclasses import replace
from typing import Any

import pytest
from tests.scheduling.scheduler_harness import Harness

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.protocol import KvCompression, Rejected, SamplingParams, Submit
from moeyard_worker.scheduling.step import Compaction

CONFIG = SchedulerConfig(
    num_pages=32,
    page_size=4,
    max_model_len=100,
    vocab_size=100,
    max_batch_tokens=16,
    max_num_seqs=4,
    prefill_chunk=16,
)
PROMPT = tuple(range(30))


def submit(name: str, budget: int | None = 10, window: int = 3, **sampling: Any) -> Submit:
    asked = None if budget is None else KvCompression(method="snapkv", budget=budget, window=window)
    params = SamplingParams(**{"max_tokens": 6, "kv_compression": asked, **sampling})
    return Submit(request_id=name, prompt_token_ids=PROMPT, sampling=params)


def test_places_follow_the_kept_part_and_rows_their_position() -> None:
    harness = Harness(CONFIG)
    harness.submit(submit("r"))
    first, last = harness.step(), harness.plan()
    assert [(c.start, c.num_tokens, c.compaction) for c in first.prefill] == [(0, 16, None)]
    [chunk] = last.prefill
    assert (chunk.start, chunk.num_tokens, len(chunk.pages), chunk.dropped) == (16, 14, 8, 0)
    assert chunk.compaction == Compaction(kept=10, dropped=20, window=3, pages=chunk.compaction.pages)
    assert len(chunk.compaction.pages) == 3
    # Both are held until the copy is made, and then the prompt's pages are free.
    assert harness.scheduler.pool.num_free == 32 - 8 - 3
    assert harness.scheduler.stats.dropped_tokens == 0
    harness.finish(last)
    assert harness.scheduler.pool.num_free == 32 - 3
    assert harness.scheduler.stats.dropped_tokens == 20
    starts = []
    while harness.live:
        [row] = harness.step().decode
        assert (row.dropped, row.pages[:3]) == (20, chunk.compaction.pages)
        starts.append((row.start, len(row.pages)))
    assert starts == [(30, 3), (31, 3), (32, 4), (33, 4), (34, 4)]
    harness.drain()


def test_window_is_never_split() -> None:
    """After a full chunk of 16 only 2 rows would be left, so a window of 5 takes rows from it."""
    harness = Harness(CONFIG)
    harness.submit(replace(submit("r", window=5, max_tokens=1), prompt_token_ids=PROMPT[:18]))
    found = []
    while harness.live:
        found += [chunk.num_tokens for chunk in harness.step().prefill]
    assert found == [13, 5]


def test_prefix_hits_exclude_the_window_and_kept_parts() -> None:
    harness = Harness(CONFIG)
    harness.submit(submit("plain", None))
    harness.drain()
    harness.submit(submit("kept", window=5))
    assert [(c.start, c.num_tokens) for c in harness.step().prefill] == [(24, 6)]
    harness.drain()
    # The pages of its prompt stay reusable; the pages of the kept part have no owner now.
    harness.submit(submit("plain", None))
    assert [(c.start, c.num_tokens) for c in harness.step().prefill] == [(28, 2)]
    harness.drain()


def test_lost_step_and_lost_rank_compress_again() -> None:
    harness = Harness(CONFIG)
    harness.submit(submit("r", max_tokens=9))
    harness.step()
    for _ in range(2):
        assert harness.plan().prefill[0].compaction is not None
        harness.roll_back()
    for _ in range(4):
        harness.step()
    harness.roll_back()
    harness.carry("r")
    again = []
    while harness.live:
        step = harness.step()
        again += [(c.start, c.num_tokens, c.prompt, c.dropped) for c in step.chunks]
    assert harness.scheduler.stats.dropped_tokens == 40
    # Its whole pages are found again; its output runs as output, after the kept part.
    assert again[:2] == [(24, 6, True, 0), (30, 4, False, 20)]


@pytest.mark.parametrize(("budget", "sampling"), [(30, {}), (31, {}), (10, {"max_tokens": 0})], ids=str)
def test_nothing_happens_if_nothing_is_dropped(budget: int, sampling: dict[str, Any]) -> None:
    plain, asked = Harness(CONFIG), Harness(CONFIG)
    plain.submit(submit("r", None, **sampling))
    asked.submit(submit("r", budget, **sampling))
    while plain.live:
        assert plain.step() == asked.step()
    assert not asked.live


@pytest.mark.parametrize(
    ("changes", "request_", "words"),
    [
        ({}, submit("r", 3, 4), "wants 1 <= window <= budget, got window 4 and budget 3"),
        ({}, submit("r", 3, 0), "wants 1 <= window <= budget, got window 0 and budget 3"),
        ({}, submit("r", 20, 14), "the window of 14 exceeds the 13 prompt rows"),
        ({"max_num_seqs": 12}, submit("r", 20, 9), "the window of 9 exceeds the 8 prompt rows"),
        ({"max_num_seqs": 1}, submit("r", 20, 17), "the window of 17 exceeds the 16 prompt rows"),
        ({"mixed_prefill_tokens": 8}, submit("r", 20, 9), "the window of 9 exceeds the 8 prompt rows"),
        ({"num_state_slots": 4, "chunk_alignment": 4}, submit("r", 20, 11), "of 11 exceeds the 10 prompt rows"),
        ({"num_pages": 11}, submit("r"), "the request needs 12 KV pages, this worker has 11"),
    ],
)
def test_refusals_have_both_numbers(changes: dict[str, Any], request_: Submit, words: str) -> None:
    rejected = Harness(replace(CONFIG, **changes)).scheduler.add(request_, b"a", 0.0)
    assert isinstance(rejected, Rejected)
    assert words in rejected.message


def test_window_of_all_remaining_rows_is_accepted() -> None:
    """Three outputs run for long. A window above the 13 remaining rows would wait for one, with all behind it."""
    harness = Harness(replace(CONFIG, max_model_len=400, num_pages=256))
    for i in range(3):
        harness.submit(replace(submit(f"long{i}", None, max_tokens=300), prompt_token_ids=PROMPT[:2]))
    for _ in range(4):
        harness.step()
    assert harness.submit(submit("wide", 20, 13, max_tokens=1)) is None
    for _ in range(6):
        harness.step()
    assert "wide" not in harness.live


def test_unknown_method_is_named() -> None:
    asked = replace(submit("r").sampling, kv_compression=KvCompression(method="h2o", budget=4, window=2))
    rejected = Harness(CONFIG).scheduler.add(replace(submit("r"), sampling=asked), b"a", 0.0)
    assert isinstance(rejected, Rejected)
    assert "knows snapkv, got 'h2o'" in rejected.message
