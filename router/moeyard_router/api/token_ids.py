"""vLLM's API of token ids: POST /inference/v1/generate. No text is made, so clients need not tokenize twice.

A request becomes a completion of one prompt. Its sampling parameters have vLLM's own defaults, not the checkpoint's,
because a trainer must know the distribution that it samples from.
"""

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Any

import orjson
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from moeyard_router.api.choice import Choice, Delta
from moeyard_router.api.fields import IGNORED, NOT_SERVED, Strict
from moeyard_router.api.intake import Intake, Job
from moeyard_router.api.replies import (
    DONE_EVENT,
    LOWEST_LOGPROB,
    MANY_SCORES,
    LongLists,
    Served,
    prompt_logprobs,
    usage_of,
)
from moeyard_router.api.schema import (
    CacheSalt,
    CompletionRequest,
    Count,
    DistributionFields,
    OutputFields,
    Score,
    StreamOptions,
)
from moeyard_router.api.structured import StructuredOutputs
from moeyard_router.api.translation import Translation, given
from moeyard_router.errors import ApiError, bad_request
from moeyard_router.text.detokenizer import TokenBytes
from moeyard_worker.protocol import MAX_LOGPROBS, TokenLogprob

NEUTRAL = MappingProxyType({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0})
_NAMES = MappingProxyType(
    {"prompt": "token_ids", r"(model|cache_salt|stream)(_options)?(\..*)?": r"\g<0>", ".*": r"sampling_params.\g<0>"}
)


class TokenSampling(OutputFields, DistributionFields, Strict):
    """`sampling_params` of a request, by the names of vLLM's class SamplingParams.

    trace_decode_token_ids: the output to produce instead of sampling. The log-probabilities are the model's own. It
        ends after these ids or after `max_tokens`, and other conditions of its end do not apply.
    score: compute a given output many tokens per step, with the log-probabilities of sampling. The output is
        `trace_decode_token_ids`, or the prompt's ids from `output_start` on.
    """

    # Fields about text, vLLM's processes and caches.
    harmless = frozenset(
        (
            *("detokenize", "extra_args", "flat_logprobs", "output_kind", "skip_clone", "skip_reading_prefix_cache"),
            # prime-rl sends the second here. The answer always has the ids.
            *("spaces_between_special_tokens", "return_token_ids"),
        )
    )
    unserved = NOT_SERVED

    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    cache_salt: CacheSalt | None = None  # prime-rl sends it here. vLLM has it beside `token_ids`
    structured_outputs: StructuredOutputs | None = None
    trace_decode_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    score: Score | None = None
    output_start: Count | None = None


class GenerateRequest(Strict):
    """Body of POST /inference/v1/generate. `request_id` is repeated in the answer."""

    harmless = IGNORED - {"features", "request_id"}
    unserved = MappingProxyType({**NOT_SERVED, "features": ()})
    inner = ("sampling_params", "stream_options")

    token_ids: Annotated[list[int], Field(min_length=1)]
    sampling_params: TokenSampling
    model: str | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None

    @model_validator(mode="after")
    def _one_salt(self) -> "GenerateRequest":
        salts = {self.cache_salt, self.sampling_params.cache_salt} - {None}
        if len(salts) > 1:
            raise PydanticCustomError(
                "cache_salt", "cache_salt and sampling_params.cache_salt are both given and differ"
            )
        return self


class AllRoomCompletion(CompletionRequest):
    """A completion that may fill the model by default."""

    default_tokens = None


async def token_job(request: GenerateRequest, intake: Intake) -> Job:
    """Return the job of a request. Raises `ApiError` 400 with the client's field names."""
    params = request.sampling_params
    trace = params.trace_decode_token_ids
    body = given(**{name: getattr(params, name) for name in TokenSampling.model_fields if name not in _OWN})
    body["stop"] = list(params.stop)
    if trace is not None:
        _check_trace(params)
        intake.limits.check_ids(trace, "sampling_params.trace_decode_token_ids")
        trace = trace[: params.max_tokens]
        body = {name: value for name, value in body.items() if name not in _REPLACED}
        body |= {"max_tokens": len(trace), "ignore_eos": True}
    elif params.score is not None and params.output_start is None:
        needs = "'sampling_params.trace_decode_token_ids', or 'sampling_params.output_start'"
        raise bad_request(f"'sampling_params.score' needs {needs}", "sampling_params.score")
    translation = Translation(
        kind=AllRoomCompletion,
        body={
            **NEUTRAL,
            **body,
            **given(model=request.model, stream=request.stream, stream_options=request.stream_options),
            **given(cache_salt=request.cache_salt or params.cache_salt),
            "prompt": request.token_ids,
        },
        names=_NAMES,
        ignored=request.ignored,
        repeated=given(request_id=request.request_id),
    )
    job = await translation.job(intake)
    if not trace:
        return job
    (only,) = job.continuations
    forced = dataclasses.replace(
        only.sampling, trace_decode_token_ids=tuple(trace), as_decoded=params.score is not None
    )
    return dataclasses.replace(job, continuations=(dataclasses.replace(only, sampling=forced),))


# Fields that `token_job` does not pass on as they are, and those that a forced output replaces.
_OWN = frozenset(("cache_salt", "dropped", "stop", "trace_decode_token_ids"))
_REPLACED = frozenset(("max_tokens", "min_tokens", "score", "stop", "stop_token_ids"))


def _check_trace(params: TokenSampling) -> None:
    """Raise `ApiError` 400 for a parameter that contradicts a forced output."""
    excluding = {
        "n": (params.n or 1) > 1,
        "structured_outputs": params.structured_outputs is not None,
        "output_start": params.output_start is not None,
    }
    for name, excluded in excluding.items():
        if excluded:
            message = f"'sampling_params.{name}' and 'sampling_params.trace_decode_token_ids' exclude each other"
            raise bad_request(message, f"sampling_params.{name}")
    if params.score is not None and params.logprobs is None:
        raise bad_request("'sampling_params.score' needs 'sampling_params.logprobs'", "sampling_params.score")


class TokenWriter:
    """Writes the answer to one job as token ids, in vLLM's form.

    An event of a stream has the ids that were added to a choice. The last event of a choice has its finish reason, and
    may have no ids.
    """

    text_event = None  # there is no text: see `ReplyWriter.text_event`

    def __init__(self, job: Job, *, reply_id: str, served: Served, created: int, tokens: TokenBytes) -> None:
        self._job = job
        self._long = LongLists()
        self._served, self._request_id = served, (job.repeated or {}).get("request_id", reply_id)

    @property
    def _base(self) -> dict[str, Any]:
        # vLLM's answer names no model.
        fields = {name: value for name, value in self._served().items() if name != "model"}
        return {"request_id": self._request_id, **fields}

    def chunk(self, index: int, delta: Delta, choices: Sequence[Choice]) -> list[bytes]:
        """Return the event of a delta of choice `index`, in pieces."""
        if not delta.token_ids and delta.finish_reason is None:
            return []
        usage = usage_of(self._job, choices) if self._job.continuous_usage else None
        return self._long.pieces(self._event(orjson.dumps(self._choice(index, delta, choices[index])), usage))

    def end(self, choices: Sequence[Choice]) -> bytes:
        """Return the last events of a stream. With `include_usage` the first has the token counts and no choices."""
        return (self._event(b"", usage_of(self._job, choices)) if self._job.include_usage else b"") + DONE_EVENT

    def failed(self, error: ApiError, choices: Sequence[Choice]) -> bytes:
        """Return the event that ends a failed stream. No [DONE] follows it."""
        return b"data: " + orjson.dumps(error.body()) + b"\n\n"

    def body(self, deltas: Sequence[Delta], choices: Sequence[Choice]) -> list[bytes]:
        """Return the answer of a request that is not streamed, in pieces. `deltas[i]` is all of choice i."""
        answer: dict[str, Any] = {
            **self._base,
            "choices": [self._choice(index, delta, choices[index]) for index, delta in enumerate(deltas)],
            "usage": usage_of(self._job, choices),
        }
        if self._job.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._long.add(prompt_logprobs(self._job, 0, choices, lambda token_id: None))
        return self._long.pieces(orjson.dumps(answer))

    def _event(self, choice: bytes, usage: dict[str, Any] | None) -> bytes:
        head = b"data: " + orjson.dumps(self._base)[:-1] + b',"choices":['
        return head + choice + b'],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def _choice(self, index: int, delta: Delta, choice: Choice) -> dict[str, Any]:
        found = {
            "index": index,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "token_ids": delta.token_ids,
        }
        if delta.finish_reason is None:
            return found
        return {**found, **choice.versions, **self._long.add_experts(self._job, choice)}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        count = self._job.logprobs
        if count is None or not delta.token_ids:
            return None
        scores = (_scored(*pair, count) for pair in zip(delta.token_ids, delta.logprobs, strict=True))
        many = self._job.output_scores(len(delta.token_ids)) >= MANY_SCORES
        return {"content": self._long.add(map(orjson.dumps, scores)) if many else list(scores)}


def _scored(token_id: int, entry: TokenLogprob, count: int) -> dict[str, Any]:
    """Return the scores of an output token. Its list has `count` tokens, the chosen one first (at least that one)."""
    others = ((t, value) for t, value in entry.top if t != token_id)
    ranked = [(token_id, entry.logprob), *others][: max(count, 1)]
    return {**_token(token_id, entry.logprob), "top_logprobs": [_token(t, value) for t, value in ranked]}


def _token(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": max(logprob, LOWEST_LOGPROB), "bytes": None}
