"""Rows per expert that GPU ranks count equal the rows that a fleet of CPUs computes.

Without a GPU the same steps run over the kernels' references in fp32 (captured_on_cpu.py, test_peer_steps.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import DEMO, MLA, make_checkpoint
from tests.e2e.test_one_answer import requests
from tests.engine.captured_on_cpu import GPU, PLACE, gpu_steps
from tests.engine.test_peer_steps import Starter, config, gpu_memory, start
from tests.fleet import Client, ProcessPool, start_fleet
from tests.rank import Rank, Requests

from moeyard_kernels.cuda.gate import GateCounts
from moeyard_router.fleet.loads import rows_of_ranks
from moeyard_worker.config.placement import Placement
from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.models.families import load_model_config
from moeyard_worker.protocol import ExpertLoads, SamplingParams

__all__ = ["gpu_memory", "start"]

DRAFTS: dict[str, Any] = {"speculate": "mtp", "draft_tokens": 2, "max_num_seqs": 8, "max_batch_tokens": 128}
DRAFTS["max_model_len"] = 208
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_moe": {}, "deepseek_v3": MLA, "qwen3_next": {"head_dim": 32}}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dtype = torch.bfloat16 if GPU else torch.float32
    directory = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(directory, request.param, dtype=dtype, **FAMILIES[request.param])


def asked() -> Requests:
    """Prompts of several chunks with decode rows, in numbers that fit no captured size."""
    return {name: (prompt, SamplingParams(**params)) for name, (prompt, params) in requests().items()}


def load(model: Path, **options: Any) -> Rank:
    return Rank(model, page_size=16, max_num_seqs=8, max_batch_tokens=128, max_model_len=208, **options)


def loads(rank: Rank) -> ExpertLoads:
    """Return the loads of a rank that no loop drives. A device answers a later call."""
    while (found := rank.worker.experts.loads(0)) is None:
        torch.cuda.synchronize()
    return found


def by_layer(found: Sequence[ExpertLoads]) -> dict[int, list[int]]:
    """Return the rows of each layer's experts, summed over ranks."""
    out: dict[int, dict[int, int]] = {layer: {} for layer in found[0].layers}
    for each, rows in zip(found, rows_of_ranks(found), strict=True):
        for layer, row in zip(each.layers, rows, strict=True):
            for expert, count in zip(each.experts, row, strict=True):
                out[layer][expert] = out[layer].get(expert, 0) + count
    return {layer: [row[expert] for expert in sorted(row)] for layer, row in out.items()}


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    """The rows on a CPU, or on a GPU eager with one step in flight, because a GPU chooses differently."""
    with load(model, **({"device": "cuda", "enforce_eager": True, "async_scheduling": False} if GPU else {})) as rank:
        rank.run(asked())
        return by_layer([loads(rank)])


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("eager", "deep"), [(False, 2), (False, 1), (True, 2)], ids=str)
def test_counts_equal_those_of_a_cpu(model: Path, expected: dict[int, list[int]], eager: bool, deep: int) -> None:
    """Graphs and eager, with and without padding rows. Rehearsed steps do not count."""
    with gpu_steps(), load(model, enforce_eager=eager, **({"device": "cuda"} if GPU else {})) as rank:
        assert not any(loads(rank).chosen)
        answers, stats = rank.run(asked(), max_in_flight=deep)
        found, runner = loads(rank), rank.worker.runner
    assert isinstance(runner, GpuRunner)
    assert (runner.num_replayed == 0) == eager
    assert eager or runner.num_padded_rows > runner.num_rows
    assert found.rows == found.held == ()
    counted = by_layer([found])
    read = load_model_config(model)
    assert sorted(counted) == list(read.moe_layers)
    assert {len(row) for row in counted.values()} == {read.num_experts}
    assert counted == expected
    # No step reads the last token of an answer.
    rows = stats.prefill_tokens + sum(len(each.token_ids) - 1 for each in answers.values())
    assert {sum(row) for row in counted.values()} == {rows * read.gate.rule.top_k}


def unpenalised() -> Requests:
    """Return the requests without penalties: graphs make their drafts, the host those of the others."""
    return {name: (prompt, params) for name, (prompt, params) in asked().items() if params.repetition_penalty == 1}


@pytest.fixture(scope="module")
def drafted() -> dict[int, list[int]]:
    """The same for the demo model with two drafts per token."""
    with Rank(DEMO, **DRAFTS, **PLACE, enforce_eager=GPU) as rank:
        rank.run(unpenalised(), adaptive_drafts=False, max_in_flight=1)
        return by_layer([loads(rank)])


def test_rows_that_verify_drafts_count(drafted: dict[int, list[int]]) -> None:
    """Refused drafts count, because they passed through experts. Padding rows of a captured step do not."""
    with gpu_steps(), Rank(DEMO, **DRAFTS, **PLACE) as rank:
        assert not any(loads(rank).chosen)
        _, stats = rank.run(unpenalised(), adaptive_drafts=False, max_in_flight=1)
        found, runner = by_layer([loads(rank)]), rank.worker.runner
    assert isinstance(runner, GpuRunner)
    assert runner.num_replayed > 5
    assert 0 < sum(stats.accepted) < sum(stats.drafts)
    *layers, drafts = sorted(found)
    assert {layer: found[layer] for layer in layers} == {layer: drafted[layer] for layer in layers}
    # A graph drafts for every sequence. The host skips those that may have no further token.
    assert sum(found[drafts]) >= sum(drafted[drafts]) > 0


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPool]:
    pool = ProcessPool()
    yield pool
    pool.close()


def ask_all(client: Client, ranks: int) -> None:
    """Submit the same requests to any fleet, round robin over its ranks."""
    for i, (name, (prompt, sampling)) in enumerate(requests().items()):
        client.submit(i % ranks, name, prompt[:70], **{**sampling, "max_tokens": 5})
    client.wait()


def uneven(model: Path, *, copies: bool) -> Placement:
    """Place experts over two ranks, differently in each layer. With `copies` one expert of each layer is on both."""
    read = load_model_config(model)
    rows = [tuple((expert + i) % 3 // 2 for expert in range(read.num_experts)) for i, _ in enumerate(read.moe_layers)]
    second = tuple(((0, 1 - row[0]),) for row in rows) if copies else ()
    return Placement(read.moe_layers, tuple(rows), second)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small"), "qwen3_moe", dtype=torch.float32)


ONE_PROCESS = pytest.mark.skipif(GPU, reason="ranks of one process share no GPU")


@pytest.mark.sampled(0)
@ONE_PROCESS
@pytest.mark.parametrize("kind", ["alone", "shards", "uneven", "copies"])
def test_fleet_reports_equal_those_of_cpu_ranks(small: Path, processes: ProcessPool, start: Starter, kind: str) -> None:
    """Each rank's report, read through the router's messages, equals that of CPU ranks."""
    ranks = 1 if kind == "alone" else 2
    placement = None if kind in ("alone", "shards") else uneven(small, copies=kind == "copies")
    settings = config(small, ranks=ranks, exchange="auto" if ranks == 1 else "nvlink")
    on_cpus = replace(settings, device="cpu", exchange="auto", async_scheduling=False)
    with start_fleet(processes, on_cpus, placement) as fleet:
        ask_all(fleet.client, ranks)
        wanted = fleet.client.inspect()
    gpus = start(settings, placement)
    first = gpus.client.inspect()
    assert not any(any(each.chosen) for each in first)
    ask_all(gpus.client, ranks)
    found = gpus.client.inspect()
    assert all(gpus.runner(rank).num_replayed for rank in range(ranks))
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.rank, ours.layers, ours.experts) == (theirs.rank, theirs.layers, theirs.experts)
    assert all(bool(each.held) == (kind in ("uneven", "copies")) for each in found)
    if kind == "copies":
        assert by_layer(found) == by_layer(wanted)
        return
    assert rows_of_ranks(found) == rows_of_ranks(wanted)
    assert rows_of_ranks(wanted) != [[] for _ in wanted]


class Slow(GateCounts):
    """The counters of a slow device: only every fifth read returns."""

    def __init__(self, whole: GateCounts) -> None:
        super().__init__()
        self._whole, self.asked = whole, 0

    def read(self) -> list[list[int]] | None:
        self.asked += 1
        return self._whole.read() if self.asked % 5 == 0 else None


@ONE_PROCESS
def test_slow_device_is_read_again(small: Path, start: Starter) -> None:
    """A reader waits, on idle ranks too, while steps continue. Each reader gets one answer."""
    fleet = start(config(small, ranks=1, exchange="auto"))
    slow = fleet.workers[0].experts._choices = Slow(fleet.workers[0].experts._choices)
    fleet.client.inspect()
    assert slow.asked == 5
    ask_all(fleet.client, 1)
    (idle,) = fleet.client.inspect()
    prompt, sampling = requests()["c"]
    fleet.client.submit(0, "busy", prompt, **{**sampling, "max_tokens": 40})
    fleet.client.wait_for(lambda: len(fleet.client.answers["busy"].token_ids) > 3)
    asked = slow.asked
    (busy,) = fleet.client.inspect()
    answer = fleet.client.answers["busy"]
    assert answer.end is None
    assert slow.asked == asked + 5
    fleet.client.wait()
    (last,) = fleet.client.inspect()
    sums = [sum(each.chosen) for each in (idle, busy, last)]
    assert sums == sorted(set(sums))


def test_no_counts_are_reported_when_counting_is_off(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons of whole steps run with and without counts."""
    monkeypatch.setattr(GateCounts, "on", False)
    with gpu_steps(), load(small, **PLACE) as rank:
        rank.run({"a": asked()["a"]})
        found = loads(rank)
        monkeypatch.setattr(GateCounts, "on", True)
        assert not any(loads(rank).chosen)
    assert (found.rows, found.chosen, found.held) == ((), (), ())
    assert rows_of_ranks([found]) == [[]]


@pytest.mark.slow
@ONE_PROCESS
def test_new_rank_counts_from_zero(small: Path, start: Starter) -> None:
    """The counts of the lost rank are gone, and the others keep theirs."""
    fleet = start(config(small, ranks=2, exchange="nvlink"))
    ask_all(fleet.client, 2)
    before = fleet.client.inspect()
    assert all(any(each.chosen) for each in before)
    fleet.replace(1)
    stayed, new = fleet.client.inspect()
    assert stayed == before[0]
    assert not any(new.chosen)
    assert len(new.chosen) == len(before[1].chosen)
