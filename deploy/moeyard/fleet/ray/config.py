"""Ray's settings for moeyard: the one place that touches Ray's environment variables.

Measured with Ray 2.60: without these, Ray binds wildcard addresses even for a local fleet, writes an authentication
token to the home directory, and sends usage statistics.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from moeyard_worker.config.cpu_config import CPU_ENVIRONMENT

# Time limit for the start of a private Ray. Ray's own 30 s are too short for a slow or busy machine.
START_SECONDS = 180.0

# Ray prints a line on stdout about every process that ends and suspects a lack of memory; no setting stops it. The
# launcher reports ended processes itself, so this pattern skips all of Ray's lines.
QUIET: Mapping[str, str] = MappingProxyType({"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "."})

LOCAL_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes ray.init bind 127.0.0.1 only
        "RAY_USAGE_STATS_ENABLED": "0",
        **QUIET,
        # Ray's default niceness of 15 lets any other process delay a step, and with it all ranks.
        "RAY_worker_niceness": "0",
        "RAY_gcs_server_port_wait_time_s": f"{START_SECONDS:.0f}",
        # SIGTERM stops the driver normally, so print no stack trace.
        "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # By default ranks and the launcher exit a minute after Ray's head ends, but they can serve without it.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "2000000",
        # Ray's own metrics and task history are unused here, and they wake idle processes.
        "RAY_enable_metrics_collection": "0",
        "RAY_task_events_report_interval_ms": "0",
        "RAY_event_stats": "0",
        "RAY_kill_idle_workers_interval_ms": "0",
    }
)

REMOTE_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "RAY_USAGE_STATS_ENABLED": "0",
        **QUIET,
        "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    }
)

# By default a Ray worker of a cluster sees only its assigned GPU. The exchange writes to memory of peer GPUs, so a
# process must see them, too. It asks Ray which GPU is its own (`RankActor.seat`).
CLUSTER_GPU: Mapping[str, str] = MappingProxyType({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"})


def prepare_local(threads: int) -> None:
    """Set the environment of a private Ray with `threads` OpenMP threads per worker. Call it before `import ray`."""
    # Set it in this process: actors can then use the workers that Ray starts in advance.
    os.environ.update({**LOCAL_ENVIRONMENT, **worker_environment(threads)})
    # A driver checks whether "its raylet", by default its parent process, lives, and exits if not. With systemd as
    # parent (process 1) a launcher could not start a second Ray. Ray sets another value for its workers.
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())
    if os.environ.get("RAY_AUTH_MODE", "token") == "token":
        os.environ["RAY_AUTH_MODE"] = "token"
        # Only this process and its children need the token. A token set by the user takes precedence.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def prepare_remote() -> None:
    """Set the environment to join a cluster; the operator provides its token. Call it before `import ray`."""
    os.environ.update(REMOTE_ENVIRONMENT)


def ray_logs() -> Path:
    """Return the log folder of the latest Ray on this machine."""
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "session_latest" / "logs"


def uses_tls() -> bool:
    """Return whether the operator has enabled TLS for Ray's own connections."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def worker_environment(threads: int) -> dict[str, str]:
    """Return the environment of each worker process."""
    # The default is one OpenMP thread per worker: two become very slow next to any busy process, as libgomp spins.
    # The exchange writes to peer GPUs directly. Torch would also bind memory to NVLink multicast, which is unused and
    # fails without the rights for it.
    threaded = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**threaded, **CPU_ENVIRONMENT, "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def own_gpu(given: Sequence[str]) -> int:
    """Return the index of the GPU that Ray assigned (`get_accelerator_ids`) among this process's visible GPUs.

    Ray uses the names in the node's CUDA_VISIBLE_DEVICES, or numbers if it is not set. Raises ValueError with one line
    if the assigned GPU is not visible here.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = visible.split(",") if visible else None
    if len(given) != 1 or (seen is not None and given[0] not in seen):
        raise ValueError(f"Ray gave GPUs {', '.join(given) or 'none'}, not one of CUDA_VISIBLE_DEVICES={visible}")
    return seen.index(given[0]) if seen is not None else int(given[0])
