"""Ray's own start: a private one on this machine, with patience, or the way into a running cluster."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray._private import services

from moeyard.listen import check_ports
from moeyard.local_ray import RAYLET, daemons
from moeyard.rank import FleetLost
from moeyard.ray_config import START_SECONDS, ray_logs
from moeyard.ray_errors import first_line
from moeyard.signals import run_apart

# Ray itself gives up after so long.
_QUICK_SECONDS = 30.0
_PAUSE_SECONDS = 0.2


def connect(address: str | None, *, num_workers: int, stage: Callable[[str], None]) -> None:
    """Start a private Ray (`address` None), or join the one at `address`.

    `stage` is told when a start takes long. Raises FleetLost with one line.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if address is None:
        check_ports("127.0.0.1", num_workers=num_workers)
        # The object store carries nothing but call arguments: its smallest size.
        options |= {"num_cpus": num_workers, "num_gpus": 0, "include_dashboard": False}
        options["object_store_memory"] = 80 * 1024**2
    # Ray would say that it runs in another thread; `configure_logging` leaves its loggers as they are.
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
    """Make `ray.init` wait up to START_SECONDS for the daemon of its node, where Ray has a fixed 30 s.

    Ray asks `services.get_node` again and again, and no setting changes for how long. So within this block that
    function itself does not return before the node is there.
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
            # Asked while the daemon starts, Ray answers after half a minute.
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
    """Whether the daemon of this process's node runs."""
    return RAYLET in daemons()
