"""Pretended GPUs: the answers of torch for code that only asks."""

import pytest
import torch

GIB = 1 << 30
NAMES = {8: "NVIDIA A100", 9: "NVIDIA H100", 10: "NVIDIA B200", 12: "NVIDIA RTX 5090"}


def pretend(
    monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int], free: int | Exception = 70 * GIB
) -> list[torch.device]:
    """Let torch report a GPU for each capability, with `free` bytes of 80 GiB free, or raise `free`.

    Return the list of devices that code makes the current one.
    """
    chosen: list[torch.device] = []

    def memory(_index: int | None = None) -> tuple[int, int]:
        if isinstance(free, Exception):
            raise free
        return free, 80 * GIB

    def refuse(*args: object, **_: object) -> None:
        raise AssertionError(f"something was allocated: {args}")

    for name, value in {
        "is_available": lambda: bool(capabilities),
        "device_count": lambda: len(capabilities),
        "get_device_capability": lambda index: capabilities[index],
        "get_device_name": lambda index: NAMES[capabilities[index][0]],
        "mem_get_info": memory,
        "set_device": chosen.append,
        "caching_allocator_alloc": refuse,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return chosen
