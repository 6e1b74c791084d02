"""The Ray side of one rank: a shell around the engine's `Worker` that lives in the worker process.

Only plain values cross Ray, so that the launcher never imports torch.
"""

import os
import time
from typing import Any

import ray

from moeyard import logs
from moeyard.entry import load
from moeyard.fleet.ray.config import own_gpu
from moeyard.fleet.ray.processes import began_of
from moeyard_worker.config.placement import Placement
from moeyard_worker.config.worker_spec import WorkerSpec


class RankActor:
    """Methods are the worker's own, in its order: setup, connect, load, start, wait, and after a loss rebind, connect,
    prepare, rejoin, wait; `alive`, `progress` and `stop` any time.
    """

    def alive(self) -> dict[str, Any]:
        """Answer, as a sign of life: where this process is, as `fence_process` wants to know it."""
        node, pid = ray.get_runtime_context().get_node_id(), os.getpid()
        return {"node": node, "pid": pid, "began": began_of(pid)}

    def warm(self) -> None:
        """Import what `setup` will need; at once the second time."""
        load("moeyard_worker.engine.assembly.worker")

    def seat(self) -> tuple[str, int]:
        """Its node, and which of the GPUs that its process sees Ray has given it."""
        context = ray.get_runtime_context()
        return context.get_node_id(), own_gpu(context.get_accelerator_ids()["GPU"])

    def setup(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Bind the rank's sockets (`host` None: the node's address); returns its endpoints, node and process, and what
        tells its weights from others. `seat`: where the rank was, in a cluster of GPUs, whose own it is told by Ray; if
        its peers know its GPU and it has another, nothing is set up, and `moved`, which one, is all that is returned.

        Its log lines go to this process's stderr, which Ray keeps in a file of its session's `logs`.
        """
        rank = spec["rank"]
        logs.start(spec.pop("log"), context=lambda: {"rank": rank})
        if (known := spec.pop("seat")) is None:
            node = ray.get_runtime_context().get_node_id()
        else:
            node, spec["gpu"] = self.seat()
            if spec["peer_gpus"] and (node, spec["gpu"]) != known:
                return {"moved": f"GPU {spec['gpu']} of node {node}"}
        # The address under which the cluster knows the node: `ray start --node-ip-address` may have chosen it.
        host = spec.pop("host") or next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node)
        begun = time.monotonic()
        make = load("moeyard_worker.engine.assembly.worker").Worker
        imported = time.monotonic()
        self._worker = make(WorkerSpec(host=host, **spec))
        return {
            **self._worker.endpoints(), **self.alive(),
            "seconds": {"imports": imported - begun, "device": time.monotonic() - imported},
            "weights": dict(self._worker.checkpoint.identity),
        }  # fmt: skip

    def rebind(self, epoch: int, placement: Placement) -> dict[str, Any]:
        """Bind sockets for the peers of another epoch, which this placement names; returns the endpoints."""
        return self._worker.rebind(epoch, placement)

    def room(self) -> dict[str, Any]:
        """What experts of others could have here: the fields of a `Room`."""
        return self._worker.room()

    def prepare(self, placement: Placement, room: int) -> int:
        """Read the experts that the next epoch brings, into `room` more slots at most; returns bytes."""
        return self._worker.prepare(placement, room)

    def end_epoch(self, reason: str) -> None:
        """Have all ranks stop between steps and tell a loss of nobody."""
        self._worker.end_epoch(reason)

    def connect(self, mesh: list[dict[str, Any]], timeout: float) -> None:
        """Meet the peers."""
        self._worker.connect(mesh, timeout)

    def load(self, ranks_on_host: int) -> dict[str, Any]:
        """Load weights; returns the worker's report."""
        return self._worker.load(ranks_on_host)

    def progress(self) -> tuple[int, int]:
        """Bytes loaded so far and in all."""
        return self._worker.progress()

    def start(self, step: int) -> None:
        """Start stepping behind step `step`."""
        self._worker.start(step)

    def rejoin(self, step: int) -> None:
        """Go on behind step `step` with peers that were met again."""
        self._worker.rejoin(step)

    def wait(self) -> dict[str, Any] | None:
        """Block until the engine loses a peer (then the fields of its `Loss`) or ends; raises what ended it."""
        return self._worker.wait()

    def stop(self) -> None:
        """End the engine after its current step."""
        self._worker.stop()
