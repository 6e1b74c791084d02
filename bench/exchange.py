"""Time of one MoE layer's exchange: dispatch + combine between processes of this host.

    python bench/exchange.py --ranks 2 --tokens 8 --hidden 512
    python bench/exchange.py --kinds nccl zmq --device cuda --ranks 2 --tokens 1 8 64 --hidden 7168 --top-k 8

Every rank sends `--tokens` rows with random top-k routing; the experts' results are ready. Times are rank 0's, in
microseconds. "both" is dispatch + combine of the same layer. The chain keeps the ranks in step, so a rank's time
includes waiting for its peers. If only the device knows when a phase ends (`--device cuda`, one GPU per rank, and
nccl), "both" is a step's time divided by its layers. With `--prompts` all rows are prompt rows, for which nccl returns
computed rows.
"""

import argparse
import json
import multiprocessing
import time
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing.connection import Connection

import numpy as np
import torch

from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.exchange.base import PeerRows
from moeyard_worker.exchange.factory import build_exchange, build_mesh, resolve_kind
from moeyard_worker.exchange.membership.wires import MeshLock
from moeyard_worker.exchange.shape import ExchangeShape
from moeyard_worker.keys import WorkerKeys
from moeyard_worker.sockets import make_keys

WARM_UP_LAYERS = 50
LAYERS_PER_STEP = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table."""

    kind: str
    lock: str
    ranks: int
    tokens: int
    hidden: int
    dtype: str
    experts: int
    top_k: int
    layers: int
    device: str
    prompts: bool

    @property
    def shape(self) -> ExchangeShape:
        """The sizes of the exchange."""
        return ExchangeShape(
            num_experts=self.experts,
            top_k=self.top_k,
            hidden=self.hidden,
            dtype=self.dtype,
            max_tokens=max(1, self.tokens),
        )


def run_rank(case: Case, rank: int, pipe: Connection, keys: WorkerKeys) -> None:
    """Run one process: rendezvous through `pipe`, then send (dispatch, combine) seconds of every measured layer."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(rank)
    lock = None if case.lock == "none" else MeshLock(keys=keys, encrypt=case.lock == "on")
    mesh = build_mesh(case.kind, shape=case.shape, rank=rank, world_size=case.ranks, deadline=60, lock=lock)
    pipe.send(mesh.endpoint())
    mesh.connect(pipe.recv())
    placement = Placement.of_shards(range(LAYERS_PER_STEP), partition(case.experts, case.ranks))
    device = torch.device("cpu") if case.device == "cpu" else torch.device(case.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    exchange = build_exchange(case.kind, mesh=mesh, shape=case.shape, placement=placement, device=device, seconds=60)
    exchange.attach(mesh, placement)
    x = torch.randn(case.tokens, case.hidden, generator=generator).to(getattr(torch, case.dtype)).to(device)
    routes = [_random_routes(case, generator).to(device) for _ in range(16)]
    # Any work of a rank between the phases would appear in the waiting time of its peers.
    num_answers = case.ranks * case.tokens * case.top_k
    answers = torch.ones(num_answers, case.hidden, dtype=getattr(torch, case.dtype), device=device)
    prompt = case.tokens if case.prompts else 0
    walls: list[float] = []
    for number in range(WARM_UP_LAYERS + case.layers):
        step, layer = divmod(number, LAYERS_PER_STEP)
        if layer == 0:
            begun = time.perf_counter()
            exchange.steps.begin(step)
            exchange.steps.set_rows(PeerRows(case.tokens, (prompt,) * case.ranks, (case.tokens,) * case.ranks))
        if number == WARM_UP_LAYERS:
            exchange.stats.seconds = {"dispatch": [], "combine": []}
        received = exchange.dispatch(x, routes[number % len(routes)], layer=layer, num_prompt=prompt)
        outputs = answers[: len(received.rows) * case.top_k].view(-1, case.top_k, case.hidden)
        exchange.combine(outputs, received.handle)
        if layer == LAYERS_PER_STEP - 1:
            exchange.steps.drain()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            walls.append((time.perf_counter() - begun) / LAYERS_PER_STEP)
    pipe.send({**exchange.stats.seconds, "both": walls[WARM_UP_LAYERS // LAYERS_PER_STEP :]})
    exchange.close()
    mesh.close()


def _random_routes(case: Case, generator: torch.Generator) -> torch.Tensor:
    scores = torch.rand(case.tokens, case.experts, generator=generator)
    return scores.topk(case.top_k, dim=1).indices


def measure(case: Case) -> dict[str, float]:
    """Run one case and return rank 0's median and 99th percentile of each phase, in microseconds."""
    context = multiprocessing.get_context("spawn")
    pipes, processes, keys = [], [], make_keys().of_worker()
    for rank in range(case.ranks):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=run_rank, args=(case, rank, theirs, keys)))
        pipes.append(ours)
        processes[-1].start()
        theirs.close()
    endpoints = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(endpoints)
    seconds, *_ = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    dispatch, combine = np.array(seconds["dispatch"]) * 1e6, np.array(seconds["combine"]) * 1e6
    if not len(dispatch):
        dispatch = combine = np.array([np.nan])
    both = np.array(seconds["both"]) * 1e6 if np.isnan(dispatch).any() or case.device != "cpu" else dispatch + combine
    figures = {}
    for name, values in (("dispatch", dispatch), ("combine", combine), ("both", both)):
        figures[f"{name}_median_us"] = round(float(np.median(values)), 1)
        figures[f"{name}_p99_us"] = round(float(np.percentile(values, 99)), 1)
    return figures


def main() -> None:
    """Measure every combination of the given options and print a table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["zmq", "zmq-tcp"], help="local, zmq, zmq-tcp, nccl")
    parser.add_argument("--locks", nargs="+", default=["on"], help="mesh encryption: on, off, or none")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8], help="tokens per rank")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2000, help="measured layers per case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompts", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    args = parser.parse_args()
    if not args.json:
        print("us, median / p99       tokens    dtype           dispatch            combine               both")
    for kind, lock in product(args.kinds, args.locks):
        for ranks in args.ranks:
            resolve_kind(kind, ranks)
            for tokens in args.tokens:
                for dtype in args.dtypes:
                    case = Case(
                        kind=kind,
                        lock=lock,
                        ranks=ranks,
                        tokens=tokens,
                        hidden=args.hidden,
                        dtype=dtype,
                        experts=args.experts,
                        top_k=args.top_k,
                        layers=args.layers,
                        device=args.device,
                        prompts=args.prompts,
                    )
                    figures = measure(case)
                    if args.json:
                        print(json.dumps(asdict(case) | figures), flush=True)
                        continue
                    columns = (
                        f"{figures[f'{name}_median_us']:9.1f} /{figures[f'{name}_p99_us']:8.1f}"
                        for name in ("dispatch", "combine", "both")
                    )
                    print(f"{kind:8} {lock:4} {ranks:2} ranks {tokens:8} {dtype:>8} {' '.join(columns)}", flush=True)


if __name__ == "__main__":
    main()
