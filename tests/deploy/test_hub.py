"""Models by hub id: with a cache built by hand, with a small HTTP hub, and without a hub."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tests.deploy.test_cli import moeyard
from tests.deploy.test_serve import free_port
from tests.limits import HANG_SECONDS
from tokenizers import Tokenizer, models

from moeyard.cli.commands import build_parser, main
from moeyard.local.before_start import Checked, check_before_start, fetch_missing
from moeyard.local.hub import describe, fetch, missing_file
from moeyard.local.model_source import hub_id
from moeyard.local.settings import api_settings, engine_config
from moeyard_worker.checkpoint.index import read_header
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.shapes import served_model

MODEL = "org/tiny-1.5"
OLD, NEW = "a" * 40, "b" * 40
INDEX = json.dumps({"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}})
ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deploy" / "demo"
CONFIG = json.loads((DEMO / "config.json").read_text())
FILES = {
    "config.json": json.dumps(CONFIG),
    "tokenizer.json": Tokenizer(models.BPE()).to_str(),
    "model.safetensors.index.json": INDEX,
    "model-1.safetensors": "1",
    "model-2.safetensors": "2",
}
TEMPLATES = {
    "chat_template.jinja": "x",
    "additional_chat_templates/tool_use.jinja": "y",
    "encoding/encoding_dsv4.py": "z",
}
MORE = {
    "README.md": "no",
    "consolidated.safetensors": "no",
    "original/config.json": "no",
    "original/x.jinja": "no",
    "encoding/x.py": "no",
}


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a cache of this test, and no hub."""
    for name, value in (("HF_HUB_CACHE", str(tmp_path / "hub")), ("HF_HUB_OFFLINE", False)):
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    use_hub(monkeypatch, f"http://127.0.0.1:{free_port()}")


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Do what HF_ENDPOINT does to a new program."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """The model in the cache, at its main branch, and an older commit with missing files."""
    repository = tmp_path / "hub" / f"models--{MODEL.replace('/', '--')}"
    for commit, files in ((NEW, FILES), (OLD, {"config.json": FILES["config.json"]})):
        (repository / "snapshots" / commit).mkdir(parents=True)
        for name, text in files.items():
            (repository / "snapshots" / commit / name).write_text(text)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(NEW)
    (repository / "refs" / "old").write_text(OLD)
    return repository / "snapshots"


class Held(bytes):
    """A file of the hub that ends after its beginning until `gate` is set."""

    def __init__(self, _: bytes) -> None:
        self.gate = threading.Event()


@pytest.fixture
def files() -> dict[str, bytes]:
    """Files of the hub; a test may change them."""
    return {name: text.encode() for name, text in {**FILES, **TEMPLATES, **MORE}.items()}


@pytest.fixture
def real(files: dict[str, bytes]) -> dict[str, bytes]:
    """The same with a servable checkpoint: the demo's, behind an index."""
    keys = list(read_header(DEMO / "model.safetensors"))
    files.clear()
    files |= {name: (DEMO / name).read_bytes() for name in ("config.json", "tokenizer.json", "model.safetensors")}
    files["model.safetensors.index.json"] = json.dumps(
        {"weight_map": dict.fromkeys(keys, "model.safetensors")}
    ).encode()
    return files


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub with the model at commit NEW of its main branch; returns the requested paths."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body if not isinstance(body, Held) else body[:1000])
                if isinstance(body, Held):
                    body.gate.wait()

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
                self.reply(200, files[name], ETag=f'"{name}-1"', X_Repo_Commit=NEW)
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


def test_complete_copy_needs_no_hub(cached: Path, hub: list[str]) -> None:
    assert fetch(MODEL, None) == fetch(MODEL, NEW) == str(cached / NEW)
    assert hub == []


def test_only_missing_files_are_fetched(hub: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path(fetch(MODEL, None))
    assert directory.name == NEW
    found = {str(f.relative_to(directory)): f.read_text() for f in directory.rglob("*") if f.is_file()}
    assert found == {**FILES, **TEMPLATES}
    assert capsys.readouterr().err.splitlines()[-1] == "downloaded 2 B of weights"
    hub.clear()
    assert fetch(MODEL, None) == str(directory)
    assert hub == []


def test_incomplete_copy_is_completed(cached: Path, hub: list[str]) -> None:
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
def test_models_missing_on_the_hub(hub: list[str], model: str, revision: str | None, says: str) -> None:
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


def test_single_weight_file_is_complete(cached: Path) -> None:
    for name in ("model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"):
        (cached / NEW / name).unlink()
    (cached / NEW / "model.safetensors").write_text("1")
    assert missing_file(cached / NEW) is None
    (cached / NEW / "model.safetensors.index.json").write_text("[]")
    assert "index.json" in str(missing_file(cached / NEW))


def test_command_line_accepts_a_hub_id(cached: Path) -> None:
    args = build_parser().parse_args(["serve", MODEL])
    config = engine_config(args)
    assert config.model_path == str(cached / NEW)
    assert api_settings(args, config).names == (MODEL,)
    args = build_parser().parse_args(["verify", MODEL, "--revision", NEW])
    assert (args.model, args.revision) == (MODEL, NEW)


def test_directory_takes_precedence_over_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_id(MODEL) == MODEL
    (tmp_path / MODEL).mkdir(parents=True)
    assert [hub_id(m) for m in (MODEL, "/org/tiny", "./org/tiny", "a/b/c", "tiny", None)] == [None] * 6


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["org/none"], "moeyard: no directory 'org/none' here, not whole in the hub's cache"),
        (["org/none", "--workers", "0"], "moeyard: --workers must be at least 1, got 0"),  # before any download
        (["--revision", "v1"], "moeyard: --revision v1: only a model of the Hugging Face hub has revisions"),
    ],
)
def test_errors_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(says)


def weights_of(asked: list[str]) -> list[str]:
    """Return requests for weights, even for their size."""
    return [path for path in asked if path.endswith(".safetensors")]


def checked(*flags: str) -> tuple[Checked, EngineConfig, ModelConfig]:
    """Run the checks that `serve` makes before it starts."""
    args = build_parser().parse_args(["serve", MODEL, *flags])
    config = engine_config(args)
    model = served_model(config)
    api = api_settings(args, config)
    return check_before_start(config, model, api=api, local=True, hub_model=MODEL), config, model


def change(files: dict[str, bytes], **values: Any) -> None:
    """Change values in config.json."""
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), **values}).encode()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"quantization_config": {"quant_method": "quark", "fmt": "e4m3"}}, r"quantised by quark \(e4m3\)"),
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        (
            {"num_hidden_layers": 8},
            r"its index names no tensor \S+layers\.7\.\S+, which config\.json calls for \(and \d+",
        ),
    ],
)
def test_unsupported_model_downloads_no_weights(
    values: dict[str, Any], says: str, real: dict[str, bytes], hub: list[str]
) -> None:
    change(real, **values)
    with pytest.raises(ValueError, match=says):
        checked()
    assert f"/{MODEL}/resolve/{NEW}/config.json" in hub
    assert weights_of(hub) == []


def test_other_commands_refuse_before_the_download(
    real: dict[str, bytes], hub: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    change(real, quantization_config={"quant_method": "quip", "bits": 4})
    for words in (["verify", MODEL], ["bench", "engine", MODEL, "--device", "cpu"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert "quantised by quip (4 bits)" in capsys.readouterr().err
    assert main(["doctor", MODEL, "--port", "0", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert any(f["level"] == "problem" and "quantised by quip (4 bits)" in f["text"] for f in findings)
    assert weights_of(hub) == []


def test_serve_reports_the_download(real: dict[str, bytes], hub: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found, config, model = checked("--workers", "2")
    assert weights_of(hub) == []
    capsys.readouterr()
    fetch_missing(found, config, model)
    err = capsys.readouterr().err
    said, *progress, last = err.splitlines()
    assert re.fullmatch(
        rf"{MODEL}: 15\.11 MiB of weights to download in 1 file, [\d.]+ [MGT]iB are free in \S+; in memory the experts "
        r"take [\d.]+ MiB in all, other weights [\d.]+ MiB per worker; a worker has [\d.]+ GiB free: dense weights .*",
        said,
    )
    # At least one line, the first as soon as any progress is known.
    assert progress
    assert all(re.fullmatch(r"downloading weights: [\d.]+ [KM]?i?B of 15\.11 MiB \(\d+ %\)", line) for line in progress)
    assert last == "downloaded 15.11 MiB of weights"
    assert Path(str(config.model_path), "model.safetensors").read_bytes() == real["model.safetensors"]
    assert checked()[0].download is None


def test_doctor_downloads_nothing(real: dict[str, bytes], hub: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", MODEL, "--port", "0", "--json"])
    found = {each["subject"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert found["model"]["text"].startswith(f"{MODEL}: 6 layers, 32 experts")
    assert found["download"]["level"] == "ok"
    assert found["download"]["text"].startswith("15.11 MiB of weights to download in 1 file")
    assert weights_of(hub) == []


def test_disk_that_is_too_small(real: dict[str, bytes], hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(ValueError, match=r"15\.11 MiB of weights.* 1 MiB are free in \S+; make room, or set HF_"):
        checked()
    assert weights_of(hub) == []
    # A downloaded part needs no space.
    blobs = describe(MODEL, None).parents[1] / "blobs"
    (blobs / "x.incomplete").write_bytes(bytes(15 << 20))
    assert checked()[0].download is not None


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["q-Q4_K_M.gguf"], r"has its weights as GGUF files \(q-Q4_K_M\.gguf\); for .* download the file"),
        (["config.json", "tokenizer.json", "q.gguf"], "as GGUF files"),
        (["config.json", "tokenizer.json", "pytorch_model.bin"], "as PyTorch files"),
        (
            ["config.json", "tokenizer.json"],
            "no model.safetensors.index.json, and the hub has no model.safetensors",
        ),
        (["config.json", "model.safetensors"], r"has no tokenizer\.json, and the hub gave none"),
    ],
)
def test_repository_without_safetensors(names: list[str], says: str, files: dict[str, bytes], hub: list[str]) -> None:
    known = files.copy()
    files.clear()
    files |= {name: known.get(name, b"") for name in names}
    with pytest.raises(ValueError, match=says):
        checked()
    assert not [path for path in hub if path.endswith((".gguf", ".bin", ".safetensors"))]


def test_command_refuses_before_the_download(
    real: dict[str, bytes], hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command, for a port that is in use and an unsupported checkpoint."""
    monkeypatch.setenv("HF_ENDPOINT", huggingface_hub.constants.ENDPOINT)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "another"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        outcome = moeyard("serve", MODEL, "--port", str(taken.getsockname()[1]))
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("moeyard: cannot listen on 127.0.0.1:")
    change(real, quantization_config={"quant_method": "quip", "bits": 4})
    shutil.rmtree(tmp_path / "another")
    outcome = moeyard("serve", MODEL, "--port", "0")
    assert outcome.code == 2
    assert "quantised by quip (4 bits)" in outcome.err.splitlines()[-1]
    assert f"/{MODEL}/resolve/{NEW}/config.json" in hub
    assert weights_of(hub) == []


def test_ctrl_c_ends_a_download_at_once(real: dict[str, bytes], hub: list[str], tmp_path: Path) -> None:
    """The library's threads wait for a file that never arrives."""
    held = Held(real["model.safetensors"])
    real["model.safetensors"] = held
    code = (
        "import _thread, sys; from moeyard.local import hub; directory = hub.describe(sys.argv[1], None)\n"
        "class Interrupting(hub.Progress):\n"
        "    def show(self, done, total): super().show(done, total); _thread.interrupt_main()\n"
        "hub.Progress = Interrupting; hub.download(hub.missing_weights(sys.argv[1], directory))"
    )
    folders = os.pathsep.join(str(ROOT / name) for name in ("worker", "router", "kernels", "deploy"))
    cache = {"HF_ENDPOINT": huggingface_hub.constants.ENDPOINT, "HF_HUB_CACHE": str(tmp_path / "cut")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, MODEL],
            env={**os.environ, **cache, "PYTHONPATH": folders},
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
    finally:
        held.gate.set()
    assert done.returncode == 130, done.stderr
    assert weights_of(hub)
    assert done.stderr.startswith("downloading weights: ")
