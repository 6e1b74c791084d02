"""The exchange of a fleet of one rank: every expert is local, so no row moves, on any device."""

import torch

from moeyard_worker.config.placement import Placement
from moeyard_worker.exchange.base import Dispatched, ExchangeStats, ExchangeSteps, ExchangeTraits, PeerRows
from moeyard_worker.exchange.membership.mesh import Mesh


class LocalExchange:
    """`Exchange` of rank 0 of 1. `combine` returns its argument. Nothing is timed."""

    rank = 0
    world_size = 1
    traits = ExchangeTraits(capturable=True, local=True)

    def __init__(self) -> None:
        self.stats = ExchangeStats()
        self.steps = ExchangeSteps(self._set_rows)
        # The prompt flags of a step's layers, and their numbers of rows and prompt rows.
        self._prompt: torch.Tensor | None = None
        self._prompt_of = (0, 0)

    def attach(self, mesh: Mesh, placement: Placement) -> None:
        assert placement.ranks == (0,), placement.ranks
        self.steps.open_epoch(mesh)

    def _set_rows(self, rows: PeerRows) -> None:
        # Flags made while a graph was captured were never computed.
        self._prompt, self._prompt_of = None, (0, 0)

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, *, layer: int, num_prompt: int) -> Dispatched:
        num_tokens = topk_ids.shape[0]
        assert num_tokens <= x.shape[0], (x.shape, topk_ids.shape)
        assert 0 <= num_prompt <= num_tokens, num_prompt
        if self._prompt_of != (num_tokens, num_prompt):
            self._prompt_of = (num_tokens, num_prompt)
            self._prompt = torch.arange(num_tokens, device=x.device) < num_prompt if num_prompt else None
        return Dispatched(rows=x[:num_tokens], experts=topk_ids, prompt=self._prompt, handle=num_tokens)

    def combine(self, expert_out: torch.Tensor | None, handle: int) -> torch.Tensor:
        assert expert_out is not None, "the local exchange has no result window"
        assert expert_out.shape[0] == handle, (expert_out.shape, handle)
        return expert_out

    def close(self) -> None:
        """Do nothing: no resource is held."""
