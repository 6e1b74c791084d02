"""An exchange of the host for ranks that compute on GPUs: rows come to the host's memory, and go back to the device.

The portable way, and the oracle for those that never leave the device: the host waits for the GPU in both phases of
every layer, so no step that uses it can be captured in a graph.
"""

from collections.abc import Callable, Sequence

import torch

from moeyard_worker.config.placement import Placement
from moeyard_worker.exchange.base import Dispatched, Exchange, PeerRows
from moeyard_worker.exchange.mesh import Mesh


class StagedExchange:
    """`Exchange` on `device` over `host`, one of the CPU. Bits are only moved."""

    captures = False
    of_epoch = None
    warms = False
    places_rows = stays = False

    def __init__(self, host: Exchange, device: torch.device) -> None:
        self.rank, self.world_size, self.stats = host.rank, host.world_size, host.stats
        self._host, self._device = host, device

    def attach(self, mesh: Mesh, placement: Placement) -> None:
        """See `Exchange.attach`."""
        self._host.attach(mesh, placement)
        self.rank, self.world_size = self._host.rank, self._host.world_size

    def begin_step(self, step: int) -> None:
        """See `Exchange.begin_step`."""
        self._host.begin_step(step)

    def expect(self, rows: PeerRows) -> None:
        """Every frame says it."""

    def finish_step(self, step: int, has_run: Callable[[], bool]) -> None:
        """Each phase has waited for its own packets."""

    def drain(self, has_run: Callable[[], bool] | None = None) -> None:
        """Each phase has waited for its own packets."""

    def abort(self, lost: Sequence[int] = ()) -> None:
        """The host waits, not the device."""

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
        assert expert_out is not None, "nobody was told where home is"
        return self._host.combine(expert_out.cpu(), handle).to(self._device)

    def close(self) -> None:
        """See `Exchange.close`."""
        self._host.close()
