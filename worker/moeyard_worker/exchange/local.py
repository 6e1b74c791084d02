"""The exchange of a fleet of one rank: every expert is at home, so no row moves, on whatever device it lies."""

from collections.abc import Callable, Sequence

import torch

from moeyard_worker.config.placement import Placement
from moeyard_worker.exchange.base import Dispatched, ExchangeStats, PeerRows
from moeyard_worker.exchange.mesh import Mesh


class LocalExchange:
    """Rank 0 of 1. `rows` of a dispatch are those of `x`, `combine` returns what it is given: nothing is timed."""

    rank = 0
    world_size = 1
    captures = True
    of_epoch = None
    warms = True
    places_rows = False
    stays = True

    def __init__(self) -> None:
        self.stats = ExchangeStats()
        self._step_rows = (0, 0)
        self._prompt: torch.Tensor | None = None

    def attach(self, mesh: Mesh, placement: Placement) -> None:
        """No peer is ever lost, and there is nobody else to own an expert."""
        assert placement.ranks == (0,), placement.ranks

    def begin_step(self, step: int) -> None:
        """Nothing to agree on with oneself."""

    def expect(self, rows: PeerRows) -> None:
        """There are no others; what the step before asked of the device may never have run."""
        self._step_rows, self._prompt = (0, 0), None

    def finish_step(self, step: int, has_run: Callable[[], bool]) -> None:
        """Nobody is waited for."""

    def drain(self, has_run: Callable[[], bool] | None = None) -> None:
        """Nobody is waited for."""

    def abort(self, lost: Sequence[int] = ()) -> None:
        """Nobody is waited for."""

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, *, layer: int, num_prompt: int) -> Dispatched:
        """See `Exchange.dispatch`; global ids are local ones."""
        num_tokens = topk_ids.shape[0]
        assert num_tokens <= x.shape[0], (x.shape, topk_ids.shape)
        assert 0 <= num_prompt <= num_tokens, num_prompt
        if self._step_rows != (num_tokens, num_prompt):
            # The same in all layers of a step.
            self._step_rows = (num_tokens, num_prompt)
            self._prompt = torch.arange(num_tokens, device=x.device) < num_prompt if num_prompt else None
        return Dispatched(rows=x[:num_tokens], experts=topk_ids, prompt=self._prompt, handle=num_tokens)

    def combine(self, expert_out: torch.Tensor | None, handle: int) -> torch.Tensor:
        """See `Exchange.combine`."""
        assert expert_out is not None, "nobody was told where home is"
        assert expert_out.shape[0] == handle, (expert_out.shape, handle)
        return expert_out

    def close(self) -> None:
        """Nothing is held."""
