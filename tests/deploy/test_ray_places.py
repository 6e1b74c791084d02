"""Which GPU each rank has where Ray gives them out."""

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.deploy.test_serve import BUSY_READY_SECONDS, cluster

from moeyard import ray_actor
from moeyard.ray_actor import RankActor
from moeyard.ray_config import own_gpu
from moeyard.ray_places import Seats

__all__ = ["cluster"]  # its fixture

pytestmark = pytest.mark.timeout(BUSY_READY_SECONDS + 120)

# What `moeyard serve --device cuda --ray-address ADDRESS` does before it sets ranks up. A process dies, too.
SEATS = """
import json
import sys

import ray

from moeyard.ray_config import prepare_remote

prepare_remote()
from moeyard.ray_places import Places
from moeyard_worker.config.engine_config import EngineConfig

ray.init(address=sys.argv[1], log_to_driver=False)
places = Places(EngineConfig(model_path="m", device="cuda", num_workers=2), local=False)
places.reserve(wait=0.0, stage=lambda words: None, check=lambda: None)
actors = [places.actor(rank) for rank in range(2)]
told = ray.get([actor.seat.remote() for actor in actors])
for rank, seat in enumerate(told):
    places.seats.take(rank, seat)
ray.kill(actors[0])
again = ray.get(places.actor(0).seat.remote())
print(json.dumps({"told": told, "peers": places.gpus(0, 2), "again": again}))
places.close()
"""


def test_ranks_of_a_cluster_see_all_gpus_and_know_their_own(cluster: str) -> None:
    """Where Ray shows each process its own GPU only, no GPU reaches another's memory; both must see both."""
    done = subprocess.run(
        [sys.executable, "-c", SEATS, cluster], capture_output=True, text=True, timeout=BUSY_READY_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(gpu for _, gpu in found["told"]) == [0, 1], found
    assert found["peers"] == {"gpu": None, "peer_gpus": [gpu for _, gpu in found["told"]]}
    assert found["again"] == found["told"][0], "a rank's next process has its GPU"


@pytest.mark.parametrize(
    ("given", "visible", "own"),
    [("3", None, 3), ("3", "", 3), ("3", "5,3", 1), ("GPU-b", "GPU-a,GPU-b", 1), (None, "5,3", 0), (None, None, 0)],
)
def test_gpus_are_known_by_their_place_among_those_that_are_seen(
    given: str | None, visible: str | None, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert own_gpu([] if given is None else [given]) == own


def test_peers_are_those_of_one_node() -> None:
    seats = Seats()
    assert seats.peer_gpus == ()
    for rank, gpu in ((2, 0), (0, 3), (1, 1)):
        seats.take(rank, ("here", gpu))
    assert seats.peer_gpus == (3, 1, 0)
    seats.take(1, ("there", 1))
    assert seats.peer_gpus == ()


def test_a_rank_on_another_gpu_than_its_peers_know_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    actor: Any = RankActor()
    monkeypatch.setattr(actor, "seat", lambda: ("here", 2), raising=False)
    monkeypatch.setattr(ray_actor.logs, "start", lambda *args, **more: None)
    spec = {"rank": 1, "log": None, "host": "127.0.0.1", "gpu": None, "peer_gpus": (0, 1)}
    with pytest.raises(ValueError, match=r"^rank 1 has GPU 2 now, and its peers know GPU 1$"):
        actor.setup(spec)
