"""The API of trainers: the paths, fields and answers of SGLang and vLLM, over the control socket and on a port."""

import json
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.limits import HANG_SECONDS

from moeyard.fleet import control
from moeyard.fleet.control import MAX_BODY, ControlPort, ControlSocket
from moeyard.fleet.messages import Refused
from moeyard.fleet.weights_api import FleetState, WeightsApi
from moeyard.local.serve import check_control
from moeyard.local.serve_config import ServeConfig
from moeyard_worker.config.worker_spec import ServedWeights


class Fleet:
    """Takes commands. `refuses` is the next refusal, `found` the digests of its ranks."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.refuses: Refused | None = None
        self.found = [{"rank0.w": "1"}, {"rank1.w": "2"}]
        self.state = FleetState(weights=ServedWeights(version="step-3", directory="/models/c"), paused=True, size=2)

    def command(self, name: str, say: Callable[[str], None], **fields: Any) -> str:
        self.asked.append((name, fields))
        refuses, self.refuses = self.refuses, None
        if refuses is not None:
            raise refuses
        say("on its way")
        return json.dumps(self.found) if name == "checksum" else "done"


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def api(fleet: Fleet) -> WeightsApi:
    return WeightsApi(fleet.command, lambda: fleet.state)


def post(api: WeightsApi, target: str, **body: Any) -> tuple[int, dict[str, Any]]:
    return api.answer("POST", target, json.dumps(body).encode())


SGLANG = {"load_format": None, "is_async": False, "torch_empty_cache": False, "keep_pause": False, "token_step": 0}
SGLANG |= {"recapture_cuda_graph": False, "flush_cache": True, "manifest": None}


@pytest.mark.parametrize(
    ("body", "mode"),
    [
        ({}, "wait"),
        (SGLANG, "wait"),
        ({"abort_all_requests": True}, "abort"),
        ({"is_async": True, "flush_cache": False}, "keep"),
    ],
)
def test_update_from_disk(api: WeightsApi, fleet: Fleet, body: dict[str, Any], mode: str) -> None:
    found = post(api, "/update_weights_from_disk", model_path="/models/b", weight_version="step-4", **body)
    assert found == (200, {"success": True, "message": "done", "num_paused_requests": 0})
    weights = ServedWeights(version="step-4", directory="/models/b")
    assert fleet.asked == [("update", {"weights": weights, "mode": mode})]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "model_path: expected a directory with safetensors files"),
        ({"model_path": 7}, "model_path: expected a text, got 7"),
        ({"model_path": "/b", "load_format": "dummy"}, 'load_format: "dummy" is not served; expected null or "auto"'),
        ({"model_path": "/b", "keep_pause": True}, "keep_pause: true is not served; expected false"),
        ({"model_path": "/b", "abort_all_requests": 1}, "abort_all_requests: expected true or false, got 1"),
        ({"model_path": "/b", "weight_version": "x" * 257}, "weight_version: at most 256 characters"),
        ({"model_path": "/b", "colour": "red"}, "colour: unknown field; expected abort_all_requests, "),
    ],
)
def test_refused_fields_of_an_update(api: WeightsApi, fleet: Fleet, body: dict[str, Any], said: str) -> None:
    status, found = post(api, "/update_weights_from_disk", **body)
    assert (status, found["success"]) == (400, False)
    assert found["message"].startswith(said)
    assert fleet.asked == []


def test_failed_update_says_why(api: WeightsApi, fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    message = "/b: truncated; the old weights remain in service"
    for code, status in ((2, 400), (1, 409)):
        fleet.refuses = Refused(message, code)
        found = post(api, "/update_weights_from_disk", model_path="/b")
        assert found == (status, {"success": False, "message": message, "num_paused_requests": 0})
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [f"update refused: {message}"] * 2


COMMANDS: dict[str, dict[str, Any]] = {
    "/update_weights_from_disk": {"model_path": "/b"},
    "/update_weights": {"weight_dir": "/b"},
    "/weight_checker": {"action": "checksum"},
    "/abort_request": {"abort_all": True},
    **{path: {} for path in ("/pause", "/resume", "/pause_generation", "/continue_generation", "/flush_cache")},
    **{path: {} for path in ("/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation")},
}


@pytest.mark.parametrize("path", COMMANDS)
def test_status_of_refused_commands(api: WeightsApi, fleet: Fleet, path: str) -> None:
    """The status says whether the client is at fault, should ask again later, or has no fleet any more."""
    for code, ended, status in ((2, False, 400), (1, False, 409), (1, True, 503)):
        fleet.refuses = Refused("busy or dead", code)
        fleet.state = replace(fleet.state, ended=ended)
        found, body = post(api, path, **COMMANDS[path])
        assert found == status
        assert "busy or dead" in json.dumps(body)


def test_fields_may_be_in_the_query_or_in_the_body(api: WeightsApi, fleet: Fleet) -> None:
    for target, body, name, fields in (
        ("/pause", {"mode": "keep"}, "pause", {"mode": "keep"}),
        ("/pause?mode=keep", {"mode": "keep", "clear_cache": False}, "pause", {"mode": "keep"}),
        ("/pause?clear_cache=false", {"mode": None, "wait_for_inflight_requests": True}, "pause", {"mode": "wait"}),
        ("/pause_generation?mode=retract", {}, "pause", {"mode": "keep"}),
        ("/sleep", {"level": 2, "mode": "wait"}, "sleep", {"level": 2, "mode": "wait"}),
        ("/sleep?level=2", {"level": 2, "tags": ["weights"]}, "sleep", {"level": 2, "mode": "keep"}),
        ("/abort_request?abort_all=true", {}, "cancel", {"names": None}),
        ("/wake_up?tags=weights&tags=kv_cache", {"tags": ["weights", "kv_cache"]}, "wake", {}),
    ):
        assert post(api, target, **body)[0] == 200, target
        assert fleet.asked.pop() == (name, fields), target
    for target, body, said in (
        ("/pause?mode=keep", {"mode": "abort"}, 'mode: "keep" in the query and "abort" in the body'),
        ("/pause?mode=keep&mode=abort", {}, "mode: the query has two values"),
        ("/pause", {"Mode": "keep"}, "Mode: unknown field; expected clear_cache, mode, wait_for_inflight_requests"),
        ("/pause?mode=", {}, 'mode: "" is none of abort, wait, keep'),
        ("/resume", {"mode": "keep"}, "mode: unknown field"),
        ("/sleep?level=1", {"level": 2}, 'level: "1" in the query and 2 in the body'),
        ("/sleep", {"level": True}, "level: true is none of 1, 2"),
        ("/wake_up?tags=weights", {"tags": ["kv_cache"]}, "tags: "),
        ("/update_weights_from_disk?model_path=/b", {"model_path": "/c"}, "model_path: "),
    ):
        status, found = post(api, target, **body)
        assert status == 400, target
        assert said in json.dumps(found).replace('\\"', '"'), target
    assert fleet.asked == []


@pytest.mark.parametrize("value", [[], {}, [[]], [{}], 1.5, -1, 10**30, None, True, "", "\ud800", "x" * 5000])
def test_no_value_of_a_field_breaks_the_handler(api: WeightsApi, value: Any) -> None:
    for (method, path), (_, known) in api._routes.items():
        for name in known or ():
            status, _ = api.answer(method, path, json.dumps({name: value}).encode())
            assert status in (200, 400), f"{method} {path} {name}"


@pytest.mark.parametrize("path", ["/pause", "/sleep", "/update_weights_from_disk"])
def test_a_bug_is_a_logged_500(
    api: WeightsApi, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    def bug(name: str, say: Callable[[str], None], **fields: Any) -> str:
        raise TypeError("two\nlines")

    monkeypatch.setattr(api, "_command", bug)
    status, found = post(api, path, **COMMANDS[path])
    assert status == 500
    assert f"POST {path} failed, and the launcher's log says where: TypeError('two\\\\nlines')" in json.dumps(found)
    assert caplog.records[-1].exc_info is not None


def test_pauses(api: WeightsApi, fleet: Fleet) -> None:
    assert api.answer("POST", "/pause", b"") == (200, {"status": "paused"})
    assert post(api, "/pause?mode=keep&clear_cache=false") == (200, {"status": "paused"})
    assert post(api, "/pause?wait_for_inflight_requests=true") == (200, {"status": "paused"})
    assert post(api, "/pause?mode=soon") == (400, {"error": 'mode: "soon" is none of abort, wait, keep'})
    said = {"message": "Generation paused successfully.", "status": "ok"}
    for mode in ("abort", "retract", "in_place"):
        assert post(api, "/pause_generation", mode=mode) == (200, said)
    assert post(api, "/pause_generation", mode="never")[0] == 400
    assert post(api, "/resume") == (200, {"status": "resumed"})
    said = {"message": "Generation continued successfully.", "status": "ok"}
    assert post(api, "/continue_generation", torch_empty_cache=True) == (200, said)
    assert [fields.get("mode") for _, fields in fleet.asked[:6]] == ["abort", "keep", "wait", "abort", "keep", "keep"]
    assert [name for name, _ in fleet.asked[6:]] == ["resume", "resume"]
    assert api.answer("GET", "/is_paused", b"") == (200, {"is_paused": True})
    fleet.refuses = Refused("busy: the server pauses, for 3 s; wait for its end")
    status, found = post(api, "/resume")
    assert (status, found["error"]["message"]) == (409, "busy: the server pauses, for 3 s; wait for its end")
    assert found["error"]["type"] == "conflict_error"


def test_update_from_memory(api: WeightsApi, fleet: Fleet, tmp_path: Path) -> None:
    """Files may come in several calls. Nothing changes before the last one."""
    files = [str(tmp_path / name) for name in ("0.safetensors", "1.safetensors")]
    for each in files:
        Path(each).touch()
    update = {"update_info": {"files": files[:1]}}
    assert post(api, "/update_weights", **update)[1]["error"]["message"].startswith("no update has begun")
    assert post(api, "/init_weight_transfer_engine", init_info={}) == (200, {"message": "Weight transfer initialized"})
    assert post(api, "/init_weight_transfer_engine", init_info={"master_port": 1})[0] == 400
    assert post(api, "/start_weight_update", is_checkpoint_format=True) == (200, {"message": "Weight update started"})
    assert post(api, "/start_weight_update", is_checkpoint_format=False)[0] == 400
    for each in files:
        assert post(api, "/update_weights", update_info={"files": [each]}) == (200, {"message": "Weights updated"})
    for wrong in ({"ipc_handles": "x"}, {"files": []}, {"files": ["/no/such/file"]}, None):
        status, found = post(api, "/update_weights", update_info=wrong)
        assert status == 400
        assert found["error"]["param"].startswith("update_info")
    assert fleet.asked == []
    update = ("update", {"weights": ServedWeights(version="m", files=tuple(files)), "mode": "keep"})
    fleet.refuses = Refused("busy: the weights are being updated, for 3 s; wait for its end")
    assert post(api, "/finish_weight_update", weight_version="m")[0] == 409
    assert post(api, "/finish_weight_update", weight_version="m") == (200, {"message": "Weight update finished"})
    assert fleet.asked == [update, update], "a busy fleet must not forget the files"
    assert post(api, "/finish_weight_update")[0] == 400, "an update ends once"
    post(api, "/start_weight_update")
    post(api, "/update_weights", update_info={"files": files})
    fleet.refuses = Refused("truncated", 2)
    assert post(api, "/finish_weight_update")[0] == 400
    assert "no file was sent" in post(api, "/finish_weight_update")[1]["error"]["message"]


def test_requests_that_end(api: WeightsApi, fleet: Fleet) -> None:
    assert post(api, "/abort_request", abort_all=True)[0] == 200
    assert post(api, "/abort_request", rid="a", abort_message="x")[0] == 200
    assert post(api, "/abort_requests", request_ids=["b", "c"])[0] == 200
    names = [fields["names"] for _, fields in fleet.asked]
    assert names == [None, frozenset("a"), frozenset("bc")]
    for path, body, param in (
        ("/abort_request", {"rid": ""}, "rid"),
        ("/abort_requests", {"request_ids": "a"}, "request_ids"),
        ("/reset_prefix_cache", {"reset_running_requests": True}, "reset_running_requests"),
    ):
        status, found = post(api, path, **body)
        assert (status, found["error"]["param"]) == (400, param)
    for method, path in (("GET", "/flush_cache"), ("POST", "/flush_cache"), ("POST", "/reset_prefix_cache")):
        assert api.answer(method, path, b"")[1]["success"]
    assert [name for name, _ in fleet.asked[3:]] == ["flush"] * 3


def test_sleep(api: WeightsApi, fleet: Fleet) -> None:
    """The server wakes up when the last part of its memory does."""
    asked = {
        "/sleep": {"level": 1, "mode": "keep"},
        "/sleep?level=2&mode=abort&tags=weights": {"level": 2, "mode": "abort"},
        "/release_memory_occupation": {"level": 2, "mode": "keep"},
    }
    for path, fields in asked.items():
        assert post(api, path)[0] == 200
        assert fleet.asked.pop() == ("sleep", fields)
    assert post(api, "/wake_up?tags=weights&tags=cuda_graph")[0] == 200
    assert fleet.asked == []
    fleet.refuses = Refused("no room")
    assert post(api, "/resume_memory_occupation", tags=["kv_cache"])[0] == 409
    assert post(api, "/wake_up?tags=kv_cache")[0] == 200
    assert [name for name, _ in fleet.asked] == ["wake", "wake"]
    post(api, "/release_memory_occupation", tags=["kv_cache"])
    assert fleet.asked.pop() == ("sleep", {"level": 1, "mode": "keep"})
    post(api, "/resume_memory_occupation", tags=["kv_cache"])
    assert fleet.asked.pop()[0] == "wake"
    post(api, "/release_memory_occupation", tags=["cuda_graph"])
    assert len(fleet.asked) == 2, "graphs alone are no memory that is given back"
    for path, param in (("/sleep?level=0", "level"), ("/sleep?mode=now", "mode"), ("/wake_up?tags=all", "tags")):
        status, found = post(api, path)
        assert (status, found["error"]["param"]) == (400, param)
    assert api.answer("GET", "/is_sleeping", b"") == (200, {"is_sleeping": False})


def test_directory_of_a_trainer(api: WeightsApi, fleet: Fleet) -> None:
    assert post(api, "/update_weights", weight_dir="/steps/3") == (200, {"status": "ok"})
    assert fleet.asked == [("update", {"weights": ServedWeights(version="", directory="/steps/3"), "mode": "keep"})]
    for body in ({"weight_dir": None}, {"weight_dir": "/a", "colour": 1}):
        assert post(api, "/update_weights", **body)[0] == 400


def test_facts(api: WeightsApi) -> None:
    expected = {"weight_version": "step-3", "model_path": "/models/c", "files": []}
    assert api.answer("GET", "/weight_info", b"") == (200, expected)
    assert api.answer("GET", "/get_weight_version", b"")[1]["weight_version"] == "step-3"
    assert api.answer("GET", "/get_world_size", b"") == (200, {"world_size": 2})
    status, found = api.answer("GET", "/pause", b"")
    assert (status, found["error"]["type"]) == (405, "method_not_allowed_error")
    status, found = api.answer("GET", "/v1/models", b"")
    assert status == 404
    assert "POST /update_weights_from_disk" in found["error"]["message"]
    for body in (b"{", b"[]", b"\xff"):
        assert api.answer("POST", "/pause_generation", body)[0] == 400


def test_checker(api: WeightsApi, fleet: Fleet) -> None:
    assert post(api, "/weight_checker", action="compare")[0] == 400
    status, found = post(api, "/weight_checker", action="checksum")
    assert (status, found["baseline_created"]) == (200, True)
    assert found["checksums"] == {"rank0.w": "1", "rank1.w": "2"}
    assert found["engines"] == fleet.found
    fleet.found = [{"rank0.w": "1"}, {"rank1.w": "3"}]
    assert post(api, "/weight_checker", action="checksum")[1]["baseline_created"] is False
    assert post(api, "/weight_checker", action="compare") == (200, {"match": False, "mismatches": ["rank1.w"]})
    assert post(api, "/weight_checker", action="compare")[0] == 400, "a comparison uses its baseline up"
    post(api, "/weight_checker", action="checksum")
    assert post(api, "/weight_checker", action="compare") == (200, {"match": True, "mismatches": []})
    assert post(api, "/weight_checker", action="reset")[0] == 400


@pytest.fixture
def opened(api: WeightsApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, int, Path]]:
    """The path of a control socket, the number of a control port, and its file of keys."""
    keys = tmp_path / "keys"
    keys.write_text("trainer:a-long-secret\n")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        # pytest's own folder names are too long for a socket.
        monkeypatch.setattr(tempfile, "tempdir", name)
        stack.callback(ControlSocket(8000, {}, api).close)
        port = ControlPort("127.0.0.1", 0, keys, api)
        stack.callback(port.close)
        (path,) = control.directory().glob("*.sock")
        yield path, int(port.server_address[1]), keys


def test_control_socket_needs_no_key(opened: tuple[Path, int, Path]) -> None:
    path, _, _ = opened
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
        for _ in range(2):
            assert client.get("/is_paused").json() == {"is_paused": True}
        assert client.post("/resume", content=b"{}").json() == {"status": "resumed"}
        assert client.post("/resume", content=b"x" * (MAX_BODY + 1)).status_code == 413
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(str(path))
        end.sendall(b'{"command": "nothing"}\n')
        assert "knows no command 'nothing'" in end.makefile().readline()


def test_control_port_needs_a_key(opened: tuple[Path, int, Path], fleet: Fleet) -> None:
    _, port, keys = opened
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_SECONDS) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic a-long-secret"}):
            answer = client.post("/resume", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")
        assert fleet.asked == []
        for headers in ({"authorization": "Bearer a-long-secret"}, {"x-api-key": "a-long-secret"}):
            assert client.post("/resume", headers=headers).status_code == 200
        keys.write_text("trainer:another-secret\n")
        assert client.post("/resume", headers={"x-api-key": "a-long-secret"}).status_code == 401
        assert client.post("/resume", headers={"x-api-key": "another-secret"}).status_code == 200
        assert client.put("/resume", headers={"x-api-key": "another-secret"}).status_code == 501


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"control_listen": "127.0.0.1:1"}, "--control-listen needs --control-key-file FILE"),
        ({"control_key_file": "keys"}, "--control-key-file is for --control-listen HOST:PORT"),
        ({"control_listen": "8001", "control_key_file": "k"}, "--control-listen 8001: expected HOST:PORT"),
        ({"control_listen": "h:99999", "control_key_file": "k"}, "--control-listen h:99999: expected HOST:PORT"),
        ({"control_listen": "h:1", "control_key_file": "/no/such/keys"}, "/no/such/keys: No such file or directory"),
    ],
)
def test_flags_that_cannot_work(fields: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_control(ServeConfig(**fields))


def test_taken_port(opened: tuple[Path, int, Path], api: WeightsApi) -> None:
    _, port, keys = opened
    with pytest.raises(ValueError, match=f"--control-listen 127.0.0.1:{port}: Address already in use"):
        ControlPort("127.0.0.1", port, keys, api)
