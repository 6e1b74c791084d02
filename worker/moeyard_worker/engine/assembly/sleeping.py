"""Gives back a rank's memory while it sleeps, and takes it again.

Level 1 frees the state (keys, values, states of sequences) and the expert slots. On a GPU it also frees the dense
weights, and copies them to host memory. Level 2 frees the dense weights without a copy. They are read again at the end.

Tensors keep their objects and views, because only their storage is freed. Addresses change, so a GPU's captured steps
are dropped, and captured again when the rank wakes.
"""

import ctypes
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from moeyard_worker.config.engine_config import format_size
from moeyard_worker.engine.assembly.device import Device
from moeyard_worker.engine.memory.plan import Reserve
from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.experts.cache import ExpertCache, ExpertSource
from moeyard_worker.layers.weights import Weight
from moeyard_worker.models.spec import ModelSpec

# Smaller tensors of a GPU are always kept on the host. Some are constants of layers, which no file holds.
_SMALL = 1 << 20


class Source(ExpertSource, Protocol):
    """Opened weights: the dense ones, and the experts."""

    def load(self, weight: Weight) -> Any:
        """See `CheckpointWeights.load`."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A storage that was freed: its bytes, and a copy of its content on the host, if it counts.

    constant: no file holds the content.
    """

    storage: torch.UntypedStorage
    size: int
    copy: torch.Tensor | None
    constant: bool


class _Storages:
    """The memory of tensors, which is freed and taken again. `given` lists what is free now."""

    def __init__(self) -> None:
        self.given: list[_Given] = []

    def free(self, tensors: Iterable[torch.Tensor], *, keep: bool, constant: bool = False) -> int:
        """Free the storage of these tensors and return its bytes. `keep`: copy the content to host memory before."""
        freed = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                continue  # it is free already, perhaps by another view
            copy = _bytes(storage, tensor.device).to("cpu", copy=True) if keep else None
            self.given.append(_Given(storage, storage.nbytes(), copy, constant))
            freed += storage.nbytes()
            storage.resize_(0)
        return freed

    def forget(self) -> None:
        """Drop the copies of content that files hold."""
        self.given = [each if each.constant else replace(each, copy=None) for each in self.given]

    def take(self) -> None:
        """Take all of it again. Content that was not kept becomes zero."""
        given, self.given = self.given, []
        for each in given:
            each.storage.resize_(each.size)
            content = _bytes(each.storage, each.storage.device)
            if each.copy is None:
                content.zero_()
            else:
                content.copy_(each.copy)


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload]


class Sleeper:
    """The memory of one rank. Call `sleep`, `change_weights` and `wake` between two epochs.

    runner: the model and its state. level: 0 while the rank is awake. needs: the bytes that `wake` takes for them.
    """

    def __init__(self, device: Device, runner: Runner, experts: ExpertCache, reserve: Reserve) -> None:
        self._device, self.runner, self._experts = device, runner, experts
        # Tensors of steps. Captured steps keep theirs, and sleep gives them back.
        self._step_bytes = reserve.workspace + reserve.sums
        self._storages = _Storages()
        self.level = self.needs = 0

    @property
    def room(self) -> int:
        """The bytes that must be free to wake and run steps, 0 if the rank is awake."""
        return self.needs + self._step_bytes if self.level else 0

    def refusal(self, level: int, free: int) -> str | None:
        """Return why this rank cannot sleep, or None. `free`: bytes of host memory that it may take."""
        if self._device.captures and not self.runner.exchange.traits.local:
            return "ranks on several GPUs cannot sleep: their captured steps hold each other's addresses"
        if (copies := self._copied_bytes(level)) > free:
            return (
                f"level 1 copies {format_size(copies)} to host memory, which has {format_size(free)}; level 2 copies "
                "nothing, and reads the weights again"
            )
        return None

    def _copied_bytes(self, level: int) -> int:
        """Return the bytes that sleep at this level copies to host memory, without the small tensors of level 2."""
        if level == 2 or self.level:
            return 0
        kept = list(self._experts.regions) if self._experts.all_resident else []
        if self._device.captures:
            kept += [*self.runner.model.shared(), *(tensor for _, tensor in self.runner.weights())]
        return sum({each.data_ptr(): each.nbytes() for each in (tensor.untyped_storage() for tensor in kept)}.values())

    @torch.inference_mode()
    def sleep(self, level: int, dense_bytes: int) -> int:
        """Free the memory of a level above the present one. Return the bytes freed.

        The caller has dropped the runner that launches captured steps. `dense_bytes`: of the weights.
        """
        freed = 0
        if self.level:
            self._storages.forget()
        else:
            freed += self._storages.free(self.runner.states(), keep=False)
            freed += self._free_slots(keep=level == 1)
        if self._device.captures:
            weights = [tensor for _, tensor in self.runner.weights()]
            small = [each for each in weights if each.untyped_storage().nbytes() <= _SMALL]
            freed += self._storages.free([*self.runner.model.shared(), *small], keep=True, constant=True)
            freed += self._storages.free(weights, keep=level == 1)
        elif level == 2:
            self.runner.drop()
            freed += dense_bytes
        self.level, self.needs = level, self.needs + freed
        self._return()
        return freed

    def _free_slots(self, *, keep: bool) -> int:
        # A store of experts on the host fills its slots again.
        keep = keep and self._experts.all_resident
        regions = self._experts.regions
        return self._storages.free(regions, keep=keep) if regions else self._experts.give_back()

    def change_weights(self, dense_bytes: int) -> None:
        """Read other weights at the end, because these are not served any more."""
        assert self.level, "a rank that is awake changes its weights at once"
        self._storages.forget()
        if self.level == 1 and not self._device.captures:
            self.runner.drop()
            self.needs += dense_bytes
            self._return()
        self.level = 2

    @torch.inference_mode()
    def wake(
        self, spec: ModelSpec, source: Callable[[], Source], resume: Callable[[], Runner | GpuRunner]
    ) -> Runner | GpuRunner:
        """Take the memory again, and read what was not kept. Return the runner that `resume` makes to launch steps.

        `source` opens the weights.
        """
        self._storages.take()
        if self.level == 1:
            self._experts.refill()
        else:
            opened = source()
            if self._device.captures:
                self.runner.overwrite(spec, opened.load)
            else:
                self.runner.use(self.runner.assemble(spec, opened.load))
            self._experts.replace_from(opened)
        self.level = self.needs = 0
        found = resume()
        self._device.finish()
        return found

    def _return(self) -> None:
        """Return freed memory to the system."""
        gc.collect()
        if self._device.backend.device.type == "cpu":
            # The C library keeps smaller blocks otherwise.
            ctypes.CDLL(None).malloc_trim(0)
        else:
            torch.cuda.empty_cache()
