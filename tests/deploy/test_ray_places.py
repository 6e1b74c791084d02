"""Assignment of GPUs to ranks on a Ray cluster."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tests.deploy.test_serve import cluster
from tests.limits import HANG_SECONDS

from moeyard.fleet.ray import actor as actors
from moeyard.fleet.ray.actor import RankActor
from moeyard.fleet.ray.config import own_gpu
from moeyard_worker.config.engine_config import EngineConfig

__all__ = ["cluster"]  # its fixture

# The steps of `moeyard serve --device cuda --ray-address ADDRESS` before ranks are set up; processes die, too.
SEATS = """
import json
import sys

import ray

from moeyard.fleet.ray.config import prepare_remote

prepare_remote()
from moeyard.fleet.ray.places import Places
from moeyard_worker.config.engine_config import EngineConfig

ray.init(address=sys.argv[1], log_to_driver=False)
places = Places(EngineConfig(model_path="m", device="cuda", num_workers=2), local=False)
places.reserve(wait=0.0, stage=lambda words: None, check=lambda: None)
actors = [places.actor(rank) for rank in range(2)]
gpus = ray.get([actor.seat.remote() for actor in actors])
for actor in actors:
    ray.kill(actor)
# Without assigned places the first process would get the first GPU.
again = [ray.get(actor.seat.remote()) for actor in [places.actor(rank) for rank in (1, 0)]]
print(json.dumps({"gpus": gpus, "again": again[::-1]}))
places.close()
"""


@pytest.mark.slow
def test_ranks_see_all_gpus_and_know_their_own(cluster: str) -> None:
    """If Ray shows each process only its own GPU, no GPU can access another's memory; both must see both."""
    done = subprocess.run(
        [sys.executable, "-c", SEATS, cluster], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(gpu for _, gpu in found["gpus"]) == [0, 1], found
    assert found["again"] == found["gpus"], "a rank's next process must have its GPU"


@pytest.mark.parametrize(("given", "visible", "own"), [("3", None, 3), ("3", "5,3", 1), ("GPU-b", "GPU-a,GPU-b", 1)])
def test_gpu_index_is_its_position_among_visible_ones(
    given: str, visible: str | None, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(visible, monkeypatch)
    assert own_gpu([given]) == own


@pytest.mark.parametrize(
    ("given", "visible", "names"),
    [([], None, "none"), (["1", "0"], "1,0", "1, 0"), (["3"], "5,4", "3")],
    ids=["none", "two", "one that is not seen"],
)
def test_ambiguous_gpu_is_refused(
    given: list[str], visible: str | None, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(visible, monkeypatch)
    with pytest.raises(ValueError, match=rf"^Ray gave GPUs {names}, not one of CUDA_VISIBLE_DEVICES={visible}$"):
        own_gpu(given)


def show(visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


class SetUp(Exception):
    """Replacement for a worker that records its arguments."""


def set_up(monkeypatch: pytest.MonkeyPatch, *, peer_gpus: tuple[int, ...]) -> dict[str, Any]:
    """Return the setup of a rank that was on GPU 1 here and is on GPU 3 there."""

    def worker(spec: Any) -> None:
        raise SetUp(spec)

    actor: Any = RankActor()
    monkeypatch.setattr(actor, "seat", lambda: ("there", 3), raising=False)
    monkeypatch.setattr(actors.logs, "start", lambda *args, **more: None)
    monkeypatch.setattr(actors, "load", lambda name: SimpleNamespace(Worker=worker))
    config = EngineConfig(model_path="m", device="cuda", num_workers=2)
    spec = {"config": config, "rank": 1, "epoch": 0, "host": "127.0.0.1", "version": "", "log": None}
    answer: dict[str, Any] = actor.setup({**spec, "peer_gpus": peer_gpus, "seat": ("here", 1)})
    return answer


def test_rank_on_an_unexpected_gpu_sets_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set_up(monkeypatch, peer_gpus=(0, 1)) == {"moved": "GPU 3 of node there"}


def test_rank_keeps_its_gpu_with_peers_on_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node was lost and the others were not, so no rank there knows its GPU, and they keep theirs."""
    with pytest.raises(SetUp) as setup:
        set_up(monkeypatch, peer_gpus=())
    assert setup.value.args[0].gpu == 3
