"""Decode and prefill of one engine in process, on a GPU: `python bench/engine.py --shape Qwen3-30B-A3B [--layers N]`.

Scheduler, graph runner and sampler as a worker runs them, two steps deep, without sockets: weights of chance on a real
model's scale (checkpoint/dummy.py), distinct prompts. Prints per number of streams the time per output token (median of
steps), the time that a replay of the same graph takes alone, the host's time per step, distinct experts per layer and
the floor: bytes that a step must read at the copy bandwidth measured in the same run. Then prefill rates.

    python bench/engine.py --shape Qwen3-30B-A3B --streams 1 8 64 --prompt 128 --output 128 [--json FILE]
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from moeyard_kernels.bench.timing import Timer
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_worker.checkpoint.dummy import DummyWeights
from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.config.fields import Fields
from moeyard_worker.engine.graph_runner import GraphLaunched, GraphRunner
from moeyard_worker.engine.runner import Runner
from moeyard_worker.exchange.base import Dispatched
from moeyard_worker.exchange.local import LocalExchange
from moeyard_worker.experts.cache import ExpertCache
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

    def __init__(self, config: ModelConfig, *, num_pages: int, max_rows: int, max_pages: int, chunk: int) -> None:
        self.config, self.chunk = config, chunk
        self.num_pages, self.max_rows, self.max_len = num_pages, max_rows, max_pages * PAGE_SIZE
        self.spec: ModelSpec = model_spec(config, ())
        backend = CudaBackend(page_size=PAGE_SIZE, device=torch.device("cuda"))
        weights = DummyWeights(self.spec, backend=backend, dtype=DTYPE)
        cache = ExpertCache(
            backend=backend, source=weights, layers=config.moe_layers, experts=range(config.num_experts),
            hidden=config.hidden_size, intermediate=config.moe_intermediate_size, dtype=DTYPE,
            num_slots=config.num_experts * len(config.moe_layers),
        )  # fmt: skip
        cache.preload()
        self.experts = Counting(cache)
        self.runner = Runner(
            self.spec, load=weights.load, backend=backend, exchange=LocalExchange(), experts=self.experts, dtype=DTYPE,
            num_pages=num_pages,
        )  # fmt: skip
        self.graphs = GraphRunner(self.runner, backend, max_rows=max_rows, max_pages=max_pages)
        self.rng = random.Random(7)

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
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
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


def floor_bytes(bench: Bench, distinct: float, rows: int, context: float) -> float:
    """What one decode step must read: dense weights, the experts that were chosen, every row's keys and values."""
    config = bench.config
    dense = sum(w.parts and torch.Size(w.shape).numel() * (4 if w.fp32 else 2) for w in bench.spec.dense())
    dense -= torch.Size(bench.spec.embed.shape).numel() * 2 if bench.spec.lm_head is not None else 0
    experts = distinct * len(config.moe_layers) * config.expert_bytes(2)
    return dense + experts + rows * context * config.state_spec(2).bytes_per_token


def decode(bench: Bench, streams: int, prompt: int, output: int, bandwidth: float) -> dict[str, Any]:
    """Time per output token of so many streams."""
    scheduler = bench.scheduler()
    for i in range(streams):
        bench.submit(scheduler, str(i), prompt, output)
    records = [r for r in bench.run(scheduler) if not r["prefill"] and r["rows"] == streams]
    gaps = [b["at"] - a["at"] for a, b in itertools.pairwise(records)]
    # The last replay again, alone.
    key = min(k for k in bench.graphs._graphs if k[0] >= streams and k[1] * PAGE_SIZE >= prompt + output)
    graph = bench.graphs._graphs[key].graph
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
        "host_ms": statistics.median(r["host"] for r in records) * 1e3, "bucket": key,
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


def prefill(bench: Bench, count: int, length: int) -> dict[str, Any]:
    """Prompt tokens per second: from the first launch to the first token of the last prompt."""
    rates = []
    for i in range(4):
        scheduler = bench.scheduler()
        for j in range(count):
            bench.submit(scheduler, f"p{i}.{j}", length, 1)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        records = bench.run(scheduler)
        rates.append(count * length / (records[-1]["at"] - begun))
    return {"prefill": f"{count} x {length}", "tok_s": statistics.median(rates[1:])}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--prefill", nargs="*", default=["1x256", "1x1024", "1x8192", "4x4096"])
    parser.add_argument("--chunk", type=int, default=8192, help="prompt rows of a step")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    begun = time.perf_counter()
    timer = Timer()
    config = parse_model_config(Fields(args.shape, shape_config(args.shape, args.layers)), Fields("", {}))
    longest = max([args.prompt + args.output, *(int(p.split("x")[1]) + 1 for p in args.prefill)])
    max_pages = -(-longest // PAGE_SIZE)
    total = max(max(args.streams) * -(-(args.prompt + args.output) // PAGE_SIZE), 0)
    total = max([total, *(int(p.split("x")[0]) * -(-(int(p.split("x")[1]) + 1) // PAGE_SIZE) for p in args.prefill)])
    bench = Bench(config, num_pages=total + 64, max_rows=max(args.streams), max_pages=max_pages, chunk=args.chunk)
    torch.cuda.synchronize()
    loaded = time.perf_counter()
    # Only what is measured, to save the time of the others.
    wanted = -(-(args.prompt + args.output) // PAGE_SIZE)
    widths = sorted({w for _, w in bench.graphs.buckets() if w >= wanted})[:1]
    buckets = [(r, widths[0]) for r in {r for r, _ in bench.graphs.buckets() if r in args.streams}]
    bench.graphs.buckets = lambda: iter(buckets)  # type: ignore[method-assign]
    bench.graphs.capture()
    torch.cuda.synchronize()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {timer.copy_bandwidth * 1e-12:.2f} TB/s; "
        f"{args.shape}, {config.num_layers} layers: weights {loaded - begun:.1f} s, {len(buckets)} graphs "
        f"{time.perf_counter() - loaded:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    for streams in args.streams:
        rows.append(decode(bench, streams, args.prompt, args.output, timer.copy_bandwidth))
        print(json.dumps(rows[-1]), flush=True)
    for each in args.prefill:
        count, length = map(int, each.split("x"))
        rows.append(prefill(bench, count, length))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
