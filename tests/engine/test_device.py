"""Which GPU a rank takes, and the error for one that it cannot take. The GPUs are fakes."""

import pytest
import torch
from tests.gpus import pretend

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.engine.assembly import device
from moeyard_worker.engine.assembly.device import CudaDevice, check_gpu, make_device, unfit
from moeyard_worker.engine.loop.faults import out_of_memory


@pytest.mark.parametrize(
    ("capabilities", "asked", "says"),
    [
        ([], {"device": "cuda"}, f"--device cuda: torch {torch.__version__} sees no CUDA GPU here; use --device cpu"),
        (
            [(9, 0)] * 2,
            {"device": "cuda:9"},
            "--device cuda:9: there are 2 GPUs, the last is cuda:1; choose one of these",
        ),
        (
            [(9, 0)] * 2,
            {"device": "cuda", "gpu": 2, "num_workers": 4},
            "--device cuda --workers 4 takes a GPU each: there are 2 GPUs, the last is cuda:1; lower --workers",
        ),
        (
            [(8, 0)],
            {"device": "cuda"},
            "--device cuda: NVIDIA A100 has compute capability 8.0, the kernels need 9.0 (Hopper's TMA and wgmma, "
            "which it lacks); use another GPU or --device cpu",
        ),
        (
            [(9, 0), (10, 0)],
            {"device": "cuda:1"},
            "--device cuda:1: NVIDIA B200 has compute capability 10.0, the kernels need 9.0 (Hopper's wgmma, which it "
            "lacks); use another GPU or --device cpu",
        ),
        (
            [(12, 0)],
            {"device": "cuda"},
            "--device cuda: NVIDIA RTX 5090 has compute capability 12.0, the kernels need 9.0 (Hopper's wgmma, which "
            "it lacks); use another GPU or --device cpu",
        ),
        ([(9, 0)], {"device": "cuda:x"}, "--device 'cuda:x' is not cpu, cuda or cuda:N"),
    ],
    ids=["none", "number", "workers", "8.0", "10.0", "12.0", "name"],
)
def test_unusable_gpu_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], asked: dict[str, object], says: str
) -> None:
    pretend(monkeypatch, *capabilities)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - all of it is compared
        check_gpu(**asked)  # type: ignore[arg-type]
    assert str(caught.value) == says


def test_hopper_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = pretend(monkeypatch, (8, 0), (9, 0), (9, 0))
    assert unfit(1) is None
    assert check_gpu("cuda:1") == torch.device("cuda:1")
    assert check_gpu("cuda", gpu=2, num_workers=3) == torch.device("cuda:2")
    assert chosen == [], "a check activates no GPU"
    monkeypatch.setattr(device, "CudaBackend", lambda **_: None)
    config = EngineConfig(model_path="", device="cuda", num_workers=3)
    assert isinstance(make_device(config, 1), CudaDevice)
    assert chosen == [torch.device("cuda:1")]
    with pytest.raises(ValueError, match=r"NVIDIA A100 has compute capability 8\.0"):
        make_device(config, 0)


def test_out_of_memory_errors_are_recognized() -> None:
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    # Errors of graphs, of pinned memory, and of loading a kernel.
    assert out_of_memory(torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be ..."))
    assert out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"))
    assert not out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not out_of_memory(ValueError("a shard is out of memory's reach"))
