"""Environment of processes that move rows with NCCL through torch. Imports no torch."""

import os
from types import MappingProxyType

# Of torch's threads beside a communicator one ends the process, at once or a minute later, when a peer is lost: but a
# rank outlives its peers. Losses are found by the mesh (exchange/nccl.py), which also ends what the device waits for.
NCCL_ENVIRONMENT = MappingProxyType(
    {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        # In one step a rank may replay what another launches: by their sizes alone both then choose the same channels.
        "NCCL_GRAPH_REGISTER": "0",
    }
)


def keep_to_loopback() -> None:
    """Have this process's NCCL speak on no network, whatever the environment names: nobody asked for NCCL by name."""
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def set_nccl_environment(*, one_host: bool) -> None:
    """Give this process NCCL_ENVIRONMENT, unless the user chose. Before a communicator is made; NCCL_* are the user's.

    Of these NCCL_SOCKET_IFNAME names the network between hosts; of `one_host` it is the loopback unless somebody said
    otherwise, for NCCL would take any address but that. A host that waits for rows is none of the user's choices: it
    could not watch its peers.
    """
    if one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "0"
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
