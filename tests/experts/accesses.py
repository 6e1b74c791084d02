"""Random accesses and experts for tests of caches and their policies."""

import itertools
from collections.abc import Iterable, Sequence

import torch
from hypothesis import strategies as st
from tests.expert_fill import copy_expert

from moeyard_kernels.types.matrix import ExpertViews
from moeyard_worker.experts.policies import start_policy
from moeyard_worker.experts.ranked import RankedPolicy

NUM_LAYERS, NUM_EXPERTS = 3, 6

Need = tuple[int, list[int], list[int]]


@st.composite
def needs(draw: st.DrawFn) -> list[Need]:
    """Accesses of (layer, decode ids, prefill ids)."""
    # 0: not needed, 1: needed by a decode row, 2: needed only by prompt rows.
    use = st.lists(st.sampled_from([0, 0, 0, 1, 1, 2]), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)
    steps = draw(st.lists(st.tuples(st.integers(0, NUM_LAYERS - 1), use), max_size=40))
    return [
        (layer, [e for e, u in enumerate(uses) if u == 1], [e for e, u in enumerate(uses) if u == 2])
        for layer, uses in steps
    ]


num_slots = st.integers(1, NUM_LAYERS * NUM_EXPERTS + 2)


def small(name: str, slots: int, *, num_layers: int = NUM_LAYERS, num_experts: int = NUM_EXPERTS) -> RankedPolicy:
    """Return a policy over layers and experts from 0."""
    return start_policy(name, layers=range(num_layers), experts=range(num_experts), num_slots=slots)


def hits_of(policy: RankedPolicy, layer: int, decode: Sequence[int], prefill: Sequence[int] = ()) -> list[int]:
    return [p.expert for wave in policy.access(layer, decode, prefill) for p in wave if p.hit]


class RandomExperts:
    """Experts of random weights. `reads` are the (layer, expert) pairs that were read."""

    def __init__(
        self,
        layers: Sequence[int],
        experts: Sequence[int],
        *,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.reads: list[tuple[int, int]] = []
        generator = torch.Generator().manual_seed(5)
        shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
        self.experts = {
            key: tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
            for key in itertools.product(layers, experts)
        }

    def expect(self, experts: Iterable[tuple[int, int]]) -> None:
        pass

    def fill(self, layer: int, expert: int, out: ExpertViews) -> None:
        self.reads.append((layer, expert))
        copy_expert(out, *self.experts[layer, expert])
