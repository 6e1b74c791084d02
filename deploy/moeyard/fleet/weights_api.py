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
from urllib.parse import parse_qs

from moeyard.fleet.messages import Refused
from moeyard_router.errors import ApiError
from moeyard_worker.config.worker_spec import ServedWeights

log = logging.getLogger(__name__)

Answer = tuple[int, dict[str, Any]]
Fields = dict[str, Any]

# Fields of SGLang's update that cannot change the result here: caches are always dropped, and graphs are kept.
_NO_EFFECT = frozenset(("flush_cache", "torch_empty_cache", "recapture_cuda_graph", "token_step"))
# Fields that are served with these values only.
_ONLY: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"load_format": (None, "auto", "safetensors"), "keep_pause": (False,), "manifest": (None,)}
)
_MODES = ("abort", "wait", "keep")
_FLAGS = MappingProxyType({"true": True, "1": True, "false": False, "0": False})
# The parts of memory that sleep frees, by vLLM's and SGLang's names. Here all of them wake up together.
_TAGS = frozenset(("weights", "kv_cache", "cuda_graph"))
# SGLang's modes of a pause. Requests that were kept are computed again if the weights change.
_SGLANG_MODES = MappingProxyType({"abort": "abort", "retract": "keep", "in_place": "keep"})


class BadField(ValueError):
    """A field of a request that cannot be served, or its whole body. `name`: the field."""

    def __init__(self, message: str, name: str | None) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """The facts of a fleet that the API reports. `ended`: it has failed or stops, and takes no more commands."""

    weights: ServedWeights
    paused: bool
    size: int
    asleep: int = 0
    ended: bool = False


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
        flush = ("timeout", "reset_running_requests", "reset_external")
        update = ("model_path", "abort_all_requests", "weight_version", "is_async", *_ONLY, *_NO_EFFECT)
        # Each handler with its fields, in the query or in the body. None: all are ignored.
        self._routes: dict[tuple[str, str], tuple[Callable[[Fields], Answer], tuple[str, ...] | None]] = {
            ("POST", "/update_weights_from_disk"): (self._from_disk, update),
            ("POST", "/pause_generation"): (self._pause_generation, ("mode",)),
            ("POST", "/continue_generation"): (self._continue_generation, ("torch_empty_cache",)),
            ("GET", "/get_weight_version"): (self._info, None),
            ("GET", "/flush_cache"): (self._flush, flush),
            ("POST", "/flush_cache"): (self._flush, flush),
            ("POST", "/abort_request"): (self._abort, ("rid", "abort_all", "abort_message")),
            ("POST", "/weights_checker"): (self._check, ("action",)),
            ("POST", "/release_memory_occupation"): (self._release, ("tags",)),
            ("POST", "/resume_memory_occupation"): (self._resume_memory, ("tags",)),
            ("POST", "/pause"): (self._pause, ("mode", "wait_for_inflight_requests", "clear_cache")),
            ("POST", "/resume"): (self._resume, ()),
            ("GET", "/is_paused"): (lambda fields: (200, {"is_paused": self._state().paused}), None),
            ("POST", "/reset_prefix_cache"): (self._flush, flush),
            ("POST", "/sleep"): (self._sleep, ("level", "mode", "tags")),
            ("POST", "/wake_up"): (self._wake_up, ("tags",)),
            ("GET", "/is_sleeping"): (lambda fields: (200, {"is_sleeping": self._state().asleep > 0}), None),
            ("POST", "/abort_requests"): (self._abort_several, ("request_ids",)),
            ("POST", "/init_weight_transfer_engine"): (self._init, ("init_info",)),
            ("POST", "/start_weight_update"): (self._start, ("is_checkpoint_format",)),
            ("POST", "/update_weights"): (self._add, ("update_info", "weight_dir")),
            ("POST", "/finish_weight_update"): (self._finish, ("weight_version",)),
            ("GET", "/weight_info"): (self._info, None),
            ("POST", "/weight_checker"): (self._check, ("action",)),
            ("GET", "/get_world_size"): (lambda fields: (200, {"world_size": self._state().size}), None),
        }

    def answer(self, method: str, target: str, data: bytes) -> Answer:
        """Return the status and the JSON of the answer to a request."""
        path, _, query = target.partition("?")
        route = self._routes.get((method, path))
        if route is None:
            status = 405 if any(path == known for _, known in self._routes) else 404
            paths = ", ".join(f"{verb} {path}" for verb, path in self._routes)
            return error(status, f"{method} {path}: this is the API of trainers, which has {paths}")
        handler, known = route
        try:
            fields = read_fields(query, data)
            if known is not None:
                check_names(fields, known)
            return handler(fields)
        except BadField as fault:
            return _failed(path, 400, str(fault), fault.name)
        except Refused as refused:
            return _failed(path, self._status(refused), str(refused))
        except Exception as fault:  # boundary: the client must learn that this request failed, and no other
            log.exception("control: %s %s failed", method, path)
            return _failed(path, 500, f"{method} {path} failed, and the launcher's log says where: {fault!r:.200}")

    def _status(self, refused: Refused) -> int:
        """Return 400 for a refusal for good, 503 if the fleet has ended, and 409 if another attempt may succeed."""
        if refused.exit_code == 2:
            return 400
        return 503 if self._state().ended else 409

    def _run(self, name: str, **fields: Any) -> str:
        try:
            return self._command(name, lambda said: log.info("%s: %s", name, said), **fields)
        except Refused as refused:
            # Trainers ask again and again for an empty cache, so other refusals are no warnings.
            log.log(logging.WARNING if name == "update" else logging.INFO, "%s refused: %s", name, refused)
            raise

    # SGLang.

    def _from_disk(self, fields: Fields) -> Answer:
        for name, values in _ONLY.items():
            if name in fields and fields[name] not in values:
                expected = " or ".join(json.dumps(value) for value in values)
                raise BadField(f"{name}: {json.dumps(fields[name])} is not served; expected {expected}", name)
        path = directory(fields, "model_path")
        gentle = "keep" if flag(fields, "is_async") else "wait"
        mode = "abort" if flag(fields, "abort_all_requests") else gentle
        weights = ServedWeights(version=version_of(fields), directory=path)
        said = self._run("update", weights=weights, mode=mode)
        return 200, {"success": True, "message": said, "num_paused_requests": 0}

    def _pause_generation(self, fields: Fields) -> Answer:
        mode = choice(fields, "mode", tuple(_SGLANG_MODES), "abort")
        self._run("pause", mode=_SGLANG_MODES[mode])
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _continue_generation(self, fields: Fields) -> Answer:
        self._run("resume")
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def _flush(self, fields: Fields) -> Answer:
        """Drop the prefix caches. vLLM's clients may send the last two fields, as false."""
        for name in ("reset_running_requests", "reset_external"):
            if flag(fields, name):
                raise BadField(f"{name}: true is not served; expected false", name)
        self._run("flush")
        return 200, {"success": True, "message": "The prefix caches are empty."}

    def _abort(self, fields: Fields) -> Answer:
        rid, everything = text(fields, "rid"), flag(fields, "abort_all")
        if not rid and not everything:
            raise BadField("rid: expected the name of a request, or abort_all true", "rid")
        self._run("cancel", names=None if everything else frozenset((rid,)))
        return 200, {"message": "Aborted."}

    def _release(self, fields: Fields) -> Answer:
        tags, said = tags_of(fields), self._asleep()
        if tags - {"cuda_graph"}:
            said = self._fall_asleep(2 if "weights" in tags else 1, "keep", tags)
        return 200, {"success": True, "message": said}

    def _resume_memory(self, fields: Fields) -> Answer:
        return 200, {"success": True, "message": self._wake(tags_of(fields))}

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

    def _sleep(self, fields: Fields) -> Answer:
        """Fall asleep. Running requests must be ended or paused first, unless `mode` ends them."""
        tags_of(fields)  # vLLM's clients send tags, but a level has all of them
        level, mode = choice(fields, "level", ("1", "2"), "1"), choice(fields, "mode", _MODES, "keep")
        return 200, {"status": "sleeping", "message": self._fall_asleep(int(level), mode, _TAGS)}

    def _wake_up(self, fields: Fields) -> Answer:
        return 200, {"status": "ok", "message": self._wake(tags_of(fields))}

    def _abort_several(self, fields: Fields) -> Answer:
        names = texts(fields, "request_ids", "names of requests")
        self._run("cancel", names=frozenset(names))
        return 200, {"message": "Aborted."}

    def _pause(self, fields: Fields) -> Answer:
        mode = choice(fields, "mode", _MODES, "abort")
        self._run("pause", mode="wait" if flag(fields, "wait_for_inflight_requests") else mode)
        return 200, {"status": "paused"}

    def _resume(self, fields: Fields) -> Answer:
        self._run("resume")
        return 200, {"status": "resumed"}

    def _info(self, fields: Fields) -> Answer:
        weights = self._state().weights
        return 200, {"weight_version": weights.version, "model_path": weights.directory, "files": list(weights.files)}

    def _init(self, fields: Fields) -> Answer:
        if fields.get("init_info"):
            names = ", ".join(fields["init_info"]) if isinstance(fields["init_info"], dict) else "init_info"
            raise BadField(f"{names}: weights come as safetensors files, so nothing is set up; send {{}}", "init_info")
        return 200, {"message": "Weight transfer initialized"}

    def _start(self, fields: Fields) -> Answer:
        if not flag(fields, "is_checkpoint_format", default=True):
            raise BadField("is_checkpoint_format: tensors have the names of the checkpoint", "is_checkpoint_format")
        with self._lock:
            self._files = []
        return 200, {"message": "Weight update started"}

    def _add(self, fields: Fields) -> Answer:
        if "weight_dir" in fields:
            return self._from_trainers_directory(fields)
        info = fields.get("update_info")
        if not isinstance(info, dict):
            raise BadField("Missing 'update_info' in request body", "update_info")
        check_names(info, ("files",), "update_info.")
        files = texts(info, "files", "paths of safetensors files", "update_info.")
        if not files:
            raise BadField("update_info.files: expected one file at least", "update_info.files")
        if missing := [each for each in files if not Path(each).is_file()]:
            raise BadField(f"update_info.files: {missing[0]}: no such file", "update_info.files")
        with self._lock:
            if self._files is None:
                raise BadField("no update has begun; send /start_weight_update first", "update_info")
            self._files += [str(Path(each).absolute()) for each in files]
        return 200, {"message": "Weights updated"}

    def _from_trainers_directory(self, fields: Fields) -> Answer:
        """Update from a directory, as prime-rl does. It pauses the server before, and resumes it afterwards."""
        if "update_info" in fields:
            raise BadField("update_info: expected no weight_dir beside it", "update_info")
        path = directory(fields, "weight_dir", "; NCCL is not served")
        self._run("update", weights=ServedWeights(version="", directory=path), mode="keep")
        return 200, {"status": "ok"}

    def _finish(self, fields: Fields) -> Answer:
        version = version_of(fields)
        with self._lock:
            files = self._files
            named = tuple(files or ())
        if not named:
            raise BadField("no file was sent; send /start_weight_update and /update_weights first", "update_info")
        try:
            self._run("update", weights=ServedWeights(version=version, files=named), mode="keep")
        except Refused as refused:
            if refused.exit_code == 2:
                self._forget(files)
            raise  # the client may finish the same update again, unless it was refused for good
        self._forget(files)
        return 200, {"message": "Weight update finished"}

    def _forget(self, files: list[str] | None) -> None:
        """End the update with these files, unless another one has begun meanwhile."""
        with self._lock:
            if self._files is files:
                self._files = None

    def _check(self, fields: Fields) -> Answer:
        action = fields.get("action")
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


def _failed(path: str, status: int, message: str, param: str | None = None) -> Answer:
    """Return the answer for an error of a path, in the form that the path's clients read."""
    if path == "/update_weights_from_disk":  # SGLang
        return status, {"success": False, "message": message, "num_paused_requests": 0}
    if path == "/pause":  # vLLM
        return status, {"error": message}
    return error(status, message, param)


def read_fields(query: str, data: bytes) -> Fields:
    """Return the fields of a query and of a JSON body together. `tags` of a query are a list, other values texts.

    Raises BadField if a field has two values, or if the body is no JSON object.
    """
    try:
        body = json.loads(data) if data.strip() else {}
    except (ValueError, RecursionError) as fault:
        raise BadField(f"the body is not JSON: {fault}", None) from fault
    if not isinstance(body, dict):
        raise BadField("the body is not a JSON object", None)
    fields: Fields = dict(body)
    for name, values in parse_qs(query, keep_blank_values=True).items():
        value = values if name == "tags" else values[0]
        if name != "tags" and len({*values}) > 1:
            raise BadField(f"{name}: the query has two values", name)
        other = body.get(name)
        if other is not None and value not in (other, json.dumps(other)):
            raise BadField(f"{name}: {json.dumps(value)} in the query and {json.dumps(other)[:80]} in the body", name)
        fields[name] = value if other is None else other
    return fields


def check_names(fields: Mapping[str, Any], known: tuple[str, ...], at: str = "") -> None:
    """Raise BadField for a field that is not known."""
    for name in fields:
        if name not in known:
            raise BadField(f"{at}{name}: unknown field; expected {', '.join(sorted(known))}", f"{at}{name}")


def flag(fields: Fields, name: str, *, default: bool = False) -> bool:
    """Return a field that is true or false, as JSON or as text of a query. Raises BadField."""
    value = fields.get(name, default)
    found = _FLAGS.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise BadField(f"{name}: expected true or false, got {json.dumps(value)}", name)
    return found


def text(fields: Fields, name: str) -> str:
    """Return a text field, "" if it is absent. Raises BadField."""
    value = fields.get(name)
    if value is not None and not _is_text(value):
        raise BadField(f"{name}: expected a text, got {json.dumps(value)[:80]}", name)
    return value or ""


def texts(fields: Fields, name: str, what: str, at: str = "") -> list[str]:
    """Return a field that is a list of texts, none of them empty. Raises BadField with `what` is expected."""
    values = fields.get(name)
    if not isinstance(values, list) or not all(_is_text(each) and each for each in values):
        raise BadField(f"{at}{name}: expected a list of {what}", f"{at}{name}")
    return values


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 4096 and value.isprintable()


def directory(fields: Fields, name: str, more: str = "") -> str:
    """Return the absolute path in a field. Raises BadField without one, with `more` at the end of the message."""
    path = text(fields, name)
    if not path:
        raise BadField(f"{name}: expected a directory with safetensors files{more}", name)
    return str(Path(path).absolute())


def choice(fields: Fields, name: str, known: tuple[str, ...], default: str) -> str:
    """Return a field with one of the values `known`. A number counts as its text. Raises BadField."""
    value = fields.get(name)
    found = default if value is None else str(value) if type(value) is int else value
    if not isinstance(found, str) or found not in known:
        raise BadField(f"{name}: {json.dumps(value)[:80]} is none of {', '.join(known)}", name)
    return found


def tags_of(fields: Fields) -> frozenset[str]:
    """Return `tags`, all of them if there are none. Raises BadField."""
    tags = fields.get("tags") or sorted(_TAGS)
    if not isinstance(tags, list) or not all(isinstance(each, str) and each in _TAGS for each in tags):
        raise BadField(f"tags: {json.dumps(tags)[:80]} is no list of {', '.join(sorted(_TAGS))}", "tags")
    return frozenset(tags)


def version_of(fields: Fields) -> str:
    """Return `weight_version`, "" to number the update. Raises BadField for a name that is too long."""
    version = text(fields, "weight_version")
    if len(version) > 256:
        raise BadField("weight_version: at most 256 characters", "weight_version")
    return version
