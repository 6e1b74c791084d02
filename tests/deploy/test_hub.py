"""Models by their id on the hub: a cache built by hand, a hub of a few lines of HTTP, and none at all."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from tests.deploy.test_serve import free_port

from moeyard.api_flags import api_settings
from moeyard.cli import build_parser, main
from moeyard.flags import engine_config
from moeyard.hub import fetch, missing_file
from moeyard.model_source import hub_id

MODEL = "org/tiny-1.5"
OLD, NEW = "a" * 40, "b" * 40
INDEX = json.dumps({"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}})
FILES = {
    "config.json": "{}",
    "tokenizer.json": "{}",
    "model.safetensors.index.json": INDEX,
    "model-1.safetensors": "1",
    "model-2.safetensors": "2",
}
MORE = {"chat_template.jinja": "x", "README.md": "no", "consolidated.safetensors": "no", "original/config.json": "no"}


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of this test's own, and no hub to reach."""
    for name, value in (("HF_HUB_CACHE", str(tmp_path / "hub")), ("HF_HUB_OFFLINE", False)):
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    use_hub(monkeypatch, f"http://127.0.0.1:{free_port()}")
    # transformers' oracle, loaded by other tests, switches the bars off for its whole process; a machine may for all.
    bars = sys.modules["huggingface_hub.utils.tqdm"]  # by attribute this name is the class in it
    monkeypatch.setattr(bars, "HF_HUB_DISABLE_PROGRESS_BARS", None)
    monkeypatch.setattr(bars, "progress_bar_states", {})


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Do what HF_ENDPOINT does to a program that starts."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """The model in the cache, at its main branch; with an older commit of which files are missing."""
    repository = tmp_path / "hub" / f"models--{MODEL.replace('/', '--')}"
    for commit, files in ((NEW, FILES), (OLD, {"config.json": "{}"})):
        (repository / "snapshots" / commit).mkdir(parents=True)
        for name, text in files.items():
            (repository / "snapshots" / commit / name).write_text(text)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(NEW)
    (repository / "refs" / "old").write_text(OLD)
    return repository / "snapshots"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that has the model at commit NEW of its main branch; the paths it was asked for."""
    asked: list[str] = []
    files = {**FILES, **MORE}

    class Hub(BaseHTTPRequestHandler):
        def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            asked.append(self.path)
            path = self.path.partition("?")[0]
            if path == f"/api/models/{MODEL}/revision/main":
                self.reply(200, json.dumps({"id": MODEL, "sha": NEW}).encode())
            elif path == f"/api/models/{MODEL}/tree/{NEW}":
                tree = [{"type": "file", "path": n, "size": len(t), "oid": f"{n}-1"} for n, t in files.items()]
                self.reply(200, json.dumps(tree).encode())
            elif path.startswith(f"/{MODEL}/resolve/{NEW}/"):
                name = path.removeprefix(f"/{MODEL}/resolve/{NEW}/")
                self.reply(200, files[name].encode(), ETag=f'"{name}-1"', X_Repo_Commit=NEW)
            elif path.startswith("/api/models/org/gated"):
                self.reply(403, X_Error_Code="GatedRepo")
            else:
                code = "RevisionNotFound" if MODEL in path else "RepoNotFound"
                self.reply(404, X_Error_Code=code)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        use_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        yield asked
        server.shutdown()
        thread.join()


def test_a_whole_copy_needs_no_hub(cached: Path, hub: list[str]) -> None:
    assert fetch(MODEL, None) == fetch(MODEL, NEW) == str(cached / NEW)
    assert hub == []


def test_what_is_missing_is_fetched_and_nothing_else(hub: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path(fetch(MODEL, None))
    assert directory.name == NEW
    assert {f.name: f.read_text() for f in directory.iterdir()} == {**FILES, "chat_template.jinja": "x"}
    assert "100%" in capsys.readouterr().err, "somebody waits for it"
    hub.clear()
    assert fetch(MODEL, None) == str(directory)
    assert hub == []


def test_a_copy_that_is_not_whole_is_completed(cached: Path, hub: list[str]) -> None:
    (cached / NEW / "model-2.safetensors").unlink()
    assert fetch(MODEL, None) == str(cached / NEW)
    assert missing_file(cached / NEW) is None


@pytest.mark.parametrize(
    ("model", "revision", "says"),
    [
        ("org/none", None, r"no directory 'org/none' here, and the Hugging Face hub has no such model"),
        ("org/gated", None, "org/gated: accept its terms"),
        (MODEL, "v9", f"{MODEL}: the Hugging Face hub has no revision 'v9'"),
        ("org/a..b", None, "neither a directory here nor an id"),
    ],
)
def test_what_the_hub_has_not(hub: list[str], model: str, revision: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fetch(model, revision)


def test_without_a_hub(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'org/none' here, not whole in the hub's cache, and the hub cannot be reach"):
        fetch("org/none", None)
    with pytest.raises(ValueError, match=rf"{OLD} has no tokenizer\.json, and the hub gave none"):
        fetch(MODEL, "old")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE forbids"):
        fetch("org/none", None)


@pytest.mark.parametrize("name", sorted(FILES))
def test_missing_file(cached: Path, name: str) -> None:
    (cached / NEW / name).unlink()
    assert missing_file(cached / NEW) == name


def test_a_single_file_of_weights_is_whole(cached: Path) -> None:
    for name in ("model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"):
        (cached / NEW / name).unlink()
    (cached / NEW / "model.safetensors").write_text("1")
    assert missing_file(cached / NEW) is None
    (cached / NEW / "model.safetensors.index.json").write_text("[]")
    assert "index.json" in str(missing_file(cached / NEW))


def test_the_command_line_finds_it_and_calls_it_by_its_id(cached: Path) -> None:
    args = build_parser().parse_args(["serve", MODEL])
    config = engine_config(args)
    assert config.model_path == str(cached / NEW)
    assert api_settings(args, config).names == (MODEL,)
    args = build_parser().parse_args(["verify", MODEL, "--revision", NEW])
    assert (args.model, args.revision) == (MODEL, NEW)


def test_a_directory_goes_before_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_id(MODEL) == MODEL
    (tmp_path / MODEL).mkdir(parents=True)
    assert [hub_id(m) for m in (MODEL, "/org/tiny", "./org/tiny", "a/b/c", "tiny", None)] == [None] * 6


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["org/none"], "moeyard: no directory 'org/none' here, not whole in the hub's cache"),
        (["org/none", "--workers", "0"], "moeyard: --workers must be at least 1, got 0"),  # before anything is fetched
        (["--revision", "v1"], "moeyard: --revision v1: only a model of the Hugging Face hub has revisions"),
    ],
)
def test_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(says)
