"""One answer: token ids, log-probability bits and routed experts of a request do not depend on how it runs.

Every combination of ranks, exchange, expert slots, policy, prefill chunk and KV pages runs the same requests. They run
alone and in a mixed batch, with prefix misses and hits. The answers equal those of one rank with all experts resident
to each request alone. Random placements of experts are among the cases. Scarce pages cause preemption. Some cases have
two steps in flight, some speculate, and some compress long prompts, which has its own answers.
"""

import itertools
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.fleet import Answer, Fleet, ProcessPool, start_fleet

from moeyard_router.fleet.loads import rows_of_ranks
from moeyard_worker.config.engine_config import DTYPE_BYTES, EngineConfig
from moeyard_worker.config.placement import Placement
from moeyard_worker.models.families import load_model_config
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.protocol import KvCompression

PAGE = 16
NUM_PAGES = {"ample": 256, "scarce": 10}
# Snapshots of models with state per sequence.
SNAPSHOTS = {"ample": 16, "scarce": 1}
# The kept part of the longest prompt has its own pages while the prompt has.
MORE_PAGES = 3
VOCAB = 272
KEPT = KvCompression(method="snapkv", budget=40, window=16)


@dataclass(frozen=True, slots=True)
class Case:
    """One fleet configuration."""

    ranks: int
    exchange: str
    slots: str
    policy: str
    chunk: int
    pages: str
    deep: int = 1
    scattered: bool = False
    drafts: int = 0
    compressed: bool = False

    def __str__(self) -> str:
        name = f"{self.ranks}ranks-{self.exchange}-{self.slots}-{self.policy}-chunk{self.chunk}-{self.pages}"
        name += f"-{self.deep}deep" * (self.deep > 1) + "-scattered" * self.scattered
        return name + f"-{self.drafts}drafts" * (self.drafts > 0) + "-compressed" * self.compressed

    @property
    def num_pages(self) -> int:
        return NUM_PAGES[self.pages] + MORE_PAGES * self.compressed


def cases() -> list[Case]:
    """Return the whole product. One rank has no exchange to choose. Chunks of 64 go with a random placement."""
    exchanges, slots, policies, chunks = ("shm", "tcp"), ("min", "half", "all"), ("slru", "lru"), (16, 64, 2048)
    product = itertools.product((1, 2, 4), exchanges, slots, policies, chunks, NUM_PAGES)
    return [
        Case(*values, scattered=values[0] > 1 and values[4] == 64)
        for values in product
        if not (values[0] == 1 and values[1] == "tcp")
    ]


def requests(*, compressed: bool = False) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Prompts from shorter than a page to longer than two chunks of 64: greedy and seeded, one of them scored.

    `compressed`: keep 40 tokens of each longer prompt.
    """
    rng = random.Random(7)
    greedy = {"temperature": 0.0, "logprobs": 3}
    seeded = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 11, "logprobs": 2, "prompt_logprobs": 3}
    penalised = {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logprobs": 0}
    sizes = (("a", 5, greedy), ("b", 37, seeded), ("c", 90, penalised), ("d", 130, greedy))
    common = {"max_tokens": 12, "ignore_eos": True, "kv_compression": KEPT if compressed else None}
    return {name: ([rng.randrange(VOCAB) for _ in range(size)], {**params, **common}) for name, size, params in sizes}


def asked(fleet: Fleet, *, compressed: bool) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Return the requests. If the fleet keeps routing, all of them want it, one from a later position on."""
    found = requests(compressed=compressed)
    if fleet.config.enable_return_routed_experts:
        for name, (_, sampling) in found.items():
            sampling["routed_experts_start"] = 20 if name == "b" else 0
    return found


def read_model(case: Case, model: Path) -> ModelConfig:
    """Return the model's config, with the MTP layer if the case drafts."""
    read = load_model_config(model)
    return read.with_drafts() if case.drafts else read


def config(case: Case, model: Path) -> EngineConfig:
    read = read_model(case, model)
    total = read.num_experts // case.ranks * len(read.moe_layers)
    state = read.state_spec(DTYPE_BYTES[read.dtype])
    snapshots = SNAPSHOTS[case.pages] * state.bytes_per_sequence
    return EngineConfig(
        model_path=str(model),
        num_workers=case.ranks,
        exchange="zmq-tcp" if case.exchange == "tcp" else "auto",
        expert_slots={"min": 1, "half": total // 2, "all": total}[case.slots],
        expert_policy=case.policy,
        prefill_chunk=case.chunk,
        kv_memory=case.num_pages * PAGE * state.bytes_per_token + snapshots,
        snapshot_memory=snapshots or None,
        page_size=PAGE,
        max_batch_tokens=256,
        max_num_seqs=16,
        async_scheduling=case.deep == 2,
        enable_return_routed_experts=True,
        speculate=None if not case.drafts else "mtp" if read.block_drafts is None else "dspark",
        # 3 stands for adaptive: up to three drafts (DSpark: five), chosen by each rank.
        draft_tokens=None if case.drafts == 3 else case.drafts or 1,
    )


def placement(case: Case, model: Path) -> Placement | None:
    """Return a random uneven placement with half of the experts twice for a scattered case, else contiguous shards."""
    return dealt(read_model(case, model), case.ranks, str(case)) if case.scattered else None


def dealt(read: ModelConfig, ranks: int, seed: str, *, copied: bool = True, alone: bool = False) -> Placement:
    """Return a random uneven placement. `alone`: rank 0 has all experts of the first layer. `copied`: half of the
    experts are also on a second rank, if there is one."""
    chance = random.Random(seed)
    rows = [[chance.randrange(ranks) for _ in range(read.num_experts)] for _ in read.moe_layers]
    if alone:
        rows[0] = [0] * read.num_experts
    for row, rank in zip(itertools.cycle(rows[alone:]), range(ranks), strict=False):
        row[rank] = rank  # every rank has an expert in some layer
    copies = []
    for row in rows if copied and ranks > 1 else ():
        some = sorted(chance.sample(range(read.num_experts), read.num_experts // 2))
        copies.append(tuple((e, (row[e] + chance.randrange(1, ranks)) % ranks) for e in some))
    return Placement(read.moe_layers, tuple(map(tuple, rows)), tuple(copies))


def dealt_evenly(read: ModelConfig, ranks: int, seed: str, *, copied: bool = True) -> Placement:
    """Return a random placement in parts of equal size, which GPUs with fewer slots than experts need. `copied`: half
    of each rank's part is also on the next rank."""
    chance = random.Random(seed)
    rows = [chance.sample([e % ranks for e in range(read.num_experts)], read.num_experts) for _ in read.moe_layers]
    copies = []
    for row in rows if copied else ():
        of_ranks = [[e for e, owner in enumerate(row) if owner == rank] for rank in range(ranks)]
        pairs = [(e, (row[e] + 1) % ranks) for own in of_ranks for e in chance.sample(own, len(own) // 2)]
        copies.append(tuple(sorted(pairs)))
    return Placement(read.moe_layers, tuple(map(tuple, rows)), tuple(copies))


def bits(answer: Answer) -> tuple[Any, ...]:
    """Return all that must not change: ids, experts, and log-probabilities compared as floats without tolerance."""
    assert getattr(answer.end, "finish_reason", None) == "length", answer.end
    return tuple(answer.token_ids), tuple(answer.logprobs), tuple(answer.prompt_logprobs), answer.experts


def run_mixed(
    fleet: Fleet,
    label: str,
    ranks: dict[str, int],
    *,
    compressed: bool = False,
    scored: dict[str, tuple[Any, ...]] | None = None,
) -> dict[str, tuple[Any, ...]]:
    """Run all requests at once, each on its rank. `scored`: force these answers, many tokens per step."""
    # On a busy machine a request may end before the next one is sent, and pages never run out.
    fleet.call("pause")
    for name, (prompt, sampling) in asked(fleet, compressed=compressed).items():
        if scored is not None:
            sampling |= {"trace_decode_token_ids": scored[name][0], "as_decoded": True, "temperature": 0.0}
        fleet.client.submit(ranks[name], f"{label}-{name}", prompt, **sampling)
    fleet.client.inspect()
    fleet.call("resume")
    return {name: bits(fleet.client.wait(f"{label}-{name}")[0]) for name in ranks}


def run_alone(fleet: Fleet, label: str, name: str, rank: int, *, compressed: bool = False) -> tuple[Any, ...]:
    """Run one request alone."""
    prompt, sampling = asked(fleet, compressed=compressed)[name]
    fleet.client.submit(rank, f"{label}-{name}", prompt, **sampling)
    return bits(fleet.client.wait(f"{label}-{name}")[0])


def check_rows(fleet: Fleet, num_answers: int) -> None:
    """Check that each layer's experts computed each row once, on whichever rank. The rows are the computed prompt
    tokens and all tokens of each answer but the last. Preemption computes some rows again."""
    stats, told, read = fleet.call("stats"), fleet.client.inspect(), load_model_config(fleet.config.model_path or "")
    rows = sum(each["prefill_tokens"] for each in stats) + 11 * num_answers
    layers = zip(*rows_of_ranks(told), strict=True)
    (computed,) = {sum(map(sum, layer)) for layer in layers}
    again, once = computed - rows * read.gate.rule.top_k, not any(each["num_preemptions"] for each in stats)
    assert again == 0 if once else again >= 0, (computed, rows, stats)


Answers = dict[str, tuple[Any, ...]]


class Expected(dict[str, Answers]):
    """The answers for a checkpoint kind by request, computed when a test needs the kind."""

    def __init__(self, compute: Callable[..., Answers]) -> None:
        self.compute = compute

    def __missing__(self, kind: str) -> Answers:
        self[kind] = self.compute(kind)
        return self[kind]


@pytest.fixture(scope="session")
def expected(processes: ProcessPool, checkpoints: dict[str, Path]) -> Expected:
    """Answer each request alone on one rank: all experts resident, whole prompts, no prefix cache."""

    def compute(kind: str, *, compressed: bool = False) -> Answers:
        case, answers = Case(1, "shm", "all", "slru", 2048, "ample"), {}
        for name in requests():
            with start_fleet(processes, config(case, checkpoints[kind])) as fleet:
                answers[name] = run_alone(fleet, "reference", name, 0, compressed=compressed)
        return answers

    return Expected(compute)


@pytest.fixture(scope="session")
def expected_compressed(expected: Expected) -> Expected:
    """Return the answers with compressed prompts. They differ if tokens were dropped."""

    def compute(kind: str) -> Answers:
        answers = expected.compute(kind, compressed=True)
        for name, (prompt, _) in requests().items():
            assert (answers[name] != expected[kind][name]) == (len(prompt) > KEPT.budget)
        return answers

    return Expected(compute)


def check(case: Case, processes: ProcessPool, model: Path, expected: dict[str, tuple[Any, ...]]) -> None:
    """Compare the bits of one case."""
    with start_fleet(processes, config(case, model), placement(case, model)) as fleet:
        # A miss alone, then all at once on one rank ("c" is a prefix hit, scarce pages preempt), then a hit alone.
        kept = case.compressed
        assert run_alone(fleet, "alone", "c", 0, compressed=kept) == expected["c"]
        assert run_mixed(fleet, "mixed", dict.fromkeys(requests(), 0), compressed=kept) == expected
        assert run_alone(fleet, "again", "d", 0, compressed=kept) == expected["d"]
        each = {name: i % case.ranks for i, name in enumerate(requests())}
        assert run_mixed(fleet, "scored", each, compressed=kept, scored=expected) == expected
        if case.ranks > 1 and case.policy == "slru":
            assert run_mixed(fleet, "spread", each, compressed=kept) == expected
        read = load_model_config(model)
        width = len(read.routed_layers) * read.top_k * read.expert_id_bytes
        for name, (prompt, sampling) in asked(fleet, compressed=kept).items():
            assert len(expected[name][-1]) == width * (len(prompt) + 11 - sampling["routed_experts_start"])
        stats = fleet.call("stats")[0]
        assert stats["prefix_hit_tokens"] > 0
        # With drafts or compression a request may end before pages run out. tests/engine preempts those.
        assert (stats["num_preemptions"] > 0) == (case.pages == "scarce") or case.drafts or kept, stats
        assert stats["num_free"] == stats["num_pages"] == case.num_pages  # the pages' size shows the checkpoint's dtype
        if not case.drafts:
            check_rows(fleet, 10 + 4 * (case.ranks > 1 and case.policy == "slru"))
        if case.drafts:
            assert stats["accepted"][0] > 0.25 * stats["drafts"][0] > 0, stats


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_mla(case: Case, processes: ProcessPool, checkpoints: dict[str, Path], expected: dict[str, Any]) -> None:
    check(case, processes, checkpoints["mla"], expected["mla"])


TWO_DEEP_CASES = [
    Case(1, "shm", "all", "slru", 2048, "ample", deep=2),
    Case(1, "shm", "half", "lru", 16, "scarce", deep=2),
    Case(2, "shm", "min", "slru", 64, "scarce", deep=2),
    Case(2, "tcp", "all", "slru", 16, "ample", deep=2),
    Case(4, "shm", "half", "slru", 64, "scarce", deep=2),
]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", ["mla", "gqa_bf16"])
@pytest.mark.parametrize("case", TWO_DEEP_CASES, ids=str)
def test_two_steps_in_flight(
    kind: str, case: Case, processes: ProcessPool, checkpoints: dict[str, Path], expected: dict[str, Any]
) -> None:
    check(case, processes, checkpoints[kind], expected[kind])


SPECULATED_CASES = [
    Case(1, "shm", "half", "slru", 16, "scarce", drafts=3),
    Case(2, "shm", "all", "slru", 64, "ample", drafts=2, scattered=True),
    Case(2, "tcp", "min", "lru", 16, "scarce", drafts=1, deep=2),
    Case(4, "shm", "half", "slru", 2048, "scarce", drafts=3),
]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("case", SPECULATED_CASES, ids=str)
def test_speculation(
    case: Case, processes: ProcessPool, checkpoints: dict[str, Path], expected: dict[str, Any]
) -> None:
    check(case, processes, checkpoints["demo"], expected["demo"])


GQA_CASES = [
    Case(1, "shm", "min", "slru", 16, "scarce"),
    Case(1, "shm", "half", "lru", 64, "ample"),
    Case(2, "shm", "half", "slru", 64, "scarce", scattered=True),
    Case(2, "tcp", "min", "lru", 2048, "ample"),
    Case(4, "tcp", "half", "slru", 16, "ample"),
    Case(4, "shm", "min", "lru", 64, "scarce"),
]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("case", GQA_CASES, ids=str)
def test_gqa(case: Case, processes: ProcessPool, checkpoints: dict[str, Path], expected: dict[str, Any]) -> None:
    check(case, processes, checkpoints["gqa"], expected["gqa"])


def by_kind(cases: dict[str, list[Case]]) -> pytest.MarkDecorator:
    """Run a test with each case of each checkpoint kind."""
    return pytest.mark.parametrize(
        ("kind", "case"), [pytest.param(kind, case, id=f"{kind}-{case}") for kind in cases for case in cases[kind]]
    )


# Chunks end at multiples of 64, and a prefix hit continues from a snapshot of state. With the bf16 cases each value of
# an axis meets each value of every other axis (`test_hybrid_cases_pair_all_values`).
HYBRID_CASES = {
    "hybrid": [
        Case(1, "shm", "min", "slru", 64, "scarce"),
        Case(2, "shm", "half", "slru", 64, "scarce", scattered=True, deep=2),
        Case(2, "tcp", "min", "lru", 2048, "ample"),
        Case(4, "shm", "all", "slru", 2048, "scarce"),
        Case(4, "tcp", "half", "lru", 64, "scarce"),
        Case(1, "shm", "half", "slru", 2048, "ample"),
    ],
    "hybrid_mla": [
        Case(2, "tcp", "all", "lru", 64, "ample"),
        Case(4, "shm", "min", "slru", 2048, "ample"),
        Case(1, "shm", "all", "slru", 128, "ample", deep=2),
        Case(2, "shm", "min", "slru", 64, "scarce", scattered=True),
        Case(4, "tcp", "half", "lru", 128, "scarce"),
    ],
    "hybrid_drafts": [
        Case(1, "shm", "half", "slru", 64, "scarce", drafts=2),
        Case(2, "tcp", "min", "slru", 64, "scarce", drafts=3, deep=2),
        Case(4, "shm", "all", "slru", 2048, "ample", drafts=1, scattered=True),
    ],
    # Chunks of DeepSeek-V4 end at multiples of 128.
    "compressed": [
        Case(1, "shm", "min", "slru", 128, "scarce"),
        Case(2, "shm", "half", "lru", 2048, "scarce", scattered=True, deep=2),
        Case(2, "tcp", "all", "slru", 128, "ample"),
        Case(4, "tcp", "min", "lru", 2048, "scarce"),
    ],
    "compressed_drafts": [
        Case(1, "shm", "half", "slru", 128, "scarce", drafts=2),
        Case(2, "tcp", "min", "slru", 128, "scarce", drafts=3, deep=2),
        Case(4, "shm", "all", "slru", 2048, "ample", drafts=1, scattered=True),
    ],
    "compressed_dspark": [
        Case(1, "shm", "half", "slru", 128, "scarce", drafts=5),
        Case(2, "tcp", "min", "slru", 128, "scarce", drafts=3, deep=2),
        Case(2, "shm", "all", "lru", 2048, "ample", drafts=5, scattered=True),
    ],
}


@pytest.mark.sampled(0)
@by_kind(HYBRID_CASES)
def test_hybrid(
    kind: str, case: Case, processes: ProcessPool, checkpoints: dict[str, Path], expected: dict[str, Any]
) -> None:
    check(case, processes, checkpoints[kind], expected[kind])


BF16_CASES = {
    "hybrid_bf16": [
        Case(1, "shm", "half", "lru", 64, "scarce"),
        Case(2, "tcp", "min", "slru", 128, "scarce"),
        Case(4, "shm", "all", "slru", 64, "ample"),
    ],
    "compressed_bf16": [
        Case(1, "shm", "half", "slru", 2048, "ample", deep=2),
        Case(2, "shm", "min", "lru", 128, "scarce"),
        Case(4, "shm", "all", "slru", 128, "ample", scattered=True),
    ],
    "mla_bf16": [
        Case(1, "shm", "half", "lru", 16, "scarce"),
        Case(2, "shm", "all", "slru", 2048, "ample"),
        Case(2, "tcp", "min", "slru", 64, "scarce"),
        Case(4, "shm", "half", "slru", 2048, "scarce"),
        Case(4, "tcp", "min", "lru", 16, "ample", scattered=True),
        Case(4, "tcp", "all", "lru", 64, "scarce"),
    ],
    "gqa_bf16": [
        Case(1, "shm", "min", "slru", 2048, "ample"),
        Case(2, "shm", "min", "lru", 16, "scarce"),
        Case(2, "tcp", "half", "slru", 64, "ample"),
        Case(4, "shm", "half", "lru", 16, "ample"),
        Case(4, "shm", "all", "slru", 64, "scarce"),
        Case(4, "tcp", "min", "slru", 2048, "scarce"),
    ],
}


@pytest.mark.sampled(0)
@by_kind(BF16_CASES)
def test_bf16(
    kind: str, case: Case, processes: ProcessPool, checkpoints: dict[str, Path], expected: dict[str, Any]
) -> None:
    check(case, processes, checkpoints[kind], expected[kind])


# Every answer is that of the bfloat16 checkpoint which the codes stand for. The cases of all forms together pair the
# values of the axes (`test_quantised_cases_pair_all_values`). Chunks of DeepSeek-V4 end at multiples of 128.
QUANTISED_CASES = {
    "fp8": [
        Case(1, "shm", "half", "lru", 16, "scarce"),
        Case(2, "tcp", "min", "slru", 64, "ample", scattered=True),
        Case(4, "shm", "all", "slru", 16, "ample"),
        Case(4, "tcp", "half", "slru", 2048, "scarce", deep=2),
        Case(2, "shm", "all", "lru", 64, "scarce"),
    ],
    "int4": [
        Case(2, "shm", "min", "slru", 16, "scarce"),
        Case(4, "tcp", "all", "lru", 16, "ample", scattered=True),
        Case(1, "shm", "min", "lru", 64, "ample", deep=2),
        Case(4, "shm", "half", "lru", 64, "scarce"),
        Case(1, "shm", "all", "slru", 2048, "scarce"),
    ],
    "fp4": [
        Case(1, "shm", "half", "slru", 128, "ample"),
        Case(2, "tcp", "half", "lru", 2048, "ample"),
        Case(4, "shm", "min", "lru", 2048, "scarce", scattered=True),
        Case(4, "tcp", "all", "slru", 128, "scarce"),
    ],
}


@pytest.mark.sampled(0)
@by_kind(QUANTISED_CASES)
def test_quantised(
    kind: str, case: Case, processes: ProcessPool, checkpoints: dict[str, Path], expected: dict[str, Any]
) -> None:
    check(case, processes, checkpoints[kind], expected[f"{kind}_plain"])


def pairs_missing(some: list[Case], wanted: list[Case]) -> list[tuple[str, str, set[Any]]]:
    """Return the pairs of values of two axes that are in `wanted` and not in `some`."""
    axes = ("ranks", "exchange", "slots", "policy", "chunk", "pages")
    found = []
    for pair in itertools.combinations(axes, 2):
        axis_values = operator.attrgetter(*pair)
        if missing := set(map(axis_values, wanted)) - set(map(axis_values, some)):
            found.append((*pair, missing))
    return found


def test_hybrid_cases_pair_all_values() -> None:
    """Check the axes of `cases` without the smallest chunk. Cases of DeepSeek-V4 do not count."""
    hybrid = {**HYBRID_CASES, **BF16_CASES}
    some = [case for kind in hybrid if kind.startswith("hybrid") for case in hybrid[kind]]
    assert pairs_missing(some, [case for case in cases() if case.chunk > 16]) == []


def test_quantised_cases_pair_all_values() -> None:
    """Chunks of 128 count as the next smaller ones."""
    found = [
        replace(case, chunk=64 if case.chunk == 128 else case.chunk) for of in QUANTISED_CASES.values() for case in of
    ]
    assert pairs_missing(found, cases()) == []


# With state, a chunk needs room for a window behind the multiple of 64 where it begins.
COMPRESSED_CASES = {
    "demo": [
        Case(1, "shm", "min", "lru", 64, "scarce", deep=2, compressed=True),
        Case(2, "shm", "half", "slru", 64, "scarce", scattered=True, compressed=True),
        Case(2, "tcp", "all", "slru", 2048, "ample", drafts=2, compressed=True),
        Case(4, "shm", "min", "slru", 16, "scarce", drafts=3, compressed=True),
    ],
    "hybrid_drafts": [
        Case(1, "shm", "half", "slru", 100, "scarce", drafts=2, compressed=True),
        Case(4, "shm", "all", "slru", 2048, "ample", scattered=True, compressed=True),
    ],
    "hybrid_mla": [Case(2, "tcp", "min", "lru", 100, "scarce", deep=2, compressed=True)],
}


@pytest.mark.sampled(0)
@by_kind(COMPRESSED_CASES)
def test_compressed_prompts(
    kind: str, case: Case, processes: ProcessPool, checkpoints: dict[str, Path], expected_compressed: dict[str, Any]
) -> None:
    check(case, processes, checkpoints[kind], expected_compressed[kind])
