"""The kernel bench without a GPU: judgements, refusals, and the message when it cannot run."""

import dataclasses
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases.case import Case, Target, assert_bits, with_own_tensors
from kernel_cases.results import HEADS, Facts, Results, compare, merged, read, write
from kernel_times import MODULES, Selection, describe, main, report, row_of

from moeyard_kernels.common import tuning
from moeyard_kernels.types.decode_tables import DecodeTables
from moeyard_kernels.types.sampling import LogitEdits

# Runs in its own process, which pretends to have a GPU. It prints a line for each run that the timer could not rotate.
SEE_THROUGH = """
import torch
from functools import partial
from triton.runtime.jit import JITFunction
from compile_for_hopper import NoStorage, pretend
from itertools import chain
from kernel_times import Selection, all_cases
from kernel_cases.case import with_own_tensors

JITFunction.run = lambda *args, **kwargs: None
pretend()
with NoStorage():
    for case in chain(all_cases(Selection()), all_cases(Selection(models=["all"], rows=(8, 1024)))):
        for run in (case.run, case.baseline, *(run for _, run in case.variants)):
            if run is None:
                continue
            if "<" in run.func.__qualname__ or isinstance(getattr(run.func, "__self__", None), torch.Tensor):
                print(case.op, case.shape, run.func, "may hide tensors")
            assert type(with_own_tensors(run)) is partial
        print(end=".")
"""


class Clock:
    """A timer that takes each launch's own number of seconds."""

    copy_bandwidth = 4e12

    def seconds(self, run: partial[Any], num_bytes: int, *, early: bool = True) -> float:
        assert num_bytes == 2 * 10**9
        return run()


def judge(seconds: float, target: Target | None, baseline: float | None = None) -> dict[str, str]:
    case = Case(
        op="op",
        shape="T1",
        run=partial(float, seconds),
        prove=lambda: None,
        num_bytes=2 * 10**9,
        num_flops=10**12,
        target=target,
        baseline=None if baseline is None else partial(float, baseline),
    )
    return dict(zip(HEADS, row_of(case, Clock()), strict=True))


def test_cases_are_timed_as_they_are_launched() -> None:
    asked = []

    class Listener(Clock):
        def seconds(self, run: partial[Any], num_bytes: int, *, early: bool = True) -> float:
            asked.append(early)
            return run()

    run = partial(float, 1.0)
    for early in (True, False):
        row_of(Case(op="op", shape="", run=run, prove=lambda: None, num_bytes=1, baseline=run, early=early), Listener())
    assert asked == [True, False, False, False]


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


def test_failed_proof_reports_no_speed() -> None:
    def prove() -> None:
        assert_bits("rows", torch.zeros(3), torch.tensor([0.0, 1.0, 0.0]))

    def run() -> float:
        raise RuntimeError("timed although the proof failed")

    with pytest.raises(AssertionError, match="rows: 1 of 3 values differ"):
        row_of(Case(op="op", shape="", run=partial(run), prove=prove, num_bytes=1), Clock())


def test_bits_are_bytes() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert_bits("a NaN equals itself", (nan, nan), (nan.clone(), nan.clone()))
    for other in (torch.tensor([-0.0]), torch.tensor([0.0], dtype=torch.float64), torch.zeros(2)):
        with pytest.raises(AssertionError):
            assert_bits("unlike", torch.tensor([0.0]), other)


NEWER = {"date": "2026-11-26", "triton": "3.7.1"}
FACTS = Facts(device="NVIDIA H200", date="2026-11-22", python="3.12", torch="2.11", triton="3.6", copy_tb_per_s="4.29")


def results(times: dict[tuple[str, str], float], **facts: str) -> Results:
    rows = [dict.fromkeys(HEADS, "") | {"op": op, "shape": shape, "us": str(us)} for (op, shape), us in times.items()]
    return Results(dataclasses.replace(FACTS, **facts), rows)


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = results({("linear", "M1, wide"): 9.21, ("sample", "64 x 3"): 13.0})
    write(tmp_path / "a.csv", [run])
    assert read(tmp_path / "a.csv") == [run]
    assert run.times() == {("linear", "M1, wide"): 9.21, ("sample", "64 x 3"): 13.0}
    (tmp_path / "b.csv").write_text("\n".join((tmp_path / "a.csv").read_text().splitlines()[1:]))
    with pytest.raises(ValueError, match=r"b\.csv: no line '# device: ...'"):
        read(tmp_path / "b.csv")
    (tmp_path / "c.csv").write_text((tmp_path / "a.csv").read_text().replace("us there", "us"))
    with pytest.raises(ValueError, match=r"c\.csv: columns op, shape, us, "):
        read(tmp_path / "c.csv")


@pytest.mark.parametrize("name", ["kernels_h200.csv", "kernels_h100.csv"])
def test_result_files_in_docs_can_be_read(name: str) -> None:
    runs = read(Path(__file__).resolve().parents[2] / "docs" / name)
    rows = [row for run in runs for row in run.times()]
    assert len(rows) == len(set(rows)) == sum(len(run.rows) for run in runs) >= 200


def test_file_keeps_rows_that_a_run_did_not_measure(tmp_path: Path) -> None:
    """Each row is under the facts of the run that measured it last."""
    first = results({("linear", "M1"): 9.2, ("linear", "M8"): 9.9})
    second = results({("linear", "M8"): 8.8, ("sample", "64"): 13.0}, date="2026-11-26", triton="3.7.1")
    write(tmp_path / "a.csv", merged([first], second))
    assert read(tmp_path / "a.csv") == [results({("linear", "M1"): 9.2}), second]
    assert merged([first, second], first) == [results({("sample", "64"): 13.0}, **NEWER), first]
    assert merged([first], results({})) == [first]
    with pytest.raises(ValueError, match="this is a NVIDIA H100"):
        merged([first], results({}, device="NVIDIA H100"))


def test_files_are_merged_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = results({("linear", "M1"): 9.2}), results({("linear", "M8"): 9.9}, **NEWER)
    write(tmp_path / "theirs.csv", [theirs])
    for before, after in (([], [theirs]), ([ours], [ours, theirs])):
        if before:
            write(tmp_path / "ours.csv", before)
        monkeypatch.setattr(
            sys, "argv", ["bench", "--csv", str(tmp_path / "ours.csv"), "--merge", str(tmp_path / "theirs.csv")]
        )
        assert main() == 0
        assert read(tmp_path / "ours.csv") == after
    assert capsys.readouterr().out.endswith("ours.csv: 2 rows of 2 runs\n")


def test_run_is_compared_with_an_earlier_one() -> None:
    earlier = results({("a", "same"): 100.0, ("a", "slower"): 100.0, ("b", "faster"): 50.0, ("b", "gone"): 7.0})
    now = results({("a", "same"): 104.9, ("a", "slower"): 107.0, ("b", "faster"): 40.0, ("c", "first"): 1.0})
    lines, good = compare(now, [earlier])
    assert good
    assert lines[1:] == [
        "         a same: 104.9 us, 100 before, ratio 1.05",
        "slower   a slower: 107 us, 100 before, ratio 1.07",
        "faster   b faster: 40 us, 50 before, ratio 0.80",
        "new      c first: 1 us",
        "missing  b gone: 7 us before",
        "3 compared, ratios 0.80 to 1.07, median 1.05; 1 slower by more than 5 %, 1 missing",
    ]
    assert compare(now, [earlier], ["a"])[0][-1].endswith("1 slower by more than 5 %, 0 missing")
    assert compare(now, [earlier], whole=False)[0][-1].endswith("1 slower by more than 5 %, 0 missing")
    again = results({("a", "slower"): 107.0}, **NEWER)
    assert compare(now, [earlier, again])[0][-1].endswith("0 slower by more than 5 %, 1 missing")


@pytest.mark.parametrize(
    ("before", "now", "good"),
    [(100.0, 110.0, True), (100.0, 110.2, False), (1.0, 1.1, True), (1.0, 1.15, False), (100.0, 10.0, True)],
)
def test_too_slow_rows_fail(before: float, now: float, good: bool) -> None:
    """A ratio above 10 % fails, unless it is within the digits of the file."""
    assert compare(results({("a", ""): now}), [results({("a", ""): before})])[1] == good


def test_devices_are_not_compared() -> None:
    with pytest.raises(ValueError, match="this is a NVIDIA H100, the earlier run is of a NVIDIA H200"):
        compare(results({}, device="NVIDIA H100"), [results({})])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can be timed here")
def test_without_a_gpu_it_exits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "kernel_times: no CUDA device: nothing to time here\n"


def test_unknown_op_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--op", "typo"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "no op typo: choose of add_rms_norm, " in capsys.readouterr().err


def test_rows_need_a_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--rows", "8"], "--rows needs a --model"),
        (["--model", "Qwen"], "invalid choice: 'Qwen'"),
        (["--model", "all", "--rows", "7"], "invalid choice: 7"),
        (["--merge", "a.csv"], "--merge copies rows to the file of --csv"),
    ):
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        with pytest.raises(SystemExit):
            main()
        assert message in capsys.readouterr().err


def test_compile_arguments_equal_those_of_the_table() -> None:
    selection = Selection(ops=["linear"], models=["Mixtral-8x7B"], rows=(1, 8))
    assert selection.arguments() == ["--op=linear", "--model=Mixtral-8x7B", "--rows=1", "--rows=8"]
    assert Selection(ops=["linear"]).arguments() == ["--op=linear"]


def test_interrupted_run_keeps_its_rows_and_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed row, or one that lacks memory, is named and keeps its earlier result."""

    def prove() -> None:
        raise torch.OutOfMemoryError("2 GiB more")

    def some(selection: Selection) -> Iterator[Case]:
        for shape, proof in (("M1", lambda: None), ("M8", prove), ("M64", lambda: None)):
            yield Case(op="linear", shape=shape, run=partial(float, 2e-6), prove=proof, num_bytes=2 * 10**9)
        raise KeyboardInterrupt

    path = tmp_path / "a.csv"
    earlier = results({("linear", "M1"): 9.2, ("linear", "M8"): 9.9})
    write(path, [earlier])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    for name, stand_in in (("all_cases", some), ("compile_all", lambda selection: None), ("Timer", Clock)):
        monkeypatch.setattr(f"kernel_times.{name}", stand_in)
    with pytest.raises(KeyboardInterrupt):
        report(Selection(models=["all"]), path, [])
    kept, new = read(path)
    assert (kept.times(), kept.facts) == ({("linear", "M8"): 9.9}, FACTS)
    assert new.times() == {("linear", "M1"): 2.0, ("linear", "M64"): 2.0}
    assert "RED linear M8: 2 GiB more" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    with pytest.raises(ValueError, match="this is a NVIDIA H100 80GB HBM3, the earlier run is of a NVIDIA H200"):
        report(Selection(), path, [])


def test_every_module_is_listed_once() -> None:
    assert len(set(MODULES)) == len(MODULES)


def test_commands_in_the_docs_have_one_op_per_flag() -> None:
    """A command with two ops repeats --op: a bare second op would be an unrecognized argument."""
    known = {op for name in MODULES for op in importlib.import_module(f"kernel_cases.{name}").OPS}
    commands = [
        (path.name, command)
        for path in sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
        for command in re.findall(r"kernel_times\.py (--op[^`]*)`", path.read_text())
    ]
    assert commands
    for where, command in commands:
        words = command.split()
        values = [word for word in words if not word.startswith("--")]
        assert words.count("--op") == len(values), (where, command)
        assert set(values) <= known, (where, command)


def test_call_with_its_own_tensors() -> None:
    wide, config = torch.arange(48.0).view(4, 12), tuning.RowConfig(BLOCK=16)
    q, k, turned = wide[:, 2:6], wide[:, 6:9], torch.arange(6).view(2, 3).T
    tables = DecodeTables(page_table=torch.ones(2, 3).int(), kv_lens=torch.ones(2).int(), page_size=16)
    edits = LogitEdits(
        words=torch.ones(1, 5).int(),
        bias=torch.zeros(1, 1).double(),
        slots=torch.zeros(1).long(),
        penalties=torch.ones(1, 3).double(),
    )
    run = partial(max, q, (k, [turned, "a"]), 7, None, again=q, tables=tables, edits=edits, config=config)
    own = with_own_tensors(run)
    assert own.func is max
    (own_q, (own_k, [own_turned, text]), seven, nothing), keywords = own.args, own.keywords
    assert (text, seven, nothing, keywords["tables"].page_size) == ("a", 7, None, 16)
    assert keywords["config"] is config
    assert keywords["again"] is own_q, "the same tensor is copied once"
    given = [q, k, turned, tables.page_table, tables.kv_lens, *edits.named().values()]
    copies = [own_q, own_k, own_turned, keywords["tables"].page_table, keywords["tables"].kv_lens]
    copies += keywords["edits"].named().values()
    for x, y in zip(given, copies, strict=True):
        assert_bits("copy", y, x)
        assert (y.stride(), y.storage_offset()) == (x.stride(), x.storage_offset())
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert own_q.untyped_storage().data_ptr() == own_k.untyped_storage().data_ptr(), "views share one tensor"


@pytest.mark.slow
def test_every_run_holds_its_tensors_as_arguments() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    command = [sys.executable, "-c", SEE_THROUGH]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert set(ended.stdout) == {"."}, ended.stdout
