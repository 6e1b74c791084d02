"""Every rank of a real `moeyard serve` is drained and restarted under load: no request fails and no answer changes."""

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.deploy.test_serve import DEMO, Command, command, get
from tests.limits import HANG_SECONDS

__all__ = ["command"]  # the fixture


def ask(url: str, i: int, tokens: int = 60) -> dict[str, Any]:
    """Return one seeded stream with log-probabilities, merged; an error in it fails the test."""
    body = {
        "prompt": [300 + (7 * i + k) % 3000 for k in range(5 + 9 * i)],
        "max_tokens": tokens + 5 * i,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
        "stream": True,
        **({"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": i}),
    }
    ids: list[int] = []
    logprobs: list[float] = []
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=HANG_SECONDS) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line and line != "data: [DONE]":
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["text"]
                    ids += choice.get("token_ids") or []
                    logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
    return {"ids": ids, "text": text, "logprobs": logprobs}


@pytest.mark.slow
def test_rolling_restart_under_load(command: Callable[..., Command], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    server = command("serve", str(model), "--workers", "2", "--port", "0", "--served-model-name", "demo")
    server.wait_ready()
    streams = 6
    with ThreadPoolExecutor(streams) as pool:
        expected = list(pool.map(lambda i: ask(server.url, i), range(streams)))
        assert all(len(each["ids"]) == 60 + 5 * i for i, each in enumerate(expected))
        before = {process.pid for process in server.workers()}
        over = threading.Event()

        def load(i: int) -> int:
            count = 0
            while not over.is_set():
                assert ask(server.url, i) == expected[i]
                count += 1
            return count

        loads = [pool.submit(load, i) for i in range(streams)]
        try:
            restarted = server.run("restart", "--drain-timeout", "0.2", "--prefill-chunk", "64")
        finally:
            over.set()
        assert restarted.returncode == 0, server.report(restarted.stderr)
        counts = [each.result() for each in loads]
    assert min(counts) >= 1
    assert restarted.stdout.startswith("ranks 0 and 1 restarted in ")
    assert "rank 0 takes no new requests, and has " in restarted.stderr
    assert not before & {process.pid for process in server.workers()}, "each rank must be a new process"
    assert len(server.workers()) == 2
    page = server.incidents()
    assert [(each["planned"], each["reason"], each["launcher"]["planned"]) for each in page] == [
        (True, f"worker {rank} is being restarted", True) for rank in (1, 0)
    ]

    # A restart that cannot succeed is refused before any rank is drained.
    weights = next(model.glob("*.safetensors"))
    weights.rename(tmp_path / "elsewhere")
    alive = {process.pid for process in server.workers()}
    refused = server.run("restart", "--worker", "0")
    assert refused.returncode == 1, refused.stdout
    assert "moeyard: the next process of rank 0 does not start: " in refused.stderr
    assert "has " not in refused.stderr, "the rank must not be drained"
    server.wait_for(lambda: {process.pid for process in server.workers()} == alive)
    assert ask(server.url, 0) == expected[0]
    (tmp_path / "elsewhere").rename(weights)

    drained = server.run("drain", "--worker", "1", "--drain-timeout", "0")
    assert drained.returncode == 0, drained.stderr
    fleet = get(f"{server.url}/v1/fleet").json()
    assert [worker["draining"] for worker in fleet["workers"]] == [False, True]
    assert ask(server.url, 3) == expected[3], "its experts must be loaded"
    for words, code, said in (
        (("drain", "--worker", "0"), 2, "no other rank than 0 takes requests"),
        (("drain", "--worker", "5"), 2, "there is no rank 5"),
        (("restart", "--worker", "1", "--threads", "3"), 2, "threads must be 1 or 2"),
    ):
        refused = server.run(*words)
        assert (refused.returncode, refused.stderr.count("\n")) == (code, 1)
        assert said in refused.stderr
    assert server.run("undrain", "--worker", "1").returncode == 0
    server.process.terminate()
    server.check_end(0)
    assert list(server.temporary.glob("moeyard-control-*/*")) == []
    assert server.run("undrain", "--worker", "1").returncode == 1, "no server may answer"
