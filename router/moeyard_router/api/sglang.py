"""SGLang's API of rollouts: POST /generate, with token ids or text in, and both out.

A request becomes a completion. Its sampling parameters have SGLang's own defaults, not the checkpoint's, because a
trainer must know the distribution that it samples from. An event of a stream has the whole output so far, as in SGLang.
"""

import itertools
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import orjson
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from moeyard_router.api.choice import ABORTED, Choice, Delta
from moeyard_router.api.fields import IGNORED, NOT_SERVED, Strict
from moeyard_router.api.intake import Intake, Job
from moeyard_router.api.replies import (
    DONE_EVENT,
    LOWEST_LOGPROB,
    PIECE_BYTES,
    LongLists,
    Served,
    prompt_scores,
    routed_bytes,
)
from moeyard_router.api.schema import CacheSalt, Count, Seed, ShapeFields
from moeyard_router.api.token_ids import NEUTRAL, AllRoomCompletion
from moeyard_router.api.translation import Translation, given
from moeyard_router.errors import ApiError
from moeyard_router.text.detokenizer import TokenBytes
from moeyard_worker.protocol import MAX_LOGPROBS, TokenLogprob

_DEFAULT_TOKENS = 128  # SGLang's default of `max_new_tokens`
_ID_BYTES = 4  # of an expert's id in SGLang's answers
# Fields that only change how a request is logged, routed among SGLang's processes, or streamed.
_HARMLESS = frozenset(
    (
        *("background", "custom_labels", "log_metrics", "modalities", "no_logs", "received_time"),
        *("return_bytes", "routing_key", "spaces_between_special_tokens", "stream_interval"),
    )
)
_UNSERVED = MappingProxyType(
    {
        **NOT_SERVED,
        **dict.fromkeys(("audio_data", "image_data", "token_ids_logprob", "video_data"), ([],)),
        **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_logit_processor"), ()),
        **dict.fromkeys(("input_embeds", "lora_id", "lora_path", "max_thinking_tokens", "session_params"), ()),
        **dict.fromkeys(("custom_params",), ({},)),
        **dict.fromkeys(("stop_regex",), ([],)),
        **dict.fromkeys(("require_reasoning", "return_entropy", "return_flat_raw_top_logprobs"), (False,)),
        **dict.fromkeys(("return_indexer_topk", "return_sampling_mask"), (False,)),
    }
)
# SGLang's names of the fields of a completion.
_NAMES = MappingProxyType(
    {
        "max_tokens": "sampling_params.max_new_tokens",
        "min_tokens": "sampling_params.min_new_tokens",
        "include_stop_str_in_output": "sampling_params.no_stop_trim",
        "seed": "sampling_params.sampling_seed",
        r"structured_outputs\.json": "sampling_params.json_schema",
        r"structured_outputs\.regex": "sampling_params.regex",
        r"structured_outputs\.grammar": "sampling_params.ebnf",
        "logprobs": "top_logprobs_num",
        "prompt_logprobs": "logprob_start_len",
        "routed_experts_prompt_start": "routed_experts_start_len",
        "(return_routed_experts|stream|cache_salt)": r"\g<0>",
        ".*": r"sampling_params.\g<0>",
    }
)


class SglangSampling(ShapeFields, Strict):
    """`sampling_params` of a request, by the names of SGLang's class SamplingParams.

    no_stop_trim: the text keeps the stop string or stop token. sampling_seed: choice i has this seed plus i.
    """

    harmless = _HARMLESS
    unserved = _UNSERVED

    max_new_tokens: Annotated[int, Field(ge=0)] | None = None
    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Any = None  # validated with the completion
    stop_token_ids: list[int] | None = None
    n: Count | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: Seed | None = None
    logit_bias: dict[str, float] | None = None


class SglangRequest(Strict):
    """Body of POST /generate: either `text` or `input_ids`, each of one prompt or a list of prompts.

    rid: the name of the request, for /abort_request. logprob_start_len: the first token of the prompt that is scored;
    -1 scores the output only. Both need return_logprob. extra_key: as cache_salt, for prefixes.
    """

    harmless = (IGNORED | _HARMLESS) - {"features", "rid"}
    unserved = _UNSERVED
    inner = ("sampling_params",)

    text: Any = None
    input_ids: Any = None
    sampling_params: SglangSampling | None = None
    rid: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Annotated[int, Field(ge=0)] | None = None
    cache_salt: CacheSalt | None = None
    extra_key: CacheSalt | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "SglangRequest":
        if (self.text is None) == (self.input_ids is None):
            raise PydanticCustomError("input_ids", "give either text or input_ids")
        return self


async def sglang_job(request: SglangRequest, intake: Intake) -> Job:
    """Return the job of a request. Raises `ApiError` 400 with the client's field names."""
    params = request.sampling_params or SglangSampling()
    scores = bool(request.return_logprob)
    start, top = request.logprob_start_len, request.top_logprobs_num or 0
    scored = start if scores and start is not None and start >= 0 else None
    prompt, name = (request.text, "text") if request.input_ids is None else (request.input_ids, "input_ids")
    grammar = given(json=params.json_schema, regex=params.regex, grammar=params.ebnf)
    alike = ("n", "ignore_eos", "logit_bias", "skip_special_tokens", "stop", "stop_token_ids")
    salts = [each for each in (request.cache_salt, request.extra_key) if each is not None]
    return await Translation(
        kind=AllRoomCompletion,
        body={
            **NEUTRAL,
            **given(**{field: getattr(params, field) for field in (*ShapeFields.model_fields, *alike)}),
            **given(min_tokens=params.min_new_tokens, seed=params.sampling_seed, stream=request.stream),
            **given(include_stop_str_in_output=params.no_stop_trim, cache_salt="\n".join(salts) or None),
            **given(structured_outputs=grammar or None, routed_experts_prompt_start=request.routed_experts_start_len),
            **given(logprobs=top if scores else None, prompt_logprobs=None if scored is None else top),
            "max_tokens": _DEFAULT_TOKENS if params.max_new_tokens is None else params.max_new_tokens,
            "return_routed_experts": bool(request.return_routed_experts),
            "prompt": prompt,
        },
        names={"prompt": name, **_NAMES},
        ignored=request.ignored,
        repeated={
            "rid": request.rid,
            "batch": isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int),
            "scored": scored,
            "spell": bool(request.return_text_in_logprobs),
            "routed_start": request.routed_experts_start_len or 0,
        },
    ).job(intake)


class _Output:
    """The output of one choice so far.

    scores, tops: its log-probabilities, encoded once, in runs of about PIECE_BYTES. Every event of a stream has all of
    them, and joining 8,000 items takes 0.5 ms.
    """

    def __init__(self) -> None:
        self.text, self.ids = "", list[int]()
        self.scores, self.tops = list[bytearray](), list[bytearray]()
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None


def _append(runs: list[bytearray], item: bytes) -> None:
    """Append an item to a list whose encoded items are joined in runs."""
    if runs and len(runs[-1]) < PIECE_BYTES:
        runs[-1] += b"," + item
    else:
        runs.append(bytearray(item))


class SglangWriter:
    """Writes the answer to one job in SGLang's form: an object, or a list of them for several prompts or choices.

    The log-probabilities are the model's own, before temperature, as everywhere in this server.
    """

    text_event = None  # an event has the whole output: see `ReplyWriter.text_event`

    def __init__(self, job: Job, *, reply_id: str, served: Served, created: int, tokens: TokenBytes) -> None:
        self._job, self._served, self._tokens = job, served, tokens
        self._asked = job.repeated or {}
        self._id = self._asked["rid"] or reply_id
        self._long = LongLists()
        self._outputs = [_Output() for _ in job.continuations]

    @property
    def _several(self) -> bool:
        return self._asked["batch"] or len(self._outputs) > 1

    def chunk(self, index: int, delta: Delta, choices: Sequence[Choice]) -> list[bytes]:
        """Return the event of choice `index` after a delta, in pieces."""
        if not delta.token_ids and not delta.text and delta.finish_reason is None:
            return []
        self._take(index, delta)
        found = self._result(index, choices)
        return self._long.pieces(b"data: " + orjson.dumps({**found, "index": index}) + b"\n\n")

    def end(self, choices: Sequence[Choice]) -> bytes:
        """Return the last event of a stream."""
        return DONE_EVENT

    def failed(self, error: ApiError, choices: Sequence[Choice]) -> bytes:
        """Return the event that ends a failed stream. No [DONE] follows it."""
        return b"data: " + orjson.dumps(error.body()) + b"\n\n"

    def body(self, deltas: Sequence[Delta], choices: Sequence[Choice]) -> list[bytes]:
        """Return the answer of a request that is not streamed, in pieces. `deltas[i]` is all of choice i."""
        for index, delta in enumerate(deltas):
            self._take(index, delta)
        found = [self._result(index, choices) for index in range(len(deltas))]
        return self._long.pieces(orjson.dumps(found if self._several else found[0]))

    def _take(self, index: int, delta: Delta) -> None:
        output = self._outputs[index]
        output.text += delta.text
        output.ids += delta.token_ids
        output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        if self._job.logprobs is not None:
            for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True):
                _append(output.scores, orjson.dumps(self._scored(token_id, entry.logprob)))
                if self._job.logprobs:
                    _append(output.tops, orjson.dumps(self._top(entry)))

    def _result(self, index: int, choices: Sequence[Choice]) -> dict[str, Any]:
        output, choice = self._outputs[index], choices[index]
        return {"text": output.text, "output_ids": output.ids, "meta_info": self._meta(index, output, choice, choices)}

    def _meta(self, index: int, output: _Output, choice: Choice, choices: Sequence[Choice]) -> dict[str, Any]:
        job, version = self._job, choice.weight_version
        served = {name: value for name, value in self._served().items() if name != "model"}
        meta: dict[str, Any] = {
            "id": f"{self._id}-{index}" if self._several else self._id,
            "finish_reason": self._reason(output, job.continuations[index].sampling.max_tokens),
            "prompt_tokens": len(job.prompts[choice.prompt].token_ids),
            "completion_tokens": len(output.ids),
            "cached_tokens": choice.cached_tokens or 0,
            **({} if version is None else {"weight_version": version}),
            **choice.versions,
            **served,
        }
        if job.logprobs is not None:
            meta["logprob_temperature"] = 1.0
            meta["output_token_logprobs"] = self._long.add(output.scores)
            if job.logprobs:
                meta["output_top_logprobs"] = self._long.add(output.tops)
            if self._asked["scored"] is not None:
                meta |= self._of_prompt(index, choices)
        # A request that is aborted before its prompt is computed has none.
        if job.routing is not None and output.finish_reason is not None and choice.has_experts:
            experts = routed_bytes(job.routing, choice.experts, id_bytes=_ID_BYTES)
            meta["routed_experts"] = self._long.add_base64([experts])
            meta["routed_experts_start_len"] = self._asked["routed_start"]
        return meta

    def _reason(self, output: _Output, max_tokens: int) -> dict[str, Any] | None:
        match output.finish_reason:
            case None:
                return None
            case "stop":
                last = output.ids[-1] if output.ids else None
                return {"type": "stop", "matched": last if output.stop_reason is None else output.stop_reason}
            case "abort":
                return {"type": "abort", "message": ABORTED}
            case _:
                return {"type": "length", "length": max_tokens}

    def _of_prompt(self, index: int, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the scores of the prompt from the requested token on. SGLang has null for the first of them."""
        start, ids = self._asked["scored"], self._job.prompts[choices[index].prompt].token_ids

        def entries() -> Iterator[tuple[int, TokenLogprob]]:
            return itertools.islice(prompt_scores(self._job, index, choices), start, None)

        first = [orjson.dumps(self._scored(each, None)) for each in ids[start : start + 1]]
        scores = (orjson.dumps(self._scored(token_id, entry.logprob)) for token_id, entry in entries())
        found = {"input_token_logprobs": self._long.add((*first, *scores))}
        if self._job.logprobs:
            tops = (orjson.dumps(self._top(entry)) for _, entry in entries())
            found["input_top_logprobs"] = self._long.add((*(b"null" for _ in first), *tops))
        return found

    def _scored(self, token_id: int, logprob: float | None) -> list[Any]:
        text = self._tokens.of(token_id).decode("utf-8", "replace") if self._asked["spell"] else None
        return [None if logprob is None else max(logprob, LOWEST_LOGPROB), token_id, text]

    def _top(self, entry: TokenLogprob) -> list[list[Any]]:
        return [self._scored(token_id, value) for token_id, value in entry.top[: self._job.logprobs]]
