"""Resources of an idle `moeyard serve` of the demo: time until ready, CPU, memory of each worker.

    python bench/resources.py [--workers 2] [--idle-seconds 20] [--json FILE]

The time runs from the start of the process to its ready line, Ray included. Idle CPU is the CPU time of all processes
of a group over the idle window, in percent of one core. The groups are the fleet (workers and the router's process) and
Ray's own daemons. Memory is a worker's unique set (USS) without the bytes of its weights.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

from moeyard_worker.checkpoint.check import check_checkpoint
from moeyard_worker.checkpoint.index import open_index
from moeyard_worker.config.placement import partition
from moeyard_worker.models.families import load_model_config

MODEL = Path(__file__).resolve().parents[1] / "deploy" / "demo"
SETTLE_SECONDS = 15.0


def weight_bytes(workers: int) -> int:
    """Return the bytes of the first (largest) rank's weights, as stored."""
    config = load_model_config(MODEL)
    checkpoint = check_checkpoint(open_index(MODEL), config)
    num_experts = len(partition(config.num_experts, workers)[0]) * len(config.moe_layers)
    return checkpoint.dense_bytes() + num_experts * config.expert_form(config.dtype).blob_bytes


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return user and system time so far."""
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def measure(workers: int, idle_seconds: float) -> dict[str, float]:
    """Start a server, wait, measure and stop it."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "moeyard", "serve", str(MODEL), "--workers", str(workers), "--port", "0"]
    serve = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert serve.stdout is not None
        line = serve.stdout.readline()
        if not line.startswith("ready: "):
            raise SystemExit("moeyard serve did not become ready")
        ready = time.perf_counter() - begun
        url = line.split()[1]
        body = json.dumps({"model": "demo", "prompt": [5] * 64, "max_tokens": 64, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=60).read()
        router = psutil.Process(serve.pid)
        children = router.children(recursive=True)
        ranks = [p for p in children if "RankActor" in " ".join(p.cmdline())]
        assert len(ranks) == workers, [p.cmdline() for p in children]
        daemons = [p for p in children if p not in ranks]
        time.sleep(SETTLE_SECONDS)
        before = [cpu_seconds(group) for group in (ranks, [router], daemons)]
        time.sleep(idle_seconds)
        after = [cpu_seconds(group) for group in (ranks, [router], daemons)]
        idle = [100 * (b - a) / idle_seconds for a, b in zip(before, after, strict=True)]
        memory = max(p.memory_full_info().uss for p in ranks)
        return {
            "ready_seconds": ready,
            "idle_workers_percent": idle[0],
            "idle_router_percent": idle[1],
            "idle_ray_percent": idle[2],
            "worker_mb_beyond_weights": (memory - weight_bytes(workers)) / 1e6,
        }
    finally:
        serve.terminate()
        serve.wait(30)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = measure(args.workers, args.idle_seconds)
    fleet = figures["idle_workers_percent"] + figures["idle_router_percent"]
    print(f"ready after                 {figures['ready_seconds']:.1f} s")
    print(f"idle fleet                  {fleet:.2f} % of a core (workers and router)")
    print(f"idle Ray daemons            {figures['idle_ray_percent']:.2f} %")
    print(f"worker without its weights  {figures['worker_mb_beyond_weights']:.0f} MB")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
