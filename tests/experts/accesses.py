"""Accesses for tests of residency policies, and what they hit."""

from collections.abc import Sequence

from hypothesis import strategies as st

from moeyard_worker.experts.policies import start_policy
from moeyard_worker.experts.ranked import RankedPolicy

NUM_LAYERS, NUM_EXPERTS = 3, 6

Need = tuple[int, list[int], list[int]]


@st.composite
def needs(draw: st.DrawFn) -> list[Need]:
    """Accesses of (layer, decode ids, prefill ids)."""
    # 0: not needed, 1: a decode row needs it, 2: only prompt rows do.
    use = st.lists(st.sampled_from([0, 0, 0, 1, 1, 2]), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)
    steps = draw(st.lists(st.tuples(st.integers(0, NUM_LAYERS - 1), use), max_size=40))
    return [
        (layer, [e for e, u in enumerate(uses) if u == 1], [e for e, u in enumerate(uses) if u == 2])
        for layer, uses in steps
    ]


num_slots = st.integers(1, NUM_LAYERS * NUM_EXPERTS + 2)


def small(name: str, slots: int, *, num_layers: int = NUM_LAYERS, num_experts: int = NUM_EXPERTS) -> RankedPolicy:
    """A policy over layers and experts from 0 on."""
    return start_policy(name, layers=range(num_layers), experts=range(num_experts), num_slots=slots)


def hits_of(policy: RankedPolicy, layer: int, decode: Sequence[int], prefill: Sequence[int] = ()) -> list[int]:
    return [p.expert for wave in policy.access(layer, decode, prefill) for p in wave if p.hit]
