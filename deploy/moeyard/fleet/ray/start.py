"""Start a private Ray on this machine, with a long time limit, or join a running cluster."""

import contextlib
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray._private import services

from moeyard.fleet.messages import FleetError, FleetLost
from moeyard.fleet.ray.config import START_SECONDS, ray_logs, uses_tls
from moeyard.fleet.ray.processes import RAYLET, daemons
from moeyard.listen import check_ports
from moeyard.signals import run_apart

CONNECT_SECONDS = 3.0
# Length 0, type SETTINGS, no flags, stream 0 (RFC 9113, 4.1 and 6.5).
HTTP2_EMPTY_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
# Ray's own time limit.
_QUICK_SECONDS = 30.0
_PAUSE_SECONDS = 0.2


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error; the last line (its cause) for an actor's failed start."""
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


def connect(address: str | None, *, num_workers: int, stage: Callable[[str], None]) -> None:
    """Start a private Ray (`address` None), or join the one at `address`.

    `stage` receives a text when a start takes long. Raises FleetLost with one line.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if address is None:
        check_ports("127.0.0.1", num_workers=num_workers)
        # The object store holds only call arguments, so use its smallest size.
        options |= {"num_cpus": num_workers, "num_gpus": 0, "include_dashboard": False}
        options["object_store_memory"] = 80 * 1024**2
    # Hide Ray's warning that it runs outside the main thread; `configure_logging` False leaves this level alone.
    logging.getLogger("ray").setLevel(logging.ERROR)
    failed = "Ray cannot start" if address is None else f"cannot join Ray at {address}"
    try:
        with patience(stage) if address is None else contextlib.nullcontext():
            run_apart(lambda: ray.init(address=address or "local", **options))
    except FleetLost:
        raise
    except Exception as error:  # boundary: Ray raises plain exceptions, of any type, while it starts
        advice = f"; see {ray_logs()}" if address is None else ""
        raise FleetLost(f"{failed}: {first_line(error)}{advice}") from error


@contextlib.contextmanager
def patience(stage: Callable[[str], None]) -> Iterator[None]:
    """Make `ray.init` wait up to START_SECONDS for its node's daemon instead of Ray's fixed 30 s.

    Ray polls `services.get_node`, and no setting changes its time limit. In this block that function blocks until the
    node has registered.
    """
    asked = services.get_node

    def get_node(gcs_address: str, node_id: str) -> Any:
        return when_registered(lambda: asked(gcs_address, node_id), alive=raylet_lives, stage=stage)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = asked


def when_registered(
    ask: Callable[[], Any],
    *,
    alive: Callable[[], bool],
    stage: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """Return the result of `ask` once it no longer raises RuntimeError, as it does until the node has registered.

    Raises FleetLost with one line if that takes longer than START_SECONDS, or if the daemon is not `alive`.
    """
    begun, told = clock(), False
    while True:
        if not alive():
            raise FleetLost(
                f"Ray cannot start: its {RAYLET} has ended; it needs memory, and room in /tmp and /dev/shm (`moeyard "
                f"doctor` looks at them); see {ray_logs()}"
            )
        try:
            # Ray answers after half a minute while the daemon starts.
            return ask()
        except RuntimeError as error:
            waited = clock() - begun
            if waited > START_SECONDS:
                raise FleetLost(
                    f"Ray has not started after {waited:.0f} s: this machine is very slow, or busy; end what else runs "
                    f"here and try again; see {ray_logs()}"
                ) from error
            if waited > _QUICK_SECONDS and not told:
                told = True
                stage(f"Ray has not started after {waited:.0f} s; waiting for it, up to {START_SECONDS:.0f} s")
        sleep(_PAUSE_SECONDS)


def raylet_lives() -> bool:
    """Return whether the raylet of this process's node runs."""
    return RAYLET in daemons()
