"""The fleet on Ray: a private local Ray or a running cluster, one actor per rank in one placement group.

Ray is the control plane only: it places, starts and watches the workers. Requests, tokens and activations never cross
it.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from moeyard import __version__
from moeyard.local_ray import RAYLET, LocalRay, is_tracker
from moeyard.logs import LogConfig
from moeyard.rank import Event, FleetError, Rank, RanksLost, Recovered, Unrecoverable, named
from moeyard.ray_address import check_reachable
from moeyard.ray_errors import first_line
from moeyard.ray_guard import Guard
from moeyard.ray_member import STOP_SECONDS, Progress, lost_of
from moeyard.ray_places import PLACEMENT_SECONDS, Places
from moeyard.ray_resizes import ResizableRanks
from moeyard.ray_start import connect
from moeyard.signals import Interrupts
from moeyard.standby import Standby
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement
from moeyard_worker.exchange.leftovers import sweep
from moeyard_worker.keys import FleetKeys

log = logging.getLogger(__name__)


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
        cluster_wait: float = 0.0,
        keys: FleetKeys,
        placement: Placement,
        takeover: str = "auto",
        standby: int | None = None,
        device: str = "",
        model_name: str = "",
    ) -> None:
        """Note how to start; nothing is started.

        `standby`: how many processes wait for a lost rank's place; None: one where starts take longest. `device`: what
        the workers run on, for people (default: as `config` says). `model_name` labels the workers' metrics.
        """
        self._device, self._model_name = device or config.device, model_name
        self._config, self._keys, self._log = config, keys, log
        self._address = address
        self._worker_host = worker_host if worker_host or address else "127.0.0.1"
        self._metrics_port_base = metrics_port_base
        self._cluster_wait = cluster_wait
        self._places = Places(config, local=address is None)
        self._local = LocalRay()
        self._headless_told = False
        self._place_until = 0.0  # when ranks that come must have their places
        self._check: Callable[[], None] = lambda: None
        # Actors are made, heard and ended within its calls.
        self.guard = Guard(self._local, starting=lambda: self._ranks.starting, serving=lambda: self._ranks.serving)
        # In a cluster a process without a place has no node, and no GPU.
        few = int(config.device != "cpu") if standby is None else standby
        self._standby = Standby(self._places.standby, few if address is None else 0)
        self._ranks = ResizableRanks(
            config, make=self._actor, spec=self._spec, placement=placement, takeover=takeover, seats=self._places.seats
        )

    def start(self, progress: Progress, *, stage: Callable[[str], None], interrupts: Interrupts) -> list[Rank]:
        """Start Ray and all ranks; `progress(done, total)` gets the bytes loaded over all ranks, `stage` what begins.

        `interrupts` are looked at between calls of Ray, and end the start by KeyboardInterrupt.

        Raises FleetError when Ray, the placement or a worker cannot start.
        """

        def check() -> None:
            interrupts.check()
            if (ended := self._local.ended()) is not None:
                raise Unrecoverable(f"Ray's {ended} has ended while the fleet was starting; start it again")

        self._check = self._ranks.check = check
        if self._address is not None:
            check_reachable(self._address)
        stage("starting Ray" if self._address is None else f"joining Ray at {self._address}")
        with interrupts.at_once():
            connect(self._address, num_workers=self._config.num_workers, stage=stage)
        self._local.find()
        self._check()
        if self._address is None:
            self.guard.watch()
        workers = f"{self._config.num_workers} worker{'s' if self._config.num_workers > 1 else ''}"
        stage(f"starting {workers}, device {self._device}")
        try:
            with self.guard.call():
                self._places.reserve(wait=self._cluster_wait, stage=stage, check=self._check)
                # While ranks load and capture there is time for it.
                return self._ranks.launch(progress, self._standby.fill)
        finally:
            # From here on only `stop` ends what is going on.
            self._ranks.check = self._go_on

    def _actor(self, rank: int) -> Any:
        found = self._standby.take()
        if found is not None and self._config.device != "cpu":
            # The next one starts beside this rank's captures; on CPUs it would take from who recovers.
            self._standby.fill()
        return found or self._places.actor(rank)

    def _check_stop(self) -> None:
        if self.guard.stopping.is_set():
            raise FleetError("the fleet is being stopped")

    def _go_on(self) -> None:
        """Raise FleetError when the fleet is stopped, RanksLost naming all ranks when Ray has ended."""
        self._check_stop()
        if (ended := self._local.ended()) is not None:
            raise RanksLost(range(self._ranks.size), f"Ray's {ended} has ended")

    def events(self, timeout: float) -> list[Event]:
        """See `RayRanks.events`; nothing once `stop` was called. The raylet takes all ranks with it."""
        if self.guard.stopping.is_set():
            return []
        ended = self._local.ended()
        if ended == RAYLET:
            reason = f"Ray's {ended} has ended, and all ranks with it"
            return [Event(rank=rank, reason=reason) for rank in range(self._ranks.size)]
        if ended is not None and not self._headless_told:
            self._headless_told = True
            log.error(
                "Ray's %s has ended: serving goes on; when a rank is lost, Ray and all ranks are started again", ended
            )
        with self.guard.call():
            return self._ranks.events(timeout)

    def end_of(self, rank: int) -> str | None:
        """See `RayRanks.end_of`."""
        return self._ranks.end_of(rank)

    def admit(self) -> Recovered | None:
        """See `RayRanks.admit`; raises as `recover`."""
        with self.guard.call():
            self._go_on()
            return self._ranks.admit()

    def recover(self, dead: Collection[int], *, whole: bool = False) -> Recovered | None:
        """Replace ranks and go on in another epoch, if that is needed (`RayRanks.recover`).

        A private Ray that has ended is started again, and all ranks in it. Raises RanksLost for those to be replaced
        next, Unrecoverable when Ray cannot be started again, and FleetError when `stop` was called.
        """
        with self.guard.call():
            self._check_stop()
            if (ended := self._local.ended()) is not None:
                self._start_again(ended)
            try:
                recovered = self._ranks.recover(dead, whole=whole)
                self._standby.fill()
                return recovered
            except RayError as error:
                raise RanksLost(dead, first_line(error)) from error

    def prepare(self, rank: int, changes: Mapping[str, Any]) -> bool:
        """Have `rank`'s next process differ by `changes` (fields of EngineConfig), and start it now, beside the rank.

        A GPU has no room for two, and a fixed port is taken: there a standby is started, and False says that there is
        none. Raises FleetError when `stop` was called.
        """
        with self.guard.call():
            self._go_on()
            beside = self._config.device == "cpu" and not self._metrics_port_base
            # Who is restarted may be so for other code than those that wait have.
            self._standby.stop()
            try:
                self._standby.fill()
                self._ranks.prepare(rank, changes, self._places.actor(rank, beside=True) if beside else None)
            except RayError as error:
                raise RanksLost([rank], first_line(error)) from error
            return beside or self._standby.kept

    def prepared(self, rank: int) -> bool:
        """Whether that process has started; raises RanksLost with its own words if it cannot."""
        with self.guard.call():
            self._go_on()
            if rank in self._ranks.spares.members:
                return self._ranks.spares.prepared(rank, self._ranks.weights)
            try:
                return self._standby.ready()
            except RayError as error:
                raise lost_of(rank, error) from error

    def abandon(self, rank: int) -> None:
        """End that process, and forget what was to be changed, unless it has taken its place."""
        with self.guard.call():
            if not self.guard.stopping.is_set():
                self._ranks.spares.abandon(rank)

    def begin_resize(self, size: int) -> bool:
        """Begin to become `size` ranks; False if it has to be asked again. Raises FleetError where that cannot be."""
        with self.guard.call():
            self._go_on()
            come = range(self._ranks.size, size)
            # What can never be is said before what is lacking now.
            self._ranks.check_size(size)
            if come and (problem := self._places.lacks(size)) is not None:
                raise FleetError(problem)
            try:
                if not self._ranks.may_resize():
                    return False
                self._places.add(come)
                self._ranks.begin_resize(size)
            except RayError as error:
                raise FleetError(first_line(error)) from error
            self._place_until = time.monotonic() + PLACEMENT_SECONDS
            return True

    def resize_stage(self) -> str | None:
        """What that waits for (`Resizing.stage`), None if nothing any more; raises FleetError for what goes wrong."""
        with self.guard.call():
            self._go_on()
            stage = self._ranks.resize_stage()
            if (late := self._places.waits(self._ranks.coming)) and time.monotonic() > self._place_until:
                raise FleetError(f"the Ray cluster has no place for {named(late)}; stop what else runs there")
            return stage

    def resize(self) -> Recovered:
        """Have all ranks of the other size meet. Raises as `recover`, which is to be called then; all is as before."""
        with self.guard.call():
            self._go_on()
            return self._ranks.resize()

    def end_resize(self) -> None:
        """End ranks that have left, or that were to come and do not; their places are given back."""
        with self.guard.call():
            if not self.guard.stopping.is_set():
                self._ranks.end_resize()
                self._places.give_back_from(self._ranks.size)
                # Who waited may have come in.
                self._standby.fill()

    def _start_again(self, ended: str) -> None:
        """End what is left of a private Ray, and start another, without ranks. Raises Unrecoverable."""
        log.warning("Ray's %s has ended: starting Ray again, and all ranks", ended)
        # References to the old Ray's actors go before it does.
        self._standby.forget()
        self._local.kill()
        self._ranks.forget()
        try:
            ray.shutdown()
            connect(self._address, num_workers=self._config.num_workers, stage=log.warning)
            self._local.find()
            self._places.reserve(wait=0.0, stage=lambda text: None, check=self._go_on)
        except (ValueError, RayError) as error:
            self._check_stop()
            raise Unrecoverable(f"Ray's {ended} has ended, and {first_line(error)}") from error
        self._headless_told = False

    def _spec(self, config: EngineConfig, rank: int, epoch: int, placement: Placement) -> dict[str, Any]:
        return {
            "keys": self._keys.of_worker(),
            "config": config,
            "log": self._log,
            "rank": rank,
            "epoch": epoch,
            "placement": placement,
            "host": self._worker_host,
            "version": __version__,
            "model_name": self._model_name,
            **self._places.gpus(rank, config.num_workers),
            "metrics_port": self._metrics_port_base + rank if self._metrics_port_base else 0,
        }

    def stop(self) -> None:
        """Stop the actors and leave Ray (a private one ends with its processes). Safe to call twice.

        Ends the whole process, with code 1, if a call of Ray's never returns.
        """
        # A thread that replaces ranks notices at its next check. A call after `shutdown` would start another Ray.
        with self.guard.end():
            self._end()

    def _end(self) -> None:
        children = psutil.Process().children(recursive=True)
        if ray.is_initialized():
            self._stop_ranks()
        if self._local.ended() is not None:
            # Ray's own end would wait for its daemon for ever, where others still run.
            self._local.kill()
        # Once more, while Ray lives: it may have been starting a rank's process.
        children = [*{*children, *psutil.Process().children(recursive=True)}]
        trackers = [process for process in children if is_tracker(process)]
        # Also ends what an interrupted ray.init had started.
        ray.shutdown()
        # Ray leaves its agents to notice the end by themselves, half a minute later.
        _, alive = psutil.wait_procs([p for p in children if p not in trackers], timeout=STOP_SECONDS)
        for process in (*alive, *trackers):
            with contextlib.suppress(psutil.NoSuchProcess):  # boundary: it ended meanwhile
                process.kill()
        # What they hold is theirs until they are gone.
        psutil.wait_procs(alive, timeout=STOP_SECONDS)
        # Ranks that were killed before they met leave names on this host.
        sweep()

    def _stop_ranks(self) -> None:
        self._standby.stop()
        self._ranks.stop()
        self._places.close()
