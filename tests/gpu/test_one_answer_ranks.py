"""One answer over several GPUs: ids, experts and log-probability bits of a request, however many ranks serve it.

Each rank has its own GPU. The product is {NVLink, NCCL, shared memory, TCP} x {one, two steps in flight} x {all, half
of the experts in slots}. Requests run alone and mixed, with prefix misses and hits. The reference is each request alone
on one rank, eager. NVLink also runs with a quarter of the experts or one in slots, and with misses that each rank reads
alone instead of for its peers. The demo model runs with {1 draft, 3, adaptive} against itself without drafts. All three
exchanges run with random placements and with half of the experts on two ranks. NVLink also runs models with linear
attention and DeepSeek-V4, where in one case one rank has three of four requests. Codes of fp8, int4 and fp4 are
compared with the bfloat16 weights that they stand for.
"""

import itertools
import re
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.checkpoints import DEMO, make_checkpoint
from tests.e2e.test_one_answer import SNAPSHOTS, check_rows, dealt, dealt_evenly, requests, run_alone, run_mixed
from tests.fleet import Fleet, ProcessPool, start_fleet
from tests.gpu.test_one_answer import CODES, MODELS
from tests.limits import HANG_SECONDS
from tests.quantised import make_served

from moeyard_worker.config.engine_config import DTYPE_BYTES, EngineConfig, ExchangeKind, ExpertFetch
from moeyard_worker.config.placement import Placement
from moeyard_worker.exchange.transports.nvlink.steps import LOOK_SECONDS
from moeyard_worker.models.families import load_model_config

NUM_GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.gpu(2)

NUM_PAGES, PAGE_SIZE = 64, 64
# Placement of experts: contiguous shards, random, or random with copies on a second rank.
Placed = Literal["shards", "shuffled", "copied"]


@dataclass(frozen=True, slots=True)
class Case:
    """One fleet."""

    ranks: int
    exchange: ExchangeKind
    deep: int = 1
    slots: str = "all"
    eager: bool = False
    drafts: str = "off"
    fetch: ExpertFetch = "auto"
    placed: Placed = "shards"
    weights: str = "auto"

    def __str__(self) -> str:
        launched = ("eager" if self.eager else "graphs") + ("" if self.drafts == "off" else f"-drafts_{self.drafts}")
        slots = self.slots + ("" if self.fetch == "auto" else f"_{self.fetch}")
        placed = "" if self.placed == "shards" else f"-{self.placed}"
        weights = "" if self.weights == "auto" else f"-{self.weights}"
        return f"{self.ranks}ranks-{self.exchange}-{self.deep}deep-{slots}-{launched}{placed}{weights}"


MANY = [ranks for ranks in (2, 4, 8) if ranks <= NUM_GPUS]
# Ranks with fewer slots than experts read misses for each other, unless `expert_fetch` is alone.
FETCHES: tuple[tuple[str, ExpertFetch], ...] = (("half", "alone"), ("quarter", "shared"), ("one", "shared"))
CASES = [Case(*values) for values in itertools.product(MANY, ("nvlink",), (2, 1), ("all", "half"))]
CASES += [Case(ranks, "nvlink", 2, "all", eager=True) for ranks in MANY]
CASES += [Case(ranks, "nvlink", 2, slots, fetch=fetch) for ranks in MANY for slots, fetch in FETCHES]
CASES += [Case(MANY[0], "nvlink", 1, "quarter", eager=True)] if MANY else []
CASES += [Case(1, "auto"), Case(1, "nvlink"), Case(1, "zmq"), Case(1, "nccl")]
CASES += [Case(*values) for values in itertools.product(MANY, ("zmq", "zmq-tcp", "nccl"), (1, 2), ("all", "half"))]
PLACED = [
    Case(ranks, exchange, 2, slots, placed=placed)
    for ranks in MANY
    for exchange, slots, placed in (
        ("nvlink", "all", "shuffled"),
        ("nvlink", "all", "copied"),
        ("nvlink", "half", "copied"),
        ("nccl", "all", "copied"),
        ("zmq", "all", "copied"),
    )
]
HYBRID = [
    Case(ranks, "nvlink", deep, slots, placed=placed)
    for ranks in MANY[:1]
    for deep, slots, placed in ((2, "all", "shards"), (1, "half", "shards"), (2, "all", "copied"))
]
QUANTISED = [
    Case(ranks, exchange, deep, slots, placed=placed, weights=weights)
    for ranks in MANY
    for exchange, deep, slots, placed, weights in (
        ("nvlink", 2, "all", "shards", "auto"),
        ("nvlink", 1, "half", "copied", "codes"),
        ("nccl", 2, "all", "copied", "codes"),
        ("zmq", 2, "half", "shards", "auto"),
    )
]
SPECULATED = [
    Case(MANY[-1] if MANY else 1, "nvlink", deep, slots, drafts=drafts)
    for deep, slots, drafts in ((2, "all", "auto"), (1, "all", "3"), (2, "all", "1"), (2, "half", "auto"))
]


def config(case: Case, model: Path) -> EngineConfig:
    read = load_model_config(model)
    read = read if case.drafts == "off" else read.with_drafts()
    total = read.num_experts * len(read.moe_layers) // case.ranks
    state = read.state_spec(DTYPE_BYTES[read.dtype])
    snapshots = SNAPSHOTS["ample"] * state.bytes_per_sequence
    return EngineConfig(
        model_path=str(model),
        device="cuda",
        num_workers=case.ranks,
        exchange=case.exchange,
        kv_memory=NUM_PAGES * PAGE_SIZE * state.bytes_per_token + snapshots,
        snapshot_memory=snapshots or None,
        page_size=PAGE_SIZE,
        prefill_chunk=max(16, state.chunk_alignment),
        max_batch_tokens=256,
        max_num_seqs=8,
        expert_slots={"all": None, "half": total // 2, "quarter": total // 4, "one": 1}[case.slots],
        expert_fetch=case.fetch,
        weights=case.weights,
        enforce_eager=case.eager,
        async_scheduling=case.deep == 2,
        enable_return_routed_experts=True,
        speculate=None if case.drafts == "off" else "mtp",
        draft_tokens=int(case.drafts) if case.drafts.isdigit() else None,
        # A first step compiles its kernels.
        step_deadline=10.0,
    )


def placement(case: Case, model: Path) -> Placement | None:
    """Contiguous shards or random placement. Without copies rank 0 has all experts of the first layer."""
    if case.placed == "shards":
        return None
    read, copied = load_model_config(model), case.placed == "copied"
    if case.slots != "all":
        return dealt_evenly(read, case.ranks, str(case), copied=copied)
    return dealt(read, case.ranks, str(case), copied=copied, alone=not copied)


@pytest.fixture(scope="module", params=[f"{kind}-{dtype}" for kind in ("mla", "gqa") for dtype in DTYPE_BYTES])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: ProcessPool
) -> tuple[Path, dict[str, tuple[Any, ...]]]:
    """A checkpoint and the answers of one eager rank to each request alone. Codes get those of their values in bf16."""
    kind, dtype = request.param.split("-")
    if kind in CODES:
        model, plain = make_served(kind, tmp_path_factory.mktemp(kind), **CODES[kind])
    else:
        family, overrides = MODELS[kind]
        plain = model = make_checkpoint(tmp_path_factory.mktemp(kind), family, dtype=getattr(torch, dtype), **overrides)
    with start_fleet(pool, config(Case(1, "auto", eager=True), plain)) as fleet:
        return model, {name: run_alone(fleet, "reference", name, 0) for name in requests()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_answer(case: Case, served: tuple[Path, dict[str, Any]], pool: ProcessPool) -> None:
    check(case, served, pool)


@pytest.mark.parametrize("served", ["gqa-bfloat16", "mla-bfloat16"], indirect=True)
@pytest.mark.parametrize("case", PLACED, ids=str)
def test_placements_of_experts(case: Case, served: tuple[Path, dict[str, Any]], pool: ProcessPool) -> None:
    check(case, served, pool)


@pytest.mark.parametrize("served", ["gdn-bfloat16", "kda-bfloat16", "v4-bfloat16"], indirect=True)
@pytest.mark.parametrize("case", HYBRID, ids=str)
def test_models_with_slots(case: Case, served: tuple[Path, dict[str, Any]], pool: ProcessPool) -> None:
    check(case, served, pool, uneven=True)


@pytest.mark.parametrize("served", [f"{kind}-bfloat16" for kind in CODES], indirect=True)
@pytest.mark.parametrize("case", QUANTISED, ids=str)
def test_quantised(case: Case, served: tuple[Path, dict[str, Any]], pool: ProcessPool) -> None:
    check(case, served, pool)


@pytest.mark.parametrize("served", ["gqa-bfloat16"], indirect=True)
@pytest.mark.parametrize("exchange", ["nvlink", "nccl"])
def test_eager_rank_beside_replaying_ranks(
    exchange: ExchangeKind, served: tuple[Path, dict[str, Any]], pool: ProcessPool
) -> None:
    """Each rank is eager in turn, then none: their messages match, in a graph or not."""
    model, expected = served
    case = Case(2, exchange, 2)
    spread = {name: i % case.ranks for i, name in enumerate(requests())}
    with start_fleet(pool, config(case, model)) as fleet:
        for label, launching in (("first", (True, False)), ("second", (False, True)), ("none", (False, False))):
            for rank, eager in zip(fleet.ranks, launching, strict=True):
                rank.call("eager", eager)
            before = [each["num_replayed"] for each in fleet.call("graphs")]
            assert run_mixed(fleet, label, spread) == expected
            after = [each["num_replayed"] for each in fleet.call("graphs")]
            assert [a == b for a, b in zip(before, after, strict=True)] == [*launching], (before, after)


def check(case: Case, served: tuple[Path, dict[str, Any]], pool: ProcessPool, *, uneven: bool = False) -> None:
    """Compare the bits of one case. `uneven` also puts all requests but one on the last rank."""
    model, expected = served
    with start_fleet(pool, config(case, model), placement(case, model)) as fleet:
        last = case.ranks - 1
        # The other ranks have no row.
        assert run_alone(fleet, "alone", "c", last) == expected["c"]
        spread = {name: i % case.ranks for i, name in enumerate(requests())}
        assert run_mixed(fleet, "mixed", spread) == expected
        assert run_alone(fleet, "again", "c", last) == expected["c"]
        # DeepSeek-V4 reuses prefixes of whole multiples of 128 positions, and request "c" is shorter.
        reused = fleet.call("stats")[last]["prefix_hit_tokens"]
        assert (reused > 0) == (fleet.config.prefill_chunk < len(requests()["c"][0])), reused
        if uneven:
            assert run_mixed(fleet, "uneven", {name: last if i else 0 for i, name in enumerate(requests())}) == expected
        check_rows(fleet, 6 + len(expected) * uneven)
        if case.exchange == "nvlink" and not case.eager:
            # Requests that score their prompt run eager. Decoding replays graphs.
            assert all(each["num_replayed"] > each["num_eager"] for each in fleet.call("graphs")), fleet.call("graphs")
        if case.exchange == "nccl":
            assert all(each["num_replayed"] for each in fleet.call("graphs")), fleet.call("graphs")
        assert all(report["exchange"] != "auto" for report in fleet.reports)
        if case.ranks > 1 and case.exchange == "nvlink" and case.slots != "all":
            # Ranks read their device's counters at different steps, so the sums may differ.
            for direction, fetched in fetched_bytes(fleet, expected, last).items():
                assert (sum(fetched) > 0) == (case.fetch != "alone"), (direction, fetched)


@pytest.fixture(scope="module")
def demo(pool: ProcessPool) -> dict[str, tuple[Any, ...]]:
    """The demo model's answers to each request alone, on one rank without drafts."""
    with start_fleet(pool, config(Case(1, "auto", eager=True), DEMO)) as fleet:
        return {name: run_alone(fleet, "reference", name, 0) for name in requests()}


@pytest.mark.parametrize("case", SPECULATED, ids=str)
def test_drafts_over_ranks(case: Case, demo: dict[str, Any], pool: ProcessPool) -> None:
    with start_fleet(pool, config(case, DEMO)) as fleet:
        last = case.ranks - 1
        # The other ranks have no row.
        assert run_alone(fleet, "alone", "c", last) == demo["c"]
        assert run_mixed(fleet, "mixed", {name: i % case.ranks for i, name in enumerate(requests())}) == demo
        assert run_alone(fleet, "again", "d", last) == demo["d"]
        stats, graphs = fleet.call("stats"), fleet.call("graphs")
        assert sum(each["accepted"][0] for each in stats) > 0.25 * sum(each["drafts"][0] for each in stats) > 0, stats
        assert all(each["num_replayed"] > each["num_eager"] for each in graphs), graphs
        assert {report["exchange"] for report in fleet.reports} == {"nvlink"}
        for turn in range(3):
            # The host reads the device's counters a few times a second and publishes them at the next read.
            time.sleep(2 * LOOK_SECONDS)
            assert run_alone(fleet, f"counted-{turn}", "a", last) == demo["a"]
        check_exchange_metrics(fleet)


def fetched_bytes(fleet: Fleet, expected: dict[str, Any], rank: int) -> dict[str, list[float]]:
    """Return the bytes that each rank read for peers, and peers for it, from the metrics pages."""
    for turn in range(2):
        # The host reads the device's counters a few times a second and publishes them at the next read.
        time.sleep(2 * LOOK_SECONDS)
        assert run_alone(fleet, f"fetched-{turn}", "a", rank) == expected["a"]
    found: dict[str, list[float]] = {"for_peers": [], "by_peers": []}
    for endpoint in fleet.endpoints:
        with urllib.request.urlopen(endpoint["metrics_url"], timeout=HANG_SECONDS) as response:
            page = response.read().decode()
        for direction, values in found.items():
            pattern = rf'^moeyard_expert_cache_bytes_total\{{direction="{direction}",.*\}} (\S+)$'
            values.append(sum(float(count) for count in re.findall(pattern, page, re.M)))
    return found


def check_exchange_metrics(fleet: Fleet) -> None:
    """Check bytes and times of the exchange on each rank's metrics page."""
    for endpoint in fleet.endpoints:
        with urllib.request.urlopen(endpoint["metrics_url"], timeout=HANG_SECONDS) as response:
            page = response.read().decode()
        found = re.findall(r'^moeyard_exchange_(\w+)\{.*(?:phase|direction)="(\w+)",.*\} (\S+)$', page, re.M)
        values = {(name, of): float(value) for name, of, value in found}
        assert values["bytes_total", "sent"] > 0
        assert values["bytes_total", "received"] > 0
        for phase in ("dispatch", "combine"):
            mean = values["seconds_sum", phase] / values["seconds_count", phase]
            # This includes waiting for the slowest rank.
            assert 1e-7 < mean < fleet.config.step_deadline, (phase, mean)


def test_auto_chooses_nvlink_when_gpus_have_peer_access(served: tuple[Path, dict[str, Any]], pool: ProcessPool) -> None:
    reach = all(torch.cuda.can_device_access_peer(*pair) for pair in itertools.permutations(range(2), 2))
    with start_fleet(pool, config(Case(2, "auto"), served[0])) as fleet:
        assert {report["exchange"] for report in fleet.reports} == {"nvlink" if reach else "zmq"}
        assert run_alone(fleet, "auto", "a", 1) == served[1]["a"]


def test_more_workers_than_gpus_are_refused(pool: ProcessPool, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3_moe", num_experts=4 * (NUM_GPUS + 1))
    refused = pytest.raises(
        RuntimeError, match=rf"--workers {NUM_GPUS + 1} takes a GPU each: there are {NUM_GPUS} GPUs"
    )
    with refused, start_fleet(pool, config(Case(NUM_GPUS + 1, "zmq"), model)):
        pass
