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
from moeyard_worker.config.worker_spec import WorkerSpec


class RankActor:
    """One rank. Life: `warm` for a standby, `seat` in a cluster of GPUs, `setup`, then `do` what the machine says.

    `alive` at any time.
    """

    def alive(self) -> dict[str, Any]:
        """Give a sign of life: the arguments of `fence_process`."""
        node, pid = ray.get_runtime_context().get_node_id(), os.getpid()
        return {"node": node, "pid": pid, "began": began_of(pid)}

    def warm(self) -> None:
        """Import what `setup` will need; at once the second time."""
        load("moeyard_worker.engine.assembly.worker")

    def seat(self) -> tuple[str, int]:
        """Return its node, and which of the GPUs that its process sees Ray has given it."""
        context = ray.get_runtime_context()
        return context.get_node_id(), own_gpu(context.get_accelerator_ids()["GPU"])

    def setup(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Bind the rank's sockets (`host` None: the node's address); returns endpoints, process and weights' identity.

        `seat`: the rank's node and GPU before, in a cluster of GPUs. If its peers know its GPU and it has another now,
        nothing is set up, and only `moved` is returned. Log lines go to this process's stderr, which Ray keeps in a
        file of its session's `logs`.
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
            **self._worker.endpoints(),
            **self.alive(),
            "seconds": {"imports": imported - begun, "device": time.monotonic() - imported},
            "weights": dict(self._worker.checkpoint.identity),
        }

    def do(self, method: str, *args: Any) -> Any:
        """Call a method of the worker: `load`, `connect`, `wait` and so on. At most eight run at once."""
        return getattr(self._worker, method)(*args)
