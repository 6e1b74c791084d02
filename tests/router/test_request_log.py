"""`--log-requests`: what a line has with and without `--log-prompts`, and what becomes of a disk that is full."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.router.test_contract import HELLO

from moeyard_router.api import request_log
from moeyard_router.api.request_log import RequestLog, check_log
from moeyard_router.config import AccessConfig
from moeyard_worker.protocol import SamplingParams, TokenIds, TokenLogprob, Tokens


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_lines_of_requests(start, wait_for, tmp_path, prompts, stream):
    path = tmp_path / "log"
    access = AccessConfig(log_requests=path, log_prompts=prompts)
    service = start(1, access=access, fingerprint="ab12")
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "seed": 3, "n": 2, "return_token_ids": True, "stream": stream}
    answer = service.post("/v1/completions", **body)
    assert answer.status_code == 200
    assert service.post("/v1/messages", messages=HELLO, max_tokens=2, stream=stream).status_code == 200
    wait_for(lambda: len(lines_of(path)) == 3, "three lines")
    lines = {(line["id"].partition("-")[0], line["index"]): line for line in lines_of(path)}
    line = lines["cmpl", 1]
    assert (line["reason"], line["model"], line["system_fingerprint"]) == ("length", "tiny", "fp_ab12")
    assert (line["prompt_tokens"], line["output_tokens"]) == (3, 4)
    assert line["prompt_sha256"] == hashlib.sha256(TokenIds.of([5, 6, 7]).data).hexdigest()
    assert (line["sampling_params"]["seed"], line["sampling_params"]["max_tokens"]) == (4, 4)
    assert ("prompt_token_ids" in line, "token_ids" in line) == (prompts, prompts)
    if prompts:
        assert line["prompt_token_ids"] == [5, 6, 7]
        assert line["output_sha256"] == hashlib.sha256(TokenIds.of(line["token_ids"]).data).hexdigest()
    if prompts and not stream:
        assert line["token_ids"] == answer.json()["choices"][1]["token_ids"]


def add(log: RequestLog, *, logprobs: int | None = None) -> None:
    scores = (TokenLogprob(logprob=float("-inf"), rank=9),) * 2 if logprobs is not None else ()
    output = [Tokens(request_id="r", start=0, token_ids=(8, 9), logprobs=scores)]
    sampling = SamplingParams(max_tokens=2, logprobs=logprobs)
    log.add("r", 0, prompt=(1, 2), sampling=sampling, output=output, count=1, reason="stop", served={"model": "m"})


def test_only_delivered_tokens_are_logged(tmp_path):
    log = RequestLog(tmp_path / "log", prompts=True)
    add(log, logprobs=0)
    log.close()
    (line,) = lines_of(tmp_path / "log")
    assert (line["token_ids"], line["token_logprobs"], line["output_tokens"]) == ([8], [-9999.0], 1)
    assert "system_fingerprint" not in line


def test_full_disk_is_said_and_serving_continues(caplog, monkeypatch):
    log = RequestLog(Path("/dev/full"), prompts=False)
    add(log)
    log.close()
    assert "1 requests are missing in /dev/full: " in caplog.text
    monkeypatch.setattr(request_log, "_QUEUE", 1)
    monkeypatch.setattr(RequestLog, "_write", lambda self: None)
    log = RequestLog(Path("/dev/null"), prompts=False)
    for _ in range(4):
        add(log)
    assert [each.args[0] for each in caplog.records[1:]] == [1, 2]


def test_unusable_settings(tmp_path):
    with pytest.raises(ValueError, match=r"^--log-requests /no/such/file: No such file or directory$"):
        check_log(AccessConfig(log_requests=Path("/no/such/file")))
    with pytest.raises(ValueError, match="--log-prompts says what --log-requests FILE writes"):
        AccessConfig(log_prompts=True)
    check_log(AccessConfig(log_requests=tmp_path / "new"))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
