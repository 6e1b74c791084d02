"""`moeyard serve`: check everything that can be checked cheaply, start the fleet, put the router in front of it.

The launcher's own process runs the router and never imports torch. Whatever fails before the fleet is ready is one line
on stderr and leaves no process behind.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from moeyard import ray_config
from moeyard.lazy import load
from moeyard.rank import Rank
from moeyard.routers import RouterProcesses, reserve
from moeyard.signals import sigterm_as_interrupt, uninterrupted
from moeyard.supervisor import RestartBudget, Supervisor
from moeyard_kernels.cpu import footprint
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.http.server import RouterServer, run_router
from moeyard_router.text.chat import TextCodec
from moeyard_worker.checkpoint.check import check_weights
from moeyard_worker.config.engine_config import DTYPE_BYTES, EngineConfig, loading_rates
from moeyard_worker.engine.host_memory import available_memory
from moeyard_worker.engine.memory import plan_memory
from moeyard_worker.experts.placement import partition
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.shapes import served_model

DUMMY_NOTE = (
    'weights of chance and no tokenizer: prompts are token ids ("prompt": [1, 2, 3] of /v1/completions), answers are '
    "token ids and mean nothing"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What is known of a fleet once it is ready."""

    url: str
    model_name: str
    metrics_urls: tuple[str, ...]


def serve(args: argparse.Namespace, config: EngineConfig, *, on_ready: Callable[[Running], None] | None = None) -> int:
    """Run until SIGINT or SIGTERM; returns the exit code. `on_ready` is called in the router's loop, once.

    Raises ValueError with one line that says what to change when the fleet cannot start.
    """
    begun = time.monotonic()
    model = served_model(config)
    check_before_start(config, model, local=args.ray_address is None)
    sock = bind(args.host, args.port, shared=args.routers > 1)
    if args.ray_address is None:
        ray_config.prepare_local(config.threads)
    else:
        ray_config.prepare_remote()
    # Ray reads its settings when it is imported, and takes a second for it: after the cheap checks.
    fleet = load("moeyard.ray_fleet").RayFleet(
        config, address=args.ray_address, worker_host=args.worker_host, metrics_port_base=args.metrics_port_base
    )
    supervisor: Supervisor | None = None
    failure: str | None = None
    with sigterm_as_interrupt():
        try:
            with progress_bar() as progress:
                ranks = fleet.start(progress)
            report_loaded(ranks)
            report_skipped(ranks[0].report["skipped"])
            if config.load_format == "dummy":
                print(DUMMY_NOTE, file=sys.stderr)
            router = router_config(args, config, model, ranks=ranks, port=sock.getsockname()[1])

            def ready() -> None:
                running = report_ready(router, ranks, seconds=time.monotonic() - begun)
                if on_ready is not None:
                    on_ready(running)

            supervisor = Supervisor(
                fleet,
                num_workers=config.num_workers,
                replace=lambda ranks, then: server.replace_workers(addresses(ranks), then),
                budget=RestartBudget(),
            )
            server: RouterServer | RouterProcesses
            if args.routers == 1:
                server = RouterServer(router, sock, on_ready=ready, on_failed=supervisor.failed)
            else:
                server = RouterProcesses(router, sock, count=args.routers, on_ready=ready, on_failed=supervisor.failed)
            fleet.watch(supervisor.ended)
            if isinstance(server, RouterServer):
                run_router(server)
            else:
                server.run()
                failure = server.failure
        finally:
            with uninterrupted():
                fleet.stop()
                sock.close()
    return 1 if failure or (supervisor is not None and supervisor.failure is not None) else 0


def addresses(ranks: list[Rank]) -> tuple[WorkerAddress, ...]:
    """Where a router finds these ranks."""
    return tuple(WorkerAddress(rank=r.rank, endpoint=r.frontend, metrics_url=r.metrics_url) for r in ranks)


def router_config(
    args: argparse.Namespace, config: EngineConfig, model: ModelConfig, *, ranks: list[Rank], port: int
) -> RouterConfig:
    """The router before these ranks. What they decided while loading bounds the length of a sequence."""
    return RouterConfig(
        model_name=args.served_model_name or model_name(config),
        model_path=None if config.model_path is None else Path(config.model_path),
        workers=addresses(ranks),
        max_model_len=min(rank.report["max_model_len"] for rank in ranks),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        host=args.host,
        port=port,
        max_inflight=config.num_workers * (config.max_num_seqs + config.max_waiting),
        step_deadline=config.step_deadline,
        prefix_caching=config.prefix_caching,
    )


def model_name(config: EngineConfig) -> str:
    """What a model is called where nobody says: its directory, or its shape."""
    return config.shape or Path(config.model_path or "").name


def report_ready(router: RouterConfig, ranks: list[Rank], *, seconds: float) -> Running:
    """Print the ready line."""
    url = f"http://{router.host}:{router.port}"
    report = ranks[0].report
    print(
        f"ready: {url}/v1 serves {router.model_name} ({report['dtype']}) on {len(ranks)} workers, expert slots "
        f"{report['expert_slots']}/{report['num_experts']} per worker, up to {router.max_model_len} tokens, after "
        f"{seconds:.1f} s",
        flush=True,
    )
    return Running(url=url, model_name=router.model_name, metrics_urls=tuple(rank.metrics_url for rank in ranks))


def check_before_start(config: EngineConfig, model: ModelConfig, *, local: bool) -> None:
    """Everything that needs no worker: the files, the shards, and (on this machine) the memory. Raises ValueError."""
    checkpoint = check_weights(config, model)
    if config.model_path is not None:
        TextCodec(Path(config.model_path))
    shards = partition(model.num_experts, config.num_workers)
    if not local:
        return
    if config.record_routing is not None and not os.access(Path(config.record_routing).parent, os.W_OK):
        raise ValueError(f"--record-routing {config.record_routing}: its directory cannot be written; name another one")
    if config.device != "cpu":
        # What a GPU holds is known where torch is: the worker plans, and says what does not fit.
        return
    itemsize = DTYPE_BYTES[model.served_dtype(config.dtype)]
    plan_memory(
        config=config,
        model=model,
        itemsize=itemsize,
        resident_bytes=checkpoint.resident_bytes(itemsize, footprint),
        footprints=footprint,
        num_local_experts=len(shards[0]) * len(model.moe_layers),
        available=available_memory() // config.num_workers,
    )


def bind(host: str, port: int, *, shared: bool) -> socket.socket:
    """A bound TCP socket for the API, or for several routers to share; ValueError when the address cannot be had."""
    try:
        if shared:
            return reserve(host, port)
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Listening at once makes a second server on this port fail now and not when it gets its first request.
        sock.listen(1024)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from error
    return sock


def report_loaded(ranks: list[Rank]) -> None:
    """Say how fast the weights came: all ranks' bytes over the slowest one's time, and the mean rate of their files."""
    reports = [rank.report for rank in ranks]
    rates = [report["read_rate"] for report in reports if report["read_rate"] is not None]
    text = loading_rates(
        sum(report["loaded_bytes"] for report in reports),
        max(report["load_seconds"] for report in reports),
        sum(rates) / len(rates) if rates else None,
    )
    print(text, file=sys.stderr, flush=True)


def report_skipped(skipped: dict[str, str]) -> None:
    """Say which known extras of the checkpoint are not served, one line per reason."""
    for reason in sorted(set(skipped.values())):
        keys = [key for key, value in skipped.items() if value == reason]
        print(f"skipped {len(keys)} tensors ({reason}), {keys[0]} first", file=sys.stderr)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes loaded over all ranks, on stderr if that is a terminal."""
    loaded = 0
    with tqdm(
        desc="loading weights", unit="B", unit_scale=True, unit_divisor=1024, total=0, leave=False, disable=None
    ) as bar:

        def progress(done: int, total: int) -> None:
            nonlocal loaded
            bar.total = total
            bar.update(done - loaded)
            loaded = done

        yield progress
