"""Ranks of the GPU backend over the host's exchange compute what one rank computes, to the bit.

Two or three ranks run in threads of this process, each with its shard of the experts; on a CPU they use the reference
kernels. A rank without rows takes part in every step.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.exchange.meshes import connect_all
from tests.limits import HANG_SECONDS

from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_checkpoint
from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.engine.assembly.local import PAGE_SIZE, local_runner
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.exchange.base import Exchange
from moeyard_worker.exchange.factory import build_exchange, build_mesh
from moeyard_worker.exchange.shape import ExchangeShape
from moeyard_worker.exchange.transports.zmq_exchange import ZmqExchange
from moeyard_worker.experts.cache import ExpertCache
from moeyard_worker.models.families import load_model_config
from moeyard_worker.scheduling.step import Chunk, Step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_PAGES = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("staged"), "qwen3_moe", dtype=torch.bfloat16)


def backend() -> CudaBackend:
    return CudaBackend(page_size=PAGE_SIZE, device=DEVICE)


def rank_runner(directory: Path, exchange: Exchange) -> Runner:
    """A rank with its shard, with a slot for every expert."""
    config, own = load_model_config(directory), backend()
    opened, shard = open_checkpoint(directory, config), partition(config.num_experts, exchange.world_size)
    weights = CheckpointWeights(opened, backend=own, dtype=torch.bfloat16)
    experts = ExpertCache(
        backend=own,
        source=weights,
        layers=config.moe_layers,
        experts=shard[exchange.rank],
        form=config.expert_form("bfloat16"),
        num_slots=len(shard[exchange.rank]) * len(config.moe_layers),
    )
    experts.preload()
    return Runner(
        opened.spec,
        load=weights.load,
        backend=own,
        exchange=exchange,
        experts=experts,
        dtype=torch.bfloat16,
        num_pages=NUM_PAGES,
    )


def prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist())


def chunk(ids: tuple[int, ...], start: int, end: int, *, is_prompt: bool) -> Chunk:
    return Chunk(
        key=(b"", ""), start=start, token_ids=ids[start:end], pages=tuple(range(8)), prompt=is_prompt, num_sampled=1
    )


def steps_of(length: int) -> list[Step]:
    """Return a prompt in two chunks, then two rows of output."""
    ids = prompt(length)
    return [
        Step(prefill=(chunk(ids, 0, length - 12, is_prompt=True),)),
        Step(prefill=(chunk(ids, length - 12, length - 2, is_prompt=True),)),
        *(Step(decode=(chunk(ids, at, at + 1, is_prompt=False),)) for at in (length - 2, length - 1)),
    ]


def run_steps(runner: Runner, steps: list[Step], begin: Callable[[int], None]) -> list[torch.Tensor]:
    seen = []
    for number, step in enumerate(steps):
        begin(number)
        seen.append(runner.forward(step)[: len(step.sample_rows)].cpu())
    return seen


def fleet_of(directory: Path, world: int) -> tuple[ExchangeShape, Placement, list[list[Step]]]:
    """Return the shape, the placement and six steps for each of `world` ranks.

    The second rank begins two steps late, and the third has no rows.
    """
    config = load_model_config(directory)
    shape = ExchangeShape(
        num_experts=config.num_experts, top_k=config.top_k, hidden=config.hidden_size, dtype="bfloat16", max_tokens=64
    )
    plans = [[*steps_of(50), Step.empty(), Step.empty()], [Step.empty(), Step.empty(), *steps_of(37)]][:world]
    plans += [[Step.empty()] * 6] * (world - 2)
    return shape, Placement.of_shards(config.moe_layers, partition(config.num_experts, world)), plans


def check_alone(directory: Path, seen: Sequence[list[torch.Tensor]]) -> None:
    """Require that ranks computed in the steps of `fleet_of` what one rank computes, to the bit."""
    for of_rank, length in zip(seen, (50, 37), strict=False):
        alone = local_runner(directory, dtype=torch.bfloat16, num_pages=NUM_PAGES, backend=backend())
        wanted = run_steps(alone, steps_of(length), lambda number: None)
        got = [logits for logits in of_rank if len(logits)]
        assert len(got) == len(wanted)
        for number, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
            assert torch.isfinite(theirs).all()
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), f"length {length}, step {number}"


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_equal_one_rank(checkpoint: Path, world: int) -> None:
    shape, placement, plans = fleet_of(checkpoint, world)
    meshes = [build_mesh("zmq", shape=shape, rank=rank, world_size=world, deadline=30) for rank in range(world)]
    assert connect_all(meshes) == [None] * world
    exchanges = [ZmqExchange(mesh, shape=shape, placement=placement, device=DEVICE) for mesh in meshes]
    runners = [rank_runner(checkpoint, exchange) for exchange in exchanges]
    with ThreadPoolExecutor(world) as pool:
        runs = [
            pool.submit(run_steps, runner, plan, exchange.steps.begin)
            for runner, plan, exchange in zip(runners, plans, exchanges, strict=True)
        ]
        seen = [run.result(timeout=HANG_SECONDS) for run in runs]
    for exchange in exchanges:
        exchange.close()
    check_alone(checkpoint, seen)


def test_only_exchanges_without_the_host_are_captured(checkpoint: Path) -> None:
    shape = ExchangeShape(num_experts=4, top_k=2, hidden=8, dtype="float32", max_tokens=3)
    mesh = build_mesh("zmq", shape=shape, rank=0, world_size=1)
    placement = Placement.of_shards((0,), partition(4, 1))
    gpu = build_exchange("zmq", mesh=mesh, shape=shape, placement=placement, device=torch.device("cuda:0"))
    cpu = build_exchange("zmq", mesh=mesh, shape=shape, placement=placement)
    assert not gpu.traits.capturable
    assert not cpu.traits.capturable
    assert local_runner(checkpoint, dtype=torch.bfloat16, num_pages=1).exchange.traits.capturable
    gpu.close()
