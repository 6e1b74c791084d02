"""The expert cache on the demo model's routing of held-out text.

In tests/experts/data, `demo-routing` is the trace of one rank and one stream. The file demo-routing.json has the
counters of all engine runs on these accesses. The trace `demo-routing-4` and its .json are the same for four streams
with all experts resident. To record all of them again, run `python bench/cache.py --keep-trace
tests/experts/data/demo-routing`.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.fleet import Client
from tests.rank import Rank
from tests.scripts import loaded

from moeyard_worker.experts.offline.sim import belady, simulate
from moeyard_worker.experts.offline.trace import RankTrace, read_trace
from moeyard_worker.experts.policies import POLICIES
from moeyard_worker.experts.policy import Counters
from moeyard_worker.models.families import load_model_config
from moeyard_worker.models.model_config import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deploy" / "demo"
TRACE = Path(__file__).parent / "data" / "demo-routing"
NOTES = TRACE.with_name("demo-routing.json")
FOUR = TRACE.with_name("demo-routing-4")
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
MARGIN = 0.02  # of the hit rate

Replays = dict[tuple[str, int], Counters]


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """The script bench/cache.py as a module."""
    with loaded(ROOT / "bench" / "cache.py") as module:
        yield module


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return load_model_config(DEMO)


@pytest.fixture(scope="module")
def trace() -> RankTrace:
    [trace] = read_trace(TRACE)
    return trace


@pytest.fixture(scope="module")
def sizes(trace: RankTrace) -> list[int]:
    """Numbers of slots, one for each of `SHARES`."""
    return [round(share * len(trace.header.layers) * len(trace.header.experts)) for share in SHARES]


@pytest.fixture(scope="module")
def replays(sizes: list[int]) -> Replays:
    """The simulator's counters for one stream, by policy and slots."""
    return replay(TRACE, sizes)


@pytest.fixture(scope="module")
def replays_of_four(sizes: list[int]) -> Replays:
    """The same for four streams."""
    return replay(FOUR, sizes)


def replay(path: Path, sizes: list[int]) -> Replays:
    return {
        (policy, slots): simulate(path, policy, slots).total for policy, slots in itertools.product(POLICIES, sizes)
    }


def decode_hits(counters: Counters) -> int:
    return sum(count for (_, kind), count in counters.hits.items() if kind == "decode")


def decode_rate(counters: Counters) -> float:
    hits = decode_hits(counters)
    return hits / (hits + counters.misses["decode"])


@pytest.mark.parametrize("path", [TRACE, FOUR], ids=["one stream", "four streams"])
def test_traces_match_the_bundled_checkpoint(path: Path, model: ModelConfig) -> None:
    notes = json.loads(path.with_name(f"{path.name}.json").read_text())
    bundled = hashlib.sha256((DEMO / "model.safetensors").read_bytes()).hexdigest()
    assert notes["model_sha256"] == bundled, "the demo model has changed: record its routing again (see the top)"
    [trace] = read_trace(path)
    header = trace.header
    assert (header.layers, header.experts, header.top_k) == (model.moe_layers, range(model.num_experts), model.top_k)


def test_every_expert_is_used_and_none_dominates(trace: RankTrace) -> None:
    """The trace of a collapsed router would not test a cache."""
    uses = Counter((access.layer, expert) for access in trace for expert in access.decode)
    assert set(uses) == set(itertools.product(trace.header.layers, trace.header.experts))
    num_accesses = Counter(access.layer for access in trace if access.decode)
    assert max(count / num_accesses[layer] for (layer, _), count in uses.items()) < 0.75


def test_simulator_counts_equal_those_of_the_engine(bench: ModuleType, replays: Replays, sizes: list[int]) -> None:
    full, *partial = json.loads(NOTES.read_text())["engine"]
    recorded = {(run["policy"], run["slots"]): run["ranks"] for run in partial}
    assert recorded == {key: [bench.flat(counters)] for key, counters in replays.items()}
    everything = simulate(TRACE, full["policy"], full["slots"]).total
    assert full["ranks"] == [bench.flat(everything)]
    assert everything.num_hits > 0
    assert everything.num_misses == everything.num_evictions == 0


def test_no_policy_exceeds_the_optimum(bench: ModuleType, replays: Replays, sizes: list[int]) -> None:
    for slots in sizes:
        [best] = belady(TRACE, slots)
        for policy in POLICIES:
            counters = replays[policy, slots]
            assert best.num_hits + best.num_misses == counters.num_hits + counters.num_misses
            assert counters.num_hits <= best.num_hits, (policy, slots)
    slots = sizes[1]
    [best] = belady(TRACE, slots)
    bound = bench.decode_bound(TRACE, slots)
    assert max(decode_hits(replays[policy, slots]) for policy in POLICIES) <= bound <= best.num_hits


def test_more_slots_never_hurt_lru(replays: Replays, sizes: list[int]) -> None:
    """More slots hold all that fewer would (Mattson's stack property), for all accesses and for those of decode."""
    assert sizes == sorted(sizes)
    for count in (lambda c: c.num_hits, decode_hits):
        hits = [count(replays["lru", slots]) for slots in sizes]
        assert hits == sorted(hits)


def test_slru_is_not_below_lru(replays: Replays, replays_of_four: Replays, sizes: list[int]) -> None:
    """Four streams need two fifths of all experts per step. A segment sized for one token's needs would lose to lru."""
    for each, slots in itertools.product((replays, replays_of_four), sizes):
        slru, lru = each["slru", slots], each["lru", slots]
        assert decode_rate(slru) >= decode_rate(lru) - MARGIN, slots
        assert slru.hit_rate is not None
        assert lru.hit_rate is not None
        assert slru.hit_rate >= lru.hit_rate - MARGIN, slots


def test_slru_hits_when_a_step_needs_more_than_the_slots(
    replays: Replays, replays_of_four: Replays, sizes: list[int]
) -> None:
    """Recency alone evicts every expert before its layer runs again."""
    for each, path in ((replays, TRACE), (replays_of_four, FOUR)):
        [trace] = read_trace(path)
        num_steps = len({access.step for access in trace if access.decode})
        needed = sum(len(access.decode) for access in trace) / num_steps
        assert sizes[1] < 0.9 * needed < sizes[-1]
        for slots, share in zip(sizes, SHARES, strict=True):
            if slots < 0.9 * needed:
                assert decode_rate(each["lru", slots]) < 0.02, slots
                assert decode_rate(each["slru", slots]) > share / 2, slots


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_live_engine_counts_equal_those_of_the_simulator(
    bench: ModuleType, model: ModelConfig, tmp_path: Path, policy: str
) -> None:
    slots = round(0.1 * len(model.moe_layers) * model.num_experts)
    trace = tmp_path / "trace"
    options: dict[str, Any] = {"expert_slots": slots, "expert_policy": policy, "record_routing": str(trace)}
    with Rank(DEMO, max_model_len=160, max_num_seqs=4, **options) as rank:
        rank.worker.start()
        with closing(Client([rank.worker.endpoints()["frontend"]])) as client:
            for i, request in enumerate(bench.load_requests(DEMO, DEMO / "heldout.jsonl", 3)):
                client.submit(0, str(i), request.prompt, max_tokens=12, temperature=0.0, ignore_eos=True)
            answers = client.wait()
    experts = rank.worker.experts
    assert [len(answer.token_ids) for answer in answers] == [12] * 3
    experts.validate()
    [simulated] = simulate(trace).ranks
    assert (simulated.counters, simulated.num_slots) == (experts.stats.counters, slots)
    assert simulated.counters.num_evictions > 0
