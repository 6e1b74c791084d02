"""Hit rates of the expert cache on held-out text: engine counters, simulation, and the upper bound of any policy.

    python bench/cache.py [--prompts 32] [--max-tokens 64] [--concurrency 1 4] [--csv FILE] [--keep-trace FILE]

Each figure comes from a fresh `moeyard serve` with --record-routing that answers the same requests over HTTP. Prompts
are the first 64 to 128 tokens of held-out passages, from all sources in turn. Half of the answers are greedy and half
sampled with a seed, because a greedy answer of a small model may repeat itself, which flatters every cache. Caches
start cold. Each access counts an expert once. Decode accesses are the experts that an output row needs.

"sim" replays one trace, recorded with every expert resident, so all policies and the bound see the same accesses.
"engine" is /metrics of the run with that policy and size. The script asserts that the simulator, on each run's own
trace, counts exactly what that engine counted, and that with one stream all runs made the same accesses. With several
streams the scheduling differs a little from run to run, and so does the trace.
"""

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from moeyard_worker.config.placement import partition
from moeyard_worker.experts.offline.sim import belady, simulate
from moeyard_worker.experts.offline.trace import read_trace
from moeyard_worker.experts.policies import POLICIES
from moeyard_worker.experts.policy import Counters
from moeyard_worker.experts.recorder import RoutingRecorder, rank_path
from moeyard_worker.models.families import load_model_config

DEMO = Path(__file__).resolve().parents[1] / "deploy" / "demo"
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
PROMPT_TOKENS = (64, 128)
STRIDE = 256  # tokens between two passages of a document, so that no answer continues into the next prompt
TEMPERATURE = 0.8
ORDER = tuple(sorted(POLICIES, reverse=True))  # slru, the default, first


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its prompt, and its sampling seed (None: greedy)."""

    prompt: list[int]
    seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One server's run: its settings, its ranks' counters, and the place of its trace."""

    policy: str
    num_slots: int
    num_tokens: int
    engine: tuple[Counters, ...]
    trace: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. `cells` has for each column the hit rate of decode and of all accesses, in percent."""

    streams: int
    share: float
    slots: int
    cells: dict[str, tuple[float, float]]


def load_requests(model: Path, heldout: Path, count: int) -> list[Request]:
    """Return `count` requests, always the same for the same files. Raises SystemExit if the text is too short."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    bos = load_model_config(model).bos_token_id
    documents: dict[str, list[list[int]]] = {}
    for line in heldout.read_text().splitlines():
        document = json.loads(line)
        ids = tokenizer.encode(document["text"], add_special_tokens=False).ids
        documents.setdefault(document["source"], []).append(ids)
    by_source = itertools.zip_longest(*map(_passages, documents.values()))
    passages = [passage for row in by_source for passage in row if passage is not None][:count]
    if len(passages) < count:
        raise SystemExit(f"{heldout} has {len(passages)} passages of {PROMPT_TOKENS[1]} tokens, {count} are needed")
    rng = random.Random(0)
    sampled = set(rng.sample(range(count), count // 2))
    first = [] if bos is None else [bos]
    prompts = [(first + passage)[: rng.randint(*PROMPT_TOKENS)] for passage in passages]
    return [Request(prompt, i if i in sampled else None) for i, prompt in enumerate(prompts)]


def _passages(texts: Sequence[list[int]]) -> Iterator[list[int]]:
    """Yield the first passage of every document of a source, then their second passages, and so on."""
    for start in range(0, max(map(len, texts)), STRIDE):
        for ids in texts:
            if len(ids) - start >= PROMPT_TOKENS[1]:
                yield ids[start : start + PROMPT_TOKENS[1]]


@contextlib.contextmanager
def serve(model: Path, *, workers: int, slots: int, policy: str, trace: Path) -> Iterator[str]:
    """Run `moeyard serve` in a process and yield its URL when it is ready. Its trace is complete after the block."""
    command = [sys.executable, "-m", "moeyard", "serve", str(model), "--workers", str(workers), "--port", "0"]
    command += ["--served-model-name", "bench", "--expert-slots", str(slots), "--expert-policy", policy]
    command += ["--record-routing", str(trace)]
    log = trace.with_name(f"{trace.name}.log")
    with log.open("w") as errors, Popen(command, stdout=PIPE, stderr=errors, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("ready: "):
                raise SystemExit(f"moeyard serve did not become ready:\n{log.read_text()}")
            yield line.split()[1].removesuffix("/v1")
        finally:
            process.terminate()


async def drive(url: str, requests: Sequence[Request], *, max_tokens: int, concurrency: int) -> int:
    """Send the requests in order, `concurrency` at a time. Return the number of output tokens."""
    waiting = iter(requests)
    num_tokens = 0

    async def client_loop(client: httpx.AsyncClient) -> None:
        nonlocal num_tokens
        for request in waiting:
            body: dict[str, Any] = {"model": "bench", "prompt": request.prompt, "max_tokens": max_tokens}
            body |= {"temperature": 0 if request.seed is None else TEMPERATURE, "seed": request.seed}
            response = await client.post("/v1/completions", json=body)
            response.raise_for_status()
            num_tokens += response.json()["usage"]["completion_tokens"]

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await asyncio.gather(*(client_loop(client) for _ in range(concurrency)))
    return num_tokens


def read_counters(url: str) -> tuple[Counters, ...]:
    """Return every rank's counters from its own /metrics when they no longer change."""
    groups = httpx.get(f"{url}/metrics/targets").json()
    targets = {int(group["labels"]["worker"]): group["targets"][0] for group in groups}
    pages = [f"http://{targets[rank]}/metrics" for rank in range(len(targets))]
    before: tuple[Counters, ...] = ()
    # A rank answers a request's last token before it counts that step.
    while (counters := tuple(_parse(httpx.get(page).text) for page in pages)) != before:
        before = counters
        time.sleep(0.2)
    return counters


def _parse(page: str) -> Counters:
    counters = Counters()
    for family in text_string_to_metric_families(page):
        kind = family.name.removeprefix("moeyard_expert_cache_")
        for sample in family.samples:
            if kind in ("hits", "misses", "evictions") and sample.name.endswith("_total"):
                phase = sample.labels["phase"]
                key = phase if kind == "misses" else (sample.labels["segment"], phase)
                getattr(counters, kind)[key] = int(sample.value)
    return counters


def decode_bound(path: Path, slots: int) -> int:
    """Return the decode hits of all ranks that no policy can exceed. Other choices may reach the bound on all hits.

    It is Belady's rule on the trace without prompts, because prompt misses take no slot from decode rows.
    """
    with tempfile.TemporaryDirectory() as root:
        copy = Path(root) / "trace"
        for trace in read_trace(path):
            with RoutingRecorder(copy, trace.header) as recorder:
                for access in trace:
                    recorder.record(step=access.step, layer=access.layer, decode=access.decode, prefill=())
        return sum(optimum.num_hits for optimum in belady(copy, slots))


def run_server(
    args: argparse.Namespace, requests: Sequence[Request], trace: Path, *, concurrency: int, policy: str, slots: int
) -> Run:
    """Start a server, answer the requests, stop it, and check the simulator against its counters."""
    with serve(args.model, workers=args.workers, slots=slots, policy=policy, trace=trace) as url:
        num_tokens = asyncio.run(drive(url, requests, max_tokens=args.max_tokens, concurrency=concurrency))
        engine = read_counters(url)
    simulated = tuple(rank.counters for rank in simulate(trace).ranks)
    assert simulated == engine, f"{trace.name}: simulated {simulated}, the engine {engine}"
    return Run(policy=policy, num_slots=slots, num_tokens=num_tokens, engine=engine, trace=trace)


def rates(ranks: Sequence[Counters]) -> tuple[float, float]:
    """Return the hit rates of decode and of all accesses, in percent."""
    total = Counters()
    for counters in ranks:
        total.add(counters)
    hits = sum(count for (_, phase), count in total.hits.items() if phase == "decode")
    return 100 * hits / (hits + total.misses["decode"]), 100 * total.num_hits / (total.num_hits + total.num_misses)


def tabulate(reference: Run, runs: Sequence[Run], *, concurrency: int, share: float) -> Row:
    """Return simulated rates and bounds of the reference's trace, and the engine's rates, for equal slots."""
    slots = runs[0].num_slots
    cells = {}
    for run in runs:
        cells[f"{run.policy} sim"] = rates([simulate(reference.trace, run.policy, slots).total])
        cells[f"{run.policy} engine"] = rates(run.engine)
    optima = belady(reference.trace, slots)
    num_decode = sum(len(access.decode) for trace in read_trace(reference.trace) for access in trace)
    cells["Belady"] = (
        100 * decode_bound(reference.trace, slots) / num_decode,
        100 * sum(o.num_hits for o in optima) / sum(o.num_hits + o.num_misses for o in optima),
    )
    return Row(streams=concurrency, share=share, slots=slots, cells=cells)


def as_markdown(rows: Sequence[Row]) -> str:
    """Format the table of docs/benchmarks.md: percent of decode's accesses / of all accesses that hit."""
    lines = [f"| streams | resident | {' | '.join(rows[0].cells)} |", f"|{'---|' * (len(rows[0].cells) + 2)}"]
    for row in rows:
        cells = " | ".join(f"{decode:.1f} / {both:.1f}" for decode, both in row.cells.values())
        lines.append(f"| {row.streams} | {100 * row.share:.0f} % ({row.slots}) | {cells} |")
    return "\n".join(lines)


def as_csv(rows: Sequence[Row]) -> str:
    """Format unrounded figures, one column for each."""
    names = [f"{name} {kind}" for name in rows[0].cells for kind in ("decode", "all")]
    lines = [["streams", "share", "slots", *names]]
    lines += [[str(x) for x in (r.streams, r.share, r.slots, *itertools.chain(*r.cells.values()))] for r in rows]
    return "".join(f"{','.join(line)}\n" for line in lines)


def keep(target: Path, runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Copy the first run's trace to `target`, and write each run's engine counters for these accesses next to it."""
    for trace in read_trace(runs[0].trace):
        copy = rank_path(target, rank=trace.header.rank, world_size=args.workers)
        copy.write_bytes(trace.path.read_bytes())
    notes = {
        "model_sha256": hashlib.sha256((args.model / "model.safetensors").read_bytes()).hexdigest(),
        "num_tokens": runs[0].num_tokens,
        "engine": [
            {"policy": run.policy, "slots": run.num_slots, "ranks": [flat(counters) for counters in run.engine]}
            for run in runs
        ],
    }
    target.with_name(f"{target.name}.json").write_text(json.dumps(notes, indent=1) + "\n")


def flat(counters: Counters) -> dict[str, int]:
    """Return one number for each name, such as "misses decode" and "hits protected decode"."""
    numbers = {f"misses {phase}": count for phase, count in counters.misses.items()}
    for name, counts in (("hits", counters.hits), ("evictions", counters.evictions)):
        numbers |= {f"{name} {segment} {phase}": count for (segment, phase), count in counts.items()}
    return numbers


def measure(args: argparse.Namespace, requests: Sequence[Request], concurrency: int, folder: Path) -> list[Row]:
    """Run all servers of one concurrency: one with all experts resident, then each policy with each number of slots."""
    config = load_model_config(args.model)
    total = len(config.moe_layers) * len(partition(config.num_experts, args.workers)[0])

    def run(policy: str, slots: int) -> Run:
        trace = folder / f"{concurrency}-{policy}-{slots}"
        return run_server(args, requests, trace, concurrency=concurrency, policy=policy, slots=slots)

    reference = run(ORDER[0], total)
    print(f"{concurrency} streams: {len(requests)} requests, {reference.num_tokens} tokens", file=sys.stderr)
    rows, kept = list[Row](), [reference]
    for share in SHARES:
        runs = [run(policy, max(1, round(share * total))) for policy in ORDER]
        rows.append(tabulate(reference, runs, concurrency=concurrency, share=share))
        print(as_markdown(rows[-1:]).splitlines()[-1], file=sys.stderr)
        kept += runs
    if concurrency == 1:
        accesses = [[list(trace) for trace in read_trace(each.trace)] for each in kept]
        assert all(each == accesses[0] for each in accesses), "the cache contents changed the accesses"
    if args.keep_trace and concurrency == 1:
        keep(args.keep_trace, kept, args)
    elif args.keep_trace:
        # Accesses of the other runs differ slightly.
        keep(args.keep_trace.with_name(f"{args.keep_trace.name}-{concurrency}"), [reference], args)
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--heldout", type=Path, default=DEMO / "heldout.jsonl", help="one JSON object per line")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--keep-trace", type=Path, metavar="FILE", help="write FILE for one stream, FILE-4 for 4, ...")
    args = parser.parse_args()
    requests = load_requests(args.model, args.heldout, args.prompts)
    with tempfile.TemporaryDirectory() as root:
        rows = [row for each in args.concurrency for row in measure(args, requests, each, Path(root))]
    print(as_markdown(rows))
    if args.csv:
        args.csv.write_text(as_csv(rows))


if __name__ == "__main__":
    main()
