"""bench/deterministic.py: the commands of its servers, the count of changed answers, and a row of a real server."""

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import deterministic
import pytest
from tests.checkpoints import make_checkpoint
from tests.e2e.http_fleet import engine_config, serve_http
from tests.fleet import ProcessPool


def test_servers_and_their_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    args = deterministic.parse(["/models/m", "--device", "cuda:1"])
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/{name}")
    ours, plain, invariant = deterministic.engines(args)
    assert ours.command[1:] == ("-m", "moeyard", "serve", "/models/m", "--device", "cuda:1")
    assert plain.command == invariant.command == ("/opt/vllm", "serve", "/models/m", "--no-enable-prefix-caching")
    assert (ours.variables, plain.variables) == ((), ())
    assert invariant.variables == (("VLLM_BATCH_INVARIANT", "1"),)
    some = deterministic.parse(["/models/m", "--of", "vllm-invariant"])
    assert deterministic.engines(some) == [invariant]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert deterministic.engines(args) == [ours]
    assert "vllm is not installed" in capsys.readouterr().err


class Wavering(BaseHTTPRequestHandler):
    """A server that answers the seeds 1 and 4 with other bits when it is asked again."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen: list[int] = self.server.seen  # type: ignore[attr-defined]
        again = body["seed"] in seen
        seen.append(body["seed"])
        token = 8 if again and body["seed"] == 1 else 7
        logprob = -0.25 if again and body["seed"] == 4 else -0.5
        self._answer({"choices": [{"token_ids": [token], "logprobs": {"token_logprobs": [logprob]}}]})

    def _answer(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def wavering() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Wavering)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_changed_answers_are_counted(wavering: str) -> None:
    assert deterministic.count_changed(wavering, checks=6, vocab=200) == 2


def test_row_of_a_server(processes: ProcessPool, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=True, max_position_embeddings=1024)
    words = [str(model), "--streams", "2", "--prompt", "8", "--output", "4", "--prefill", "40", "--checks", "3"]
    with serve_http(processes, engine_config(model, num_workers=1)) as http:
        row = deterministic.measure(http.url, deterministic.parse(words), tmp_path)
    assert row.keys() == {"tpot 2", "prefill", "changed"}
    assert row["tpot 2"] > 0
    assert row["prefill"] > 0
    assert row["changed"] == "0 of 3"
