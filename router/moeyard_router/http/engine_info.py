"""Answers to SGLang's clients and gateway: the model, the server's size, and the load of each rank."""

import time
from typing import Any

from moeyard_router.api.endpoints import Services
from moeyard_router.http.live import LiveView


class EngineInfo:
    """The answers of /model_info, /server_info and /v1/loads. The whole fleet is one engine of SGLang."""

    def __init__(self, services: Services, live: LiveView) -> None:
        self._config, self._fleet, self._live = services.config, services.fleet, live

    async def model(self) -> dict[str, Any]:
        """Return the model's name, in place of the paths that clients need not know, and its weights' version."""
        return {
            "model_path": self._config.model_name,
            "tokenizer_path": self._config.model_name,
            "is_generation": True,
            "preferred_sampling_params": None,
            **self._weights(),
        }

    async def server(self) -> dict[str, Any]:
        """Return the sizes of the fleet in SGLang's words: attention runs data-parallel, experts expert-parallel."""
        size = len(self._fleet.admission.ranks)
        snapshots = [rank.snapshot for rank in self._fleet.admission.ranks if rank.snapshot is not None]
        return {
            **await self.model(),
            "version": self._config.version,
            "served_model_name": self._config.model_name,
            "num_gpus": size,
            "tp_size": size,
            "dp_size": size,
            "ep_size": size,
            "pp_size": 1,
            "context_length": self._config.max_model_len,
            "max_total_num_tokens": sum(each.kv_pages_total * each.page_size for each in snapshots),
            "disaggregation_mode": "null",
            "enable_memory_saver": False,  # SGLang's flag, which /release_memory_occupation does not need here
            "enable_return_routed_experts": self._config.routing is not None,
        }

    async def loads(self) -> dict[str, Any]:
        """Return how many sequences each rank runs. Those that wait for a rank are counted with the first."""
        fleet = await self._live.fleet()
        running = [worker["router_inflight"] for worker in fleet["workers"]]
        waiting = [fleet["inflight"] - sum(running), *[0] * (len(running) - 1)]
        loads = [
            {"dp_rank": rank, "num_running_reqs": runs, "num_waiting_reqs": waits, "num_total_reqs": runs + waits}
            for rank, (runs, waits) in enumerate(zip(running, waiting, strict=True))
        ]
        return {"timestamp": time.time(), "version": self._config.version, "dp_rank_count": len(loads), "loads": loads}

    def _weights(self) -> dict[str, str]:
        found = (rank.snapshot.weight_version for rank in self._fleet.admission.ranks if rank.snapshot is not None)
        version = next(found, "")
        return {"weight_version": version} if version else {}
