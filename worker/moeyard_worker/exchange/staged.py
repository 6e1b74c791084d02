"""An exchange of the host for ranks that compute on GPUs: rows come to the host's memory, and go back to the device.

The portable way, and the oracle for those that never leave the device: the host waits for the GPU in both phases of
every layer, so no step that uses it can be captured in a graph.
"""

import torch

from moeyard_worker.config.placement import Placement
from moeyard_worker.exchange.base import Dispatched, Exchange, ExchangeTraits
from moeyard_worker.exchange.mesh import Mesh


class StagedExchange:
    """`Exchange` on `device` over `host`, one of the CPU. Bits are only moved."""

    traits = ExchangeTraits()

    def __init__(self, host: Exchange, device: torch.device) -> None:
        self.rank, self.world_size, self.stats = host.rank, host.world_size, host.stats
        self._host, self._device = host, device
        self.steps = host.steps

    def attach(self, mesh: Mesh, placement: Placement) -> None:
        """See `Exchange.attach`."""
        self._host.attach(mesh, placement)
        self.rank, self.world_size = self._host.rank, self._host.world_size

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, *, layer: int, num_prompt: int) -> Dispatched:
        """See `Exchange.dispatch`; all that it returns is on the device."""
        rows = x[: topk_ids.shape[0]].cpu()
        got = self._host.dispatch(rows, topk_ids.cpu(), layer=layer, num_prompt=num_prompt)
        return Dispatched(
            rows=got.rows.to(self._device),
            experts=got.experts.to(self._device),
            prompt=None if got.prompt is None else got.prompt.to(self._device),
            handle=got.handle,
        )

    def combine(self, expert_out: torch.Tensor | None, handle: object) -> torch.Tensor:
        """See `Exchange.combine`."""
        assert expert_out is not None, "the staged exchange has no result window"
        return self._host.combine(expert_out.cpu(), handle).to(self._device)

    def close(self) -> None:
        """See `Exchange.close`."""
        self._host.close()
