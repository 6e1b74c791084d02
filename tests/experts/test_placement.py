"""Shards of experts are contiguous, complete, and larger ones come first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard_worker.config.placement import partition


def test_uneven_shards_put_the_larger_first() -> None:
    assert partition(16, 3) == (range(0, 6), range(6, 11), range(11, 16))


@given(st.integers(1, 300), st.integers(1, 64))
def test_shards_cover_every_expert_once(num_experts: int, world_size: int) -> None:
    if world_size > num_experts:
        with pytest.raises(ValueError, match=f"{world_size} ranks for {num_experts} experts"):
            partition(num_experts, world_size)
        return
    shards = partition(num_experts, world_size)
    sizes = [len(shard) for shard in shards]
    assert [expert for shard in shards for expert in shard] == list(range(num_experts))
    assert len(shards) == world_size
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", [0, -1])
def test_fewer_than_one_rank_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1 rank, got {world_size}"):
        partition(4, world_size)
