"""The Ray side of one rank: a shell around `moeyard_worker.engine.worker.Worker` that lives in the worker process.

Only plain values cross Ray, so that the launcher never imports torch.
"""

from typing import Any

import ray

from moeyard import logs
from moeyard.lazy import load
from moeyard_worker.config.worker_spec import WorkerSpec


class RankActor:
    """Methods are the worker's own, in its order: setup, connect, load, start, wait; `progress` and `stop` any time."""

    def setup(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Bind the rank's sockets (`host` None: the node's address); returns its endpoints and its node.

        Its log lines go to this process's stderr, which Ray keeps in a file of its session's `logs`.
        """
        rank = spec["rank"]
        logs.start(spec.pop("log"), context=lambda: {"rank": rank})
        node = ray.get_runtime_context().get_node_id()
        # The address under which the cluster knows the node: `ray start --node-ip-address` may have chosen it.
        host = spec.pop("host") or next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node)
        self._worker = load("moeyard_worker.engine.worker").Worker(WorkerSpec(host=host, **spec))
        return {**self._worker.endpoints(), "node": node}

    def connect(self, mesh: list[dict[str, Any]]) -> None:
        """Meet the peers."""
        self._worker.connect(mesh)

    def load(self, ranks_on_host: int) -> dict[str, Any]:
        """Load weights; returns the worker's report."""
        return self._worker.load(ranks_on_host)

    def progress(self) -> tuple[int, int]:
        """Bytes loaded so far and in all."""
        return self._worker.progress()

    def start(self) -> None:
        """Start stepping."""
        self._worker.start()

    def wait(self) -> None:
        """Block until the engine ends; raises what ended it when that was not `stop`."""
        self._worker.wait()

    def stop(self) -> None:
        """End the engine after its current step."""
        self._worker.stop()
