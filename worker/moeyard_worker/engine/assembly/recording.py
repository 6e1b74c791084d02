"""The recording of a rank's routing that --record-routing asks for."""

from pathlib import Path

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.experts.recorder import RoutingRecorder, TraceHeader
from moeyard_worker.models.model_config import ModelConfig


def open_recorder(
    config: EngineConfig, model: ModelConfig, *, rank: int, experts: tuple[int, ...], num_slots: int
) -> RoutingRecorder | None:
    """Begin the recording of a rank with these experts and slots; None if none is asked for. Raises OSError."""
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
