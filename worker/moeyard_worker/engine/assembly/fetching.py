"""Whether ranks read for each other what they miss of their experts, what that takes of memory, what each lends."""

from typing import Any, Protocol

from moeyard_kernels.types.fetch_shape import FetchShape
from moeyard_kernels.types.lent_memory import LentMemory
from moeyard_worker.config.engine_config import DTYPE_BYTES, EngineConfig, ExpertFetch
from moeyard_worker.engine.memory.plan import MemoryPlan, plan_memory
from moeyard_worker.exchange.peer_fetch import Lending
from moeyard_worker.models.model_config import ModelConfig


class Lender(Protocol):
    """What an expert cache says of its host memory."""

    @property
    def lent(self) -> LentMemory | None: ...
    @property
    def all_resident(self) -> bool: ...


def settle_fetch(config: EngineConfig) -> ExpertFetch:
    """What `expert_fetch` comes to where the exchange is settled; "auto" is then: together, if ranks find they can.

    Raises ValueError, in one line, where it was asked for and cannot be.
    """
    if config.exchange == "nvlink" and config.num_workers > 1:
        return config.expert_fetch
    if config.expert_fetch == "shared":
        why = "there is one rank" if config.num_workers == 1 else f"the exchange is {config.exchange}, not nvlink"
        raise ValueError(f"--expert-fetch shared cannot be: {why}; use --expert-fetch alone")
    return "alone"


def plan_with_fetch(*, config: EngineConfig, model: ModelConfig, **rest: Any) -> MemoryPlan:
    """See `plan_memory`: with room for what peers read for this rank, if it misses anything and they may."""
    plan = plan_memory(config=config, model=model, **rest)
    if config.expert_fetch == "alone" or not plan.stream_slots:
        return plan
    # With less room experts do not get more slots.
    return plan_memory(config=config, model=model, **rest, staging=_shape(config, model).num_bytes)


def lending(config: EngineConfig, model: ModelConfig, experts: Lender) -> Lending | None:
    """What this rank brings to its exchange; None where every rank reads alone."""
    if config.expert_fetch == "alone":
        return None
    return Lending(
        shape=_shape(config, model), lent=experts.lent, misses=not experts.all_resident,
        required=config.expert_fetch == "shared",
    )  # fmt: skip


def _shape(config: EngineConfig, model: ModelConfig) -> FetchShape:
    part = model.expert_bytes(DTYPE_BYTES[model.served_dtype(config.dtype)]) // 3
    return FetchShape(world_size=config.num_workers, up_bytes=2 * part, down_bytes=part)
