"""The choice of `--device auto`, and the search for GPUs before Ray starts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpus import pretend

from moeyard.cli.commands import build_parser
from moeyard.local import device_choice
from moeyard.local.device_choice import check_device, choose_device, device_reason, find_gpus, probe
from moeyard.local.serve import device_named
from moeyard.local.settings import engine_config

DEMO = str(Path(__file__).resolve().parents[2] / "deploy" / "demo")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that marks a driver; absent at first."""
    monkeypatch.setattr(device_choice, "_DRIVER_FILES", (tmp_path / "nvidiactl",))
    return tmp_path / "nvidiactl"


def chosen(*flags: str) -> tuple[str, str | None]:
    """Return the device chosen by these flags, and the reason."""
    args = build_parser().parse_args(["serve", DEMO, *flags])
    config = engine_config(args)
    assert config.device == args.device
    return config.device, device_reason(args)


def probed(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """Probe in this process, with these GPUs visible to torch."""
    pretend(monkeypatch, *capabilities)

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        device, workers = command[-2:]
        found = probe(device, int(workers))
        return subprocess.CompletedProcess(command, 0, f"noise\n{json.dumps(found)}\n", "")

    monkeypatch.setattr(subprocess, "run", run)


def test_without_a_driver_torch_is_not_queried(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("torch was queried"))
    assert chosen() == ("cpu", "auto: no NVIDIA driver here")
    assert chosen("--device", "cpu") == ("cpu", None)
    args = build_parser().parse_args(["serve", DEMO])
    engine_config(args)
    assert device_named(args) == "cpu (auto: no NVIDIA driver here)"
    driver.touch()
    device, why = chosen("--ray-address", "127.0.0.1:1")
    assert device == "cpu"
    assert "no GPUs of a Ray cluster; --device cuda" in str(why)


def test_gpus_are_chosen_if_each_worker_has_one(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.touch()
    probed(monkeypatch, (9, 0), (9, 0))
    assert chosen() == ("cuda", "auto: NVIDIA H100")
    assert chosen("--workers", "2") == ("cuda", "auto: 2 x NVIDIA H100")
    device, why = chosen("--workers", "3")
    assert device == "cpu"
    assert str(why).startswith("auto: --device cuda --workers 3 takes a GPU each: there are 2 GPUs")
    # Defaults of a GPU apply with it.
    assert engine_config(build_parser().parse_args(["serve", DEMO])).async_scheduling


def test_unfit_gpus_are_named(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.touch()
    probed(monkeypatch, (8, 0))
    device, why = chosen()
    assert device == "cpu"
    assert str(why).startswith("auto: NVIDIA A100 has compute capability 8.0")
    probed(monkeypatch)
    assert chosen() == ("cpu", f"auto: torch {torch.__version__} sees no CUDA GPU here")


def test_named_gpu_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    probed(monkeypatch, (9, 0))
    for flags, says in (
        (("--device", "cuda:1"), "--device cuda:1: there are 1 GPUs, the last is cuda:0"),
        (("--device", "cuda", "--workers", "2"), "--device cuda --workers 2 takes a GPU each: there are 1 GPUs"),
    ):
        args = build_parser().parse_args(["serve", DEMO, *flags])
        choose_device(args)
        with pytest.raises(ValueError, match=says):
            check_device(args)
        # A cluster's GPUs are on other machines.
        args.ray_address = "host:1"
        check_device(args)
    args = build_parser().parse_args(["serve", DEMO, "--device", "cuda"])
    check_device(args)


def test_torch_probe_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match=r"^--device cuda: torch cannot look for GPUs: exit code 1; use --device cpu$"):
        find_gpus("cuda", 1)
    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(ValueError, match=r"^--device cuda: torch does not find out within 180 s .*nvidia-smi"):
        find_gpus("cuda", 1)
