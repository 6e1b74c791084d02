"""`moeyard bench URL` and `moeyard chat` against a real router: requests, counts and output."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeyard.cli.commands import main
from moeyard.clients.api_client import stream_chat
from moeyard.clients.chat import Talk, command, converse
from moeyard.clients.target_config import parse_target
from moeyard_worker.protocol import Rejected

IDS = ("--endpoint", "completions", "--prompts", "ids", "--prompt-tokens", "30", "--warmup", "2")
Run = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture
def bench(service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line on the service; return its exit code, its table and its --json."""

    def run(*arguments: str) -> tuple[int, str, dict[str, Any]]:
        file = tmp_path / "result.json"
        code = main(["bench", service.url, "--json", str(file), "--seed", "3", *arguments])
        return code, capsys.readouterr().out, json.loads(file.read_text())

    return run


def test_closed_loop(service: Any, bench: Run) -> None:
    """Every measured request has its own prompt and answer length, and every token counts once."""
    code, table, result = bench(
        "--num-requests",
        "12",
        "--warmup",
        "0",
        "--concurrency",
        "3",
        "--prompt-tokens",
        "60:90",
        "--output-tokens",
        "5:9",
        "--slo",
        "ttft=120s,e2e=120s",
    )
    figures = result["figures"]
    assert (code, figures["completed"], figures["failed"]) == (0, 12, 0)
    measured = [s for s in service.submits if s.sampling.max_tokens > 1]
    assert len(measured) == 12
    assert figures["output_tokens"] == sum(s.sampling.max_tokens for s in measured)
    assert figures["prompt_tokens"] == sum(len(s.prompt_token_ids) for s in measured)
    assert figures["cached_tokens"] == 3 * 12
    assert len({s.prompt_token_ids for s in service.submits}) == len(service.submits)
    # Three probes estimate the tokens per word.
    assert 55 <= figures["prompt_tokens"] / 12 <= 95
    assert {s.sampling.max_tokens for s in measured} <= set(range(5, 10))
    assert all(s.sampling.ignore_eos for s in measured)
    assert figures["goodput"]["share"] == 1.0
    assert 0 < figures["ttft_ms"]["p50"] <= figures["e2e_ms"]["p50"]
    assert [row["output_tokens"] for row in result["requests"]]
    assert "12 of 12 whole" in table
    assert "us per token" in table


def test_open_loop_of_conversations(service: Any, bench: Run) -> None:
    """A turn resends the earlier turns and the answers."""
    short = ("--prompt-tokens", "40", "--output-tokens", "4", "--warmup", "0")
    code, _, result = bench("--rate", "inf", "--num-requests", "4", "--turns", "2", *short)
    assert (code, result["figures"]["completed"]) == (0, 4)
    lengths = sorted(len(s.prompt_token_ids) for s in service.submits if s.sampling.max_tokens == 4)
    assert max(lengths[:2]) + 20 < min(lengths[2:])


def test_token_ids(service: Any, bench: Run) -> None:
    _, _, result = bench(*IDS, "--num-requests", "3", "--output-tokens", "4", "--shared-prefix", "16")
    assert result["figures"]["prompt_tokens"] == 3 * 46
    assert result["figures"]["completed"] == 3
    assert len({s.prompt_token_ids[:16] for s in service.submits}) == 2  # warm-up prompts have other words
    assert len({s.prompt_token_ids for s in service.submits}) == 3 + 2


def test_failures_are_counted_and_named(service: Any, bench: Run) -> None:
    for worker in service.workers:
        worker.reject = Rejected(request_id="", reason="queue_full", message="8 sequences wait here", retry_after=1.0)
    code, table, result = bench(*IDS, "--num-requests", "5", "--warmup", "0")
    assert (code, result["figures"]["completed"], result["figures"]["failed"]) == (1, 0, 5)
    (error,) = result["errors"]
    assert error["status"] == 429
    assert error["count"] == 5
    assert f"5 x HTTP {error['status']}" in table


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the single line with which a command ends."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("moeyard: ")
    return line


def test_invalid_settings_are_refused(service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "bench", service.url, "--model", "other")
    assert "HTTP 404" in line
    assert "other" in line
    assert "no server answers" in refused(capsys, "bench", "http://127.0.0.1:9")
    assert "--prompts ids goes with" in refused(capsys, "bench", service.url, "--prompts", "ids")
    assert "--burstiness" in refused(capsys, "bench", service.url, "--burstiness", "2")
    assert "no objective" in refused(capsys, "bench", service.url, "--slo", "fast")
    assert f"--json {tmp_path} is no place for a file" in refused(capsys, "bench", service.url, "--json", str(tmp_path))
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert "no result" in refused(capsys, "bench", service.url, "--compare", str(other))


def test_compare_and_png(service: Any, bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = tmp_path / "first.json"
    short = ("--num-requests", "2", "--prompt-tokens", "40", "--output-tokens", "4", "--warmup", "0")
    assert main(["bench", service.url, "--json", str(first), *short]) == 0
    png = tmp_path / "picture.png"
    _, table, _ = bench(*short, "--png", str(png), "--compare", str(first))
    assert "B: this run" in table
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "--compare", str(first), str(tmp_path / "result.json")]) == 0
    assert "B/A" in capsys.readouterr().out


def test_piped_chat(service: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Stdout has the answer and nothing else."""
    monkeypatch.setattr("sys.stdin", io.StringIO("one two\nthree\n"))
    assert main(["chat", service.url, "--set", "max_tokens=6", "--system", "Be brief."]) == 0
    out, err = capsys.readouterr()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one two\nthree"}]
    whole = service.chat(model="tiny", max_tokens=6, messages=messages)
    assert out.rstrip("\n") == whole["choices"][0]["message"]["content"]
    assert err == ""
    assert service.submits[0].prompt_token_ids == service.submits[1].prompt_token_ids
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert "HTTP 400" in refused(capsys, "chat", service.url, "--set", "bogus=1")


def test_conversation(service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The next turn resends the conversation, a failed request is dropped, and commands change the settings."""
    lines = iter(["/set max_tokens=4", "first", "/set temperature=-1", "fails", "/set temperature=", "second", "/quit"])
    talk = Talk(model="tiny")
    converse(parse_target(service.url), talk, lambda: next(lines))
    assert [m["content"] for m in talk.messages if m["role"] == "user"] == ["first", "second"]
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2
    assert talk.settings == {"max_tokens": 4}
    first, second = service.submits
    assert len(second.prompt_token_ids) > len(first.prompt_token_ids) + 4
    _, err = capsys.readouterr()
    assert "4 tokens" in err
    assert "moeyard: HTTP 400" in err
    command(talk, "/clear")
    command(talk, "/system Be brief.")
    assert [m["role"] for m in talk.body()["messages"]] == ["system"]
    command(talk, "/nonsense")
    assert "/help" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_chat(service: Any, wait_for: Callable[..., None]) -> None:
    """The server stops decoding, and the conversation keeps the partial answer."""
    for worker in service.workers:
        worker.pace = 0.01
    shown: list[str] = []

    def show(text: str, thought: bool) -> None:
        shown.append(text)
        if len(shown) == 3:
            raise KeyboardInterrupt

    from_stream = stream(service, show)
    assert from_stream.interrupted
    assert from_stream.error is None
    assert from_stream.text == "".join(shown)
    wait_for(lambda: len(service.aborts) == 1, "the request was not aborted")


def stream(service: Any, show: Callable[[str, bool], None]) -> Any:
    """Return a long answer."""
    talk = Talk(model="tiny", messages=[{"role": "user", "content": "Hello"}], settings={"max_tokens": 200})
    return stream_chat(parse_target(service.url), talk.body(), show)
