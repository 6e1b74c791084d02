"""Ray's settings for moeyard: the one place that touches Ray's environment variables.

Measured with Ray 2.60 (docs/architecture.md): without these, Ray binds wildcard addresses even for a local fleet,
writes an authentication token to the home directory, and sends usage statistics.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from moeyard_worker.config.cpu_config import CPU_ENVIRONMENT

# Longest start of a private Ray. Ray's own 30 s are too few for a slow or a busy machine.
START_SECONDS = 180.0

# Whatever it is told not to print, Ray says of every process that ends, on stdout, that memory may have run out. What
# ends is said by the supervisor; of Ray's own lines those that match are skipped.
QUIET: Mapping[str, str] = MappingProxyType({"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "."})

LOCAL_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes ray.init bind 127.0.0.1 only
        "RAY_USAGE_STATS_ENABLED": "0",
        **QUIET,
        # Ray gives its workers niceness 15: whatever else runs would go before a step, and before all other ranks.
        "RAY_worker_niceness": "0",
        "RAY_gcs_server_port_wait_time_s": f"{START_SECONDS:.0f}",
        # The driver gets SIGTERM to stop: no stack trace for it.
        "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ranks and the launcher would end themselves a minute after Ray's head, which they do not need to serve.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "2000000",
        # Ray's own metrics and task history: nobody looks at them here, and idle processes would wake to send them.
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

# Ray would show each worker of a cluster only the GPU that it gave it; but rows go straight into the memory of other
# GPUs, which a process must see for that. Which of them is its own, the process asks Ray (`RankActor.seat`).
CLUSTER_GPU: Mapping[str, str] = MappingProxyType({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"})


def prepare_local(threads: int) -> None:
    """Environment for a private Ray on this machine with `threads` OpenMP threads per worker. Before `import ray`."""
    # Processes inherit it from this one, so that actors take the workers that Ray starts beforehand.
    os.environ.update({**LOCAL_ENVIRONMENT, **worker_environment(threads)})
    # A driver whose raylet has ended ends itself if "its raylet", by default its parent process, lives no more. A
    # launcher that systemd started (its parent is process 1) could start no other Ray. Ray's workers get another value.
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())
    if os.environ.get("RAY_AUTH_MODE", "token") == "token":
        os.environ["RAY_AUTH_MODE"] = "token"
        # Only this process and its children need it; a token of the user's own is respected.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def prepare_remote() -> None:
    """Environment for joining a running cluster, whose token comes from the operator. Must run before `import ray`."""
    os.environ.update(REMOTE_ENVIRONMENT)


def ray_logs() -> Path:
    """The folder of what the daemons of the last Ray on this machine have logged."""
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "session_latest" / "logs"


def uses_tls() -> bool:
    """Whether the operator has Ray's own connections encrypted."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def worker_environment(threads: int) -> dict[str, str]:
    """Environment of each worker process."""
    # One OpenMP thread per worker as a rule: two collapse beside any busy process (libgomp spins).
    # GPUs put into each other's memory one by one; torch would also bind theirs to the switches' multicast, which can
    # fail for want of rights and is not used.
    threaded = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**threaded, **CPU_ENVIRONMENT, "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def own_gpu(given: Sequence[str]) -> int:
    """Which of the GPUs that this process sees is the one that Ray gave it (`get_accelerator_ids`).

    Ray names them as the node's CUDA_VISIBLE_DEVICES does, by number where that is not set. Raises ValueError, in one
    line, where that does not tell which, as in a process that was shown others than its node has.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = visible.split(",") if visible else None
    if len(given) != 1 or (seen is not None and given[0] not in seen):
        raise ValueError(f"Ray gave GPUs {', '.join(given) or 'none'}, not one of CUDA_VISIBLE_DEVICES={visible}")
    return seen.index(given[0]) if seen is not None else int(given[0])
