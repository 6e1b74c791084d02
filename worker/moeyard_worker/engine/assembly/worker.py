"""One rank of the fleet: builds the parts in order and runs the engine. Ray (deploy) or a test drives it.

Life: construct (sockets bound, nothing loaded), `endpoints`, `connect` (meet the peers), `load` (weights and caches),
`start`, `wait`. `wait` returns when the engine ends or has lost a peer. After a loss: `rebind` (a mesh of the next
epoch), `connect`, `prepare` if the rank gets other experts, `rejoin`, and `wait` again. `progress` and `stop` may be
called at any time, in any thread. A rank that joins later loads before it meets its peers. Arguments and results are
plain values.

New weights: `stage_weights` while steps run, then `discard_weights`; or between two epochs `use_weights`, then
`rebind`. Sleep: between two epochs `sleep`, and later `wake`.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

import torch

from moeyard_worker.checkpoint.check import CheckedCheckpoint, DummyCheckpoint, check_weights
from moeyard_worker.checkpoint.identity import CONFIG_NAME, content
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_weights, read_through
from moeyard_worker.config.engine_config import EngineConfig, SchedulerConfig, format_size, loading_rates
from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.config.worker_spec import ServedWeights, WorkerSpec
from moeyard_worker.engine.assembly.device import make_device
from moeyard_worker.engine.assembly.fingerprint import fingerprint
from moeyard_worker.engine.assembly.fitting import Planner, plan_or_suggest, ran_out
from moeyard_worker.engine.assembly.sleeping import Sleeper, Source
from moeyard_worker.engine.assembly.topology import bind_mesh, patience, settle_exchange
from moeyard_worker.engine.loop.faults import out_of_memory
from moeyard_worker.engine.loop.frontend import Frontend
from moeyard_worker.engine.loop.loop import Engine
from moeyard_worker.engine.loop.loss import Loss
from moeyard_worker.engine.loop.metrics import WorkerMetrics
from moeyard_worker.engine.memory.host_memory import available_memory
from moeyard_worker.engine.memory.plan import MemoryPlan, exchange_shape, fetch_shape, plan_with_fetch
from moeyard_worker.engine.sampling.grammars import Grammars
from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.engine.steps.runner import Loaded, Runner
from moeyard_worker.exchange.factory import build_exchange
from moeyard_worker.exchange.membership.frames import Phase
from moeyard_worker.exchange.membership.rendezvous import MeshEndpoint
from moeyard_worker.exchange.transports.nvlink.expert_fetch import FetchOffer
from moeyard_worker.experts.cache import ExpertCache, StagedExperts
from moeyard_worker.experts.recorder import RoutingRecorder, TraceHeader
from moeyard_worker.layers.routing import StepRouting
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.shapes import served_model
from moeyard_worker.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

# Seconds for peers to answer. This is long, because all have bound their sockets before any of them connects.
MEET_SECONDS = 20.0


class Worker:
    """A rank. Methods other than `progress` and `stop` are called in the order of the module's docstring."""

    def __init__(self, spec: WorkerSpec) -> None:
        torch.set_num_threads(spec.config.threads)
        self._device = make_device(spec.config, spec.gpu)
        self._model = served_model(spec.config)
        self._shape = exchange_shape(spec.config, self._model)
        # From here on the config names the chosen exchange.
        spec, self._exchange_why = settle_exchange(spec, self._device, self._shape)
        self._spec, config = spec, spec.config
        log.info("rank %d: exchange %s: %s", spec.rank, config.exchange, self._exchange_why)
        self._weights = spec.weights
        self._staged: StagedWeights | None = None
        self._reading: ServedWeights | None = None  # what `stage_weights` reads
        self.checkpoint = check_weights(config, self._model, self._weights)
        self._dtype: torch.dtype = getattr(torch, self._model.served_dtype(config.dtype))
        self._form = self._model.expert_form(self._model.served_dtype(config.dtype))
        shards = partition(self._model.num_experts, config.num_workers) if spec.placement is None else ()
        self._placement = spec.placement or Placement.of_shards(self._model.moe_layers, shards)
        self._mesh = bind_mesh(spec, self._shape, spec.epoch, self._placement, self._weights_digest)
        # No caller has this object yet, so this closes what an error leaves: ports, and names in /dev/shm and /tmp.
        with ExitStack() as on_error:
            on_error.callback(self._mesh.close)
            self._metrics, self._metrics_port = serve_metrics(spec)
            on_error.callback(self._metrics.close)
            # Later plans may shorten sequences, never lengthen them.
            longest = config.max_model_len or self._model.max_position
            self._frontend = Frontend(spec.host, deadline=config.step_deadline, max_model_len=longest, keys=spec.keys)
            on_error.pop_all()
        self._metrics.refused = {"router": self._frontend.refusals.counts, "peer": self._mesh.refused}
        self._available: int | None = None
        self._ranks_on_host = 1
        self._loaded = self._total = 0
        self._engine: Engine | None = None
        self.grammars: Grammars | None = None
        self._recording: RoutingRecorder | None = None
        # The stage of `load`, for the error if memory runs out.
        self._doing = "loading weights"
        # Results of `wait`, returned or raised. The last one is never removed.
        self._ended: SimpleQueue[Loss | BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def endpoints(self) -> dict[str, Any]:
        """Return `frontend` for routers, `metrics_url` for Prometheus, `mesh` (fields of a MeshEndpoint) for peers."""
        return {
            "frontend": self._frontend.endpoint,
            "metrics_url": f"http://{self._spec.host}:{self._metrics_port}/metrics",
            "mesh": asdict(self._mesh.endpoint()),
        }

    def rebind(self, epoch: int, placement: Placement | None = None) -> dict[str, Any]:
        """Bind a mesh of another epoch, after `wait` or if peers did not meet. `placement`: a new one, if any."""
        self._placement = placement or self._placement
        self._mesh.close()
        self._mesh = bind_mesh(self._spec, self._shape, epoch, self._placement, self._weights_digest)
        # The totals go on: a counter that falls would hide the refusals since the last scrape.
        self._mesh.refused.update(self._metrics.refused["peer"])
        self._metrics.refused["peer"] = self._mesh.refused
        return self.endpoints()

    def connect(self, mesh: list[dict[str, Any]], timeout: float = MEET_SECONDS) -> None:
        """Meet the peers within `timeout` seconds. `mesh`: their endpoints in rank order."""
        self._mesh.connect([MeshEndpoint(**fields) for fields in mesh], timeout=timeout)
        if self._available is None:
            # At the start no rank loads before all have met. In `load`, peers of this host already take memory.
            self._available = self._device.available()

    def progress(self) -> tuple[int, int]:
        """Return the bytes loaded so far and in total (0, 0 before `load`)."""
        return self._loaded, self._total

    def _advance(self, num_bytes: int) -> None:
        self._loaded += num_bytes

    def load(self, ranks_on_host: int) -> dict[str, Any]:
        """Load this rank's weights and allocate its caches. Return the decisions made (sizes in bytes).

        `ranks_on_host` workers share evenly the memory that was free on the host when they had met, or is now. A GPU
        serves one worker. Raises ValueError if something does not fit, and CheckpointError for a bad file.
        """
        config, self._ranks_on_host = self._spec.config, ranks_on_host
        # A launcher may call from any thread, and each thread has a current device.
        self._device.activate()
        if self._available is None:
            self._available = self._device.available()
        planner = self._planner(ranks_on_host)
        plan = plan_or_suggest(planner, config, self._available // (ranks_on_host if self._device.shared else 1))
        for reason in plan.reasons:
            log.info("rank %d: %s", self._spec.rank, reason)
        if self._device.captures and plan.stream_slots and plan.host_store == "none":
            log.info("the host reads missing experts: steps are launched kernel by kernel, none is captured")
            config = replace(config, enforce_eager=True)
            self._spec = replace(self._spec, config=config)
        try:
            return self._build(plan)
        except (RuntimeError, MemoryError) as error:  # the plan is an estimate, and others may have taken memory since
            if not out_of_memory(error):
                raise
            now = self._device.available_at_start() or plan.available
            raise ValueError(ran_out(error, planner, config, planned=plan, doing=self._doing, now=now)) from error

    def _build(self, plan: MemoryPlan) -> dict[str, Any]:
        """Build the parts of the rank with the sizes of `plan`."""
        config, model = self._spec.config, self._model
        owned = self._placement.experts(self._spec.rank)
        self._recording = open_recorder(
            config, model, rank=self._spec.rank, experts=owned[0], num_slots=plan.expert_slots
        )
        state = model.state_spec(self._dtype.itemsize)
        num_state_slots = config.max_num_seqs if state.bytes_per_sequence else 0
        backend = self._device.backend
        begun, staging = time.perf_counter(), self._device.staging()
        weights = open_weights(self.checkpoint, self._device.backend, self._dtype, staging, self._advance)
        slot = self._form.blob_bytes
        experts = self.experts = ExpertCache(
            backend=backend,
            source=weights,
            layers=model.moe_layers,
            experts=owned,
            form=self._form,
            num_slots=plan.expert_slots,
            policy=config.expert_policy,
            recorder=self._recording,
            host_store=plan.host_store,
            shared=config.expert_fetch != "alone",
            captured=self._device.captures and not config.enforce_eager,
        )
        self._total = self.checkpoint.dense_bytes() + experts.num_preloaded * slot
        exchange = build_exchange(
            config.exchange,
            mesh=self._mesh,
            shape=self._shape,
            placement=self._placement,
            device=backend.device,
            seconds=patience(config),
            drafts=config.num_drafts > 0,
            fetch_offer=fetch_offer(config, model, experts),
        )
        if not (exchange.traits.capturable or config.enforce_eager or config.device == "cpu"):
            log.info("the exchange needs the host: steps are launched kernel by kernel, none is captured")
        routing = None
        if config.enable_return_routed_experts or experts.wants_choices:
            routing = StepRouting(
                model.routed_layers,
                # Captured steps are padded.
                max_rows=config.max_batch_tokens + config.max_num_seqs,
                top_k=model.top_k,
                id_bytes=model.expert_id_bytes,
                device=backend.device,
            )
        runner = Runner(
            self.checkpoint.spec,
            load=weights.load,
            backend=backend,
            exchange=exchange,
            experts=experts,
            dtype=self._dtype,
            num_pages=plan.num_pages,
            num_state_slots=num_state_slots * state.slots_per_sequence(config.num_drafts) + plan.num_snapshots,
            max_sequences=config.max_num_seqs,
            routing=routing,
        )
        experts.preload(self._advance)
        self._device.finish()
        self._doing = "capturing steps"
        seconds = time.perf_counter() - begun
        scheduler = self.scheduler = Scheduler(
            SchedulerConfig(
                num_pages=plan.num_pages,
                page_size=config.page_size,
                max_model_len=plan.max_model_len,
                vocab_size=model.vocab_size,
                eos_token_ids=model.eos_token_ids,
                max_batch_tokens=config.max_batch_tokens,
                max_num_seqs=config.max_num_seqs,
                prefill_chunk=config.prefill_chunk,
                mixed_prefill_tokens=config.mixed_prefill_tokens,
                max_waiting=config.max_waiting,
                max_queue_seconds=config.max_queue_seconds,
                prefix_caching=config.prefix_caching and (state.prefix_reusable or plan.num_snapshots > 0),
                max_in_flight=2 if config.async_scheduling else 1,
                num_drafts=config.num_drafts,
                adaptive_drafts=config.draft_tokens is None,
                num_state_slots=num_state_slots,
                num_snapshots=plan.num_snapshots,
                chunk_alignment=state.chunk_alignment,
                by_position=state.by_position,
                compressible=state.compressible,
                routing_bytes=routing.row_bytes if routing and config.enable_return_routed_experts else 0,
            )
        )
        self._sleeper = Sleeper(self._device, runner, experts, plan.reserve)
        self._resume = partial(self._device.step_runner, runner, config, plan)
        step_runner = self.runner = self._resume()
        prepared = time.perf_counter()
        self.grammars = Grammars.of_directory(
            config.model_path, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
        )
        found = fingerprint(config, self.checkpoint, self._model, device=self._device.name)
        self._engine = Engine(
            rank=self._spec.rank,
            epoch=self._mesh.epoch,
            scheduler=scheduler,
            runner=step_runner,
            experts=experts,
            exchange=exchange,
            mesh=self._mesh,
            frontend=self._frontend,
            metrics=self._metrics,
            on_loss=self._ended.put,
            grammars=self.grammars,
        )
        self._engine.change_weights(self._weights.version, found)
        log.info("rank %d serves %s with %s", self._spec.rank, config.model_path or config.shape, plan)
        read = None if staging is None else weights.read_rate
        log.info("%s", loading_rates(self._loaded, seconds, read))
        return {
            "exchange": config.exchange,
            "exchange_why": self._exchange_why,
            "dtype": str(self._dtype).removeprefix("torch."),
            "fingerprint": found,
            "num_pages": plan.num_pages,
            "prefix_caching": scheduler.config.prefix_caching,
            "max_model_len": plan.max_model_len,
            "expert_slots": experts.num_slots,
            "num_experts": experts.num_experts,
            "skipped": dict(self.checkpoint.skipped),
            "loaded_bytes": self._loaded,
            "held_bytes": plan.held_bytes(page_bytes=config.page_size * state.bytes_per_token, expert_bytes=slot),
            "seconds": {"weights": seconds, "steps": prepared - begun - seconds},
            "read_rate": read,
        }

    def _planner(self, ranks_on_host: int) -> Planner:
        """Return the function that plans memory from `config` and `available` bytes. Slabs of peers are reserved."""
        footprints, dtype = self._device.footprints, str(self._dtype).removeprefix("torch.")
        return partial(
            plan_with_fetch,
            model=self._model,
            dtype=dtype,
            footprints=footprints,
            resident_bytes=self.checkpoint.resident_bytes(dtype, footprints),
            num_local_experts=self._placement.num_owned(self._spec.rank),
            slab_allocated=self._mesh.own_slab is not None,
            host_available=available_memory() // ranks_on_host if footprints.HOST_EXPERTS else None,
        )

    def start(self, step: int = 0) -> None:
        """Run the engine in a new thread. Its peers have begun `step` steps."""
        assert self._engine is not None, "start comes after load"
        self._engine.rejoin(self._mesh, step, self._placement)
        self._thread = threading.Thread(target=self._run, name=f"engine-{self._spec.rank}", daemon=True)
        self._thread.start()

    def rejoin(self, step: int) -> None:
        """Continue after step `step` with the peers of the mesh that was bound and connected last."""
        assert self._engine is not None, "only a rank that has started may rejoin"
        self._engine.rejoin(self._mesh, step, self._placement)

    def end_epoch(self, reason: str) -> None:
        """End the epoch on all ranks without a loss: `wait` returns a loss of no rank everywhere, then `rebind`."""
        assert self._engine is not None, "an epoch begins before it ends"
        self._engine.end_epoch(reason)

    def room(self) -> dict[str, Any]:
        """Return whether and how this rank can take other experts.

        Values: free bytes, bytes of a slot, whether all own experts have slots, whether experts can move (not while
        routing is recorded), and whether fewer ranks can meet.
        """
        return {
            "available": self._device.available(),
            "slot_bytes": self._form.blob_bytes,
            "all_resident": self.experts.all_resident,
            "movable": self.experts.movable and self._recording is None,
            "regroups": self._spec.config.exchange != "nvlink",
        }

    def prepare(self, placement: Placement, room: int = 0) -> int:
        """Read the experts that this rank gets by this placement while steps run. Return their bytes.

        They may take up to `room` additional slots. From the next `rejoin` on the rank has exactly these experts.
        """
        return self.experts.prepare(placement.experts(self._spec.rank), room=room)

    def stage_weights(self, weights: ServedWeights) -> dict[str, Any]:
        """Check other weights, and read what this rank will need of them, while steps run with the present ones.

        On a CPU the rank then holds both. A GPU has no room for that, so everything is read once to find faults, and
        read again by `use_weights`. Its captured steps need the new weights in the form of the present ones. Return
        `weights` (their identity) and `fingerprint`. Raises ValueError, in one line, if the rank cannot serve these
        weights. Then nothing has changed.
        """
        self.discard_weights()
        self._reading = weights
        self._device.activate()
        check_model(self._spec.config, self._model, weights)
        found = check_weights(self._spec.config, self._model, weights)
        assert isinstance(found, CheckedCheckpoint), "new weights are files"
        change: Callable[[], None]
        if self._sleeper.level:
            self._read_through(found)
            change = partial(self._sleeper.change_weights, self._dense_bytes(found))
        elif isinstance(self.runner, Runner):
            self._check_room(found)
            source = self._open(found, refuses_nan=True)
            model, experts = self.runner.assemble(found.spec, source.load), self.experts.stage(source)
            source.read_experts(key for key in self.experts.owned_keys() if key not in experts.packed)
            source.trust()
            change = partial(self._swap, model, experts)
        else:
            self._read_through(found)
            change = partial(self._overwrite, found)
        if self._reading is weights:  # nobody has discarded them meanwhile
            self._staged = StagedWeights(weights=weights, checkpoint=found, change=change)
        log.info("rank %d has read %s", self._spec.rank, weights)
        return self._facts(found)

    def _read_through(self, found: CheckedCheckpoint) -> None:
        """Read all weights that this rank will need once, to find faults."""
        compare = self._sleeper.runner.compare if self._device.captures else None
        read_through(found, self._dtype, self.experts.owned_keys(), compare, decoder=self._device.backend.device)

    def discard_weights(self) -> None:
        """Forget staged weights, also those that are being read."""
        self._staged = self._reading = None

    def use_weights(self, weights: ServedWeights) -> dict[str, Any]:
        """Put the staged weights into use. Call it between two epochs, before `rebind`. Return as `stage_weights`.

        A second call does nothing. Raises ValueError if other weights, or none, are staged, and the error of a file
        that cannot be read any more. Then the rank may hold a mixture, and must be replaced.
        """
        assert self._engine is not None, "a rank loads before its weights change"
        staged, self._staged = self._staged, None
        if weights != self._weights:
            if staged is None or staged.weights != weights:
                raise ValueError(f"rank {self._spec.rank} has not read {weights}")
            self._device.activate()
            staged.change()
            self._weights, self.checkpoint = weights, staged.checkpoint
        facts = self._facts(self.checkpoint)
        self._engine.change_weights(weights.version, facts["fingerprint"])
        return facts

    def check_sleep(self, level: int) -> None:
        """Raise ValueError if this rank cannot sleep at this level. Nothing changes."""
        if (problem := self._sleeper.refusal(level, available_memory() // self._ranks_on_host)) is not None:
            raise ValueError(f"rank {self._spec.rank}: {problem}")

    def sleep(self, level: int) -> int:
        """Free memory (`sleeping.py`) until `wake`. Call it between two epochs. Return the bytes freed.

        A second call may raise the level.
        """
        assert self._engine is not None, "a rank loads before it sleeps"
        if level <= self._sleeper.level:
            return 0
        self._device.activate()
        self.discard_weights()
        self._engine.sleep(asleep=True)
        if isinstance(self.runner, GpuRunner):
            self.runner.release()
        # Nothing may hold the captured steps now, or their memory stays.
        self.runner = self._sleeper.runner
        self._engine.use_runner(self.runner)
        freed = self._sleeper.sleep(level, self._dense_bytes(self.checkpoint))
        self._renew()
        log.info("rank %d sleeps (level %d) and has freed %s", self._spec.rank, level, format_size(freed))
        return freed

    def check_wake(self) -> None:
        """Raise ValueError if there is no room to wake and run steps. Nothing changes."""
        needed, free = self._sleeper.room, self._free()
        if needed > free:
            raise ValueError(
                f"rank {self._spec.rank} needs {format_size(needed)} to wake and has {format_size(free)}; free memory, "
                "and try again"
            )

    def wake(self) -> int:
        """End `sleep` between two epochs, with fresh state and the present weights. Return the bytes taken.

        A second call does nothing. Raises the error of a file that cannot be read any more, or of missing memory. Then
        the rank must be replaced.
        """
        assert self._engine is not None, "a rank loads before it sleeps"
        taken = self._sleeper.needs
        if self._sleeper.level:
            self._device.activate()
            self.discard_weights()
            self.runner = self._sleeper.wake(self.checkpoint.spec, self._opened, self._resume)
            self._engine.use_runner(self.runner)
            self._engine.sleep(asleep=False)
            self._renew()
            log.info("rank %d has woken up and taken %s", self._spec.rank, format_size(taken))
        return taken

    def _opened(self) -> Source:
        return open_weights(
            self.checkpoint, self._device.backend, self._dtype, self._device.staging(), lambda written: None
        )

    def _renew(self) -> None:
        """Have the engine drop what it has computed when the next epoch begins."""
        assert self._engine is not None, "a rank loads before it sleeps"
        self._engine.change_weights(self._weights.version, self._facts(self.checkpoint)["fingerprint"])

    def _dense_bytes(self, checkpoint: CheckedCheckpoint | DummyCheckpoint) -> int:
        return checkpoint.resident_bytes(str(self._dtype).removeprefix("torch."), self._device.footprints)

    def _free(self) -> int:
        """Return the free bytes of this rank's memory, its share if ranks of the host share it."""
        return self._device.available() // (self._ranks_on_host if self._device.shared else 1)

    def _facts(self, checkpoint: CheckedCheckpoint | DummyCheckpoint) -> dict[str, Any]:
        found = fingerprint(self._spec.config, checkpoint, self._model, device=self._device.name)
        return {"weights": dict(checkpoint.identity), "fingerprint": found}

    @property
    def _weights_digest(self) -> str:
        return f"{self._weights.version}/{content(self.checkpoint.identity)}"

    def _open(self, checkpoint: CheckedCheckpoint, *, refuses_nan: bool = False) -> CheckpointWeights:
        backend, staging = self._device.backend, self._device.staging()
        return CheckpointWeights(
            checkpoint, backend=backend, dtype=self._dtype, pinned=staging, refuses_nan=refuses_nan
        )

    def _check_room(self, checkpoint: CheckedCheckpoint) -> None:
        """Raise ValueError if there is no room for the new weights beside the present ones."""
        needed = self._dense_bytes(checkpoint) + self.experts.num_slots * self._form.blob_bytes
        free = self._free()
        if needed > free:
            raise ValueError(
                f"new weights take {format_size(needed)} beside the present ones until these are freed, and rank "
                f"{self._spec.rank} has {format_size(free)}; lower --kv-memory, or start the server with these weights"
            )

    def _swap(self, model: Loaded, experts: StagedExperts) -> None:
        """Compute with weights in new memory."""
        assert isinstance(self.runner, Runner), "captured steps hold the addresses of the old weights"
        self.runner.use(model)
        self.experts.replace(experts)

    def _overwrite(self, checkpoint: CheckedCheckpoint) -> None:
        """Read weights into the memory of the present ones."""
        source = self._open(checkpoint)
        self.runner.overwrite(checkpoint.spec, source.load)
        self.experts.replace(StagedExperts(source, {}))
        self._device.finish()

    def pause(self) -> None:
        """Run no steps of this rank's own requests until `resume`. It takes part in its peers' steps."""
        self._pause(paused=True)

    def resume(self) -> None:
        """Run steps again."""
        self._pause(paused=False)

    def _pause(self, *, paused: bool) -> None:
        assert self._engine is not None, "a rank loads before it pauses"
        self._engine.pause(paused=paused)

    def forget_prefixes(self) -> None:
        """Drop the cached prefixes. Requests that come later compute their prompts."""
        assert self._engine is not None, "a rank loads before it caches"
        self._engine.forget_prefixes()

    def weight_checksums(self) -> dict[str, str]:
        """Return SHA-256 digests of the weights in this rank's memory, by name, in the layout of its kernels."""
        self._device.activate()
        at = f"rank{self._spec.rank}"
        found = {f"{at}.{name}": checksum((tensor,)) for name, tensor in self.runner.weights()}
        for (layer, expert), parts in self.experts.stored():
            found[f"{at}.layers.{layer}.experts.{expert}"] = checksum(parts)
        return found

    def _run(self) -> None:
        engine = self._engine
        assert engine is not None
        self._device.activate()
        end: BaseException | None = None
        try:
            # This thread runs the loop, which owns the mesh.
            with self._device.before_compiling(lambda: engine.mesh.send_sign(Phase.BUSY)):
                engine.run()
        except BaseException as error:  # boundary: `wait` raises it where the launcher sees it
            end = error
        finally:
            if self._recording is not None:
                self._recording.close()
            # The error must be known before peers miss this rank. Routers must not keep talking to a rank that ended.
            self._ended.put(end)
            self._mesh.close()
            self._frontend.close()

    def wait(self) -> dict[str, Any] | None:
        """Block until the engine loses a peer or ends. Return the fields of the `Loss`, or None after `stop`.

        Raises the error that ended the engine otherwise.
        """
        end = self._ended.get()
        if isinstance(end, Loss):
            return asdict(end)
        self._ended.put(end)
        if end is not None:
            raise end
        return None

    def stop(self) -> None:
        """End the engine after its current step and free sockets and shared memory. Safe to call twice."""
        if self._engine is not None and self._thread is not None:
            self._engine.stop()
            self._mesh.leaving = True
            self._thread.join()
            self._engine.close()
            self._engine = None
        if self.grammars is not None:
            self.grammars.close()
        self._mesh.close()
        self._frontend.close()
        self._metrics.close()
        self._ended.put(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """Weights that a rank has checked and read. `change` puts them into use between two epochs."""

    weights: ServedWeights
    checkpoint: CheckedCheckpoint
    change: Callable[[], None]


def checksum(parts: Iterable[torch.Tensor]) -> str:
    """Return the SHA-256 of the bytes of tensors."""
    digest = hashlib.sha256()
    for each in parts:
        plain = each if each.layout == torch.strided else each.to_dense()
        for dim, stride in enumerate(plain.stride()):
            # Expanded tensors have the size of what they stand for, which may exceed the memory.
            plain = plain if stride else plain.narrow(dim, 0, min(1, plain.shape[dim]))
        digest.update(plain.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# Fields of a config whose weights are a directory of safetensors files.
_AS_DIRECTORY: Mapping[str, Any] = MappingProxyType(
    {"shape": None, "num_layers": None, "quantization": None, "gguf": None, "load_format": "auto"}
)


def check_model(config: EngineConfig, model: ModelConfig, weights: ServedWeights) -> None:
    """Raise ValueError if a directory of new weights has a config.json of another model. Without one, nothing is known.

    The ids that end a sequence may differ: they remain those of the server's start.
    """
    if weights.directory is None or not (Path(weights.directory) / CONFIG_NAME).exists():
        return
    found = served_model(replace(config, **_AS_DIRECTORY, model_path=weights.directory))
    found = replace(found, eos_token_ids=model.eos_token_ids)
    if found != model:
        name, new, served = first_difference("", found, model)
        raise ValueError(
            f"{weights.directory}/{CONFIG_NAME} describes another model: {name} is {new!r:.80}, and {served!r:.80} is "
            "served; start the server with it"
        )


def first_difference(name: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    """Return the innermost field in which two unequal values first differ, with both its values. `name`: of the values.

    It looks into dataclasses, tuples and sets.
    """
    parts: Iterable[tuple[str, Any, Any]] = ()
    if type(one) is type(other) and is_dataclass(one):
        names = (each.name for each in fields(one))
        parts = ((f"{name}.{each}".lstrip("."), getattr(one, each), getattr(other, each)) for each in names)
    elif isinstance(one, tuple) and isinstance(other, tuple):
        parts = ((f"{name}[{i}]", *pair) for i, pair in enumerate(zip(one, other, strict=False)))
    for part in parts:
        if part[1] != part[2]:
            return first_difference(*part)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return f"the length of {name}", len(one), len(other)
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        return f"{name}, without common entries,", sorted(one - other), sorted(other - one)
    return name, one, other


def open_recorder(
    config: EngineConfig, model: ModelConfig, *, rank: int, experts: tuple[int, ...], num_slots: int
) -> RoutingRecorder | None:
    """Open the recording of a rank with these experts and slots, or return None without --record-routing.

    Raises OSError.
    """
    if config.record_routing is None:
        return None
    if list(experts) != list(range(experts[0], experts[0] + len(experts))):
        raise ValueError("--record-routing is of contiguous shards: leave --expert-placement linear")
    header = TraceHeader(
        rank=rank,
        world_size=config.num_workers,
        layers=model.moe_layers,
        experts_start=experts[0],
        experts_stop=experts[-1] + 1,
        top_k=model.top_k,
        num_slots=num_slots,
        policy=config.expert_policy,
    )
    return RoutingRecorder(Path(config.record_routing), header)


def fetch_offer(config: EngineConfig, model: ModelConfig, experts: ExpertCache) -> FetchOffer | None:
    """Return what this rank offers to its peers' expert fetches, or None if every rank reads alone."""
    if config.expert_fetch == "alone":
        return None
    return FetchOffer(
        shape=fetch_shape(config, model),
        memory=experts.lent,
        misses=not experts.all_resident,
        required=config.expert_fetch == "shared",
    )


def serve_metrics(spec: WorkerSpec) -> tuple[WorkerMetrics, int]:
    """Return the rank's metrics and their port. Raises ValueError if the port is taken."""
    metrics = WorkerMetrics(model_name=spec.model_name, rank=spec.rank, version=spec.version)
    try:
        return metrics, metrics.serve(spec.host, spec.metrics_port)
    except OSError as error:
        raise ValueError(
            f"metrics of worker {spec.rank} cannot listen on {spec.host}:{spec.metrics_port}: {error.strerror}; "
            "choose another --metrics-port-base"
        ) from error
