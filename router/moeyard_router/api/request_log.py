"""`--log-requests`: a line of JSON per ended sequence, with everything that `moeyard replay` needs to run it again.

`sampling_params` has every parameter, in the form of /inference/v1/generate. Prompts, output ids (forced ones too) and
log-probabilities show what clients wrote, so they are logged only with `--log-prompts`. Otherwise a line has SHA-256
of the ids, each as 4 bytes in little-endian order.
"""

import hashlib
import json
import logging
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from moeyard_router.api.replies import LOWEST_LOGPROB
from moeyard_router.config import AccessConfig, RouterConfig
from moeyard_worker.protocol import Grammar, SamplingParams, TokenIds, Tokens

_log = logging.getLogger(__name__)
# Sequences that wait for the disk. Each holds its prompt and its output.
_QUEUE = 4096


class RequestLog:
    """Appends to `path`. Several routers may share the file: each line is one write.

    The thread that encodes and writes leaves out lines, and says so, if the disk is too slow or full. Raises OSError if
    the file cannot be opened.
    """

    def __init__(self, path: Path, *, prompts: bool) -> None:
        self._path, self._prompts = path, prompts
        self._file = _open(path)
        self._waiting: queue.Queue[partial[bytes] | None] = queue.Queue(_QUEUE)
        self._left_out = 0
        self._thread = threading.Thread(target=self._write, name="request log", daemon=True)
        self._thread.start()

    def add(
        self,
        reply_id: str,
        index: int,
        *,
        prompt: Sequence[int],
        sampling: SamplingParams,
        output: Sequence[Tokens],
        count: int,
        reason: str,
        served: Mapping[str, Any],
    ) -> None:
        """Log a sequence that has ended for `reason`. The client got the first `count` tokens of `output`.

        served: fields of its answer that say what computed it.
        """
        head = {"time": datetime.now(UTC).isoformat(), "id": reply_id, "index": index, **served, "reason": reason}
        line = partial(_line, head, prompt, sampling, tuple(output), count, prompts=self._prompts)
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lose("the disk is too slow")

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._waiting.put(None)
        self._thread.join()
        os.close(self._file)

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                os.write(self._file, line())
            except OSError as error:
                self._lose(str(error))

    def _lose(self, why: str) -> None:
        self._left_out += 1
        if self._left_out & (self._left_out - 1) == 0:  # 1, 2, 4, ...: a full disk must not fill the other log
            _log.error("%d requests are missing in %s: %s", self._left_out, self._path, why)


def open_log(config: RouterConfig) -> RequestLog | None:
    """Return the log that `config` asks for, if any. Raises OSError if its file cannot be opened."""
    path = config.access.log_requests
    if path is None:
        return None
    return RequestLog(path, prompts=config.access.log_prompts)


def check_log(access: AccessConfig) -> None:
    """Raise ValueError if the file of --log-requests cannot be written to."""
    if access.log_requests is not None:
        try:
            os.close(_open(access.log_requests))
        except OSError as error:
            raise ValueError(f"--log-requests {access.log_requests}: {error.strerror}") from error


def _open(path: Path) -> int:
    # Prompts are private.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _line(
    head: dict[str, Any],
    prompt: Sequence[int],
    sampling: SamplingParams,
    output: tuple[Tokens, ...],
    count: int,
    *,
    prompts: bool,
) -> bytes:
    ids = [token for each in output for token in each.token_ids][:count]
    packed = prompt if isinstance(prompt, TokenIds) else TokenIds.of(prompt)
    params = params_of(sampling)
    if not prompts:
        params.pop("trace_decode_token_ids", None)
    elif sampling.as_decoded and ids:
        # Tokens that were sampled behind the forced ones are scored, too, when the line is replayed.
        params["trace_decode_token_ids"] = ids
    found = {
        **head,
        "sampling_params": params,
        "prompt_tokens": len(packed),
        "prompt_sha256": hashlib.sha256(packed.data).hexdigest(),
        "output_tokens": len(ids),
        "output_sha256": hashlib.sha256(TokenIds.of(ids).data).hexdigest(),
    }
    if prompts:
        found |= {"prompt_token_ids": list(packed), "token_ids": ids}
        if sampling.logprobs is not None:
            scores = [max(each.logprob, LOWEST_LOGPROB) for tokens in output for each in tokens.logprobs]
            found["token_logprobs"] = scores[:count]
    return orjson.dumps(found) + b"\n"


def params_of(sampling: SamplingParams) -> dict[str, Any]:
    """Return the `sampling_params` of a request to /inference/v1/generate that has the same output."""
    compression = sampling.kv_compression
    found: dict[str, Any] = {
        **{name: getattr(sampling, name) for name in ("max_tokens", "min_tokens", "temperature", "top_p", "top_k")},
        **{name: getattr(sampling, name) for name in ("min_p", "seed", "repetition_penalty", "presence_penalty")},
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "kv_compression": {"method": "none"},
    }
    if compression is not None:
        found["kv_compression"] = {
            "method": compression.method,
            "budget": compression.budget,
            "window": compression.window,
        }
    if sampling.logprobs is not None:
        found["logprobs"] = sampling.logprobs
    if sampling.trace_decode_token_ids:
        found["trace_decode_token_ids"] = sampling.trace_decode_token_ids
    if sampling.as_decoded:
        found["score"] = "as_decoded"
    if sampling.grammar is not None:
        found["structured_outputs"] = _outputs_of(sampling.grammar)
    return found


def _outputs_of(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": grammar.text}
        case "choice":
            return {"choice": json.loads(grammar.text)}
        case "lark":
            return {"grammar": grammar.text}
    return {grammar.kind: grammar.text}
