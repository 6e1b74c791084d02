"""The fleet on Ray: a private local Ray or a running cluster, one actor per rank in one placement group.

Ray is the control plane only: it places, starts and watches the workers. Requests, tokens and activations never cross
it.
"""

import contextlib
import logging
import re
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moeyard import __version__
from moeyard.logs import LogConfig
from moeyard.rank import Rank
from moeyard.ray_actor import RankActor
from moeyard.ray_config import uses_tls, worker_environment
from moeyard.signals import Interrupts, own_sigterm
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.keys import FleetKeys

Progress = Callable[[int, int], None]

CONNECT_SECONDS = 3.0
# Length 0, type SETTINGS, no flags, stream 0 (RFC 9113, 4.1 and 6.5).
HTTP2_EMPTY_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
PLACEMENT_SECONDS = 60.0
PROGRESS_SECONDS = 0.2
STOP_SECONDS = 3.0


class FleetError(ValueError):
    """The fleet cannot start; one line that says what and what to do."""


class RayFleet:
    """Owns the Ray session and the actors; `stop` leaves no process behind."""

    def __init__(
        self,
        config: EngineConfig,
        log: LogConfig,
        *,
        address: str | None,
        worker_host: str | None,
        metrics_port_base: int,
        keys: FleetKeys,
    ) -> None:
        self._config = config
        self._keys = keys
        self._log = log
        self._address = address
        self._worker_host = worker_host if worker_host or address else "127.0.0.1"
        self._metrics_port_base = metrics_port_base
        self._actors: list[Any] = []
        self._group: Any = None
        self._ends: list[Any] = []
        self._stopping = threading.Event()
        self._remote_class: Any = None
        self._check: Callable[[], None] = lambda: None
        # Actors are made and ended under it.
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None

    def start(self, progress: Progress, *, stage: Callable[[str], None], interrupts: Interrupts) -> list[Rank]:
        """Start Ray and all ranks; `progress(done, total)` gets the bytes loaded over all ranks, `stage` what begins.

        `interrupts` are looked at between calls of Ray, and end the start by KeyboardInterrupt.

        Raises FleetError when Ray, the placement or a worker cannot start.
        """
        self._check = interrupts.check
        if self._address is not None:
            check_reachable(self._address)
        stage("starting Ray" if self._address is None else f"joining Ray at {self._address}")
        with interrupts.at_once():
            self._connect()
        self._check()
        stage(f"starting {self._config.num_workers} worker{'s' if self._config.num_workers > 1 else ''}")
        self._place()
        self._actors = [self._actor(rank) for rank in range(self._config.num_workers)]
        return self._launch(progress)

    def kill(self) -> None:
        """End the workers' processes, whatever they do; `watch` sees it."""
        with self._lock:
            for actor in self._actors:
                ray.kill(actor)

    def restart(self) -> list[Rank]:
        """Start all ranks again in new processes, in the same places, under another epoch.

        Raises FleetError when they cannot start, or when `stop` was called.
        """
        with self._lock:
            if self._stopping.is_set():
                raise FleetError("the fleet is being stopped")
            for actor in self._actors:
                ray.kill(actor)
            self._actors = [self._actor(rank) for rank in range(self._config.num_workers)]
        self._check = lambda: None
        try:
            return self._launch(lambda done, total: None)
        except RayError as error:
            raise FleetError(first_line(error)) from error

    def _launch(self, progress: Progress) -> list[Rank]:
        """Take the actors through their life up to their first step."""
        epoch = secrets.randbits(31)
        specs = [self._spec(rank, epoch) for rank in range(self._config.num_workers)]
        setups = self._call([a.setup.remote(spec) for a, spec in zip(self._actors, specs, strict=True)])
        mesh = [setup["mesh"] for setup in setups]
        self._call([actor.connect.remote(mesh) for actor in self._actors])
        per_node = Counter(setup["node"] for setup in setups)
        loads = [a.load.remote(per_node[s["node"]]) for a, s in zip(self._actors, setups, strict=True)]
        self._follow(loads, progress)
        reports = self._call(loads)
        self._call([actor.start.remote() for actor in self._actors])
        self._ends = [actor.wait.remote() for actor in self._actors]
        return [
            Rank(rank=rank, frontend=setup["frontend"], metrics_url=setup["metrics_url"], report=report)
            for rank, (setup, report) in enumerate(zip(setups, reports, strict=True))
        ]

    def _connect(self) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        if self._address is None:
            # The object store carries nothing but call arguments: its smallest size.
            with own_sigterm():
                ray.init(
                    address="local",
                    num_cpus=self._config.num_workers,
                    num_gpus=0,
                    include_dashboard=False,
                    object_store_memory=80 * 1024**2,
                    **quiet,
                )
            return
        try:
            with own_sigterm():
                ray.init(address=self._address, **quiet)
        except (ConnectionError, RuntimeError, TimeoutError, ray.exceptions.RayError) as error:
            raise FleetError(f"cannot join Ray at {self._address}: {first_line(error)}") from error

    def _place(self) -> None:
        count = self._config.num_workers
        cpus = ray.cluster_resources().get("CPU", 0)
        if cpus < count:
            raise FleetError(f"{count} workers need one CPU each, the Ray cluster has {cpus:g}; use fewer --workers")
        # A private Ray hands out no GPUs and hides none: --device says which. A cluster's gives each worker one.
        gpus = 0 if self._config.device == "cpu" or self._address is None else 1
        if (found := ray.cluster_resources().get("GPU", 0)) < gpus * count:
            raise FleetError(f"{count} workers need one GPU each, Ray found {found:g}; see --device")
        self._group = placement_group([{"CPU": 1, "GPU": gpus}] * count, strategy="PACK")
        if not self._placed():
            raise FleetError(
                f"{count} of the Ray cluster's {cpus:g} CPUs did not become free; stop what else runs there"
            )
        self._remote_class = ray.remote(max_concurrency=4, num_cpus=1, num_gpus=gpus)(RankActor)

    def _placed(self) -> bool:
        """Wait until the group has its CPUs; False if it does not get them in time."""
        deadline = time.monotonic() + PLACEMENT_SECONDS
        while not self._group.wait(timeout_seconds=PROGRESS_SECONDS):
            self._check()
            if time.monotonic() > deadline:
                return False
        return True

    def _actor(self, rank: int) -> Any:
        """A process for a rank, at its place."""
        # Nodes of a cluster do not inherit the launcher's environment (ray_config.prepare_local).
        environment = {"env_vars": worker_environment(self._config.threads)} if self._address else None
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        options = self._remote_class.options(scheduling_strategy=strategy, runtime_env=environment, max_restarts=0)
        return options.remote()

    def _spec(self, rank: int, epoch: int) -> dict[str, Any]:
        return {
            "keys": self._keys.of_worker(),
            "config": self._config,
            "log": self._log,
            "rank": rank,
            "epoch": epoch,
            "host": self._worker_host,
            "version": __version__,
            "metrics_port": self._metrics_port_base + rank if self._metrics_port_base else 0,
        }

    def _call(self, refs: list[Any]) -> list[Any]:
        """Results of one call per rank, or FleetError with the first rank's own message."""
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=PROGRESS_SECONDS)
            self._check()
            try:
                ray.get(done)
            except RayTaskError as error:
                raise FleetError(first_line(error.cause or error)) from error
            except RayActorError as error:
                rank = refs.index(done[0])
                raise FleetError(f"worker {rank} died while starting: {first_line(error)}") from error
            except RayError as error:
                raise FleetError(f"Ray could not run worker {refs.index(done[0])}: {first_line(error)}") from error
        return list(ray.get(refs))

    def _follow(self, loads: list[Any], progress: Progress) -> None:
        """Report progress until every load has ended, well or badly."""
        while True:
            _, pending = ray.wait(loads, num_returns=len(loads), timeout=PROGRESS_SECONDS)
            self._check()
            try:
                parts = ray.get([actor.progress.remote() for actor in self._actors], timeout=STOP_SECONDS)
                progress(sum(done for done, _ in parts), sum(total for _, total in parts))
            except RayError:
                # Its cause, if any, is raised by the load itself.
                pass
            if not pending:
                return

    def watch(self, on_end: Callable[[int, str], None]) -> None:
        """Call `on_end(rank, reason)` from a thread when a rank ends without having been asked to.

        It may call `restart`; then the new processes are watched.
        """

        def run() -> None:
            ends = self._ends
            pending = list(ends)
            while pending and not self._stopping.is_set():
                done, pending = ray.wait(pending, num_returns=1, timeout=1.0)
                for ref in done:
                    if not self._stopping.is_set():
                        on_end(ends.index(ref), end_reason(ref))
                if self._ends is not ends:
                    ends = self._ends
                    pending = list(ends)

        self._watcher = threading.Thread(target=run, name="fleet-watch", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        """Stop the actors and leave Ray (a private one ends with its processes). Safe to call twice."""
        self._stopping.set()
        children = psutil.Process().children(recursive=True)
        if ray.is_initialized():
            with self._lock:
                self._stop_actors()
            if self._watcher is not None:
                # It may be starting a worker again, which has just been ended; a call after `shutdown` would start Ray.
                self._watcher.join(STOP_SECONDS)
        # Also ends what an interrupted ray.init had started.
        ray.shutdown()
        # Ray leaves its agents to notice the end by themselves, half a minute later.
        _, alive = psutil.wait_procs(children, timeout=STOP_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):  # boundary: it ended meanwhile
                process.kill()

    def _stop_actors(self) -> None:
        stops = [actor.stop.remote() for actor in self._actors]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=STOP_SECONDS)
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None and self._address is not None:
            remove_placement_group(self._group)
        self._actors = []


def end_reason(ref: Any) -> str:
    """Why a rank's `wait` ended."""
    try:
        return ray.get(ref) or "stopped"
    except RayTaskError as error:
        return first_line(error.cause or error)
    except RayError as error:
        return first_line(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something; of an actor's failed start, the last: its cause."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if "creation task" in lines[0] else lines[0]


def check_reachable(address: str) -> None:
    """Raise FleetError when no Ray listens at host:port; Ray itself would try for minutes, with lines of its own."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise FleetError(f"--ray-address {address!r} is not HOST:PORT")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as connection:
            if uses_tls():
                return
            # Ray speaks gRPC, so HTTP/2: both sides begin with SETTINGS, ours after a preface (RFC 9113, 3.4).
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_EMPTY_SETTINGS)
            answer = connection.recv(len(HTTP2_EMPTY_SETTINGS))
    except OSError as error:
        raise FleetError(
            f"no Ray at {address}: {error.strerror or error}; start one with `ray start --head`"
        ) from error
    if answer[3:4] != HTTP2_EMPTY_SETTINGS[3:4]:
        raise FleetError(f"what listens at {address} is no Ray; give the address that `ray start --head` printed")
