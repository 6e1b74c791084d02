"""Memory handed from rank to rank as files: who gets whose, and on a GPU what a mapping holds and gives back."""

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from moeyard_kernels.cuda.mapping import Mapping, export
from moeyard_kernels.cuda.shared_memory import own_memory, swap_files

SECONDS = 20.0


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def in_threads(world_size: int, run: Callable[[int, Callable[[bytes], Sequence[bytes]], str], Any]) -> list[Any]:
    """`run` of every rank, with what gathers words and a folder of its own."""
    barrier, words = Barrier(world_size, timeout=SECONDS), [b""] * world_size

    def one(rank: int) -> Any:
        def gather(word: bytes) -> list[bytes]:
            words[rank] = word
            barrier.wait()
            return [*words]

        with tempfile.TemporaryDirectory() as folder:
            return run(rank, gather, folder)

    with ThreadPoolExecutor(world_size) as pool:
        return [each.result(timeout=2 * SECONDS) for each in [pool.submit(one, rank) for rank in range(world_size)]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_every_rank_is_given_a_file_of_each_other(world_size: int) -> None:
    """Also where more come than wait at a door, ten of Linux' own accord."""
    before = open_files()

    def run(rank: int, gather: Any, folder: str) -> dict[int, bytes]:
        own = os.memfd_create(f"rank{rank}")
        os.write(own, f"of rank {rank}".encode())
        found = swap_files(own, rank=rank, world_size=world_size, gather=gather, folder=folder, seconds=SECONDS)
        os.close(own)
        said = {peer: os.pread(file, 100, 0) for peer, file in found.items()}
        for file in found.values():
            os.close(file)
        return said

    for rank, said in enumerate(in_threads(world_size, run)):
        assert said == {peer: f"of rank {peer}".encode() for peer in range(world_size) if peer != rank}
    assert open_files() <= before


def test_a_rank_that_hands_nothing_over_is_not_waited_for() -> None:
    before = open_files()

    def run(rank: int, gather: Any, folder: str) -> str:
        own = os.memfd_create(f"rank{rank}")
        try:
            if rank == 2:
                # It says where its door is, and leaves.
                gather(os.path.join(folder, "files").encode())
                return "left"
            swap_files(own, rank=rank, world_size=3, gather=gather, folder=folder, seconds=0.3)
        except OSError as error:
            return type(error).__name__
        finally:
            os.close(own)
        return "has all"

    said = in_threads(3, run)
    assert said[2] == "left"
    assert not {"left", "has all"} & set(said[:2])
    assert open_files() <= before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_mapping_holds_the_memory_until_it_is_closed() -> None:
    """Of the same process, through another address; what it is of may be gone by then."""
    device, num_bytes = torch.device("cuda", torch.cuda.current_device()), (64 << 20) + 512
    own = own_memory(num_bytes, device)
    file = export(own)
    mapping = Mapping(file, num_bytes, device)
    os.close(file)
    assert mapping.memory.shape == (num_bytes,)
    assert mapping.memory.data_ptr() != own.data_ptr()
    mapping.memory.fill_(7)
    own[5] = 9
    assert mapping.memory[:7].tolist() == [7, 7, 7, 7, 7, 9, 7]
    assert int((own == 7).sum()) == num_bytes - 1
    held = torch.cuda.mem_get_info(device)[0]
    del own
    torch.cuda.synchronize(device)
    assert torch.cuda.mem_get_info(device)[0] < held + (32 << 20), "the mapping holds it"
    assert mapping.memory[5] == 9
    mapping.close()
    mapping.close()
    assert torch.cuda.mem_get_info(device)[0] >= held + (64 << 20)
