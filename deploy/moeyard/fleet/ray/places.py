"""Places of ranks in Ray: one placement group for the first ranks, one for each later rank; and standbys."""

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import wait as finish
from functools import partial
from typing import Any, TypeVar

import ray
from ray._private import state
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moeyard.fleet.messages import FleetError, FleetLost
from moeyard.fleet.ray.actor import RankActor
from moeyard.fleet.ray.config import CLUSTER_GPU, worker_environment
from moeyard_worker.config.engine_config import EngineConfig

PLACEMENT_SECONDS = 60.0
PAUSE_SECONDS = 0.2
# Time limit for Ray's GCS while the fleet serves. The launcher handles no loss meanwhile.
GCS_SECONDS = 5.0
# Time limit for the answer of a process that has imported everything.
ANSWER_SECONDS = 2.0

T = TypeVar("T")


class Places:
    """Creates actors in the places of ranks. `local`: the launcher started a private Ray on this machine."""

    def __init__(self, config: EngineConfig, *, local: bool) -> None:
        self._config, self._local = config, local
        # A cluster assigns each worker a GPU. A private Ray assigns and hides none; --device selects them.
        self.gpus = 0 if config.device == "cpu" or local else 1
        self._group: Any = None
        self._later: dict[int, Any] = {}
        self._extending = threading.Lock()
        self._remote_class: Any = None

    def reserve(self, *, wait: float, stage: Callable[[str], None], check: Callable[[], None]) -> None:
        """Reserve places for the first ranks. Wait up to `wait` seconds for a cluster to grow.

        `stage` receives a text on what is missing. `check` can end the wait by an exception. Raises FleetError.
        """
        count = self._config.num_workers
        deadline, shown = time.monotonic() + (0.0 if self._local else wait), ""
        while (problem := patiently(lambda: self.lacks(count), check)) is not None:
            if time.monotonic() >= deadline:
                raise FleetError(problem)
            if problem != shown:
                stage(f"waiting for the cluster: {problem}")
                shown = problem
            check()
            time.sleep(PAUSE_SECONDS)
        cpus = patiently(ray.cluster_resources, check).get("CPU", 0)
        bundles = [{"CPU": 1, "GPU": self.gpus}] * count
        self._group = patiently(lambda: placement_group(bundles, strategy="PACK"), check)
        deadline = time.monotonic() + PLACEMENT_SECONDS
        while not self._group.wait(timeout_seconds=PAUSE_SECONDS):
            check()
            if time.monotonic() > deadline:
                raise FleetLost(
                    f"{count} of the Ray cluster's {cpus:g} CPUs did not become free; stop what else runs there"
                )
        self._remote_class = ray.remote(max_concurrency=8, num_cpus=1, num_gpus=self.gpus)(RankActor)

    def lacks(self, count: int) -> str | None:
        """Return what the cluster lacks for `count` ranks, or None. A private Ray never lacks anything."""
        return None if self._local else too_small(ray.cluster_resources(), count, gpus=self.gpus)

    def extend(self, ranks: Collection[int], size: int) -> str | None:
        """Request places for new ranks of a fleet of `size`. Return what the cluster lacks, or None.

        Raises RayError if Ray's GCS does not answer within GCS_SECONDS. Then the places are released later.
        """
        refused = threading.Event()

        def ask() -> str | None:
            with self._extending:
                if (problem := self.lacks(size)) is None:
                    self._add(ranks)
                if refused.is_set():
                    self.give_back_from(min(ranks))
                return problem

        try:
            return apart(ask).result(GCS_SECONDS)
        except TimeoutError as error:
            refused.set()
            raise RayError(
                f"Ray's GCS has not answered for {GCS_SECONDS:g} s; look at the cluster's head, then try again"
            ) from error

    def _add(self, ranks: Collection[int]) -> None:
        """Request places from a cluster for ranks added after the start. Ray queues their actors until then."""
        for rank in ranks:
            if not self._local and rank >= self._config.num_workers and rank not in self._later:
                self._later[rank] = placement_group([{"CPU": 1, "GPU": self.gpus}])

    def waits(self, ranks: Collection[int]) -> list[int]:
        """Return the ranks that the cluster has not placed yet."""
        return [r for r in ranks if r in self._later and not self._later[r].wait(timeout_seconds=0)]

    def give_back_from(self, first: int) -> None:
        """Release the places of rank `first` and above. The first ranks share one group, which stays."""
        for rank in [rank for rank in self._later if rank >= first]:
            apart(partial(remove_placement_group, self._later.pop(rank)))

    def actor(self, rank: int, *, beside: bool = False) -> Any:
        """Create a process in a rank's place. With `beside` it does not wait for the CPU of the present process."""
        # Nodes of a cluster do not inherit the launcher's environment (config.prepare_local).
        options: dict[str, Any] = {"runtime_env": None, "max_restarts": 0}
        if not self._local:
            seeing = CLUSTER_GPU if self.gpus else {}
            options["runtime_env"] = {"env_vars": {**worker_environment(self._config.threads), **seeing}}
        if rank < self._config.num_workers:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank
            )
        elif rank in self._later:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._later[rank])
        # A private Ray has as many CPUs as the fleet had ranks at its start, so later ranks request none.
        elif self._local:
            beside = True
        return self._remote_class.options(**options, **({"num_cpus": 0} if beside else {})).remote()

    def standby(self) -> Any:
        """Create a process for the next rank that needs one. Private Ray only."""
        assert self._local, "standbys need a private Ray"
        return self._remote_class.options(num_cpus=0, max_restarts=0).remote()

    def close(self) -> None:
        """Release all places of a cluster. Blocks as long as Ray's GCS does not answer."""
        for group in (*self._later.values(), self._group):
            if group is not None and not self._local:
                remove_placement_group(group)
        self._later, self._group = {}, None


def too_small(resources: dict[str, float], workers: int, *, gpus: int) -> str | None:
    """Return what a cluster lacks for `workers` workers with one CPU and `gpus` GPUs each, or None."""
    if (cpus := resources.get("CPU", 0)) < workers:
        return f"{workers} workers need one CPU each, the Ray cluster has {cpus:g}; use fewer --workers"
    if (found := resources.get("GPU", 0)) < gpus * workers:
        return f"{workers} workers need one GPU each, Ray found {found:g}; see --device"
    return None


def ask_pending(actor: Any) -> Future[bool]:
    """Ask whether Ray has not started an actor's process yet: no host has room, or its host does not answer."""

    def ask() -> bool:
        return state.actors(actor._actor_id.hex()).get("State") in ("DEPENDENCIES_UNREADY", "PENDING_CREATION")

    return apart(ask)


def apart(call: Callable[[], T]) -> Future[T]:
    """Make a call of Ray in a thread of its own. It has no time limit: Ray's GCS may be slow, stopped or gone."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # boundary: the reader of the answer raises it
            answer.set_exception(error)

    threading.Thread(target=run, name="ray-call", daemon=True).start()
    return answer


def patiently(call: Callable[[], T], check: Callable[[], None]) -> T:
    """Return the result of a call of Ray. `check` can end the wait by an exception."""
    answer = apart(call)
    while not finish([answer], timeout=PAUSE_SECONDS).done:
        check()
    return answer.result()


def never_ran(error: RayError) -> bool:
    """Return whether an actor ended because its host was lost before its process ran. Ray says so in words only."""
    return isinstance(error, RayActorError) and all(text in str(error) for text in ("node has died", "never ran"))


class Standby:
    """A pool of `count` actors from `make()` with all imports done, ready to replace a lost rank.

    Starting Python and importing torch takes 6 of the 14 s of a GPU rank's replacement (docs/concepts/recovery.md). It
    is the same for every rank. A standby has touched no GPU and no checkpoint.
    """

    def __init__(self, make: Callable[[], Any], count: int) -> None:
        self._make, self.count = make, count
        self._actors: list[tuple[Any, Any]] = []  # each with the call that imports

    def fill(self) -> None:
        """Start missing actors without waiting for them."""
        while len(self._actors) < self.count:
            actor = self._make()
            self._actors.append((actor, actor.warm.remote()))

    def ready(self) -> bool:
        """Return whether the next actor has finished its imports, or none is left. Raises RayError if it failed."""
        if not self._actors:
            return True
        _, warming = self._actors[0]
        if not ray.wait([warming], timeout=0)[0]:
            return False
        ray.get(warming)
        return True

    def take(self) -> Any | None:
        """Return an actor that still answers or is still importing, or None."""
        while self._actors:
            actor, warming = self._actors.pop(0)
            try:
                if ray.wait([warming], timeout=0)[0]:
                    # Call again: it may have ended since.
                    ray.get([warming, actor.warm.remote()], timeout=ANSWER_SECONDS)
            except RayError:  # boundary: it has ended, so try the next
                ray.kill(actor)
                continue
            return actor
        return None

    def stop(self, *, kill: bool = True) -> None:
        """Kill all actors, or just forget them if Ray has ended. `fill` starts new ones with the code then on disk."""
        for actor, _ in self._actors if kill else ():
            ray.kill(actor)
        self._actors = []
