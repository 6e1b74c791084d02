"""Environment of processes that move rows with NCCL through torch. Imports no torch."""

import os
from types import MappingProxyType

# By default, a thread of torch ends the process when a peer is lost, at once or a minute later. A rank must survive its
# peers. The mesh detects losses, and `exchange/transports/nccl/` ends the waits of the device.
NCCL_ENVIRONMENT = MappingProxyType(
    {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        # In one step, a rank may replay a graph of what another rank launches. Both must choose the same channels.
        "NCCL_GRAPH_REGISTER": "0",
    }
)


def keep_to_loopback() -> None:
    """Restrict NCCL to the loopback interface. For `--exchange auto`, where the user did not choose NCCL."""
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def set_nccl_environment(*, one_host: bool) -> None:
    """Set NCCL_ENVIRONMENT before a communicator is created. Values that the user has set win.

    On one host, NCCL_SOCKET_IFNAME defaults to the loopback interface, because NCCL would choose any other one.
    TORCH_NCCL_BLOCKING_WAIT is always off: a host that blocks could not watch its peers.
    """
    if one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "0"
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
