"""Experts in host memory: layout of values, reads by other ranks, and errors if memory cannot be pinned."""

import ctypes
import gc
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.expert_fill import expert_fill
from tests.limits import HANG_SECONDS

from moeyard_kernels import host_memory
from moeyard_kernels.cuda.experts import CudaExpertSlots
from moeyard_kernels.cuda.host_experts import HostExperts
from moeyard_kernels.cuda.residency import CudaResidency
from moeyard_kernels.host_memory import BorrowedMemory, HostMemory, HostWord
from moeyard_kernels.types.peer_shape import LentMemory
from moeyard_kernels.types.weight_form import plain_expert

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_blob_has_the_layout_of_a_slot(dtype: torch.dtype) -> None:
    hidden, inner = 12, 5
    form = plain_expert(hidden=hidden, intermediate=inner, dtype=str(dtype).removeprefix("torch."))
    slots = CudaExpertSlots(num_slots=3, form=form, device=CPU)
    host = CudaResidency(slots, policy="slru", num_layers=1, num_experts=3, num_slots=1)
    assert form.blob_bytes == 3 * hidden * inner * dtype.itemsize
    experts = [(torch.randn(inner, hidden), torch.randn(inner, hidden), torch.randn(hidden, inner)) for _ in range(3)]
    # The second blob is written twice: nothing of its first expert may stay.
    for index, expert in ((0, 0), (1, 2), (2, 2), (1, 1)):
        host.put(0, index, expert_fill(*experts[expert]))
    for index, (gate, up, down) in enumerate(experts):
        gate_up, last = host.stored(0, index).split(form.region_bytes)
        assert torch.equal(gate_up.view(dtype).view(2 * inner, hidden), torch.cat((gate, up)).to(dtype))
        assert torch.equal(last.view(dtype).view(hidden, inner), down.to(dtype))


def test_memory_is_pinned_while_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        pinned[address] = size
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    sizes: Any = {"num_experts": 5, "form": plain_expert(hidden=8, intermediate=4, dtype="float32")}
    host = HostExperts(**sizes, device=torch.device("cuda", 0))
    assert pinned == {host.blobs.data_ptr(): 5 * 3 * 8 * 4 * 4}
    del host
    gc.collect()
    assert pinned == {}
    cudart.cudaHostRegister = lambda *_: 2
    with pytest.raises(ValueError, match=r"host memory for experts cannot be pinned \(CUDA error 2\)"):
        HostExperts(**sizes, device=torch.device("cuda", 0))


def lent_by(memory: HostMemory) -> LentMemory:
    assert memory.lent is not None
    return memory.lent


# Shares memory, prints how to find it, fills it and prints that. Ends with its standard input.
LENDER = """
import sys, torch
from dataclasses import astuple
from moeyard_kernels.host_memory import HostMemory
memory = HostMemory(1 << 16, torch.device("cpu"), shared=True)
print(*astuple(memory.lent), flush=True)
for line in sys.stdin:
    memory.bytes.fill_(int(line))
    print("filled", flush=True)
"""


def test_memory_of_another_process_is_mapped() -> None:
    """Changes are visible, even after the process ends. After that the memory cannot be found any more."""
    paths = [str(ROOT / folder) for folder in ("worker", "kernels")]
    lender = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}\n{LENDER}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with lender:
        assert lender.stdin is not None
        assert lender.stdout is not None
        pid, fd, inode, num_bytes = map(int, lender.stdout.readline().split())
        lent = LentMemory(pid=pid, fd=fd, inode=inode, num_bytes=num_bytes)
        assert (pid, num_bytes) == (lender.pid, 1 << 16)
        borrowed = BorrowedMemory(lent, CPU)
        for value in (7, 200):
            lender.stdin.write(f"{value}\n")
            lender.stdin.flush()
            assert lender.stdout.readline() == "filled\n"
            assert ctypes.string_at(borrowed.address, num_bytes) == bytes([value]) * num_bytes
        with pytest.raises(ValueError, match=f"file {fd} of process {pid} has been replaced by another file"):
            BorrowedMemory(replace(lent, inode=inode + 1), CPU)
        with pytest.raises(ValueError, match=f"memory of process {pid} cannot be mapped: .*No such file"):
            BorrowedMemory(replace(lent, fd=99), CPU)
        lender.stdin.close()
        lender.wait(HANG_SECONDS)
    assert ctypes.string_at(borrowed.address, num_bytes) == bytes([200]) * num_bytes
    borrowed.close()
    borrowed.close()
    with pytest.raises(ValueError, match=f"memory of process {pid} cannot be mapped"):
        BorrowedMemory(lent, CPU)


def test_shared_memory_ends_with_its_owner() -> None:
    memory = HostMemory(1 << 16, CPU, shared=True)
    lent = lent_by(memory)
    assert HostMemory(16, CPU).lent is None
    del memory
    gc.collect()
    # The file number may belong to another file by now.
    with pytest.raises(ValueError, match=rf"process {os.getpid()} (cannot be mapped|is another one)"):
        BorrowedMemory(lent, CPU)


def test_memory_that_cannot_be_pinned_for_sharing_stays_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is private to this process then, as it is without sharing."""
    asked, taken = [], []

    def register(address: int, size: int, flags: int) -> int:
        asked.append((address, size))
        return 801 if len(asked) == 1 else 0

    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0)
    )
    monkeypatch.setattr(host_memory, "take_error", taken.append)
    gpu = torch.device("cuda", 0)
    memory = HostMemory(1 << 16, gpu, shared=True)
    assert memory.lent is None
    assert asked[-1] == (memory.bytes.data_ptr(), 1 << 16)
    assert taken == [gpu]
    memory.bytes.fill_(3)


@pytest.mark.parametrize("refused", [(), (9,), (9, 1)], ids=("nothing", "read only", "both"))
def test_mapped_memory_is_pinned_read_only(refused: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning is read-only if possible, else plain. An error that was handled does not stay in CUDA's state."""
    memory = HostMemory(1 << 16, CPU, shared=True)
    pinned: dict[int, int] = {}
    asked, taken = [], []

    def register(address: int, size: int, flags: int) -> int:
        asked.append(flags)
        if flags in refused:
            return 801
        pinned[address] = size
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(host_memory, "take_error", taken.append)
    gpu = torch.device("cuda", 0)
    if len(refused) == 2:
        with pytest.raises(ValueError, match=rf"0 MiB of process {os.getpid()} cannot be pinned \(CUDA error 801\)"):
            BorrowedMemory(lent_by(memory), gpu)
    else:
        borrowed = BorrowedMemory(lent_by(memory), gpu)
        assert pinned == {borrowed.address: 1 << 16}
        borrowed.close()
    assert pinned == {}
    assert asked == [9, 1][: 1 + len(refused)]
    assert taken == [gpu] * len(refused)
    if not refused:
        left = BorrowedMemory(lent_by(memory), gpu)
        assert pinned == {left.address: 1 << 16}
        del left
        assert pinned == {}, "also without a close, since other memory may be mapped there"


def test_host_word_is_shared_with_the_device() -> None:
    word = HostWord(CPU)
    assert word.here.tolist() == [0]
    word.there.add_(1)
    assert word.here.tolist() == [1]


@pytest.mark.gpu
def test_counter_of_a_device_is_readable_at_any_time() -> None:
    """The value is visible within a graph while the rest of it still runs."""
    word = HostWord(torch.device("cuda", torch.cuda.current_device()))
    word.there.add_(1)
    torch.cuda.synchronize()
    assert word.here.tolist() == [1]
    graph, ended = torch.cuda.CUDAGraph(), torch.cuda.Event()
    with torch.cuda.graph(graph):
        word.there.add_(1)
        torch.cuda._sleep(1 << 31)
    graph.replay()
    ended.record()
    while word.here.tolist() != [2]:
        time.sleep(0.001)
    assert not ended.query()
    ended.synchronize()
    assert word.there.tolist() == [2]
