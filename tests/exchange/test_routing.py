"""The vectorized routing equals plain loops for any ids, sources and owners."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard_worker.exchange.transports.routing import LayerTables, pairs_of, route


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, list[int], list[int], int]:
    """Ids, rows per source, local experts and their number."""
    num_experts, top_k = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    num_pairs = sum(sizes) * top_k
    ids = draw(st.lists(st.integers(-1, num_experts - 1), min_size=num_pairs, max_size=num_pairs))
    experts = sorted(draw(st.sets(st.integers(0, num_experts - 1))))
    return np.array(ids, np.int64).reshape(-1, top_k), sizes, experts, num_experts


@given(cases())
def test_route_equals_plain_loops(case: tuple[np.ndarray, list[int], list[int], int]) -> None:
    ids, sizes, experts, num_experts = case
    bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    owners = [7 if expert in experts else 3 for expert in range(num_experts)]
    tables = LayerTables.of(owners, 7)
    got = route(ids, token_bounds=bounds, tables=tables)

    top_k = ids.shape[1]
    rows = [token for token, chosen in enumerate(ids.tolist()) if any(e in experts for e in chosen)]
    pairs = [pair for pair, expert in enumerate(ids.reshape(-1).tolist()) if expert in experts]
    assert got.row_tokens.tolist() == rows
    assert got.experts.tolist() == [
        [experts.index(expert) if expert in experts else -1 for expert in ids[token].tolist()] for token in rows
    ]
    assert got.pairs.tolist() == pairs
    assert got.row_pairs.tolist() == [rows.index(pair // top_k) * top_k + pair % top_k for pair in pairs]
    elsewhere = [pair for pair, expert in enumerate(ids.reshape(-1).tolist()) if expert >= 0 and pair not in pairs]
    assert pairs_of(tables.keys(ids, bounds), tables.owner, 3).tolist() == elsewhere
    for start, stop, source in zip(bounds, bounds[1:], range(len(sizes)), strict=False):
        assert rows[got.row_bounds[source] : got.row_bounds[source + 1]] == [r for r in rows if start <= r < stop]
        own = pairs[got.pair_bounds[source] : got.pair_bounds[source + 1]]
        assert own == [pair for pair in pairs if start <= pair // top_k < stop]


@pytest.mark.parametrize("expert", [-2, 4])
def test_id_out_of_range_is_refused(expert: int) -> None:
    with pytest.raises(AssertionError, match="an expert id is out of range"):
        route(np.array([[0], [expert]]), token_bounds=[0, 2], tables=LayerTables.of([0] * 4, 0))
    with pytest.raises(AssertionError, match="an expert id is out of range"):  # except for ids of the other turn
        route(np.array([[0], [expert]]), token_bounds=[0, 2], tables=LayerTables.of([0] * 4, 0, [(1, 1)]))


@given(cases(), st.integers(1, 3), st.data())
def test_copies_take_turns(case: tuple[np.ndarray, list[int], list[int], int], long: int, data: st.DataObject) -> None:
    """Two ranks have all experts, some twice: each pair is computed once, by the rank whose turn its row is."""
    ids, sizes, experts, num_experts = case
    # Enough rows for turns.
    ids, sizes = np.repeat(ids, 7 * long, 0), [7 * long * size for size in sizes]
    bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    owners = [int(expert in experts) for expert in range(num_experts)]
    copied = sorted(data.draw(st.sets(st.integers(0, num_experts - 1), max_size=num_experts)))
    copies = [(expert, 1 - owners[expert]) for expert in copied]
    rows = np.concatenate([np.arange(size) for size in sizes])
    for rank in range(2):
        tables = LayerTables.of(owners, rank, copies)
        got = route(ids, token_bounds=bounds, tables=tables)
        has = [expert for expert in range(num_experts) if owners[expert] == rank or expert in copied]
        wanted = np.full(ids.shape, -1)
        for (token, k), expert in np.ndenumerate(ids):
            second = expert in copied and rows[token] // 16 % 2 == 1
            if expert >= 0 and (owners[expert] != rank if second else owners[expert] == rank):
                wanted[token, k] = has.index(expert)
        here = (wanted >= 0).any(1)
        assert got.row_tokens.tolist() == here.nonzero()[0].tolist()
        assert got.experts.tolist() == wanted[here].tolist()
        flat = tables.keys(ids, bounds)
        assert pairs_of(flat, tables.owner, rank).tolist() == (wanted.reshape(-1) >= 0).nonzero()[0].tolist()
