"""Measure a fleet on the GPUs of one host, without Ray and router: decoding, prompts, exchange and lockstep.

    python bench/gpu_ranks.py --shape Qwen3-30B-A3B [--layers N] --ranks 2 [--exchange nvlink] [--streams 1 8 64]
        [--uneven 8,9 8,0] [--prefill 8x4096] [--mixed 4096 [--budgets 2048 512]] [--drafts 1] [--check] [--json FILE]
        [--residency 0.25 [--fetch alone shared]] [--arrivals 20x512 24x256-8192] [--routing asked] [--profile]

Real workers run in their own processes (tests/fleet.py), with random weights. This process is their client, in place of
a router, and records the time of each message.

- `--streams`: concurrent requests per rank, with distinct random prompts. TPOT is each request's mean after its first
  token, ITL the time between tokens.
- `--uneven`: rows per rank, comma separated.
- `--prefill CxN`: C prompts of N tokens on every rank.
- `--mixed N`: the last rank gets prompts of N tokens in sequence, while the others decode 8 streams each. The output is
  the ITL of these streams, for each of the `--budgets` of prompt rows beside output. The first of them, if given, also
  holds while `--streams` begin.
- `--check`: prompts answered on one rank, then spread among others: tokens and log-probability bits must be equal.
- `--arrivals RxN` or `RxM-N`: R prompts per second of N tokens, or of M to N, arrive at random at all ranks, while each
  rank decodes 8 streams. The output is TTFT of the prompts and ITL of the streams. It has two lines: each step planned
  when it is due, and as soon as there is room (`engine/loop/pacing.py`).
- `--drafts`: drafts per token, if the shape has an MTP layer. With random weights hardly any is right, so ITL is the
  time of such a step.
- `--profile`: run each case once more and list the first rank's kernels by time.
- `--residency`: slots for this share of each rank's experts.
- `--fetch`: one fleet for each value, in sequence. Ranks read missed experts alone or for each other. The output then
  has the tokens/s of the last fleet relative to the first. For each rank it has the MB missed and read for others while
  decoding, and the total ms of reads in flight. `bench/shared_links.py` has the upper bound of the gain.

The ranks' metrics give the device time per step, the wait for plans and the bytes between ranks. They also give the
time of a layer's dispatch and combine, and the number of replayed steps.
"""

import argparse
import itertools
import json
import random
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from moeyard_worker.config.engine_config import DEVICE_DEFAULTS, DTYPE_BYTES, EXPERT_FETCHES, EngineConfig
from moeyard_worker.models.shapes import served_model
from moeyard_worker.protocol import Done, Message, Tokens

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tests.fleet
from tests.fleet import Client, Fleet, ProcessPool, start_fleet

METRICS = ("step_seconds", "step_device_seconds", "lockstep_wait_seconds")
METRICS += ("exchange_seconds dispatch", "exchange_seconds combine")
# Figures of experts without a slot: printed name, counter, unit.
FETCHED = (
    ("experts missed", "expert_cache_misses decode_total", 1),
    ("slots filled (MB)", "expert_cache_bytes to_slot_total", 1e-6),
    ("read for peers (MB)", "expert_cache_bytes for_peers_total", 1e-6),
    ("read by peers (MB)", "expert_cache_bytes by_peers_total", 1e-6),
    ("in flight (ms)", "expert_copy_seconds_total", 1e3),
)
SAMPLE = re.compile(
    r'moeyard_(\w+)_(sum|count|total)\{(?:direction="(\w+)",)?model_name="[^"]*",(?:phase="(\w+)",)?rank="\d+"\} (\S+)'
)


class Clocked(Client):
    """Records when each token arrived."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.times: dict[str, list[float]] = {}

    def _take(self, message: Message) -> None:
        super()._take(message)
        if isinstance(message, Tokens):
            self.times.setdefault(message.request_id, []).extend([time.perf_counter()] * len(message.token_ids))


def engine_config(args: argparse.Namespace) -> EngineConfig:
    usual = {"page_size": 64, **DEVICE_DEFAULTS[args.device]}
    rows = max([*args.streams, 32, *(max(each) for each in args.uneven)])
    lengths = [args.prompt + args.output, *(length + 8 for _, length in args.prefill), args.mixed + 600]
    arriving = [(rows, max(longest + 8, args.prompt + 600)) for _, _, longest in args.arrivals]
    lengths += [length for _, length in arriving]
    config = EngineConfig(
        model_path=None,
        load_format="dummy",
        shape=args.shape,
        num_layers=args.layers,
        quantization=args.quantization,
        device=args.device,
        num_workers=args.ranks,
        exchange=args.exchange,
        max_num_seqs=rows,
        max_model_len=max(lengths),
        kv_memory=1,
        prefix_caching=False,
        enforce_eager=args.enforce_eager,
        step_deadline=20.0,
        enable_return_routed_experts=args.routing is not None,
        speculate="mtp" if args.drafts else None,
        draft_tokens=args.drafts or None,
        **usual,
    )
    model = served_model(config)
    page = config.page_size
    page_bytes = page * model.state_spec(DTYPE_BYTES[model.served_dtype(config.dtype)]).bytes_per_token
    if args.residency is not None:
        shard = model.num_experts // args.ranks * len(model.moe_layers)
        config = replace(config, expert_slots=max(1, int(args.residency * shard)))
    counts = [(rows, args.prompt + args.output), *args.prefill, (9, args.mixed + 600), *arriving]
    return replace(config, kv_memory=max(count * (-(-length // page) + 1) for count, length in counts) * page_bytes)


def scraped(fleet: Fleet) -> list[dict[str, float]]:
    """Return each rank's counters, and the sums and counts of its histograms."""
    found = []
    for endpoint in fleet.endpoints:
        with urllib.request.urlopen(endpoint["metrics_url"], timeout=10) as response:
            lines = response.read().decode().splitlines()
        samples = [sample.groups() for line in lines if (sample := SAMPLE.fullmatch(line))]
        found.append(
            {
                f"{name}{f' {direction or phase}' if direction or phase else ''}_{kind}": float(value)
                for name, kind, direction, phase, value in samples
            }
        )
    return found


def milliseconds(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100) if len(values) > 1 else values * 99
    return {name: round(cuts[i] * 1e3, 3) for name, i in (("p50", 49), ("p90", 89), ("p99", 98))}


class Bench:
    """One fleet and its workloads."""

    def __init__(self, fleet: Fleet, args: argparse.Namespace, vocab: int) -> None:
        self.fleet, self.client, self.args, self.vocab = fleet, fleet.client, args, vocab
        assert isinstance(self.client, Clocked)
        self.times = self.client.times
        self.random = random.Random(7)
        self.names = 0
        self.rows: list[dict[str, Any]] = []

    def prompt(self, length: int) -> list[int]:
        return self.random.choices(range(self.vocab), k=length)

    def submit(self, rank: int, prompt: list[int], output: int) -> str:
        self.names += 1
        name = str(self.names)
        routing = {"routed_experts_start": 0} if self.args.routing == "asked" else {}
        self.client.submit(rank, name, prompt, temperature=0.0, max_tokens=output, ignore_eos=True, **routing)
        return name

    def say(self, case: str, begun: float, before: tuple[Any, Any], **figures: Any) -> None:
        metrics, graphs = before
        row: dict[str, Any] = {"case": case, **figures, "seconds": round(time.perf_counter() - begun, 2)}
        after = scraped(self.fleet)
        for metric in METRICS:
            means = []
            for old, new in zip(metrics, after, strict=True):
                count = new.get(f"{metric}_count", 0) - old.get(f"{metric}_count", 0)
                total = new.get(f"{metric}_sum", 0) - old.get(f"{metric}_sum", 0)
                means.append(round(total / count * 1e3, 4) if count else None)
            row[f"mean {metric} (ms)"] = means
        sent = "exchange_bytes sent_total"
        row["sent (MB)"] = [
            round((new.get(sent, 0) - old.get(sent, 0)) * 1e-6, 2) for old, new in zip(metrics, after, strict=True)
        ]
        row["steps"] = [
            {name: new[name] - old[name] for name in new}
            for old, new in zip(graphs, self.fleet.call("graphs"), strict=True)
        ]
        if self.args.residency is not None:
            for name, counter, unit in FETCHED:
                row[name] = [
                    round((new.get(counter, 0) - old.get(counter, 0)) * unit, 2)
                    for old, new in zip(metrics, after, strict=True)
                ]
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def before(self) -> tuple[Any, Any]:
        return scraped(self.fleet), self.fleet.call("graphs")

    def profile(self, go: Callable[[], None]) -> None:
        """Run it once more and record the first rank's launches."""
        if self.args.profile:
            self.fleet.ranks[0].call("profile", self.args.device)
            go()
            print("\n".join(self.fleet.ranks[0].call("profile")), flush=True)
            self.rows.pop()

    def decode(self, rows: list[int]) -> None:
        before, begun = self.before(), time.perf_counter()
        names = [
            (rank, self.submit(rank, self.prompt(self.args.prompt), self.args.output))
            for rank, count in enumerate(rows)
            for _ in range(count)
        ]
        self.client.wait(*(name for _, name in names), timeout=120)
        figures: dict[str, Any] = {}
        of_all = [self.times[name] for _, name in names]
        begin, end = max(t[0] for t in of_all), min(t[-1] for t in of_all)
        figures["tokens_per_s"] = round(sum(begin < at <= end for t in of_all for at in t) / (end - begin), 1)
        tokens = len(names) * (self.args.prompt + self.args.output)
        figures["tokens_per_s with prompts"] = round(tokens / (max(t[-1] for t in of_all) - begun), 1)
        for rank in sorted({rank for rank, _ in names}):
            times = [self.times[name] for of, name in names if of == rank]
            # While all streams decode: from the latest first token to the earliest last one.
            first, last = max(t[0] for t in times), min(t[-1] for t in times)
            gaps = [b - a for t in times for a, b in itertools.pairwise(t) if a >= first and b <= last]
            figures[f"tpot_ms rank {rank}"] = round(
                statistics.median((t[-1] - t[0]) / (len(t) - 1) for t in times) * 1e3, 3
            )
            figures[f"itl_ms rank {rank}"] = milliseconds(gaps) if gaps else None
        self.say(f"decode {','.join(map(str, rows))}", begun, before, **figures)

    def prefill(self, count: int, length: int) -> None:
        # Draw the prompts beforehand. 4096 ids take this process a millisecond, in which the ranks would already run
        # the first prompt.
        prompts = [(rank, self.prompt(length)) for _ in range(count) for rank in range(self.args.ranks)]
        before, begun = self.before(), time.perf_counter()
        names = [self.submit(rank, prompt, 1) for rank, prompt in prompts]
        self.client.wait(*names, timeout=120)
        seconds = max(self.times[name][0] for name in names) - begun
        self.say(f"prefill {count}x{length} per rank", begun, before, tokens_per_s=round(len(names) * length / seconds))

    def mixed(self, length: int, budget: int) -> None:
        for rank in self.fleet.ranks:
            rank.call("budget", budget)
        before, begun = self.before(), time.perf_counter()
        last = self.args.ranks - 1
        names = [self.submit(rank, self.prompt(self.args.prompt), 500) for rank in range(last) for _ in range(8)]
        self.client.wait_for(lambda: all(len(self.times.get(name, ())) > 100 for name in names), timeout=120)
        loud = time.perf_counter()
        num = 0
        while min(len(self.times[name]) for name in names) < 450 and num < 12:
            self.client.wait(self.submit(last, self.prompt(length), 1), timeout=120)
            num += 1
        quiet = time.perf_counter()
        self.client.wait(*names, timeout=120)
        gaps = [(a, b - a) for name in names for a, b in itertools.pairwise(self.times[name])]
        self.say(
            f"8 rows each beside prompts of {length} on rank {last}, {budget} rows a step",
            begun,
            before,
            itl_quiet_ms=milliseconds([gap for at, gap in gaps if at < loud][50:]),
            itl_ms=milliseconds([gap for at, gap in gaps if loud <= at < quiet]),
            prompt_tokens_per_s=round(num * length / (quiet - loud)),
            prompts=num,
        )

    def arrivals(self, rate: int, shortest: int, longest: int, paced: bool) -> None:
        for rank in self.fleet.ranks:
            rank.call("pace", paced)
        before, begun = self.before(), time.perf_counter()
        ranks, chance = range(self.args.ranks), random.Random(5)
        streams = [self.submit(rank, self.prompt(self.args.prompt), 590) for rank in ranks for _ in range(8)]
        self.client.wait_for(lambda: all(len(self.times.get(name, ())) > 20 for name in streams), timeout=120)
        sent: dict[str, float] = {}
        at = time.perf_counter()
        while min(len(self.times[name]) for name in streams) < 560 and len(sent) < 400:
            at += chance.expovariate(rate)
            # Lengths are log-uniform: as many between 1000 and 2000 as between 2000 and 4000.
            prompt = self.prompt(round(shortest * (longest / shortest) ** chance.random()))
            while (left := at - time.perf_counter()) > 0:
                self.client.pump(left)
            sent[self.submit(len(sent) % self.args.ranks, prompt, 1)] = time.perf_counter()
        loud = min(sent.values()), max(sent.values())
        self.client.wait(*sent, *streams, timeout=120)
        gaps = [b - a for name in streams for a, b in itertools.pairwise(self.times[name]) if loud[0] <= a < loud[1]]
        self.say(
            f"{rate} prompts of {shortest} to {longest} a second, planned {'when due' if paced else 'at once'}",
            begun,
            before,
            ttft_ms=milliseconds([self.times[name][0] - then for name, then in sent.items()]),
            itl_ms=milliseconds(gaps),
            prompts=len(sent),
        )

    def check(self) -> None:
        """Compare prompts that run alone on the first rank with the same prompts among others."""
        sampling: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": self.args.output // 2,
            "ignore_eos": True,
            "logprobs": 1,
        }
        prompts = [self.prompt(100 + 9 * i) for i in range(6)]
        found = []
        for turn in range(3):
            strangers = [
                self.submit(rank, self.prompt(50), self.args.output)
                for rank in range(self.args.ranks)
                for _ in range(11 * turn)
            ]
            names = [f"check-{turn}-{i}" for i in range(len(prompts))]
            for i, name in enumerate(names):
                self.client.submit((i + turn) % self.args.ranks if turn else 0, name, prompts[i], **sampling)
            found.append([(a.token_ids, a.logprobs) for a in self.client.wait(*names, timeout=120)])
            self.client.wait(*strangers, timeout=120)
        same = all(each == found[0] for each in found)
        print(f"one answer: {len(prompts)} prompts, {len(found)} ways: {'equal' if same else 'DIFFERENT'}", flush=True)
        assert same


def times(text: str) -> tuple[int, int]:
    count, length = text.split("x")
    return int(count), int(length)


def arrival(text: str) -> tuple[int, int, int]:
    rate, lengths = text.split("x")
    shortest, _, longest = lengths.partition("-")
    return int(rate), int(shortest), int(longest or shortest)


def measure(pool: ProcessPool, args: argparse.Namespace, config: EngineConfig) -> list[dict[str, Any]]:
    """Run all requested workloads on one fleet."""
    begun = time.perf_counter()
    with start_fleet(pool, config) as fleet:
        report = fleet.reports[0]
        print(
            f"{args.shape}, {report['num_experts']} experts on rank 0, {report['expert_slots']} in slots; exchange "
            f"{report['exchange']} ({report['exchange_why']}), fetch {config.expert_fetch}; weights after "
            f"{report['seconds']['weights']:.1f} s, all ready after {time.perf_counter() - begun:.1f} s",
            flush=True,
        )
        while args.wait_for is not None and not args.wait_for.exists():
            time.sleep(0.2)
        bench = Bench(fleet, args, served_model(config).vocab_size)
        bench.decode([1] * args.ranks)  # first launches
        bench.rows.clear()
        for rank in fleet.ranks if args.budgets else ():
            rank.call("budget", args.budgets[0])
        if args.check:
            bench.check()
        for count in args.streams:
            bench.decode([count] * args.ranks)
            bench.profile(partial(bench.decode, [count] * args.ranks))
        for rows in args.uneven:
            bench.decode(rows)
        for count, length in args.prefill:
            # The durations of such steps are not known before. Without this, the second one would be planned at once.
            bench.prefill(1, length)
            bench.rows.pop()
            bench.prefill(count, length)
            bench.profile(partial(bench.prefill, count, length))
        for budget in (args.budgets or [2048]) if args.mixed else ():
            bench.mixed(args.mixed, budget)
        for each, paced in itertools.product(args.arrivals, (True, False, True, False)):
            bench.arrivals(*each, paced)
        assert all(isinstance(answer.end, Done) for answer in fleet.client.answers.values())
        return bench.rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--quantization", help="form of the random weights, as of `moeyard bench engine`")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--device", choices=tuple(DEVICE_DEFAULTS), default="cuda", help="cpu: for a trial without GPUs"
    )
    parser.add_argument("--exchange", default="auto")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--uneven", type=lambda text: [int(n) for n in text.split(",")], nargs="*", default=[])
    parser.add_argument("--prefill", type=times, nargs="*", default=[])
    parser.add_argument("--mixed", type=int, default=0)
    parser.add_argument("--budgets", type=int, nargs="*", default=[])
    parser.add_argument("--arrivals", type=arrival, nargs="*", default=[])
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--residency", type=float, help="share of the experts in slots (default: all that fit)")
    parser.add_argument("--fetch", choices=EXPERT_FETCHES, nargs="*", default=[])
    parser.add_argument("--check", action="store_true")
    parser.add_argument(
        "--routing", choices=("served", "asked"), help="--enable-return-routed-experts, and ask for them"
    )
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--wait-for", type=Path, help="start when this file exists, so that several runs load together")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = engine_config(args)
    tests.fleet.Client, tests.fleet.CALL_SECONDS = Clocked, 300.0  # type: ignore[misc]
    pool, found = ProcessPool(), list[list[dict[str, Any]]]()
    try:
        for fetch in args.fetch or [config.expert_fetch]:
            rows = measure(pool, args, replace(config, expert_fetch=fetch))
            found.append([{"fetch": fetch, **row} for row in rows])
        for first, last in zip(found[0], found[-1], strict=True) if len(found) > 1 else ():
            if "tokens_per_s" in first:
                gain = last["tokens_per_s"] / first["tokens_per_s"]
                print(f"{first['case']}: {last['fetch']} {gain:.3f} times the tokens/s of {first['fetch']}", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(list(itertools.chain(*found)), indent=1) + "\n")
    finally:
        pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
