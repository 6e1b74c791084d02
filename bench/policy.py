"""Simulate the router's choice of rank on traces: `python bench/policy.py`. It needs no fleet and starts none.

The simulated fleet is in lockstep: every step takes as long as its fullest rank needs. A rank computes prompts in
chunks with its decode rows, and keeps prompt pages in an LRU prefix cache. Times are those of Qwen3-30B-A3B on one H200
(docs/journal.md): TPOT of 2.6 to 15.3 ms at 1 to 64 rows, 60,000 prompt tokens/s. The comparison is between
`moeyard_router.fleet.policy.choose_rank` over `PrefixMap`, as the router calls them, round robin, and the fewest
sequences.
"""

import argparse
import heapq
import math
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moeyard_router.fleet.placement import PrefixMap, PromptBlock
from moeyard_router.fleet.policy import RankLoad, choose_rank

PAGE = 64
STEP_SECONDS = 2.4e-3
ROW_SECONDS = 0.2e-3
TOKEN_SECONDS = 1 / 60_000
CHUNK = 2048
MAX_ROWS = 64
KV_PAGES = 4096  # per rank: 262,144 tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace. `pages` are keys of the prompt's full pages; times are seconds."""

    at: float
    pages: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    client: str = ""


@dataclass(slots=True)
class Running:
    """A request in the simulation."""

    spec: TraceRequest
    number: int
    rank: int = 0
    expected: int = 0  # tokens that the router expects in the cache
    left: int = 0  # prompt tokens to compute
    first: float = 0.0
    end: float = 0.0
    blocks: list[PromptBlock] = field(default_factory=list)  # the prompt as the router sees it

    def __post_init__(self) -> None:
        begin, size = 0, 1
        while begin + size <= len(self.spec.pages):
            self.blocks.append(PromptBlock(hash(self.spec.pages[begin : begin + size]), size, begin + size))
            begin += size
            size *= 1 + (begin == 64 * size)


@dataclass(slots=True)
class Rank:
    """One simulated rank."""

    waiting: deque[Running] = field(default_factory=deque)
    prefilling: deque[Running] = field(default_factory=deque)
    ends: list[tuple[int, int, Running]] = field(default_factory=list)  # (step, number, request), a heap
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    used: int = 0  # pages of running sequences

    @property
    def sequences(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.ends)


Chooser = Callable[[Running], int]


class Simulation:
    """`num_ranks` ranks in lockstep, and the router's knowledge of them."""

    def __init__(self, num_ranks: int, policy: str) -> None:
        self.ranks = [Rank() for _ in range(num_ranks)]
        self.pending = [0] * num_ranks
        self.map = PrefixMap(num_ranks)
        self.last_ranks: dict[str, int] = {}
        self.choose: Chooser = {"turns": self._turns, "fewest": self._fewest, "score": self._score}[policy]
        self.computed = 0
        self.now = 0.0
        self.step = 0

    def run(self, trace: Sequence[TraceRequest]) -> list[Running]:
        """Run the trace and return its requests, all ended."""
        ended: list[Running] = []
        coming = deque(Running(request, i) for i, request in enumerate(trace))
        while coming or any(rank.sequences for rank in self.ranks):
            if not any(rank.sequences for rank in self.ranks):
                self.now = max(self.now, coming[0].spec.at)
            while coming and coming[0].spec.at <= self.now:
                self._submit(coming.popleft())
            ended += self._step()
        return ended

    def _submit(self, request: Running) -> None:
        request.rank = self.choose(request)
        self.ranks[request.rank].waiting.append(request)
        request.expected = self.map.known(request.rank, request.blocks) * PAGE
        self.pending[request.rank] += request.spec.prompt_tokens - request.expected
        self.map.sent(request.rank, request.blocks, KV_PAGES)
        self.last_ranks[request.spec.client] = request.rank

    def _turns(self, request: Running) -> int:
        return request.number % len(self.ranks)

    def _fewest(self, request: Running) -> int:
        return min(range(len(self.ranks)), key=lambda i: (self.ranks[i].sequences, self.pending[i], i))

    def _score(self, request: Running) -> int:
        loads = [
            RankLoad(
                rank=i,
                usable=True,
                sequences=rank.sequences,
                pending_tokens=self.pending[i],
                cached_tokens=self.map.known(i, request.blocks) * PAGE,
                page_size=PAGE,
                kv_pages=KV_PAGES,
                kv_pages_free=KV_PAGES - rank.used,
            )
            for i, rank in enumerate(self.ranks)
        ]
        last_rank = self.last_ranks.get(request.spec.client) if request.spec.client else None
        route = choose_rank(loads, prompt_tokens=request.spec.prompt_tokens, last_rank=last_rank)
        assert route is not None
        return route.rank

    def _step(self) -> list[Running]:
        rows = chunk = 0
        ready: list[Running] = []
        for rank in self.ranks:
            self._admit(rank)
            rows, budget = max(rows, len(rank.ends)), CHUNK
            while budget and rank.prefilling:
                part = min(budget, rank.prefilling[0].left)
                rank.prefilling[0].left -= part
                budget -= part
                if rank.prefilling[0].left == 0:
                    ready.append(rank.prefilling.popleft())
            self.computed += CHUNK - budget
            chunk = max(chunk, CHUNK - budget)
        self.now += STEP_SECONDS + ROW_SECONDS * rows + TOKEN_SECONDS * chunk
        self.step += 1
        ended = [heapq.heappop(rank.ends)[2] for rank in self.ranks for _ in range(len(rank.ends)) if self._over(rank)]
        for request in ended:
            request.end = self.now
            self.ranks[request.rank].used -= need(request)
        for request in ready:
            rank = self.ranks[request.rank]
            request.first = self.now
            self.pending[request.rank] -= request.spec.prompt_tokens - request.expected
            for key in reversed(request.spec.pages):
                rank.cache[key] = None
                rank.cache.move_to_end(key)
            while rank.cache and len(rank.cache) > KV_PAGES - rank.used:
                rank.cache.popitem(last=False)
            heapq.heappush(rank.ends, (self.step + request.spec.output_tokens - 1, request.number, request))
        return ended

    def _over(self, rank: Rank) -> bool:
        return rank.ends[0][0] <= self.step

    def _admit(self, rank: Rank) -> None:
        while rank.waiting and len(rank.prefilling) + len(rank.ends) < MAX_ROWS:
            request = rank.waiting[0]
            if rank.used and rank.used + need(request) > KV_PAGES:
                return
            known = 0
            while known < len(request.spec.pages) and request.spec.pages[known] in rank.cache:
                known += 1
            request.left = max(1, request.spec.prompt_tokens - known * PAGE)
            rank.used += need(request)
            rank.prefilling.append(rank.waiting.popleft())


def need(request: Running) -> int:
    """Return the pages of a whole sequence."""
    return math.ceil((request.spec.prompt_tokens + request.spec.output_tokens) / PAGE)


def arrivals(rng: random.Random, rate: float) -> Iterator[float]:
    """Yield times of a Poisson process of `rate` per second."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def trace_request(
    at: float, shared: tuple[str, int], own: tuple[str, int], output: int, client: str = ""
) -> TraceRequest:
    """Return a request whose prompt begins with a shared text. Texts are (name, tokens)."""
    pages = [hash((shared[0], i)) for i in range(shared[1] // PAGE)]
    total = shared[1] + own[1]
    pages += [hash((own[0], i)) for i in range(len(pages), total // PAGE)]
    return TraceRequest(at=at, pages=tuple(pages), prompt_tokens=total, output_tokens=output, client=client)


def shared_prefixes(rng: random.Random, count: int, rate: float) -> list[TraceRequest]:
    """Return requests with 64 system prompts of 1,000 to 6,000 tokens, equally likely, each with its own question."""
    sizes = [rng.randrange(1000, 6000) for _ in range(64)]
    times = arrivals(rng, rate)
    return [
        trace_request(
            next(times),
            (f"system {which}", sizes[which]),
            (f"question {i}", rng.randrange(50, 500)),
            rng.randrange(32, 256),
        )
        for i, which in enumerate(rng.randrange(64) for _ in range(count))
    ]


def one_hot_prefix(rng: random.Random, count: int, rate: float) -> list[TraceRequest]:
    """Return requests, four in five with the same system prompt of 4,000 tokens. One rank cannot serve all of them."""
    times = arrivals(rng, rate)
    return [
        trace_request(
            next(times),
            ("hot", 4000) if rng.random() < 0.8 else (f"cold {i}", 2000),
            (f"question {i}", rng.randrange(50, 500)),
            rng.randrange(32, 256),
        )
        for i in range(count)
    ]


def skewed_lengths(rng: random.Random, count: int, rate: float) -> list[TraceRequest]:
    """Return requests that share nothing, of 16 to 32,768 tokens, most of them short."""
    times = arrivals(rng, rate)
    return [
        trace_request(
            next(times),
            ("", 0),
            (f"prompt {i}", min(32768, int(16 + rng.lognormvariate(6, 1.6)))),
            min(2048, int(8 + rng.lognormvariate(4.5, 1.2))),
        )
        for i in range(count)
    ]


def conversations(rng: random.Random, count: int, rate: float) -> list[TraceRequest]:
    """Return conversations of 8 turns that resend earlier turns. Half of the clients name themselves."""
    turns: list[TraceRequest] = []
    times = arrivals(rng, rate / 8)
    for client in range(count // 8):
        at, said = next(times), rng.randrange(200, 2000)
        for _ in range(8):
            answer = rng.randrange(32, 384)
            name = f"client {client}" if client % 2 else ""
            turns.append(trace_request(at, (f"talk {client}", said), (f"new {client} {said}", 40), answer, name))
            said += answer + rng.randrange(20, 400)
            at += 4 + rng.expovariate(1 / 10)
    return sorted(turns, key=lambda t: t.at)


def even(rng: random.Random, count: int, rate: float) -> list[TraceRequest]:
    """Return equal requests that share nothing. No policy can gain here, and none may lose."""
    times = arrivals(rng, rate)
    return [trace_request(next(times), ("", 0), (f"prompt {i}", rng.randrange(400, 600)), 128) for i in range(count)]


# Each trace with its requests per second and rank: about three quarters of the capacity of round robin.
TRACES: tuple[tuple[Callable[[random.Random, int, float], list[TraceRequest]], float], ...] = (
    (shared_prefixes, 10.0),
    (one_hot_prefix, 10.0),
    (skewed_lengths, 14.0),
    (conversations, 14.0),
    (even, 25.0),
)
POLICIES = ("turns", "fewest", "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Latencies of a trace in milliseconds, and the share of prompt tokens that were computed."""

    ttft: float
    ttft_p99: float
    tpot: float
    latency: float
    computed: float


def outcome(trace: Sequence[TraceRequest], policy: str, num_ranks: int) -> Outcome:
    """Simulate one trace under one policy."""
    simulation = Simulation(num_ranks, policy)
    ended = simulation.run(trace)
    assert len(ended) == len(trace)
    ttft = sorted((r.first - r.spec.at) * 1e3 for r in ended)
    return Outcome(
        ttft=statistics.fmean(ttft),
        ttft_p99=ttft[int(0.99 * len(ttft))],
        tpot=statistics.fmean((r.end - r.first) * 1e3 / max(1, r.spec.output_tokens - 1) for r in ended),
        latency=statistics.fmean((r.end - r.spec.at) * 1e3 for r in ended),
        computed=simulation.computed / sum(a.prompt_tokens for a in trace),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=float, default=1.0, help="factor of the traces' rates")
    args = parser.parse_args()
    ratios: dict[str, list[float]] = {"turns": [], "fewest": []}
    print("| trace | ranks | policy | TTFT mean | p99 | TPOT mean | latency mean | prompt tokens computed |")
    print("|---|---|---|---|---|---|---|---|")
    for make, rate in TRACES:
        for num_ranks in args.ranks:
            trace = make(random.Random(args.seed), args.requests, rate * num_ranks * args.load)
            outcomes = {policy: outcome(trace, policy, num_ranks) for policy in POLICIES}
            for other, found in ratios.items():
                found.append(outcomes["score"].latency / outcomes[other].latency)
            for policy, o in outcomes.items():
                print(
                    f"| {make.__name__} | {num_ranks} | {policy} | {o.ttft:.0f} ms | {o.ttft_p99:.0f} ms "
                    f"| {o.tpot:.1f} ms | {o.latency:.0f} ms | {o.computed:.0%} |"
                )

    for other, found in ratios.items():
        print(f"mean latency against {other}, geometric mean over the traces: {statistics.geometric_mean(found):.2f}")


if __name__ == "__main__":
    main()
