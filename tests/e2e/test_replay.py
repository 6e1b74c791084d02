"""`moeyard serve --log-requests` and `moeyard replay`: another fleet repeats every logged bit."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.http_fleet import HttpFleet, engine_config, serve_http
from tests.fleet import ProcessPool

from moeyard.cli.commands import main
from moeyard_router.config import AccessConfig

PROMPT = [7, 91, 3, 200, 64, 12, 5]


@pytest.fixture(scope="module")
def log(processes: ProcessPool, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of one rank that served requests of every kind."""
    path = tmp_path_factory.mktemp("log") / "requests.jsonl"
    access = AccessConfig(log_requests=path, log_prompts=True)
    config = engine_config(checkpoints["gqa"], num_workers=1)
    with serve_http(processes, config, access=access, fingerprint="ab12") as http:
        bodies: list[dict[str, Any]] = [
            {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 3},
            {"prompt": "Hello", "seed": 2**62, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "n": 2},
            {"prompt": PROMPT, "max_tokens": 9, "logprobs": 0, "presence_penalty": 1.5, "frequency_penalty": -1},
            {"prompt": PROMPT * 9, "max_tokens": 9, "repetition_penalty": 1.2, "logit_bias": {"17": 3.5}},
            {"prompt": PROMPT * 5, "max_tokens": 9, "kv_compression": {"method": "snapkv", "budget": 16, "window": 8}},
            {"prompt": "x", "max_tokens": 40, "structured_outputs": {"regex": "[a-f]{3,9}"}},
            {"prompt": "x", "max_tokens": 40, "structured_outputs": {"choice": ["ab", "cd"]}},
            {"prompt": "x", "max_tokens": 60, "response_format": {"type": "json_object"}},
            {"prompt": "x", "max_tokens": 60, "structured_outputs": {"json": {"type": "integer"}}},
            {"prompt": PROMPT, "max_tokens": 9, "stop": ["e"], "stream": True, "ignore_eos": True},
            {"prompt": PROMPT, "max_tokens": 0, "echo": True},
            {"prompt": PROMPT, "max_tokens": 3, "prompt_logprobs": 1, "score": "as_decoded", "output_start": 4},
        ]
        for body in bodies:
            assert http.post(**body).status_code == 200
        traced = {"max_tokens": 5, "trace_decode_token_ids": [5, 4, 3, 2, 9], "logprobs": 0}
        generated = http.client.post("/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": traced})
        assert generated.status_code == 200
        messages = [{"role": "user", "content": "Hi"}]
        body = {"messages": messages, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
        assert http.client.post("/v1/chat/completions", json=body).status_code == 200
    return path


@pytest.fixture(scope="module")
def two_ranks(processes: ProcessPool, checkpoints: dict[str, Path]) -> Iterator[HttpFleet]:
    """Another fleet: two ranks, few slots and small chunks."""
    config = engine_config(checkpoints["gqa"], num_workers=2, expert_slots=3, prefill_chunk=9)
    with serve_http(processes, config, fingerprint="cd34") as http:
        yield http


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_another_fleet_repeats_every_answer(
    log: Path, two_ranks: HttpFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(log)
    assert len(lines) == 15
    assert stat.S_IMODE(os.stat(log).st_mode) == 0o600
    assert main(["replay", str(log), "--url", two_ranks.url, "--concurrency", "4"]) == 0
    empty = sum(line["output_tokens"] == 0 for line in lines)
    assert empty == 1
    assert capsys.readouterr().out == f"all {len(lines) - empty} answers are equal; left out: {empty} without output\n"


def edited(lines: list[dict[str, Any]], tmp_path: Path) -> str:
    path = tmp_path / "log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_lines_that_are_left_out(
    log: Path, two_ranks: HttpFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = [line for line in lines_of(log) if line["output_tokens"] > 1][:2]
    assert [span["version"] for span in one["weight_versions"]] == ["default"]
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": one["output_tokens"]}]
    mixed = {**one, "weight_versions": spans, "token_ids": [1, 2, 3]}
    empty = {**one, "token_ids": [], "output_tokens": 0}
    for lines, said in (
        ([other], "the only answer is equal"),
        ([mixed, other, other], "all 2 answers are equal; left out: 1 with tokens of several weights"),
        ([empty, other, empty], "the only answer is equal; left out: 2 without output"),
        (
            [empty, mixed, other],
            "the only answer is equal; left out: 1 without output, 1 with tokens of several weights",
        ),
    ):
        assert main(["replay", edited(lines, tmp_path), "--url", two_ranks.url]) == 0
        assert capsys.readouterr().out == f"{said}\n"
    for lines, said in (([empty], "no request has output"), ([empty, mixed], "every output has tokens of several")):
        with pytest.raises(SystemExit, match="2"):
            main(["replay", edited(lines, tmp_path), "--url", two_ranks.url])
        assert said in capsys.readouterr().err


def test_first_difference_is_named(
    log: Path, two_ranks: HttpFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def replayed(*lines: dict[str, Any], equal: int = 1) -> str:
        path = edited([lines_of(log)[0]] * equal + list(lines), tmp_path)
        assert main(["replay", path, "--url", two_ranks.url]) == 1
        return capsys.readouterr().out.removeprefix(path)

    one = lines_of(log)[0]
    fingerprints = " (system_fingerprint was fp_ab12 and is fp_cd34); 1 answer before it is equal\n"
    ids, logprobs = one["token_ids"], one["token_logprobs"]
    other = [*ids[:5], ids[5] + 1, *ids[6:]]
    assert replayed({**one, "token_ids": other}) == f":2: token 5 was {ids[5] + 1} and is {ids[5]}{fingerprints}"
    for equal, said in ((0, "it is the first answer"), (2, "2 answers before it are equal")):
        assert replayed({**one, "token_ids": other}, equal=equal).endswith(f"); {said}\n")
    wrong = [*logprobs[:7], logprobs[7] * (1 + 2**-40), *logprobs[8:]]
    name = f":2: the log-probability of token 7 was {wrong[7]!r} and is {logprobs[7]!r}"
    assert replayed({**one, "token_logprobs": wrong}) == name + fingerprints
    assert replayed({**one, "sampling_params": {**one["sampling_params"], "stop_token_ids": ids[3:4]}}).startswith(
        ":2: the answer had 12 tokens and has 4"
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("drop", "has no prompt; serve with --log-prompts"),
        ("text", "no line of `moeyard serve --log-requests`"),
        ("empty", "no request has output"),
        ("field", "HTTP 400: "),
    ],
)
def test_unusable_logs(
    log: Path, two_ranks: HttpFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, named: str
) -> None:
    line = lines_of(log)[0]
    if change == "drop":
        del line["prompt_token_ids"]
    if change == "field":
        line["sampling_params"]["unknown"] = 1
    path = edited([] if change == "empty" else [line], tmp_path)
    if change == "text":
        Path(path).write_text("ready\n")
    with pytest.raises(SystemExit, match="2"):
        main(["replay", path, "--url", two_ranks.url])
    assert named in capsys.readouterr().err
