"""Host memory of an expert cache on a GPU: one pinned blob per expert, with the bytes of a slot."""

import torch

from moeyard_kernels.host_memory import HostMemory
from moeyard_kernels.types.weight_form import ExpertForm


class HostExperts:
    """`blobs`, uint8 [experts, blob_bytes]: an expert's bytes in two regions, read by kernels and copy engines.

    `shared`: other processes of the host may map it. Raises ValueError when the memory cannot be pinned.
    """

    def __init__(self, *, num_experts: int, form: ExpertForm, device: torch.device, shared: bool = False) -> None:
        self._form = form
        self.memory = HostMemory(num_experts * form.blob_bytes, device, shared=shared)
        self.blobs = self.memory.bytes.view(num_experts, form.blob_bytes)

    def regions(self, index: int) -> tuple[torch.Tensor, ...]:
        """Return the bytes of gate_up and of down."""
        return self.blobs[index].split(self._form.region_bytes)
