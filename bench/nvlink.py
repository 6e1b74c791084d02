"""The exchange over NVLink on real GPUs, one process each: first proven equal, then timed.

    python bench/nvlink.py --ranks 2 [--parts times,faults] [--out FOLDER] [--seconds 300]

Every part has its own time limit, and a failure is reported. FOLDER gets two files: `nvlink.json` with all
measurements, and `nvlink.txt` with the output. The logs of ranks are in /tmp/nvlink-logs, and their ends are printed if
a part fails.

Results must equal the oracle (references of `moeyard_kernels.ops`), which every process runs for all ranks on its CPU.
The comparison covers uneven steps launch by launch, graphs of different sizes on the ranks of a step, and thousands of
replays with random delays of ranks. Then one rank does not send: a limit and the host must name it in time, and the
device must stay usable. Times are of a graph of 20 exchanges, the median of the slowest rank's replays. `--simulate`
runs the same on CPUs in Triton's interpreter, without times.
"""

import argparse
import faulthandler
import io
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "kernels")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from moeyard_kernels import ops  # noqa: E402
from moeyard_kernels.experts import peer_exchange  # noqa: E402
from moeyard_kernels.peers import Peers  # noqa: E402
from moeyard_kernels.types import peer_window as fields  # noqa: E402
from moeyard_kernels.types.peer_window import PeerShape, PeerWindow, open_window  # noqa: E402

TOP_K, NUM_EXPERTS = 8, 128
PAIRS_IN_GRAPH = 20
LOGS = Path("/tmp/nvlink-logs")


@dataclass
class Rank:
    """One process: its device, and its connection to the others."""

    number: int
    world: int
    way: str
    store: Any
    device: torch.device
    seconds: float
    results: dict[str, Any] = field(default_factory=dict)
    names: int = 0

    @property
    def simulated(self) -> bool:
        return self.device.type == "cpu"

    def say(self, *words: object) -> None:
        print(f"[{time.strftime('%H:%M:%S')} rank {self.number}]", *words, flush=True)

    def name(self) -> str:
        """The next name, the same on all ranks, which call this in the same order."""
        self.names += 1
        return f"n{self.names}"

    def meet(self) -> None:
        """Wait for all ranks, on the host."""
        self.synchronize()
        name, limit = self.name(), time.monotonic() + 60
        self.store.add(name, 1)
        while self.store.add(name, 0) < self.world:
            if time.monotonic() > limit:
                raise TimeoutError("a rank did not arrive at the barrier")
            time.sleep(0.0005)

    def synchronize(self) -> None:
        if not self.simulated:
            torch.cuda.synchronize(self.device)

    def memory(self, num_bytes: int) -> list[torch.Tensor]:
        """Return shared memory, allocated in the way that works here."""
        name = self.name()
        if self.simulated:
            files = [Path(f"/dev/shm/moeyard-nvlink-{os.getppid()}-{name}-{r}") for r in range(self.world)]
            own = torch.from_file(str(files[self.number]), shared=True, size=num_bytes, dtype=torch.uint8)
            self.meet()
            out = [
                own if r == self.number else torch.from_file(str(f), shared=True, size=num_bytes, dtype=torch.uint8)
                for r, f in enumerate(files)
            ]
            self.meet()
            files[self.number].unlink()
            return out
        if self.way == "store":
            peers = Peers(self.device)
            store = dist.PrefixStore(name, self.store)
            return peers.map_peers(
                peers.own_memory(num_bytes), rank=self.number, world_size=self.world, store=store, name=name
            )
        if self.way == "group":
            import torch.distributed._symmetric_memory as symm_mem

            if not dist.is_initialized():
                store = dist.PrefixStore("group", self.store)
                dist.init_process_group(
                    "gloo", store=store, rank=self.number, world_size=self.world, timeout=timedelta(seconds=40)
                )
            own = symm_mem.empty(num_bytes, dtype=torch.uint8, device=self.device)
            own.zero_()
            self.synchronize()
            assert dist.group.WORLD is not None
            handle = symm_mem.rendezvous(own, dist.group.WORLD)
            return [
                own if r == self.number else handle.get_buffer(r, (num_bytes,), torch.uint8, 0)
                for r in range(self.world)
            ]
        import pickle

        own = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        self.synchronize()
        self.store.set(f"{name}-{self.number}", pickle.dumps(own.untyped_storage()._share_cuda_()))
        out = []
        for r in range(self.world):
            if r == self.number:
                out.append(own)
                continue
            shared = torch.UntypedStorage._new_shared_cuda(*pickle.loads(self.store.get(f"{name}-{r}")))
            theirs = torch.empty(0, dtype=torch.uint8, device=shared.device).set_(shared)[:num_bytes]
            # The copy enables this device's access to the peer.
            torch.empty(1, dtype=torch.uint8, device=self.device).copy_(theirs[:1])
            out.append(theirs)
        return out

    def agreed(self, value: object) -> str:
        """Return the first rank's value on all ranks."""
        name = self.name()
        if self.number == 0:
            self.store.set(name, str(value))
        return str(self.store.get(name), "utf-8")

    def window(self, hidden: int, max_tokens: int, *, seconds: float = 5.0) -> PeerWindow:
        shape = shape_of(self.world, hidden, max_tokens)
        window = open_window(
            shape,
            self.memory(shape.num_bytes),
            rank=self.number,
            dtype=torch.bfloat16,
            seconds=seconds,
            **experts(self.world),
        )
        self.meet()
        return window

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, window: PeerWindow, **kw: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.simulated:
            peer_exchange.dispatch_rows(x, ids, window, send=True, wait=False, **kw)
            self.meet()
            return peer_exchange.dispatch_rows(x, ids, window, send=False, wait=True, **kw)
        return peer_exchange.dispatch_rows(x, ids, window, send=True, wait=True, **kw)

    def combine(self, out: torch.Tensor, window: PeerWindow, **kw: Any) -> torch.Tensor:
        if self.simulated:
            peer_exchange.combine_rows(out, window, send=True, wait=False, **kw)
            self.meet()
            return peer_exchange.combine_rows(out, window, send=False, wait=True, **kw)
        return peer_exchange.combine_rows(out, window, send=True, wait=True, **kw)


def experts(world: int) -> dict[str, list[int]]:
    """Return the place of experts: contiguous shards."""
    share = NUM_EXPERTS // world
    return {"owner": [e // share for e in range(NUM_EXPERTS)], "local": [e % share for e in range(NUM_EXPERTS)]}


def shape_of(world: int, hidden: int, max_tokens: int) -> PeerShape:
    return PeerShape(world_size=world, top_k=TOP_K, row_bytes=2 * hidden, max_tokens=max_tokens)


def answers(rows: torch.Tensor, here: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a result [R * K, H] for each (row, k): arbitrary bits that depend on row, expert, rank and k."""
    words = rows.contiguous().view(torch.int16)[:, None, :] ^ (here * 37 + rank * 11 + 5).to(torch.int16)[:, :, None]
    words = words ^ (torch.arange(here.shape[1], dtype=torch.int16, device=here.device)[:, None] * 301)
    return words.view(rows.dtype).flatten(0, 1)


def next_rows(home: torch.Tensor) -> torch.Tensor:
    """Return the next layer's rows [T, H]: all K results of each row, in order."""
    words = home.view(torch.int16)
    out = words[:, 0]
    for k in range(1, words.shape[1]):
        out = (out * 3) ^ words[:, k]
    return out.contiguous().view(home.dtype)


def random_rows(seed: str, rank: int, count: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random rows and ids of one rank, the same in every process."""
    g = torch.Generator().manual_seed(random.Random(f"{seed} {rank}").getrandbits(40))
    x = torch.randint(-(2**15), 2**15, (count, hidden), generator=g).to(torch.int16).view(torch.bfloat16)
    return x, torch.rand(count, NUM_EXPERTS, generator=g).argsort(1)[:, :TOP_K].contiguous()


class Oracle:
    """All ranks in this process, on the CPU."""

    def __init__(self, world: int, hidden: int, max_tokens: int) -> None:
        shape = shape_of(world, hidden, max_tokens)
        memory = [torch.zeros(shape.num_bytes, dtype=torch.uint8) for _ in range(world)]
        self.windows = [
            open_window(shape, memory, rank=r, dtype=torch.bfloat16, seconds=1.0, **experts(world))
            for r in range(world)
        ]

    def exchange(
        self, xs: list[torch.Tensor], ids: list[torch.Tensor], most: int
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return (rows, ids, home) of each rank."""
        at: dict[str, Any] = {"layer": 0, "max_rows": most}
        for send in (True, False):
            got = [
                ops.dispatch_rows.reference(x, i, w, send=send, wait=not send, **at)
                for x, i, w in zip(xs, ids, self.windows, strict=True)
            ]
        got = [(rows.clone(), here.clone()) for rows, here in got]
        outs = [answers(rows, here, r) for r, (rows, here) in enumerate(got)]
        for send in (True, False):
            home = [
                ops.combine_rows.reference(out, w, layer=0, num_tokens=len(i), send=send, wait=not send)
                for out, i, w in zip(outs, ids, self.windows, strict=True)
            ]
        return [(rows, here, h.clone()) for (rows, here), h in zip(got, home, strict=True)]


def same(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    a, b = (x.cpu().contiguous().view(torch.uint8) for x in (got, wanted))
    assert a.shape == b.shape, f"{what}: shape {list(got.shape)}, wanted {list(wanted.shape)}"
    wrong = (a != b).nonzero()
    assert not len(wrong), f"{what}: {len(wrong)} of {a.numel()} bytes differ, first at {wrong[0].tolist()}"


def check_fault(window: PeerWindow) -> None:
    assert not int(window.fault[fields.FAILED]), f"fault {window.fault.tolist()}, state {window.state.tolist()}"


def equal_eager(rank: Rank) -> str:
    """Compare uneven steps launch by launch, six layers without the host in between."""
    hidden, most, steps = (64, 6, 3) if rank.simulated else (7168, 64, 30)
    window, wanted = rank.window(hidden, most), Oracle(rank.world, hidden, most)
    for step in range(steps):
        draw = random.Random(f"eager {step}")
        counts = [draw.choice((0, 1, 3, most // 2, most)) for _ in range(rank.world)]
        bound = draw.choice((max(1, *counts), most))
        inputs = [
            [random_rows(f"eager {step} {layer}", r, counts[r], hidden) for r in range(rank.world)]
            for layer in range(6)
        ]
        mine = [[x.to(rank.device) for x in layer[rank.number]] for layer in inputs]
        seen = []
        for layer, (x, ids) in enumerate(mine):
            rows, here = rank.dispatch(x, ids, window, layer=layer, max_rows=bound)
            # The data here is valid until the combine has ended.
            here = here.clone()
            kept = rows.masked_fill((here < 0).all(1)[:, None], 0)
            out = answers(rows, here, rank.number)
            home = rank.combine(out, window, layer=layer, num_tokens=len(ids))
            seen.append((kept, here, home.clone()))
        rank.synchronize()
        check_fault(window)
        for layer, of_ranks in enumerate(inputs):
            rows, here, home = wanted.exchange([x for x, _ in of_ranks], [i for _, i in of_ranks], bound)[rank.number]
            rows = rows.masked_fill((here < 0).all(1)[:, None], 0)
            for what, a, b in zip(
                ("ids", "rows", "home"), (seen[layer][i] for i in (1, 0, 2)), (here, rows, home), strict=True
            ):
                same(f"step {step} counts {counts} bound {bound} layer {layer}: {what}", a, b)
    rank.meet()
    return f"{steps} steps of 6 layers, hidden {hidden}"


class Chain:
    """A step of several layers as a graph. Each layer's rows follow from the previous layer's results."""

    def __init__(self, rank: Rank, window: PeerWindow, count: int, bound: int, layers: int) -> None:
        self.rank, self.window, self.count, self.bound, self.layers = rank, window, count, bound, layers
        self.x = torch.zeros(count, window.hidden, dtype=torch.bfloat16, device=rank.device)
        self.ids = torch.zeros(layers, count, TOP_K, dtype=torch.int64, device=rank.device)
        self.expected = torch.zeros_like(self.x)
        self.wrong = torch.zeros(1, dtype=torch.int64, device=rank.device)
        self.out = self.x
        self.graph: torch.cuda.CUDAGraph | None = None

    def body(self) -> None:
        x = self.x
        for layer in range(self.layers):
            rows, here = self.rank.dispatch(x, self.ids[layer], self.window, layer=layer, max_rows=self.bound)
            out = answers(rows, here, self.rank.number)
            home = self.rank.combine(out, self.window, layer=layer, num_tokens=self.count)
            x = next_rows(home) if self.count else x
        self.out = x
        self.wrong += (x.view(torch.int16) != self.expected.view(torch.int16)).any().long()

    def capture(self) -> None:
        """Capture the graph. The warm run is a step that all ranks take."""
        if self.rank.simulated:
            return
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.body()

    def run(self) -> None:
        if self.graph is None:
            self.body()
        else:
            self.graph.replay()


def equal_graphs(rank: Rank) -> str:
    """Compare graphs of different sizes on the ranks of a step, then thousands of replays with random delays."""
    hidden, most, layers, steps, replays = (64, 4, 2, 2, 3) if rank.simulated else (2048, 64, 4, 40, 3000)
    window, wanted = rank.window(hidden, most), Oracle(rank.world, hidden, most)
    sizes = (0, 1, 8, 64) if not rank.simulated else (0, 1, 4)
    bounds = sorted({max(1, most // 8), most})
    chains = {}
    for count in sizes:
        for bound in bounds:
            if count <= bound:
                chain = chains[count, bound] = Chain(rank, window, count, bound, layers)
                chain.body()  # compiles; every rank runs the same
    rank.meet()
    for chain in chains.values():
        chain.capture()
    rank.meet()

    def run_step(seed: str, bound: int) -> Chain:
        draw = random.Random(seed)
        counts = [draw.choice([n for n in sizes if n <= bound]) for _ in range(rank.world)]
        if not any(counts):
            counts[draw.randrange(rank.world)] = 1
        drawn_by = [
            [random_rows(f"{seed} {layer}", r, counts[r], hidden) for r in range(rank.world)] for layer in range(layers)
        ]
        xs = [x for x, _ in drawn_by[0]]
        for layer in range(layers):
            results = wanted.exchange(xs, [i for _, i in drawn_by[layer]], max(bounds))
            xs = [next_rows(home) if len(home) else x for x, (_, _, home) in zip(xs, results, strict=True)]
        # Ranks may name different bounds.
        able = [b for b in bounds if b >= max(counts)]
        chain = chains[counts[rank.number], random.Random(f"{seed} {rank.number}").choice(able)]
        chain.x.copy_(drawn_by[0][rank.number][0])
        for layer in range(layers):
            chain.ids[layer].copy_(drawn_by[layer][rank.number][1])
        chain.expected.copy_(xs[rank.number])
        chain.wrong.zero_()
        chain.run()
        rank.synchronize()
        check_fault(window)
        same(f"step {seed} counts {counts}", chain.out, xs[rank.number])
        return chain

    for step in range(steps):
        chain = run_step(f"graph {step}", random.Random(f"bound {step}").choice(bounds))
    rank.meet()
    chain.wrong.zero_()
    held = random.Random(rank.number)
    for _ in range(replays):
        if not rank.simulated and held.random() < 0.3:
            torch.cuda._sleep(int(held.expovariate(1 / 60_000)))
        chain.run()
    rank.synchronize()
    check_fault(window)
    assert not int(chain.wrong), f"{int(chain.wrong)} of {replays} replays differ"
    rank.meet()
    return f"{len(chains)} graphs, {steps} mixed steps, {replays} replays with random delays"


def faults(rank: Rank) -> str:
    """Let the last rank not send. The others must name it, and all must continue afterwards."""
    hidden, victim, said = 2048, rank.world - 1, []
    for limit, abort_after in ((0.5, None), (30.0, 0.3)):
        window = rank.window(hidden, 8, seconds=limit)
        x, ids = (each.to(rank.device) for each in random_rows("fault", rank.number, 4, hidden))
        for layer in range(3):
            rows, here = rank.dispatch(x, ids, window, layer=layer, max_rows=8)
            rank.combine(answers(rows, here, rank.number), window, layer=layer, num_tokens=4)
        rank.meet()
        begun = time.monotonic()
        if rank.number != victim:
            rows, here = rank.dispatch(x, ids, window, layer=17, max_rows=8)
            rank.combine(answers(rows, here, rank.number), window, layer=17, num_tokens=4)
            launched = time.monotonic() - begun
            if abort_after is not None:
                time.sleep(abort_after)
                window.abort()
            named = time.monotonic() - begun
            torch.cuda.synchronize()
            spent = time.monotonic() - begun
            record = window.fault[: fields.REASON + 1].tolist()
            what = f"launched at {launched:.2f} s, host's word at {named:.2f} s, ended at {spent:.2f} s of {limit}"
            rank.say(what, record)
            assert record == [1, fields.DISPATCH, 17, 1 << victim, 4, fields.SILENT], record
            assert spent < limit + 1, what
            assert abort_after is None or spent < named + 1, what
            said.append(what if abort_after is not None else f"by the limit after {spent:.2f} s of {limit}")
        rank.meet()
        window.reset()
        rank.meet()
        rows, here = rank.dispatch(x, ids, window, layer=0, max_rows=8)
        rank.combine(answers(rows, here, rank.number), window, layer=0, num_tokens=4)
        rank.synchronize()
        check_fault(window)
        assert window.state[:3].tolist() == [1, 1, 0]
        rank.meet()
    return "; ".join(said) or "the silent rank"


def times(rank: Rank) -> str:
    """Measure microseconds of dispatch + combine by hidden size, rows per rank and programs, the default first.

    Options that remain when the part's time is nearly over are skipped.
    """
    table, left_out = rank.results.setdefault("table", []), 0
    end = time.monotonic() + rank.seconds - 5
    windows = {hidden: rank.window(hidden, most) for hidden, most in ((7168, 1024), (2048, 2048))}
    places = [(hidden, count) for hidden, w in windows.items() for count in (1, 8, 64, 256, w.shape.max_tokens)]
    for wanted in ("auto", "options"):
        for hidden, count in places:
            x, ids = (each.to(rank.device) for each in random_rows("times", rank.number, count, hidden))
            out = torch.randn(count * rank.world * TOP_K, hidden, device=rank.device).bfloat16()
            for first, second in [(None, None)] if wanted == "auto" else options(count):
                if rank.agreed(time.monotonic() < end) != "True":
                    left_out += 1
                    continue
                us = timed(rank, windows[hidden], x, ids, out, count, first, second)
                table.append({"hidden": hidden, "tokens": count, "dispatch": first, "combine": second, "us": us})
            del x, ids, out
    return f"{len(table)} rows, {left_out} skipped for lack of time"


Packets = tuple[tuple[int, int] | None, tuple[int, int] | None]


def options(count: int) -> list[Packets]:
    """Return the programs and warps of both kernels to try for `count` rows."""
    if count > 64:
        return [((p, w), (p, w)) for p in (32, 64, 128, 256) for w in (4, 8, 16)]
    first = [((p, w), None) for p in (1, 4, 16, 64) if p <= 2 * count for w in (4, 8)]
    second = [(None, (p, w)) for p in (4, 8, 16, 64, 128) if p <= 8 * count for w in (4, 8)]
    return [*first, *second]


def show_times(table: list[dict[str, Any]]) -> None:
    """Print, by case, the default and the best option."""
    print("\n| hidden | tokens per rank | default, us | best, us | of (programs, warps): dispatch, combine |")
    print("|---|---|---|---|---|")
    for hidden, tokens in dict.fromkeys((row["hidden"], row["tokens"]) for row in table):
        rows = [row for row in table if (row["hidden"], row["tokens"]) == (hidden, tokens)]
        best = min(rows, key=lambda row: row["us"])
        print(
            f"| {hidden} | {tokens} | {rows[0]['us']:.2f} | {best['us']:.2f} | {best['dispatch'] or 'auto'}, "
            f"{best['combine'] or 'auto'} |"
        )


def packet(wanted: tuple[int, int] | None) -> peer_exchange.PacketConfig | None:
    """Return the config of programs and warps."""
    return None if wanted is None else peer_exchange.PacketConfig(PROGRAMS=wanted[0], num_warps=wanted[1])


def timed(
    rank: Rank,
    window: PeerWindow,
    x: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
    count: int,
    first: tuple[int, int] | None,
    second: tuple[int, int] | None,
) -> float:
    def body() -> None:
        for layer in range(PAIRS_IN_GRAPH):
            rank.dispatch(x, ids, window, layer=layer, max_rows=count, config=packet(first))
            rank.combine(out, window, layer=layer, num_tokens=count, config=packet(second))

    body()
    rank.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    rank.meet()
    spent = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) * 1e3 / PAIRS_IN_GRAPH)
    check_fault(window)
    mine = statistics.median(spent[2:])
    name = rank.name()
    rank.store.set(f"{name}-{rank.number}", repr(mine))
    return max(float(rank.store.get(f"{name}-{r}")) for r in range(rank.world))


def links(rank: Rank) -> str:
    """Measure the speed of a copy to a peer, and the time of an empty launch in a graph."""
    memory = rank.memory(256 << 20)
    peer = memory[(rank.number + 1) % rank.world]
    source = torch.empty_like(memory[rank.number])
    spent = []
    for _ in range(6):
        rank.meet()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        peer.copy_(source)
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) * 1e-3)
    rank.results["copy_gb_per_s"] = round(source.nbytes / statistics.median(spent) * 1e-9, 1)
    return f"copy to the next rank, all at once: {rank.results['copy_gb_per_s']} GB/s"


def probe(rank: Rank) -> str:
    """Check that memory is shared: every rank writes a word to every rank's memory."""
    memory = rank.memory(1 << 20)
    for r in range(rank.world):
        memory[r][4 * rank.number : 4 * rank.number + 4] = 7 + 10 * rank.number + r
    rank.meet()
    words = memory[rank.number][: 4 * rank.world].cpu().tolist()
    assert words == [7 + 10 * r + rank.number for r in range(rank.world) for _ in range(4)], words
    rank.meet()
    return "shared"


PARTS: dict[str, tuple[Callable[[Rank], str], float]] = {
    "eager": (equal_eager, 90),
    "graphs": (equal_graphs, 110),
    "links": (links, 30),
    "times": (times, 130),
    "faults": (faults, 60),
}


def run_rank(number: int, world: int, way: str, port: int, part: str, seconds: float, simulate: bool) -> None:
    """Run one process of a part."""
    log = open(LOGS / f"{part}-{way}-rank{number}.log", "w", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds + 5, exit=True)
    torch.set_num_threads(4)
    device = torch.device("cpu") if simulate else torch.device("cuda", number)
    if not simulate:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=40))
    rank = Rank(number, world, way, store, device, seconds)
    rank.say(f"pid {os.getpid()} on {device}, way {way}")
    try:
        begun = time.monotonic()
        said = probe(rank) if part == "probe" else PARTS[part][0](rank)
        rank.results["said"] = f"ok: {said} ({time.monotonic() - begun:.1f} s)"
        rank.say(part, rank.results["said"])
        results_of(part, number).write_text(json.dumps(rank.results))
        rank.meet()
    except BaseException:
        traceback.print_exc()
        results_of(part, number).write_text(json.dumps(rank.results))
        log.flush()
        os._exit(1)
    log.flush()
    # Skip the interpreter's cleanup.
    os._exit(0)


def results_of(part: str, rank: int) -> Path:
    return LOGS / f"results-{part}-{rank}.json"


def fleet(world: int, way: str, part: str, seconds: float, simulate: bool) -> tuple[bool, list[dict[str, Any]]]:
    """Run a part on all ranks within a time limit. Return whether all succeeded, and each rank's results."""
    for r in range(world):
        results_of(part, r).unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    ranks = [
        # A rank's own limit is shorter by its start-up time.
        context.Process(target=run_rank, args=(r, world, way, store.port, part, max(5.0, seconds - 8), simulate))
        for r in range(world)
    ]
    begun = time.monotonic()
    for process in ranks:
        process.start()
    limit = begun + seconds
    while any(p.is_alive() for p in ranks) and time.monotonic() < limit:
        time.sleep(0.1)
        if any(p.exitcode not in (None, 0) for p in ranks):
            # The others find it missing, or have 8 seconds.
            limit = min(limit, time.monotonic() + 8)
    good = all(p.exitcode == 0 for p in ranks)
    codes = [p.exitcode for p in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
    outcome = "ok" if good else f"FAILED, exit codes {codes}"
    print(f"== {part} ({way}): {outcome}, {time.monotonic() - begun:.1f} s", flush=True)
    found = []
    for r in range(world):
        file = results_of(part, r)
        found.append(json.loads(file.read_text()) if file.exists() else {})
        if "said" in found[-1]:
            print(f"   rank {r}: {found[-1]['said']}", flush=True)
        if not good:
            log = LOGS / f"{part}-{way}-rank{r}.log"
            print(f"---- rank {r}, end of its log\n{log.read_text()[-2500:] if log.exists() else ''}", flush=True)
    return good, found


class Twice(io.TextIOBase):
    """Writes the output to a file too."""

    def __init__(self, file: Path) -> None:
        self.both = (sys.stdout, file.open("w"))

    def write(self, text: str) -> int:
        for each in self.both:
            each.write(text)
            each.flush()
        return len(text)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="the exchange over NVLink: equal, then timed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "/tmp/nvlink")))
    parser.add_argument("--seconds", type=float, default=320, help="limit of all parts together")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS) + "; a probe always runs")
    parser.add_argument("--simulate", action="store_true")
    args = parser.parse_args()
    for name in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if args.simulate:
        os.environ["TRITON_INTERPRET"] = "1"
    parts = [p for p in args.parts.split(",") if p != "probe"]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part is named {', '.join(sorted(unknown))}")
    for folder in (args.out, LOGS):
        folder.mkdir(parents=True, exist_ok=True)
    sys.stdout = Twice(args.out / "nvlink.txt")
    end = time.monotonic() + args.seconds
    summary: dict[str, Any] = {"torch": torch.__version__, "ranks": args.ranks}
    if not args.simulate:
        summary["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        summary["p2p"] = [
            [a == b or torch.cuda.can_device_access_peer(a, b) for b in range(args.ranks)] for a in range(args.ranks)
        ]
    print(summary, flush=True)
    way = ""
    for way in ("file",) if args.simulate else ("store", "group", "ipc"):
        good, _ = fleet(args.ranks, way, "probe", 40, args.simulate)
        if good:
            break
    else:
        print("no method of shared memory works here")
        return 1
    summary["way"] = way
    failed = 0
    for part in [p for p in parts if not (args.simulate and p in ("links", "times", "faults"))]:
        left = end - time.monotonic()
        if left < 15:
            print(f"== {part}: no time left")
            failed += 1
            continue
        good, found = fleet(args.ranks, way, part, min(PARTS[part][1], left), args.simulate)
        failed += not good
        summary[part] = {"ok": good, "ranks": found}
        if found[0].get("table"):
            # The slowest rank's time, which all ranks know.
            summary[part] = {"ok": good, "said": found[0].get("said"), "table": found[0]["table"]}
            show_times(found[0]["table"])
        (args.out / "nvlink.json").write_text(json.dumps(summary))
    print(f"{failed} parts failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
