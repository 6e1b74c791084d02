"""The matrix of one answer (gpu_matrix.py) passes equal answers and names different ones, on a CPU or a GPU.

`python -m tests.e2e.gpu_matrix` runs the whole matrix. Fleets (`--ranks`) are on CPUs here.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.e2e import gpu_matrix, gpu_matrix_ranks
from tests.e2e.gpu_matrix import Loaded, check, courses, load, references
from tests.e2e.gpu_matrix_ranks import Row, cases, missing


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_different_answer_is_named(device: str, model: str) -> None:
    """A model with pages alone, and one with state, whose prefixes are reused from one snapshot at a time."""
    rank = load(Loaded(model), device)
    try:
        expected = references(rank)
        (course,) = [c for c in courses(device) if str(c).endswith("2deep-chunk16-scarce")][:1]
        assert check(rank, course, expected)[0] == []
        a = expected["a"]
        wrong = expected | {"a": replace(a, token_ids=[*a.token_ids[:-1], a.token_ids[-1] ^ 1])}
        assert check(rank, course, wrong)[0] == [f"{course} a mixed"]
    finally:
        rank.worker.stop()


def test_failed_worker_is_named_and_others_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other workers of a model whose first worker fails have no reference."""

    def run(worker: Loaded, *_: Any) -> tuple[gpu_matrix.Row, gpu_matrix.Answers]:
        if worker.model == "olmoe" or worker.slots == "one":
            raise TypeError(f"not {worker.model}\nfor a reason")
        return gpu_matrix.Row(worker=worker, answers=2), {}

    monkeypatch.setattr(gpu_matrix, "run", run)
    monkeypatch.setattr(gpu_matrix, "ProcessPoolExecutor", lambda processes, **_: ThreadPoolExecutor(processes))
    asked = ["--models", "mixtral", "olmoe", "--kept", "no", "--slots", "all", "one", "--device", "cpu"]
    assert gpu_matrix.main(asked) == 1
    output = capsys.readouterr()
    _, _, *lines, last = output.out.splitlines()
    verdicts = {tuple(line.split()[:3]): line[line.rindex("  ") :].strip() for line in lines}
    first, other = gpu_matrix.KEPT
    lost, mixtral = "FAILED: no reference", "FAILED: TypeError: not mixtral"
    assert verdicts == {
        ("mixtral", "all", first): "equal",
        ("mixtral", "all", other): "equal",
        ("mixtral", "one", first): mixtral,
        ("mixtral", "one", other): mixtral,
        ("olmoe", "all", first): "FAILED: TypeError: not olmoe",
        ("olmoe", "all", other): lost,
        ("olmoe", "one", first): lost,
        ("olmoe", "one", other): lost,
    }
    assert re.fullmatch(r"4 answers of 8 workers in \d+ s, 0 differ, 6 workers failed", last)
    assert output.err.count("raise TypeError") == 3


RANKS = ["--ranks", "1", "2", "--exchange", "zmq", "--device", "cpu", "--models", "qwen3_moe"]


@pytest.mark.slow
def test_equal_fleets_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """Every placement passes. The output names cases that did not run and starts with revision and devices."""
    assert gpu_matrix.main([*RANKS[:4], "nccl", *RANKS[4:]]) == 0
    head, columns, *lines, last = capsys.readouterr().out.splitlines()
    assert re.match(r"revision \S.*, CPU, torch \d", head)
    assert columns.split()[:4] == ["model", "ranks", "exchange", "placement"]
    ran = [line for line in lines if line.endswith("equal")]
    assert [line.split()[1:4] for line in ran] == [
        ["1", "zmq", "shards"],
        ["2", "zmq", "shards"],
        ["2", "zmq", "shuffled"],
        ["2", "zmq", "copied"],
    ]
    assert sum("NOT RUN: nccl needs GPUs" in line for line in lines) == 4
    assert re.fullmatch(r"24 answers of 4 fleets in \d+ s, 0 differ, 0 fleets failed, 4 were not run", last)


@pytest.mark.slow
def test_different_or_failed_fleet_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next fleet still runs. One bit of a log-probability is a difference."""
    right, begin = gpu_matrix_ranks.references, gpu_matrix_ranks.start_fleet

    def wrong(*given: Any) -> gpu_matrix_ranks.Expected:
        found = right(*given)
        ids, logprobs, *rest = found["d"]
        other = replace(logprobs[3], logprob=logprobs[3].logprob + 2.0**-20)
        assert other != logprobs[3]
        return found | {"d": (ids, (*logprobs[:3], other, *logprobs[4:]), *rest)}

    def start(pool: Any, config: Any, placement: Any = None) -> Any:
        if placement is not None and placement.copies:
            raise RuntimeError("rank 1 is elsewhere\nfor a reason")
        return begin(pool, config, placement)

    monkeypatch.setattr(gpu_matrix_ranks, "references", wrong)
    monkeypatch.setattr(gpu_matrix_ranks, "start_fleet", start)
    assert gpu_matrix.main([*RANKS, "--placement", "copied", "shuffled"]) == 1
    *_, alone, copied, shuffled, last = capsys.readouterr().out.splitlines()
    assert alone.endswith("DIFFERS: d mixed")
    assert copied.endswith("FAILED: RuntimeError: rank 1 is elsewhere")
    assert shuffled.endswith("DIFFERS: d mixed")
    assert re.fullmatch(r"12 answers of 3 fleets in \d+ s, 2 differ, 1 fleets failed, 0 were not run", last)


def test_cases_need_enough_gpus_with_peer_access(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != {1, 2})
    every = cases((1, 2, 4), ("nvlink", "zmq"), ("shards", "copied"))
    assert [(case.ranks, case.exchange, case.placed) for case in every] == [
        (1, "nvlink", "shards"),
        (1, "zmq", "shards"),
        *(
            (ranks, exchange, placed)
            for ranks in (2, 4)
            for exchange in ("nvlink", "zmq")
            for placed in ("shards", "copied")
        ),
    ]
    assert {missing(case, "cuda", 2) for case in every if case.ranks < 4} == {""}
    assert {missing(case, "cuda", 2) for case in every if case.ranks == 4} == {"there are 2 GPUs"}
    assert {missing(case, "cuda", 4) for case in every if case.ranks == 4} == {
        "",
        "GPU 1 has no peer access to GPU 2",
    }
    # A run that compares nothing is not a success.
    assert gpu_matrix.main(["--ranks", "2", "--exchange", "nvlink", "--device", "cpu"]) == 1
    assert "0 answers of 0 fleets in 0 s, 0 differ, 0 fleets failed, 15 were not run" in capsys.readouterr().out


def test_fleet_that_did_not_run_as_its_line_says_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any) -> Row:
        raise AssertionError("no prefix was found again")

    monkeypatch.setattr(gpu_matrix_ranks, "references", lambda *_: {})
    monkeypatch.setattr(gpu_matrix_ranks, "run", run)
    assert gpu_matrix.main([*RANKS, "--placement", "shards"]) == 1
    assert capsys.readouterr().out.count("FAILED: AssertionError: no prefix was found again") == 2
