"""Every exchange gives every rank the same bits as the plain loops of exchange_reference.py."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from exchange_fleet import Fleet, close, run_layers
from exchange_reference import SCENARIOS, Scenario, bits, make_layer, reference

from moeyard_worker.config.placement import Copies, Placement, partition
from moeyard_worker.exchange.shape import ExchangeShape

NUM_LAYERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One fleet. `hosts[i]` is the pretended host of the i-th rank; `away` is an additional, absent rank."""

    name: str = field(compare=False)
    kind: str
    ranks: int
    dtype: str
    hosts: str | None = None
    shuffled: bool = False
    away: int | None = None
    copied: bool = False
    device: str = "cpu"

    @property
    def members(self) -> list[int]:
        """Present ranks."""
        return [rank for rank in range(self.ranks + (self.away is not None)) if rank != self.away]

    @property
    def placement(self) -> Placement:
        """Contiguous shards, or random owners per layer, including ranks without experts, some with copies."""
        if not self.shuffled:
            return Placement.of_shards(range(6), partition(self.shape.num_experts, self.ranks))
        chance = random.Random(self.name)
        rows = [tuple(chance.choice(self.members) for _ in range(self.shape.num_experts)) for _ in range(4)]
        alone = (self.members[-1],) * self.shape.num_experts
        rows += [alone, alone]
        copies: list[Copies] = []
        for row in rows if self.copied else ():
            some = sorted(chance.sample(range(self.shape.num_experts), 5))
            copies.append(tuple((e, chance.choice([r for r in self.members if r != row[e]])) for e in some))
        return Placement(tuple(range(6)), tuple(rows), tuple(copies))

    @property
    def shape(self) -> ExchangeShape:
        """Odd sizes; 16 experts do not divide by 3 ranks; 900 rows exceed ZMQ's copy limit."""
        return ExchangeShape(num_experts=16, top_k=3, hidden=37, dtype=self.dtype, max_tokens=900)


SETUPS = [
    Setup(name=f"{name}-{ranks}rank{'s' * (ranks > 1)}-{short}", kind=kind, ranks=ranks, dtype=dtype, hosts=hosts)
    for name, kind, worlds, hosts in (
        ("local", "local", (1,), None),
        ("shm", "zmq", (1, 2, 3, 4), None),
        ("tcp", "zmq-tcp", (1, 2, 3, 4), None),
        ("two_hosts", "zmq", (2, 4), "abab"),
        # Over gloo, torch's only back end on a CPU.
        ("nccl", "nccl", (1, 2, 3, 4), None),
    )
    for ranks in worlds
    for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16"))
]
SETUPS += [
    Setup(
        name=f"{name}-{ranks}ranks-{away}away",
        kind=kind,
        ranks=ranks,
        dtype="float32",
        shuffled=True,
        away=away,
        hosts=hosts,
    )
    for name, kind, ranks, away, hosts in (
        ("shm", "zmq", 3, None, None),
        ("shm", "zmq", 2, 1, None),
        ("shm", "zmq", 1, 0, None),
        ("tcp", "zmq-tcp", 3, 0, None),
        ("two_hosts", "zmq", 3, 2, "aba"),
        ("nccl", "nccl", 3, None, None),
        ("nccl", "nccl", 3, 1, None),
        ("nccl", "nccl", 1, 0, None),
    )
]
SETUPS += [
    Setup(name=f"{name}-3ranks-copies", kind=kind, ranks=3, dtype="bfloat16", shuffled=True, copied=True, hosts=hosts)
    for name, kind, hosts in (("shm", "zmq", None), ("two_hosts", "zmq", "aba"), ("nccl", "nccl", None))
]
# Over NCCL, if there are GPUs.
SETUPS += [
    Setup(
        name=f"nccl-{ranks}gpus-{dtype}{'-copies' * copied}",
        kind="nccl",
        ranks=ranks,
        dtype=dtype,
        shuffled=True,
        copied=copied,
        device="cuda",
    )
    for ranks in (2, 3, 4)
    if ranks <= torch.cuda.device_count()
    for dtype, copied in (("float32", False), ("bfloat16", False), ("bfloat16", True))
]


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: setup.name)
def connected(request: pytest.FixtureRequest) -> Iterator[tuple[Setup, Fleet, list[int]]]:
    """A fleet of one setup, and its number of steps so far."""
    setup: Setup = request.param
    with Fleet(setup.ranks) as fleet:
        fleet.connect(
            setup.kind,
            setup.shape,
            hosts=setup.hosts,
            placement=setup.placement,
            members=setup.members,
            device=setup.device,
        )
        yield setup, fleet, [0]
        assert fleet.call(close) == [None] * setup.ranks


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_same_bits_as_the_reference(connected: tuple[Setup, Fleet, list[int]], scenario: Scenario) -> None:
    setup, fleet, steps = connected
    seen = fleet.call(run_layers, setup.shape, scenario, steps[0], NUM_LAYERS)
    steps[0] += 1
    for number in range(NUM_LAYERS):
        layers = {rank: make_layer(setup.shape, scenario, rank, number) for rank in setup.members}
        for rank, expected in reference(setup.shape, setup.placement, layers, number, 2 * number).items():
            got = seen[setup.members.index(rank)][number]
            where = f"rank {rank}, layer {number}"
            assert got.rows.shape == expected.rows.shape, where
            assert torch.equal(bits(got.rows), bits(expected.rows)), where
            assert got.experts == expected.experts, where
            assert got.prompt == expected.prompt, where
            assert got.home.shape == expected.home.shape, where
            assert torch.equal(bits(got.home), bits(expected.home)), where
