"""Speculation over the nvlink exchange with ranks and graphs as in test_peer_steps.py equals plain decoding.

The bundled model, which drafts well, runs in bf16 over the references. Ranks differ in sequences and rows, may have
none, verify drafts or single tokens, want different depths, and run some steps eager while peers replay graphs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import DEMO, add_v4_drafts, make_checkpoint, publish_v4
from tests.engine.test_peer_steps import Fleet, Starter, config, gpu_memory, start
from tests.engine.test_speculation import prompts

from moeyard_kernels import ops
from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.engine.steps.graphs import smallest
from moeyard_worker.engine.steps.sizes import with_peers
from moeyard_worker.protocol import Done, Grammar
from moeyard_worker.scheduling.scheduler import Scheduler

__all__ = ["gpu_memory", "start"]

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


def asked() -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Prompts from a few tokens to more than a chunk, with all kinds of sampling."""
    a, b, c, d, _, f = prompts()
    common: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    seeded = {"temperature": 0.8, "seed": 11}
    schema = Grammar(kind="json_schema", text=SCHEMA)
    return {
        "greedy": (a, {**common, "temperature": 0.0, "logprobs": 3}),
        "seeded": (b, {**common, **seeded, "top_p": 0.95, "top_k": 40, "logprobs": 0, "prompt_logprobs": 2}),
        "penalised": (c[:40], {**common, "temperature": 0.6, "seed": 5, "repetition_penalty": 1.3, "logprobs": 1}),
        "short": (d, {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "logprobs": 1}),
        "grammar": (f, {"max_tokens": 16, **seeded, "grammar": schema, "logprobs": 1}),
    }


@dataclass(frozen=True, slots=True)
class Case:
    """One fleet. `where` is the rank of each request."""

    ranks: int
    drafts: int | None
    deep: int = 2
    eager: bool = False
    slots: int | None = None
    where: tuple[int, ...] = (0, 1, 0, 0, 1)

    def __str__(self) -> str:
        drafts, slots = ("auto" if each is None else each for each in (self.drafts, self.slots))
        how = "eager" if self.eager else "graphs"
        return f"{self.ranks}ranks-{drafts}drafts-{self.deep}deep-{how}-{slots}slots-{''.join(map(str, self.where))}"


CASES = [
    Case(2, 2, deep=1),
    Case(2, None),
    Case(2, 3),
    Case(3, 1, where=(2, 0, 2, 2, 2)),
    Case(2, 2, where=(1, 1, 1, 1, 1)),
    Case(2, 2, eager=True),
    Case(2, 2, slots=40),
    Case(1, 2, where=(0, 0, 0, 0, 0)),
]


def settings(case: Case) -> EngineConfig:
    found = config(DEMO, ranks=case.ranks, exchange="nvlink", deep=case.deep, eager=case.eager)
    return replace(
        found,
        kv_memory=2 * found.kv_memory,
        speculate="mtp",
        draft_tokens=case.drafts,
        expert_slots=case.slots,
        expert_fetch="auto",
    )


@pytest.fixture(autouse=True)
def _rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a row's bits independent of the other rows, as on a GPU."""
    monkeypatch.setattr(ops.linear, "reference", by_row)


def by_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    static_weight: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `ops.linear` row by row, because a CPU sums products of other sizes in another order."""
    y = torch.stack([weight.float() @ row for row in x.float()]) if len(x) else x.new_empty(0, len(weight)).float()
    return (y if bias is None else y + bias.float()).to(out_dtype or x.dtype)


def answers(
    fleet: Fleet, label: str, where: Sequence[int], requests: dict[str, tuple[list[int], dict[str, Any]]] | None = None
) -> dict[str, tuple[Any, ...]]:
    """Run all requests at once (those of `asked` without any), each on its rank."""
    requests = requests or asked()
    for rank, (name, (prompt, sampling)) in zip(where, requests.items(), strict=True):
        fleet.client.submit(rank, f"{label}-{name}", prompt, **sampling)
    return {name: result(fleet, f"{label}-{name}") for name in requests}


def result(fleet: Fleet, name: str) -> tuple[Any, ...]:
    """Return ids, log-probabilities without tolerance, and the end of a request."""
    (answer,) = fleet.client.wait(name)
    assert isinstance(answer.end, Done), answer.end
    assert answer.end.error is None
    ends = answer.end.finish_reason, answer.end.stop_token_id
    return tuple(answer.token_ids), tuple(answer.logprobs), tuple(answer.prompt_logprobs), ends


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, tuple[Any, ...]]]:
    """The answers of one rank without drafts, computed once."""
    return {}


def expected(plain: dict[str, Any], start: Starter) -> dict[str, tuple[Any, ...]]:
    if not plain:
        fleet = start(config(DEMO, ranks=1, exchange="auto", eager=True))
        plain["alone"] = {name: answers_alone(fleet, name) for name in asked()}
        fleet.close()
    return dict(plain["alone"])


def answers_alone(fleet: Fleet, name: str) -> tuple[Any, ...]:
    prompt, sampling = asked()[name]
    fleet.client.submit(0, name, prompt, **sampling)
    return result(fleet, name)


def runners(fleet: Fleet) -> Iterator[GpuRunner]:
    for worker in fleet.workers:
        assert isinstance(worker.runner, GpuRunner)
        yield worker.runner


def schedulers(fleet: Fleet) -> Iterator[Scheduler]:
    for worker in fleet.workers:
        yield worker.scheduler


@pytest.mark.sampled(0)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_drafts_on_any_rank_change_no_answer(case: Case, plain: dict[str, Any], start: Starter) -> None:
    wanted = expected(plain, start)
    fleet = start(settings(case))
    assert answers(fleet, "first", case.where) == wanted
    # Prefix hits make steps with prompts fewer, and each request is on another rank.
    turned = [(rank + 1) % case.ranks for rank in case.where]
    assert answers(fleet, "again", turned) == wanted
    stats = [scheduler.stats for scheduler in schedulers(fleet)]
    assert sum(each.accepted[0] for each in stats) > 0.25 * sum(each.drafts[0] for each in stats) > 0
    for rank, runner in enumerate(runners(fleet)):
        if case.eager:
            assert runner.num_replayed == 0
            continue
        assert runner.num_replayed >= 5, f"rank {rank}: {runner.num_replayed} replayed, {runner.num_eager} launched"
        assert runner.num_replayed > runner.num_eager or case.slots
    assert (fleet.turns.num_fetches > 0) == (case.slots is not None)
    # Counted bytes include those of the drafts' passes.
    if case.ranks > 1:
        counted = [worker._engine._exchange for worker in fleet.workers]  # type: ignore[union-attr]
        for exchange in counted:
            exchange.steps.counts.look(wait=True)  # type: ignore[attr-defined]
        assert sum(e.stats.bytes_sent for e in counted) == sum(e.stats.bytes_received for e in counted) > 0


@pytest.mark.sampled(0)
@pytest.mark.parametrize("drafts", [5, None], ids=["5drafts", "autodrafts"])
def test_blocks_of_drafts_change_no_answer(drafts: int | None, tmp_path: Path, start: Starter) -> None:
    """DSpark on ranks that have all requests, none, or some. A pass over blocks has more rows than its step."""
    model = publish_v4(make_checkpoint(tmp_path, "deepseek_v4", dtype=torch.bfloat16))
    add_v4_drafts(model, dspark=True)
    # Tokens of the small vocabulary, and no tokenizer for a grammar.
    some = {name: ([i % 256 for i in ids], kind) for name, (ids, kind) in asked().items() if name != "grammar"}
    plain = replace(config(model, ranks=1, exchange="auto", eager=True), max_batch_tokens=160)
    fleet = start(plain)
    wanted = answers(fleet, "alone", (0, 0, 0, 0), some)
    fleet.close()
    fleet = start(
        replace(plain, num_workers=2, exchange="nvlink", enforce_eager=False, speculate="dspark", draft_tokens=drafts)
    )
    for label, where in (("all", (1, 1, 1, 1)), ("some", (0, 1, 0, 0)), ("again", (1, 0, 0, 1))):
        assert answers(fleet, label, where, some) == wanted
    stats = [scheduler.stats for scheduler in schedulers(fleet)]
    assert sum(each.accepted[0] for each in stats) > 0.1 * sum(each.drafts[0] for each in stats) > 0
    assert all(runner.num_replayed >= 5 for runner in runners(fleet))


@pytest.mark.slow
def test_replaced_rank_keeps_the_graphs_of_its_peers(plain: dict[str, Any], start: Starter) -> None:
    wanted, case = expected(plain, start), Case(2, 2)
    fleet = start(settings(case))
    assert answers(fleet, "before", case.where) == wanted
    first = next(runners(fleet))
    graphs, replayed = first._graphs, first.num_replayed
    (loss,) = fleet.replace(1)
    assert loss["ranks"] == (1,)
    assert answers(fleet, "behind", case.where) == wanted
    assert first._graphs is graphs
    assert first.num_replayed > replayed


OWN = [
    StepSize(sequences=count, queries=queries, width=width)
    for count in (1, 2, 4, 8, 16, 32, 64)
    for queries in (1, 2, 3, 4)
    for width in (8, 128, 160)
]


def test_every_peer_depth_has_a_captured_step() -> None:
    sizes = sorted(with_peers(OWN), key=lambda size: size.order)
    assert len(set(sizes)) == len(sizes) < 3 * len(OWN)
    graphs, most = {size: size for size in sizes}, 256
    assert [size.peers for size in sizes if not size.rows] == [1, 16, 64, 256]
    for count in (1, 3, 9, 64):
        for queries in (1, 2, 4):
            for width in (1, 9, 140):
                size = StepSize(sequences=count, queries=queries, width=width)
                own = smallest(graphs, size, 0)
                assert own is not None
                for others in (1, 2, 16, 17, 100, 256):
                    found = smallest(graphs, size, max(own.rows, others))
                    assert found is not None, f"{size} beside {others}"
                    assert found.holds(size)
                    assert found.rows <= max(own.rows, others) <= found.peers
                # More than is captured is launched.
                assert smallest(graphs, size, most + 1) is None
