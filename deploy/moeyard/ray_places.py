"""Where Ray puts ranks: one placement group for those of the start, and one each for those that come later."""

import time
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moeyard.rank import FleetError, FleetLost
from moeyard.ray_actor import RankActor
from moeyard.ray_config import CLUSTER_GPU, worker_environment
from moeyard.ray_member import PROGRESS_SECONDS
from moeyard_worker.config.engine_config import EngineConfig

PLACEMENT_SECONDS = 60.0


class Places:
    """Makes actors in the places of ranks. `local`: Ray is the launcher's own, on this machine."""

    def __init__(self, config: EngineConfig, *, local: bool) -> None:
        self._config, self._local = config, local
        # A private Ray hands out no GPUs and hides none: --device says which. A cluster's gives each worker one.
        self._gpus = 0 if config.device == "cpu" or local else 1
        self.seats = Seats() if self._gpus else None
        self._group: Any = None
        self._later: dict[int, Any] = {}
        self._remote_class: Any = None

    def reserve(self, *, wait: float, stage: Callable[[str], None], check: Callable[[], None]) -> None:
        """Take places for the ranks of the start, in a cluster that may need `wait` seconds to have them.

        `stage` gets what is waited for, `check` ends it by an exception. Raises FleetError.
        """
        count = self._config.num_workers
        deadline, told = time.monotonic() + (0.0 if self._local else wait), ""
        while (problem := self.lacks(count)) is not None:
            if time.monotonic() >= deadline:
                raise FleetError(problem)
            if problem != told:
                stage(f"waiting for the cluster: {problem}")
                told = problem
            check()
            time.sleep(PROGRESS_SECONDS)
        cpus = ray.cluster_resources().get("CPU", 0)
        self._group = placement_group([{"CPU": 1, "GPU": self._gpus}] * count, strategy="PACK")
        if not self._placed(check):
            raise FleetLost(
                f"{count} of the Ray cluster's {cpus:g} CPUs did not become free; stop what else runs there"
            )
        self._remote_class = ray.remote(max_concurrency=8, num_cpus=1, num_gpus=self._gpus)(RankActor)

    def lacks(self, count: int) -> str | None:
        """What the cluster lacks for so many ranks, or None. A private Ray counts as many CPUs as it is told."""
        return None if self._local else too_small(ray.cluster_resources(), count, gpus=self._gpus)

    def _placed(self, check: Callable[[], None]) -> bool:
        """Wait until the group has its CPUs; False if it does not get them in time."""
        deadline = time.monotonic() + PLACEMENT_SECONDS
        while not self._group.wait(timeout_seconds=PROGRESS_SECONDS):
            check()
            if time.monotonic() > deadline:
                return False
        return True

    def add(self, ranks: Collection[int]) -> None:
        """Ask for places for these, which are none of the start's, in a cluster. Actors wait for them by themselves."""
        for rank in ranks:
            if not self._local and rank >= self._config.num_workers and rank not in self._later:
                self._later[rank] = placement_group([{"CPU": 1, "GPU": self._gpus}])

    def waits(self, ranks: Collection[int]) -> list[int]:
        """Those of these ranks whose places the cluster has not given yet."""
        return [r for r in ranks if r in self._later and not self._later[r].wait(timeout_seconds=0)]

    def give_back_from(self, first: int) -> None:
        """The places of this rank and those behind it, as far as that can be: those of the start are one group."""
        for rank in [rank for rank in self._later if rank >= first]:
            remove_placement_group(self._later.pop(rank))

    def actor(self, rank: int, *, beside: bool = False) -> Any:
        """A process for a rank, at its place; one `beside` the rank's own does not wait for that one's CPU."""
        # Nodes of a cluster do not inherit the launcher's environment (ray_config.prepare_local).
        options: dict[str, Any] = {"runtime_env": None, "max_restarts": 0}
        if not self._local:
            seeing = CLUSTER_GPU if self.seats is not None else {}
            options["runtime_env"] = {"env_vars": {**worker_environment(self._config.threads), **seeing}}
        if rank < self._config.num_workers:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank
            )
        elif rank in self._later:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._later[rank])
        # A private Ray has as many CPUs as the fleet began with ranks; nothing else runs there.
        elif self._local:
            beside = True
        return self._remote_class.options(**options, **({"num_cpus": 0} if beside else {})).remote()

    def gpus(self, rank: int, world_size: int) -> dict[str, Any]:
        """What a rank's setup is told of GPUs: by rank on this host, in a cluster where it was."""
        if self.seats is None:
            return {"gpu": rank, "peer_gpus": tuple(range(world_size)), "seat": None}
        return {"peer_gpus": self.seats.peer_gpus, "seat": self.seats.of(rank)}

    def standby(self) -> Any:
        """A process for whichever rank is next, of a private Ray."""
        assert self._local, "a cluster gives processes to places"
        return self._remote_class.options(num_cpus=0, max_restarts=0).remote()

    def close(self) -> None:
        """Give all places of a cluster back."""
        if self._local:
            return
        self.give_back_from(0)
        if self._group is not None:
            remove_placement_group(self._group)


class Seats:
    """Which GPU each rank of a cluster's fleet has, as Ray told those who were there when all came anew."""

    def __init__(self) -> None:
        self._seats: dict[int, tuple[str, int]] = {}

    def take(self, rank: int, seat: tuple[str, int]) -> None:
        """What `RankActor.seat` said. A rank that comes in another's place has its GPU, as long as the node lives."""
        self._seats[rank] = seat

    def of(self, rank: int) -> tuple[str, int]:
        """A rank's node, and its GPU there."""
        return self._seats[rank]

    @property
    def peer_gpus(self) -> tuple[int, ...]:
        """The GPUs of all ranks, in their order, where these are on one node; otherwise none."""
        nodes = {node for node, _ in self._seats.values()}
        return tuple(self._seats[rank][1] for rank in sorted(self._seats)) if len(nodes) == 1 else ()


def too_small(resources: dict[str, float], workers: int, *, gpus: int) -> str | None:
    """What a cluster lacks for so many workers of one CPU and `gpus` GPUs each, or None."""
    if (cpus := resources.get("CPU", 0)) < workers:
        return f"{workers} workers need one CPU each, the Ray cluster has {cpus:g}; use fewer --workers"
    if (found := resources.get("GPU", 0)) < gpus * workers:
        return f"{workers} workers need one GPU each, Ray found {found:g}; see --device"
    return None
