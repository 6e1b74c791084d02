"""Experts in the host's memory: where their values lie, and what is said when they cannot be pinned."""

import gc
from types import SimpleNamespace

import pytest
import torch

from moeyard_kernels.cuda.host_experts import HostExperts

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_blob_is_a_slot(dtype: torch.dtype) -> None:
    hidden, inner = 12, 5
    host = HostExperts(num_experts=3, hidden=hidden, intermediate=inner, dtype=dtype, device=CPU)
    experts = [(torch.randn(inner, hidden), torch.randn(inner, hidden), torch.randn(hidden, inner)) for _ in range(3)]
    # The second is put twice: nothing of the first may stay.
    for index, expert in ((0, 0), (1, 2), (2, 2), (1, 1)):
        assert host.put(index, *experts[expert]) == 3 * hidden * inner * dtype.itemsize
    for index, (gate, up, down) in enumerate(experts):
        gate_up, last = host.parts(index)
        assert torch.equal(gate_up.view(2 * inner, hidden), torch.cat((gate, up)).to(dtype))
        assert torch.equal(last.view(hidden, inner), down.to(dtype))
        assert torch.equal(host.blobs[index], torch.cat((gate_up, last)))


def test_memory_is_pinned_while_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        pinned[address] = size
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    sizes = {"num_experts": 5, "hidden": 8, "intermediate": 4, "dtype": torch.float32}
    host = HostExperts(**sizes, device=torch.device("cuda", 0))
    assert pinned == {host.blobs.data_ptr(): 5 * 3 * 8 * 4 * 4}
    del host
    gc.collect()
    assert pinned == {}
    cudart.cudaHostRegister = lambda *_: 2
    with pytest.raises(ValueError, match=r"host memory for experts cannot be pinned \(CUDA error 2\)"):
        HostExperts(**sizes, device=torch.device("cuda", 0))
