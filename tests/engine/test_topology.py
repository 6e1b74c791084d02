"""How a rank chooses its exchange: the result of `auto`, and one-line errors for a named one that cannot run."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.assembly import topology
from moeyard_worker.engine.assembly.device import CpuDevice, Device
from moeyard_worker.engine.assembly.topology import bind_mesh, host_patience, patience, settle_exchange
from moeyard_worker.exchange.shape import ExchangeShape

SHAPE = ExchangeShape(num_experts=8, top_k=2, hidden=16, dtype="bfloat16", max_tokens=4)


@dataclass
class Gpus:
    """A device that reaches these GPUs unless it has a problem."""

    problem: str | None = None

    def unreachable(self, gpus: Sequence[int]) -> str | None:
        assert gpus == (0, 1, 2)
        return self.problem


def settled(
    exchange: str,
    *,
    device: Any = None,
    shape: ExchangeShape = SHAPE,
    peer_gpus: tuple[int, ...] = (0, 1, 2),
    workers: int = 3,
    **options: Any,
) -> tuple[str, str]:
    config = EngineConfig(model_path="m", device="cuda", num_workers=workers, exchange=cast(Any, exchange), **options)
    spec = WorkerSpec(config=config, rank=1, epoch=0, host="127.0.0.1", version="", gpu=1, peer_gpus=peer_gpus)
    found, why = settle_exchange(spec, cast(Device, device or Gpus()), shape)
    return found.config.exchange, why


def test_gpus_that_reach_each_other() -> None:
    assert settled("auto") == ("nvlink", "3 GPUs of one host that reach each other")
    assert settled("auto", speculate="mtp") == ("nvlink", "3 GPUs of one host that reach each other")
    assert settled("nvlink") == ("nvlink", "asked for")
    assert settled("zmq") == ("zmq", "asked for")
    assert settled("nvlink", workers=1, peer_gpus=()) == ("nvlink", "asked for")
    assert settled("auto", workers=1) == ("local", "one rank")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"peer_gpus": ()}, "the workers are on several hosts"),
        (
            {"shape": ExchangeShape(num_experts=8, top_k=2, hidden=12, dtype="bfloat16", max_tokens=4)},
            "peers move rows of a multiple of 16 bytes, got 24",
        ),
    ],
    ids=("hosts", "rows"),
)
def test_reasons_against_nvlink(given: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "missing_nccl", lambda: None)
    assert settled("auto", **given) == ("nccl" if "shape" in given else "zmq", why)
    with pytest.raises(ValueError, match=f"^--exchange nvlink cannot be: {why}; use --exchange zmq$"):
        settled("nvlink", **given)


def test_cpus() -> None:
    config = EngineConfig(model_path="m", num_workers=2)
    spec = WorkerSpec(config=config, rank=1, epoch=0, host="127.0.0.1", version="")
    device = CpuDevice(config)
    found, why = settle_exchange(spec, device, SHAPE)
    assert (found.config.exchange, why) == ("zmq", "ranks compute on CPUs")
    for kind in ("nvlink", "nccl"):
        with pytest.raises(ValueError, match=f"exchange '{kind}' needs GPUs; use device 'cuda'"):
            EngineConfig(model_path="m", num_workers=2, exchange=cast(Any, kind))


def test_nccl_needs_no_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one host `auto` chooses nccl if GPUs lack peer access, unless drafts are verified or torch has no NCCL. For
    ranks on several hosts it must be chosen by name (docs/concepts/exchange.md says why)."""
    monkeypatch.setattr(topology, "missing_nccl", lambda: None)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    access = "GPU 0 has no peer access to GPU 2"
    far: dict[str, Any] = {"device": Gpus(access)}
    apart = "the workers are on several hosts"
    assert settled("auto", peer_gpus=()) == settled("auto", peer_gpus=(), speculate="mtp") == ("zmq", apart)
    assert settled("nccl") == ("nccl", "asked for")
    assert settled("nccl", workers=1, peer_gpus=()) == ("nccl", "asked for")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert settled("nccl", **far) == ("nccl", "asked for")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
    assert settled("auto", **far) == ("nccl", access)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo", "auto uses no network without keys"
    drafts = "steps that verify drafts have no such exchange so far"
    assert settled("auto", speculate="mtp", **far) == ("zmq", f"{access}; nccl: {drafts}")
    with pytest.raises(ValueError, match=f"^--exchange nvlink cannot be: {access}; use --exchange zmq$"):
        settled("nvlink", **far)
    refused = r"^--exchange nccl cannot be: steps that verify drafts have no such exchange so far; use"
    with pytest.raises(ValueError, match=refused):
        settled("nccl", speculate="mtp")
    monkeypatch.setattr(topology, "missing_nccl", lambda: "torch 9 has no NCCL")
    with pytest.raises(ValueError, match=r"^--exchange nccl cannot be: torch 9 has no NCCL; use --exchange zmq$"):
        settled("nccl")
    assert settled("auto", **far) == ("zmq", f"{access}; nccl: torch 9 has no NCCL")


def test_which_ranks_share_expert_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of any nvlink exchange share reads. Ranks that must share but cannot fail with one line."""
    monkeypatch.setattr(topology, "missing_nccl", lambda: "torch 9 has no NCCL")

    def fetch(asked: str, exchange: str = "auto", workers: int = 3, device: Gpus | None = None, store: str = "") -> str:
        config = EngineConfig(
            model_path="m",
            device="cuda",
            num_workers=workers,
            exchange=cast(Any, exchange),
            expert_fetch=cast(Any, asked),
            expert_host_store=cast(Any, store or "auto"),
        )
        spec = WorkerSpec(config=config, rank=0, epoch=0, host="127.0.0.1", version="", gpu=0, peer_gpus=(0, 1, 2))
        return settle_exchange(spec, cast(Device, device or Gpus()), SHAPE)[0].config.expert_fetch

    assert fetch("auto") == fetch("auto", "nvlink") == "auto"
    assert fetch("shared") == "shared"
    assert fetch("alone") == fetch("auto", "zmq") == fetch("auto", workers=1) == fetch("alone", "zmq") == "alone"
    assert fetch("auto", device=Gpus("GPU 0 has no peer access to GPU 2")) == "alone"
    for store in ("none", "missing"):
        assert fetch("auto", store=store) == "alone"
        with pytest.raises(ValueError, match=f"shared needs copies of all experts, not --expert-host-store {store}"):
            fetch("shared", store=store)
    apart = "^--expert-fetch shared cannot be: the exchange is zmq, not nvlink; use --expert-fetch alone$"
    for given in ({"exchange": "zmq"}, {"device": Gpus("GPU 0 has no peer access to GPU 2")}):
        with pytest.raises(ValueError, match=apart):
            fetch("shared", **cast(Any, given))
    with pytest.raises(ValueError, match=r"^--expert-fetch shared cannot be: there is one rank; use"):
        fetch("shared", "nvlink", workers=1)


def test_patience_with_a_peer() -> None:
    """A device waits as long as a first step may compile, if the compilation cannot be announced. A host waits as long
    as a layer may take or a peer's device may wait."""

    def of(exchange: str, **options: Any) -> tuple[float, float]:
        options = {"device": "cuda", **options}
        config = EngineConfig(model_path="m", num_workers=2, exchange=cast(Any, exchange), step_deadline=5.0, **options)
        return patience(config), host_patience(config)

    assert of("nvlink") == (5.0, 60.0)
    assert of("nvlink", enforce_eager=True) == of("nvlink", speculate="mtp") == (60.0, 60.0)
    assert of("nvlink", expert_host_store="none") == (60.0, 60.0)
    assert of("nccl") == of("nccl", enforce_eager=True) == (5.0, 5.0)
    assert of("nccl", expert_host_store="none") == (5.0, 60.0)
    for exchange in ("zmq", "zmq-tcp"):
        assert of(exchange)[1] == 5.0
        assert of(exchange, device="cpu")[1] == 60.0


def test_mesh_gets_the_deadlines() -> None:
    config = EngineConfig(model_path="m", num_workers=2, device="cuda", exchange="nccl", step_deadline=5.0)
    spec = WorkerSpec(config=config, rank=0, epoch=1, host="127.0.0.1", version="test")
    mesh = bind_mesh(spec, SHAPE, 1, Placement.of_shards((0,), partition(8, 2)), "")
    assert (mesh.deadline, mesh._patience, mesh._stall) == (5.0, 5.0, 60.0)
    mesh.close()
