"""The end of a fleet on Ray, as far as it needs no Ray."""

import subprocess
import sys

from tests.limits import HANG_SECONDS

# In a process of its own: whatever descends from one that ends its fleet ends with it.
END = """
from multiprocessing import resource_tracker

from moeyard import ray_fleet
from moeyard.logs import LogConfig
from moeyard.ray_fleet import RayFleet
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement
from moeyard_worker.experts.placement import partition
from moeyard_worker.sockets import make_keys

ray_fleet.STOP_SECONDS = 1e6
resource_tracker.ensure_running()  # as a router's process does that is started
fleet = RayFleet(
    EngineConfig(model_path="/nowhere"), LogConfig(), address=None, worker_host=None, metrics_port_base=0,
    keys=make_keys(), placement=Placement.of_shards((1,), partition(2, 1)),
)
fleet.stop()
"""


def test_the_end_does_not_wait_for_what_ends_with_the_process() -> None:
    """Python's tracker of shared resources is there as long as we are; other processes get `STOP_SECONDS`."""
    subprocess.run([sys.executable, "-c", END], timeout=HANG_SECONDS, check=True)
