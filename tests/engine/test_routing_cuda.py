"""Routed experts of a GPU's steps: graphs write them, and padding rows and rejected drafts are left out.

Without a GPU the same steps run over the kernels' references in fp32 (captured_on_cpu.py).
"""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.checkpoints import DEMO
from tests.engine.captured_on_cpu import PLACE, gpu_steps
from tests.engine.test_routing import requests, sizes
from tests.rank import Rank, Reply

from moeyard_worker.engine.steps.gpu_runner import GpuRunner

LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_batch_tokens": 128, "max_model_len": 160}


def load(**options: Any) -> Rank:
    return Rank(DEMO, **PLACE, **LIMITS, enable_return_routed_experts=True, **options)


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    with gpu_steps():
        yield


@pytest.fixture(scope="module")
def expected() -> dict[str, Reply]:
    """Answer each request alone, eager, without a prefix cache."""
    with load(enforce_eager=True, prefix_caching=False) as rank:
        return {name: rank.run({name: each})[0][name] for name, each in requests().items()}


@pytest.mark.parametrize(
    ("options", "variants"),
    [
        ({}, ({}, {"max_in_flight": 2}, {"prefill_chunk": 16, "num_pages": 9, "max_in_flight": 2})),
        ({"speculate": "mtp", "draft_tokens": 2}, ({"max_in_flight": 2}, {"prefill_chunk": 16, "num_pages": 9})),
    ],
    ids=["plain", "drafts"],
)
def test_graphs_write_the_experts(
    expected: dict[str, Reply], options: dict[str, Any], variants: tuple[dict[str, Any], ...]
) -> None:
    with load(**options) as rank:
        launches = rank.worker.runner
        assert isinstance(launches, GpuRunner)
        for changes in variants:
            replies, stats = rank.run(requests(), **changes)
            assert {name: len(reply.experts) for name, reply in replies.items()} == sizes(rank)
            for name, reply in replies.items():
                assert (reply.token_ids, reply.experts) == (expected[name].token_ids, expected[name].experts), name
            assert stats.prefix_hit_tokens > 0
            assert (stats.num_preemptions > 0) == ("num_pages" in changes)
        assert launches.num_replayed > 0
        assert launches.num_padded_rows > launches.num_rows
