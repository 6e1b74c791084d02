"""A single rank asks the device for its prompt rows once per step, and again in the next step of the same size."""

import torch

from moeyard_worker.exchange.base import PeerRows
from moeyard_worker.exchange.transports.local import LocalExchange


def test_prompt_rows_are_read_once_per_step() -> None:
    exchange, rows, ids = LocalExchange(), torch.zeros(3, 4), torch.zeros(3, 1, dtype=torch.int64)
    masks = []
    for _ in range(2):
        exchange.steps.set_rows(PeerRows(3))
        first, second = (exchange.dispatch(rows, ids, layer=layer, num_prompt=2).prompt for layer in range(2))
        assert first is not None
        assert first is second
        masks.append(first)
        # A graph that was captured and never ran leaves nothing there.
        first.fill_(False)
    assert masks[0] is not masks[1]
    exchange.steps.set_rows(PeerRows(3))
    found = exchange.dispatch(rows, ids, layer=0, num_prompt=2).prompt
    assert found is not None
    assert found.tolist() == [True, True, False]
    exchange.steps.set_rows(PeerRows(3))
    assert exchange.dispatch(rows, ids, layer=0, num_prompt=0).prompt is None
