"""Counters of a fleet: prefix hits, expert cache, and what the router reports about its ranks.

The fleet has two ranks with few pages and expert slots, and records its routing.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import VOCAB_SIZE
from tests.e2e.http_fleet import HttpFleet, engine_config, serve_http, wait_for, wait_until_idle
from tests.fleet import ProcessPool
from tests.limits import HANG_SECONDS

from moeyard_router.fleet import loads
from moeyard_worker.experts.offline.sim import simulate

NUM_PAGES = 24
SLOTS = 5
PROMPT = [7, 91, 3, 200, 64, 12, 5]
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the recorded routing."""
    return tmp_path_factory.mktemp("routing") / "trace"


@pytest.fixture(scope="module")
def fleet(processes: ProcessPool, checkpoints: dict[str, Path], recording: Path) -> Iterator[HttpFleet]:
    """Two ranks with 5 slots each for 2 x 4 experts."""
    config = engine_config(
        checkpoints["mla"], num_workers=2, num_pages=NUM_PAGES, expert_slots=SLOTS, record_routing=str(recording)
    )
    with pytest.MonkeyPatch.context() as patch, serve_http(processes, config, canary_interval=600.0) as http:
        # A rank on a busy machine may need more than a second to report its experts' rows.
        patch.setattr(loads, "_ANSWER_SECONDS", HANG_SECONDS)
        yield http


@pytest.fixture
def http(fleet: HttpFleet) -> Iterator[HttpFleet]:
    """Yield the fleet. Afterwards no request may run, wait or hold pages."""
    yield fleet
    wait_until_idle(fleet)


def test_prefix_hit_is_visible(http: HttpFleet) -> None:
    name = "moeyard_prefix_cache_hit_tokens_total"
    body = {**GREEDY, "prompt": [(31 * i) % VOCAB_SIZE for i in range(70)], "max_tokens": 4}
    before = http.total(name)
    # A rank that is busy with an earlier test may send the second request to its peer. Three requests on two ranks
    # must repeat one.
    answers = [http.complete(**body) for _ in range(len(http.fleet.ranks) + 1)]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0
    assert set(cached) == {0, 64}
    assert all(answer["choices"] == answers[0]["choices"] for answer in answers)
    wait_for(lambda: http.total(name) == before + sum(cached), "the hits in the metrics")


Totals = tuple[dict[tuple[str, ...], float], ...]


def test_simulator_counts_equal_the_engines_on_two_ranks(recording: Path, http: HttpFleet) -> None:
    others = [
        {"prompt": [3 * n] * (9 * n), "temperature": 1, "seed": n, "max_tokens": 12, "ignore_eos": True}
        for n in range(1, 6)
    ]
    http.choices_at_once(others)
    # Replies leave before their step is counted, so both sides agree once the last step is over.
    for name, sources in {
        "the metrics": lambda: metrics_totals(http),
        "the simulator": lambda: simulated_totals(recording),
    }.items():
        wait_for(equal(sources, lambda: engine_totals(http)), f"{name} and the engine's counters equal")
    for hits, misses, evictions in engine_totals(http):
        assert min(sum(hits.values()), *misses.values()) > 0
        assert misses["decode",] == sum(evictions.values()) > 0, "slots are full, and only decode misses take them"
    other = simulate(recording, policy="lru")
    assert other.total.num_hits != simulate(recording).total.num_hits, "both policies count the same"


def test_router_counters_equal_those_of_the_ranks(http: HttpFleet) -> None:
    """This includes the rank that only took part in the other one's steps."""
    before = rows_per_layer(http)
    http.complete(**GREEDY, max_tokens=12)
    names = ("generation_tokens", "prefill_tokens", "prefix_cache_query_tokens", "prefix_cache_hit_tokens")
    names += ("preemptions", "engine_steps", "expert_cache_hits", "expert_cache_misses", "expert_cache_evictions")

    def alike() -> bool:
        page = http.client.get("/metrics").text
        return all(fleet_series(page, name) == by_rank(http, name) for name in names)

    wait_for(alike, "the router's figures equal the ranks'")
    assert len(fleet_series(http.client.get("/metrics").text, "expert_cache_hits")) == 2
    # 7 prompt rows and 11 rows of generated tokens, each to 2 experts of every layer.
    grown = 2 * (len(PROMPT) + 11)
    wait_for(lambda: rows_per_layer(http) == [rows + grown for rows in before], "the experts' rows")


def fleet_series(page: str, name: str) -> dict[str, float]:
    """Return a counter of the router's own page by rank."""
    found = re.findall(rf'^moeyard_fleet_{name}_total{{.*rank="(\d+)"}} (\S+)$', page, re.M)
    return {rank: float(value) for rank, value in found}


def by_rank(http: HttpFleet, name: str) -> dict[str, float]:
    """Return the same counter of the ranks' pages, summed over its other labels."""
    return {str(rank): sum(series.values()) for rank, series in enumerate(http.samples(f"moeyard_{name}_total"))}


def rows_per_layer(http: HttpFleet) -> list[int]:
    """Return the rows that the experts of all ranks computed, by layer."""
    ranks = http.client.get("/v1/fleet/experts").json()["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    return [sum(sum(rank["rows"][i]) for rank in ranks) for i in range(len(ranks[0]["layers"]))]


def equal(one: Callable[[], list[Totals]], other: Callable[[], list[Totals]]) -> Callable[[], bool]:
    return lambda: one() == other()


def engine_totals(http: HttpFleet) -> list[Totals]:
    """Return what each rank's expert cache counted: hits, misses, evictions by (phase, segment) or (phase,)."""
    return [as_totals(*counters) for counters in http.fleet.call("counters")]


def simulated_totals(recording: Path) -> list[Totals]:
    """Return the same from a replay of the recorded routing."""
    return [as_totals(r.counters.hits, r.counters.misses, r.counters.evictions) for r in simulate(recording).ranks]


def as_totals(hits: dict[Any, int], misses: dict[Any, int], evictions: dict[Any, int]) -> Totals:
    def by_label(counts: dict[Any, int]) -> dict[tuple[str, ...], float]:
        # Prometheus labels in alphabetical order: phase before segment.
        return {(key,) if isinstance(key, str) else tuple(reversed(key)): float(n) for key, n in counts.items()}

    return by_label(hits), by_label(misses), by_label(evictions)


def metrics_totals(http: HttpFleet) -> list[Totals]:
    """Return the same from the metrics pages."""
    names = [f"moeyard_expert_cache_{what}_total" for what in ("hits", "misses", "evictions")]
    return list(zip(*(http.samples(name) for name in names), strict=True))
