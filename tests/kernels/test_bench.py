"""The kernel bench away from a GPU: what it judges, what it refuses to report, what it says where it cannot run."""

import sys
from collections.abc import Callable

import pytest
import torch

from moeyard_kernels.bench.__main__ import HEADS, MODULES, describe, main, row_of
from moeyard_kernels.bench.case import Case, Target, assert_bits


class Clock:
    """In place of the timer: every launch takes as long as it says itself."""

    copy_bandwidth = 4e12

    def seconds(self, run: Callable[[], object]) -> float:
        return run()


def judge(seconds: float, target: Target | None, baseline: float | None = None) -> dict[str, str]:
    case = Case(
        op="op",
        shape="T1",
        run=lambda: seconds,
        gate=lambda: None,
        num_bytes=2 * 10**9,
        num_flops=10**12,
        target=target,
        baseline=None if baseline is None else lambda: baseline,
    )
    return dict(zip(HEADS, row_of(case, Clock()), strict=True))


@pytest.mark.parametrize(
    ("seconds", "target", "met"),
    [
        (1e-3, Target("copy", 0.5), "yes"),
        (1.01e-3, Target("copy", 0.5), "no"),
        (6e-6, Target("us", 6.0), "yes"),
        (6.1e-6, Target("us", 6.0), "no"),
        (2e-3, Target("tflops", 500.0), "yes"),
        (2.1e-3, Target("tflops", 500.0), "no"),
        (1e-3, Target("speedup", 2.0), "yes"),
        (1.1e-3, Target("speedup", 2.0), "no"),
        (1e-3, None, ""),
    ],
    ids=lambda x: str(x),
)
def test_targets_are_judged_at_their_bound(seconds: float, target: Target | None, met: str) -> None:
    row = judge(seconds, target, baseline=2e-3)
    assert row["met"] == met
    assert row["target"] == describe(target)
    assert float(row["us"]) == pytest.approx(seconds * 1e6, abs=0.05)
    assert float(row["speedup"]) == pytest.approx(2e-3 / seconds, abs=0.005)


def test_no_speed_behind_a_red_gate() -> None:
    def gate() -> None:
        assert_bits("rows", torch.zeros(3), torch.tensor([0.0, 1.0, 0.0]))

    def run() -> float:
        raise RuntimeError("timed in spite of a red gate")

    with pytest.raises(AssertionError, match="rows: 1 of 3 values differ"):
        row_of(Case(op="op", shape="", run=run, gate=gate, num_bytes=1), Clock())


def test_bits_are_bytes() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert_bits("a NaN equals itself", (nan, nan), (nan.clone(), nan.clone()))
    for other in (torch.tensor([-0.0]), torch.tensor([0.0], dtype=torch.float64), torch.zeros(2)):
        with pytest.raises(AssertionError):
            assert_bits("unlike", torch.tensor([0.0]), other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "moeyard_kernels.bench: no CUDA device: nothing to time here\n"


def test_an_unknown_op_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--op", "typo"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "no op typo: choose of add_rms_norm, " in capsys.readouterr().err


def test_every_family_is_named_once() -> None:
    assert len(set(MODULES)) == len(MODULES)
