"""The HTTP API of trainers: pauses and updates of the weights, as in vLLM and SGLang.

It is served over the control socket, and on a TCP port with keys (`--control-listen`). Paths, fields and answers are
those of vLLM's rlhf router and of SGLang's HTTP server (2026-11), but for the transfer of weights. Here `update_info`
names safetensors files, usually in shared memory. CUDA IPC and NCCL are not served.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from moeyard.fleet.messages import Refused
from moeyard_router.errors import ApiError
from moeyard_worker.config.worker_spec import ServedWeights

log = logging.getLogger(__name__)

Answer = tuple[int, dict[str, Any]]

# Fields of SGLang's update that cannot change the result here: caches are always dropped, and graphs are kept.
_NO_EFFECT = frozenset(("flush_cache", "torch_empty_cache", "recapture_cuda_graph", "token_step"))
# Fields that are served with these values only.
_ONLY: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"load_format": (None, "auto", "safetensors"), "keep_pause": (False,), "manifest": (None,)}
)
_MODES = ("abort", "wait", "keep")
# The parts of memory that sleep frees, by vLLM's and SGLang's names. Here all of them wake up together.
_TAGS = frozenset(("weights", "kv_cache", "cuda_graph"))
# SGLang's modes of a pause. Requests that were kept are computed again if the weights change.
_SGLANG_MODES = MappingProxyType({"abort": "abort", "retract": "keep", "in_place": "keep"})


class BadField(ValueError):
    """A field of a request that cannot be served. `name`: the field."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """The facts of a fleet that the API reports."""

    weights: ServedWeights
    paused: bool
    size: int
    asleep: int = 0


class WeightsApi:
    """Answers requests. Any thread may call `answer`.

    `command(name, say, **fields)` runs a command of the fleet to its end and returns its text, or raises Refused.
    """

    def __init__(self, command: Callable[..., str], state: Callable[[], FleetState]) -> None:
        self._command, self._state = command, state
        self._lock = threading.Lock()
        self._files: list[str] | None = None  # the files of the update that has begun
        self._baseline: dict[str, str] | None = None
        self._sleeping: frozenset[str] = frozenset()  # tags that must still be woken
        self._routes: dict[tuple[str, str], Callable[[dict[str, Any], dict[str, str]], Answer]] = {
            ("POST", "/update_weights_from_disk"): self._from_disk,
            ("POST", "/pause_generation"): self._pause_generation,
            ("POST", "/continue_generation"): self._continue_generation,
            ("GET", "/get_weight_version"): self._info,
            ("GET", "/flush_cache"): self._flush,
            ("POST", "/flush_cache"): self._flush,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/weights_checker"): self._check,
            ("POST", "/release_memory_occupation"): self._release,
            ("POST", "/resume_memory_occupation"): self._resume_memory,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): lambda body, query: (200, {"is_paused": self._state().paused}),
            ("POST", "/reset_prefix_cache"): self._flush,
            ("POST", "/sleep"): self._sleep,
            ("POST", "/wake_up"): self._wake_up,
            ("GET", "/is_sleeping"): lambda body, query: (200, {"is_sleeping": self._state().asleep > 0}),
            ("POST", "/abort_requests"): self._abort_several,
            ("POST", "/init_weight_transfer_engine"): self._init,
            ("POST", "/start_weight_update"): self._start,
            ("POST", "/update_weights"): self._add,
            ("POST", "/finish_weight_update"): self._finish,
            ("GET", "/weight_info"): self._info,
            ("POST", "/weight_checker"): self._check,
            ("GET", "/get_world_size"): lambda body, query: (200, {"world_size": self._state().size}),
        }

    def answer(self, method: str, target: str, data: bytes) -> Answer:
        """Return the status and the JSON of the answer to a request."""
        url = urlsplit(target)
        route = self._routes.get((method, url.path))
        if route is None:
            status = 405 if any(path == url.path for _, path in self._routes) else 404
            paths = ", ".join(f"{verb} {path}" for verb, path in self._routes)
            return error(status, f"{method} {url.path}: this is the API of trainers, which has {paths}")
        try:
            body = json.loads(data) if data.strip() else {}
        except (ValueError, RecursionError) as fault:
            return error(400, f"the body is not JSON: {fault}")
        if not isinstance(body, dict):
            return error(400, "the body is not a JSON object")
        try:
            query = parse_qs(url.query)
            if "tags" in query:
                body["tags"] = query.pop("tags")
            return route(body, {name: values[-1] for name, values in query.items()})
        except BadField as fault:
            return error(400, str(fault), fault.name)
        except Refused as refused:
            # A refusal for good is the client's fault. Others may be tried again.
            return error(400 if refused.exit_code == 2 else 409, str(refused))

    def _run(self, name: str, **fields: Any) -> str:
        return self._command(name, lambda said: log.info("%s: %s", name, said), **fields)

    # SGLang.

    def _from_disk(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        try:
            known = ("model_path", "abort_all_requests", "weight_version", "is_async", *_ONLY, *_NO_EFFECT)
            check_names(body, known)
            for name, values in _ONLY.items():
                if name in body and body[name] not in values:
                    expected = " or ".join(json.dumps(value) for value in values)
                    raise BadField(f"{name}: {json.dumps(body[name])} is not served; expected {expected}", name)
            path = directory(body, "model_path")
            gentle = "keep" if flag(body, "is_async") else "wait"
            mode = "abort" if flag(body, "abort_all_requests") else gentle
            weights = ServedWeights(version=version_of(body), directory=path)
            said = self._run("update", weights=weights, mode=mode)
        except (BadField, Refused) as fault:
            return 400, {"success": False, "message": str(fault), "num_paused_requests": 0}
        return 200, {"success": True, "message": said, "num_paused_requests": 0}

    def _pause_generation(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        check_names(body, ("mode",))
        mode = body.get("mode", "abort")
        if mode not in _SGLANG_MODES:
            raise BadField(f"mode: {json.dumps(mode)} is none of {', '.join(_SGLANG_MODES)}", "mode")
        self._run("pause", mode=_SGLANG_MODES[mode])
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _continue_generation(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        check_names(body, ("torch_empty_cache",))
        self._run("resume")
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def _flush(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        """Drop the prefix caches. vLLM's clients may send the last two fields, as false."""
        check_names({**query, **body}, ("timeout", "reset_running_requests", "reset_external"))
        for each in (query, body):
            for name in ("reset_running_requests", "reset_external"):
                if each.get(name, False) not in (False, "false"):
                    raise BadField(f"{name}: {json.dumps(each[name])} is not served; expected false", name)
        self._run("flush")
        return 200, {"success": True, "message": "The prefix caches are empty."}

    def _abort(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        check_names(body, ("rid", "abort_all", "abort_message"))
        rid, everything = text(body, "rid"), flag(body, "abort_all")
        if not rid and not everything:
            raise BadField("rid: expected the name of a request, or abort_all true", "rid")
        self._run("cancel", names=None if everything else frozenset((rid,)))
        return 200, {"message": "Aborted."}

    def _release(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        check_names(body, ("tags",))
        tags, said = tags_of(body), self._asleep()
        if tags - {"cuda_graph"}:
            said = self._fall_asleep(2 if "weights" in tags else 1, "keep", tags)
        return 200, {"success": True, "message": said}

    def _resume_memory(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        check_names(body, ("tags",))
        return 200, {"success": True, "message": self._wake(tags_of(body))}

    def _fall_asleep(self, level: int, mode: str, tags: frozenset[str]) -> str:
        said = self._run("sleep", level=level, mode=mode)
        with self._lock:
            self._sleeping |= tags
        return said

    def _asleep(self) -> str:
        level = self._state().asleep
        return f"asleep at level {level}" if level else "awake"

    def _wake(self, tags: frozenset[str]) -> str:
        """Wake the server up once all tags are woken. Until then nothing is allocated."""
        with self._lock:
            left = self._sleeping - tags
            if left - {"cuda_graph"}:
                self._sleeping = left
                return f"{self._asleep()} until {', '.join(sorted(left))} wakes up, too"
        said = self._run("wake")
        with self._lock:
            self._sleeping = frozenset()
        return said

    # vLLM.

    def _sleep(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        """Fall asleep. Running requests must be ended or paused first, unless `mode` ends them."""
        check_names(query, ("level", "mode", "tags"))
        check_names(body, ("tags",))
        tags_of(body)  # vLLM's clients send tags, but a level has all of them
        level, mode = choice(query, "level", ("1", "2"), "1"), choice(query, "mode", _MODES, "keep")
        return 200, {"status": "sleeping", "message": self._fall_asleep(int(level), mode, _TAGS)}

    def _wake_up(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        check_names({**body, **query}, ("tags",))
        return 200, {"status": "ok", "message": self._wake(tags_of(body))}

    def _abort_several(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        check_names(body, ("request_ids",))
        names = body.get("request_ids")
        if not isinstance(names, list) or not all(isinstance(each, str) and each for each in names):
            raise BadField("request_ids: expected a list of names of requests", "request_ids")
        self._run("cancel", names=frozenset(names))
        return 200, {"message": "Aborted."}

    def _pause(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        try:
            check_names(query, ("mode", "wait_for_inflight_requests", "clear_cache"))
            waits = query.get("wait_for_inflight_requests", "false").lower() in ("true", "1")
            mode = "wait" if waits else choice(query, "mode", _MODES, "abort")
            self._run("pause", mode=mode)
        except (BadField, Refused) as fault:
            return 400, {"error": str(fault)}
        return 200, {"status": "paused"}

    def _resume(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        self._run("resume")
        return 200, {"status": "resumed"}

    def _info(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        weights = self._state().weights
        return 200, {"weight_version": weights.version, "model_path": weights.directory, "files": list(weights.files)}

    def _init(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        if body.get("init_info"):
            names = ", ".join(body["init_info"]) if isinstance(body["init_info"], dict) else "init_info"
            raise BadField(f"{names}: weights come as safetensors files, so nothing is set up; send {{}}", "init_info")
        return 200, {"message": "Weight transfer initialized"}

    def _start(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        check_names(body, ("is_checkpoint_format",))
        if body.get("is_checkpoint_format", True) is not True:
            raise BadField("is_checkpoint_format: tensors have the names of the checkpoint", "is_checkpoint_format")
        with self._lock:
            self._files = []
        return 200, {"message": "Weight update started"}

    def _add(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        if "weight_dir" in body:
            return self._from_trainers_directory(body)
        info = body.get("update_info")
        if not isinstance(info, dict):
            raise BadField("Missing 'update_info' in request body", "update_info")
        check_names(info, ("files",), "update_info.")
        files = info.get("files")
        if not isinstance(files, list) or not files or not all(isinstance(each, str) and each for each in files):
            raise BadField("update_info.files: expected a list of paths of safetensors files", "update_info.files")
        if missing := [each for each in files if not Path(each).is_file()]:
            raise BadField(f"update_info.files: {missing[0]}: no such file", "update_info.files")
        with self._lock:
            if self._files is None:
                raise BadField("no update has begun; send /start_weight_update first", "update_info")
            self._files += [str(Path(each).absolute()) for each in files]
        return 200, {"message": "Weights updated"}

    def _from_trainers_directory(self, body: dict[str, Any]) -> Answer:
        """Update from a directory, as prime-rl does. It pauses the server before, and resumes it afterwards."""
        check_names(body, ("weight_dir",))
        path = directory(body, "weight_dir", "; NCCL is not served")
        self._run("update", weights=ServedWeights(version="", directory=path), mode="keep")
        return 200, {"status": "ok"}

    def _finish(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        check_names(body, ("weight_version",))
        version = version_of(body)
        with self._lock:
            files, self._files = self._files, None
        if not files:
            raise BadField("no file was sent; send /start_weight_update and /update_weights first", "update_info")
        self._run("update", weights=ServedWeights(version=version, files=tuple(files)), mode="keep")
        return 200, {"message": "Weight update finished"}

    def _check(self, body: dict[str, Any], query: dict[str, str]) -> Answer:
        check_names(body, ("action",))
        action = body.get("action")
        if action not in ("checksum", "compare"):
            raise BadField(f"action: {json.dumps(action)} is not served; expected checksum or compare", "action")
        with self._lock:
            if action == "compare" and self._baseline is None:
                raise BadField("No checksum baseline; call action='checksum' first", "action")
            engines: list[dict[str, str]] = json.loads(self._run("checksum"))
            found = {name: digest for each in engines for name, digest in each.items()}
            if action == "checksum":
                created = self._baseline is None
                self._baseline = self._baseline or found
                return 200, {"checksums": found, "engines": engines, "baseline_created": created}
            baseline, self._baseline = self._baseline or {}, None
        names = baseline.keys() | found.keys()
        mismatches = sorted(name for name in names if baseline.get(name) != found.get(name))
        return 200, {"match": not mismatches, "mismatches": mismatches}


def error(status: int, message: str, param: str | None = None) -> Answer:
    """Return the answer for an error, in the form of the other APIs."""
    return status, ApiError(status, message, param=param).body()


def check_names(body: Mapping[str, Any], known: tuple[str, ...], at: str = "") -> None:
    """Raise BadField for a field that is not known."""
    for name in body:
        if name not in known:
            raise BadField(f"{at}{name}: unknown field; expected {', '.join(sorted(known))}", f"{at}{name}")


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Return a field that is true or false (default). Raises BadField."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise BadField(f"{name}: expected true or false, got {json.dumps(value)}", name)
    return value


def text(body: Mapping[str, Any], name: str) -> str:
    """Return a text field, "" if it is absent. Raises BadField."""
    value = body.get(name)
    if value is not None and not (isinstance(value, str) and len(value) <= 4096 and value.isprintable()):
        raise BadField(f"{name}: expected a text, got {json.dumps(value)[:80]}", name)
    return value or ""


def directory(body: Mapping[str, Any], name: str, more: str = "") -> str:
    """Return the absolute path in a field. Raises BadField without one, with `more` at the end of the message."""
    path = text(body, name)
    if not path:
        raise BadField(f"{name}: expected a directory with safetensors files{more}", name)
    return str(Path(path).absolute())


def choice(query: Mapping[str, str], name: str, known: tuple[str, ...], default: str) -> str:
    """Return a parameter of the query. Raises BadField if it is none of `known`."""
    value = query.get(name, default)
    if value not in known:
        raise BadField(f"{name}: '{value}' is none of {', '.join(known)}", name)
    return value


def tags_of(body: Mapping[str, Any]) -> frozenset[str]:
    """Return `tags`, all of them if there are none. Raises BadField."""
    tags = body.get("tags") or sorted(_TAGS)
    if not isinstance(tags, list) or not all(isinstance(each, str) and each in _TAGS for each in tags):
        raise BadField(f"tags: {json.dumps(tags)[:80]} is no list of {', '.join(sorted(_TAGS))}", "tags")
    return frozenset(tags)


def version_of(body: Mapping[str, Any]) -> str:
    """Return `weight_version`, "" to number the update. Raises BadField for a name that is too long."""
    version = text(body, "weight_version")
    if len(version) > 256:
        raise BadField("weight_version: at most 256 characters", "weight_version")
    return version
