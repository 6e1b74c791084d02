"""The vectorized routing against plain loops, for any ids, sources and shards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard_worker.exchange.routing import route


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, list[int], list[int], range, int]:
    num_experts, top_k = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    num_slots = sum(sizes) * top_k
    ids = draw(st.lists(st.integers(0, num_experts - 1), min_size=num_slots, max_size=num_slots))
    prefill = [draw(st.integers(0, size)) for size in sizes]
    start = draw(st.integers(0, num_experts - 1))
    experts = range(start, draw(st.integers(start + 1, num_experts)))
    return np.array(ids, np.int64).reshape(-1, top_k), sizes, prefill, experts, num_experts


@given(cases())
def test_route_equals_the_loops(case: tuple[np.ndarray, list[int], list[int], range, int]) -> None:
    ids, sizes, prefill, experts, num_experts = case
    bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    got = route(ids, token_bounds=bounds, num_prefill=prefill, experts=experts, num_experts=num_experts)

    top_k = ids.shape[1]
    rows = [token for token, chosen in enumerate(ids.tolist()) if any(e in experts for e in chosen)]
    slots = [slot for slot, expert in enumerate(ids.reshape(-1).tolist()) if expert in experts]
    pairs = sorted(slots, key=lambda slot: (ids.reshape(-1)[slot], slot))
    prompt = [
        token
        for start, num in zip(bounds, prefill, strict=False)
        for token in range(start, start + num)
    ]  # fmt: skip
    assert got.row_tokens.tolist() == rows
    assert got.row_of_pair.tolist() == [rows.index(slot // top_k) for slot in pairs]
    assert got.pair_slots.tolist() == slots
    assert [pairs[pair] for pair in got.pair_of_slot] == slots
    for start, stop, source in zip(bounds, bounds[1:], range(len(sizes)), strict=False):
        assert rows[got.row_bounds[source] : got.row_bounds[source + 1]] == [r for r in rows if start <= r < stop]
        own = slots[got.slot_bounds[source] : got.slot_bounds[source + 1]]
        assert own == [slot for slot in slots if start <= slot // top_k < stop]
    chosen = [ids.reshape(-1)[slot] for slot in slots]
    decode = [ids.reshape(-1)[slot] for slot in slots if slot // top_k not in prompt]
    assert got.counts == tuple(chosen.count(expert) for expert in experts)
    assert got.decode_counts == tuple(decode.count(expert) for expert in experts)
    assert got.row_of_pair.dtype == np.int64


@pytest.mark.parametrize("expert", [-1, 4])
def test_an_id_out_of_range_is_refused(expert: int) -> None:
    with pytest.raises((AssertionError, ValueError), match=r"expert id 4 of 4|negative"):
        route(np.array([[0], [expert]]), token_bounds=[0, 2], num_prefill=[0], experts=range(4), num_experts=4)
