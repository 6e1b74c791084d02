"""Decode and prefill of one engine in process, on a GPU: `python bench/engine.py --shape Qwen3-30B-A3B [--layers N]`.

Scheduler, graph runner and sampler as a worker runs them, two steps deep, without sockets: weights of chance on a real
model's scale (checkpoint/dummy.py), distinct prompts. Prints per number of streams the time per output token (median of
steps), the time that a replay of the same graph takes alone, the host's time per step, distinct experts per layer and
the floor: bytes that a step must read at the copy bandwidth measured in the same run. Then prefill rates.

    python bench/engine.py --shape Qwen3-30B-A3B --streams 1 8 64 --prompt 128 --output 128 [--json FILE]
    python bench/engine.py --shape Qwen3-30B-A3B --streams 1 --prefill 1x8192 --residency 1 0.5 0.25 0.1

With --residency, everything is measured anew with that share of the experts in slots, in the order given. Below 1 each
row also has the hit rate of decode (or prompts), the missed bytes per step (or per prompt), and `of_bound`: how near it
comes to the slower of the row at residency 1 (measured first) and missed bytes over the link, whose bandwidth is that
of the copy engine in this run, experts' blobs from pinned memory; what `gather_experts` reaches is printed beside it.
"""

import argparse
import gc
import itertools
import json
import random
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from moeyard_kernels import ops
from moeyard_kernels.bench.timing import Timer
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.cuda.graph_inputs import Bucket
from moeyard_worker.checkpoint.dummy import DummyWeights
from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.config.fields import Fields
from moeyard_worker.engine.graph_runner import GraphLaunched, GraphRunner
from moeyard_worker.engine.runner import Runner
from moeyard_worker.exchange.base import Dispatched
from moeyard_worker.exchange.local import LocalExchange
from moeyard_worker.experts.cache import ExpertCache
from moeyard_worker.experts.policies import POLICIES
from moeyard_worker.experts.policy import RowKind
from moeyard_worker.models.families import parse_model_config
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.shapes import SHAPES, shape_config
from moeyard_worker.models.spec import ModelSpec, model_spec
from moeyard_worker.protocol import SamplingParams, Submit
from moeyard_worker.scheduling.scheduler import Scheduler

PAGE_SIZE = 64
DTYPE = torch.bfloat16


class Counting:
    """Experts that note which they were asked for, while `seen` is a dict."""

    def __init__(self, experts: ExpertCache) -> None:
        self._experts = experts
        self.seen: dict[int, int] | None = None

    def run(self, layer: int, dispatched: Dispatched) -> torch.Tensor:
        if self.seen is not None:
            self.seen[layer] = int(dispatched.experts.unique().numel())
        return self._experts.run(layer, dispatched)


class Bench:
    """One model on the GPU and what serves it."""

    def __init__(
        self, config: ModelConfig, *, num_pages: int, max_rows: int, max_pages: int, chunk: int, num_slots: int,
        policy: str,
    ) -> None:  # fmt: skip
        self.config, self.chunk = config, chunk
        self.num_pages, self.max_rows, self.max_len = num_pages, max_rows, max_pages * PAGE_SIZE
        self.spec: ModelSpec = model_spec(config, ())
        backend = CudaBackend(page_size=PAGE_SIZE, device=torch.device("cuda"))
        weights = DummyWeights(self.spec, backend=backend, dtype=DTYPE)
        self.cache = cache = ExpertCache(
            backend=backend, source=weights, layers=config.moe_layers, experts=range(config.num_experts),
            hidden=config.hidden_size, intermediate=config.moe_intermediate_size, dtype=DTYPE,
            num_slots=num_slots, policy=policy,
        )  # fmt: skip
        cache.preload()
        self.experts = Counting(cache)
        self.runner = Runner(
            self.spec, load=weights.load, backend=backend, exchange=LocalExchange(), experts=self.experts, dtype=DTYPE,
            num_pages=num_pages,
        )  # fmt: skip
        self.graphs = GraphRunner(
            self.runner, backend, max_rows=max_rows, max_pages=max_pages, max_prompt=chunk,
            captures_prompts=cache.captures_prompts,
        )  # fmt: skip
        self.rng = random.Random(7)
        self.temperature, self.top_p = 0.0, 1.0

    def scheduler(self) -> Scheduler:
        """An empty one over all pages."""
        return Scheduler(
            SchedulerConfig(
                num_pages=self.num_pages,
                page_size=PAGE_SIZE,
                max_model_len=self.max_len,
                vocab_size=self.config.vocab_size,
                max_batch_tokens=max(self.chunk, self.max_rows),
                max_num_seqs=self.max_rows,
                prefill_chunk=self.chunk,
                prefix_caching=False,
                max_in_flight=2,
            )
        )

    def submit(self, scheduler: Scheduler, name: str, prompt: int, output: int) -> None:
        """Queue a greedy request with a prompt of its own."""
        ids = tuple(self.rng.randrange(self.config.vocab_size) for _ in range(prompt))
        params = SamplingParams(
            max_tokens=output, temperature=self.temperature, seed=self.rng.randrange(2**32), ignore_eos=True,
            top_p=self.top_p,
        )  # fmt: skip
        rejected = scheduler.add(
            Submit(request_id=name, prompt_token_ids=ids, sampling=params), b"bench", time.monotonic()
        )
        assert rejected is None, rejected

    def run(self, scheduler: Scheduler) -> list[dict[str, float]]:
        """Serve until nothing is left, as the engine's loop does; one record per completed step."""
        flights: deque[tuple[GraphLaunched, float, int]] = deque()
        records = []
        while scheduler.has_work() or flights:
            begun = time.perf_counter()
            step = scheduler.schedule(begun)
            busy = 0.0
            if step.chunks:
                before = flights[-1][0] if flights else None
                launched = self.graphs.launch(step, scheduler.requests(step), before=before)
                flights.append((launched, begun, step.num_prefill_tokens))
                busy = time.perf_counter() - begun
                if len(flights) < 2:
                    continue
            launched, since, prefill = flights.popleft()
            results = launched.results
            waited = time.perf_counter()
            scheduler.complete(launched.step, results, waited)
            done = time.perf_counter()
            records.append(
                {"at": waited, "since": since, "prefill": prefill, "rows": launched.step.num_tokens,
                 "host": busy + done - waited}
            )  # fmt: skip
        return records


class Misses:
    """What the cache counted while it was entered, as fields of a row: nothing where all experts are resident."""

    def __init__(self, bench: Bench, phase: RowKind) -> None:
        self._cache, self._phase = bench.cache, phase
        self._expert_bytes = bench.config.expert_bytes(DTYPE.itemsize)

    def _totals(self) -> tuple[int, int]:
        counters = self._cache.look(wait=True).counters
        hits = sum(count for (_, phase), count in counters.hits.items() if phase == self._phase)
        return hits, counters.misses[self._phase]

    def __enter__(self) -> "Misses":
        self._before = self._totals()
        return self

    def __exit__(self, *_: object) -> None:
        self._after = self._totals()

    def row(self, *, times: int, seconds: float, resident: float | None, link: float) -> dict[str, float]:
        """For what took `seconds` each of so many times, and `resident` with all experts in slots."""
        if self._cache.all_resident:
            return {}
        hits, misses = (after - before for after, before in zip(self._after, self._before, strict=True))
        missed = misses * self._expert_bytes / times
        row = {"hit_rate": hits / max(1, hits + misses), "missed_mb": missed * 1e-6, "link_ms": missed / link * 1e3}
        return row | ({} if resident is None else {"of_bound": max(resident, missed / link) / seconds})


def link_bandwidth(config: ModelConfig) -> tuple[float, float]:
    """Bytes/s of experts out of pinned memory: by the copy engine, and by `gather_experts`."""
    count, hidden, inner = 16, config.hidden_size, config.moe_intermediate_size
    store = torch.zeros(count, 3 * hidden * inner, dtype=DTYPE).pin_memory()
    gate_up = torch.empty(count, 2 * inner, hidden, dtype=DTYPE, device="cuda")
    down = torch.empty(count, hidden, inner, dtype=DTYPE, device="cuda")
    table = torch.arange(count, dtype=torch.int32, device="cuda")
    whole = torch.empty_like(store, device="cuda")

    def copied() -> None:
        for slot in range(count):
            whole[slot].copy_(store[slot], non_blocking=True)

    def gathered() -> None:
        ops.gather_experts(store, table, gate_up, down, layer=0)

    found = []
    for run in (copied, gathered):
        times = []
        for _ in range(7):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        found.append(store.nbytes / statistics.median(times[2:]))
    return found[0], found[1]


def floor_bytes(bench: Bench, distinct: float, rows: int, context: float) -> float:
    """What one decode step must read: dense weights, the experts that were chosen, every row's keys and values."""
    config = bench.config
    dense = sum(w.parts and torch.Size(w.shape).numel() * (4 if w.fp32 else 2) for w in bench.spec.dense())
    dense -= torch.Size(bench.spec.embed.shape).numel() * 2 if bench.spec.lm_head is not None else 0
    experts = distinct * len(config.moe_layers) * config.expert_bytes(2)
    return dense + experts + rows * context * config.state_spec(2).bytes_per_token


def decode(
    bench: Bench, streams: int, prompt: int, output: int, bandwidth: float, link: float, resident: float | None
) -> dict[str, Any]:
    """Time per output token of so many streams; `resident` seconds with all experts in slots."""
    scheduler = bench.scheduler()
    for i in range(streams):
        bench.submit(scheduler, str(i), prompt, output)
    with Misses(bench, "decode") as misses:
        every = bench.run(scheduler)
    records = [r for r in every if not r["prefill"] and r["rows"] == streams]
    num_decoding = sum(r["rows"] > r["prefill"] for r in every)
    gaps = [b["at"] - a["at"] for a, b in itertools.pairwise(records)]
    # The last replay again, alone.
    wanted = Bucket(decode=streams, width=-(-(prompt + output) // PAGE_SIZE))
    key, graph = next((b, g.graph) for b, g in bench.graphs._graphs.items() if b.holds(wanted))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(20):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    distinct = bench_distinct(bench, streams, prompt)
    floor = floor_bytes(bench, distinct, streams, prompt + output / 2) / bandwidth
    return {
        "streams": streams, "tpot_ms": statistics.median(gaps) * 1e3,
        "p99_ms": sorted(gaps)[int(len(gaps) * 0.99)] * 1e3,
        "replay_ms": start.elapsed_time(end) / 20, "floor_ms": floor * 1e3, "distinct_experts": distinct,
        "host_ms": statistics.median(r["host"] for r in records) * 1e3, "bucket": str(key),
        **misses.row(times=num_decoding, seconds=statistics.mean(gaps), resident=resident, link=link),
    }  # fmt: skip


def bench_distinct(bench: Bench, streams: int, prompt: int) -> float:
    """Distinct experts per layer of one decode step, launched kernel by kernel."""
    scheduler = bench.scheduler()
    for i in range(streams):
        bench.submit(scheduler, f"d{i}", prompt, 3)
    graphs, bench.graphs._graphs = bench.graphs._graphs, {}
    bench.experts.seen = {}
    bench.run(scheduler)
    seen, bench.experts.seen = bench.experts.seen, None
    bench.graphs._graphs = graphs
    return statistics.mean(seen.values())


def prefill(bench: Bench, count: int, length: int, link: float, resident: float | None) -> dict[str, Any]:
    """Prompt tokens per second: from the first launch to the first token of the last prompt."""
    rates = []
    for i in range(4):
        scheduler = bench.scheduler()
        for j in range(count):
            bench.submit(scheduler, f"p{i}.{j}", length, 1)
        torch.cuda.synchronize()
        with Misses(bench, "prefill") as misses:
            begun = time.perf_counter()
            records = bench.run(scheduler)
            rates.append(count * length / (records[-1]["at"] - begun))
    rate = statistics.median(rates[1:])
    missed = misses.row(times=1, seconds=count * length / rate, resident=resident, link=link)
    return {"prefill": f"{count} x {length}", "tok_s": rate, **missed}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--prefill", nargs="*", default=["1x256", "1x1024", "1x8192", "4x4096"])
    parser.add_argument("--chunk", type=int, default=2048, help="prompt rows of a step")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--residency", type=float, nargs="+", default=[1.0], help="shares of the experts in slots")
    parser.add_argument("--expert-slots", type=int, help="of all layers together, instead of --residency")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="slru")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    timer = Timer()
    config = parse_model_config(Fields(args.shape, shape_config(args.shape, args.layers)), Fields("", {}))
    longest = max([args.prompt + args.output, *(int(p.split("x")[1]) + 1 for p in args.prefill)])
    max_pages = -(-longest // PAGE_SIZE)
    total = max(max(args.streams) * -(-(args.prompt + args.output) // PAGE_SIZE), 0)
    total = max([total, *(int(p.split("x")[0]) * -(-(int(p.split("x")[1]) + 1) // PAGE_SIZE) for p in args.prefill)])
    copied, gathered = link_bandwidth(config)
    num_experts = config.num_experts * len(config.moe_layers)
    sizes = [args.expert_slots] if args.expert_slots else [max(1, round(r * num_experts)) for r in args.residency]
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {timer.copy_bandwidth * 1e-12:.2f} TB/s, "
        f"from the host {copied * 1e-9:.1f} GB/s, gathered {gathered * 1e-9:.1f} GB/s; {args.shape}, "
        f"{config.num_layers} layers",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    # Seconds with all experts in slots, if that was measured.
    resident: dict[Any, float] = {}
    for num_slots in sizes:
        begun = time.perf_counter()
        bench = Bench(
            config, num_pages=total + 64, max_rows=max(args.streams), max_pages=max_pages, chunk=args.chunk,
            num_slots=num_slots, policy=args.policy,
        )  # fmt: skip
        torch.cuda.synchronize()
        loaded = time.perf_counter()
        # Only what is measured, to save the time of the others.
        wanted = -(-(args.prompt + args.output) // PAGE_SIZE)
        every = list(bench.graphs.buckets())
        width = min(b.width for b in every if b.width >= wanted)
        buckets = [b for b in every if (b.decode in args.streams and b.width == width) or (b.prompt and not b.decode)]
        bench.graphs.buckets = lambda buckets=buckets: iter(buckets)  # type: ignore[method-assign, misc]
        bench.graphs.capture()
        torch.cuda.synchronize()
        print(
            f"{num_slots} of {num_experts} experts in slots: weights {loaded - begun:.1f} s, {len(buckets)} graphs "
            f"{time.perf_counter() - loaded:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB",
            flush=True,
        )
        bench.temperature, bench.top_p = args.temperature, args.top_p
        share = {} if bench.cache.all_resident else {"residency": num_slots / num_experts, "policy": args.policy}
        for streams in args.streams:
            row = decode(bench, streams, args.prompt, args.output, timer.copy_bandwidth, copied, resident.get(streams))
            if bench.cache.all_resident:
                resident[streams] = row["tpot_ms"] * 1e-3
            rows.append(share | row)
            print(json.dumps(rows[-1]), flush=True)
        for each in args.prefill:
            count, length = map(int, each.split("x"))
            row = prefill(bench, count, length, copied, resident.get(each))
            if bench.cache.all_resident:
                resident[each] = count * length / row["tok_s"]
            rows.append(share | row)
            print(json.dumps(rows[-1]), flush=True)
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
