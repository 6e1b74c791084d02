"""From a validated request to the continuations that the fleet will run: tokens, limits, explicit sampling."""

import asyncio
import dataclasses
import secrets
from dataclasses import dataclass

from moeyard_router.api.schema import ChatRequest, CompletionRequest
from moeyard_router.config import RouterConfig
from moeyard_router.errors import ApiError, bad_request, unknown_model
from moeyard_router.text.chat import ChatTemplate, Codec
from moeyard_worker.protocol import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's and vLLM's default of max_tokens for /v1/completions
_THREAD_TEXT = 8192  # characters; shorter texts are tokenized faster than a thread is woken
_MESSAGE_TEXT = 64  # characters that rendering one message counts for, however short it is
_SEEDS = 2**63
# Log-probabilities of prompts that one request may ask for, alternatives counted: about 10 MB of JSON, and one
# alternative for each of 131072 tokens.
_MAX_SCORES = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: its token ids, and its text where `echo` must repeat it."""

    token_ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """One choice to run: choice `index` of the request continues prompt `prompt`."""

    index: int
    prompt: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request, ready to run and to be answered."""

    chat: bool
    prompts: tuple[Prompt, ...]
    continuations: tuple[Continuation, ...]
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    stop_ids: frozenset[int]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None = None

    @property
    def num_scores(self) -> int:
        """Log-probabilities of prompt tokens that the workers are asked for, alternatives counted."""
        asked = ((c.sampling.prompt_logprobs, self.prompts[c.prompt].token_ids) for c in self.continuations)
        return sum(len(ids) * (count + 1) for count, ids in asked if count is not None)


class Intake:
    """Turns requests into jobs; raises `ApiError` for everything that the model or the limits rule out."""

    def __init__(self, config: RouterConfig, codec: Codec) -> None:
        self._config = config
        self._codec = codec

    async def completion(self, request: CompletionRequest) -> Job:
        """A /v1/completions request; text prompts get the tokenizer's special tokens unless told otherwise."""
        self._check_model(request.model)
        self._check_choices(request.n or 1, len(request.prompts))
        special = request.add_special_tokens is not False
        prompts = [await self._prompt(p, special=special, echo=bool(request.echo)) for p in request.prompts]
        return self._job(request, prompts, logprobs=request.logprobs, echo=bool(request.echo))

    async def chat(self, request: ChatRequest) -> Job:
        """A /v1/chat/completions request; the template writes the special tokens, so none are added by default."""
        self._check_model(request.model)
        if self._codec.template is None:
            raise bad_request(f"model '{self._config.model_name}' has no chat template", "messages")
        self._check_choices(request.n or 1, 1)
        size = sum(len(m.content) + _MESSAGE_TEXT for m in request.messages)
        # What a template does with variables of its own is unknown here.
        if size < _THREAD_TEXT and not request.chat_template_kwargs:
            text = _render(self._codec.template, request)
        else:
            text = await asyncio.to_thread(_render, self._codec.template, request)
        if not text:
            raise bad_request("the chat template made an empty prompt of these messages", "messages")
        prompt = await self._prompt(text, special=bool(request.add_special_tokens), echo=False)
        return self._job(
            request, [prompt], logprobs=(request.top_logprobs or 0) if request.logprobs else None, echo=False
        )

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._config.model_name:
            raise unknown_model(name, self._config.model_name)

    def _check_choices(self, n: int, num_prompts: int) -> None:
        limit = min(self._config.max_choices, self._config.max_inflight)
        if n * num_prompts > limit:
            what = f"n={n}" if num_prompts == 1 else f"{num_prompts} prompts with n={n}"
            message = f"{what} makes {n * num_prompts} sequences, at most {limit} are allowed in one request"
            raise bad_request(message, "n" if n > 1 else "prompt")

    async def _prompt(self, prompt: str | list[int], *, special: bool, echo: bool) -> Prompt:
        if isinstance(prompt, str):
            if len(prompt) < _THREAD_TEXT:
                ids = self._codec.encode(prompt, add_special_tokens=special)
            else:
                ids = await asyncio.to_thread(self._codec.encode, prompt, add_special_tokens=special)
            text = prompt
        else:
            self._check_ids(prompt, "prompt")
            ids, text = prompt, self._codec.decode(prompt) if echo else ""
        if not ids:
            raise bad_request("the prompt has no tokens", "prompt")
        return Prompt(token_ids=tuple(ids), text=text)

    def _check_ids(self, ids: list[int], param: str) -> None:
        size = self._config.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            outside = next(i for i in ids if not 0 <= i < size)
            raise bad_request(f"'{param}': token id {outside} is outside the vocabulary of {size} ids", param)

    def _job(
        self, request: CompletionRequest | ChatRequest, prompts: list[Prompt], *, logprobs: int | None, echo: bool
    ) -> Job:
        if logprobs is not None and logprobs > self._config.max_logprobs:
            field = "logprobs" if isinstance(request, CompletionRequest) else "top_logprobs"
            raise bad_request(f"'{field}': {logprobs} is above the limit of {self._config.max_logprobs}", field)
        if request.prompt_logprobs is not None and request.prompt_logprobs > self._config.max_logprobs:
            message = f"'prompt_logprobs': {request.prompt_logprobs} is above the limit of {self._config.max_logprobs}"
            raise bad_request(message, "prompt_logprobs")
        if request.stops and not self._codec.has_text:
            raise bad_request("'stop': this server has no tokenizer to find it with; use 'stop_token_ids'", "stop")
        continuations: list[Continuation] = []
        for i, prompt in enumerate(prompts):
            sampling = self._sampling(request, len(prompt.token_ids), logprobs, echo=echo)
            for choice in range(request.n or 1):
                seeded = dataclasses.replace(sampling, seed=(sampling.seed + choice) % _SEEDS)
                if choice and not request.stream:
                    # The first one's are theirs; a stream would have to wait for it.
                    seeded = dataclasses.replace(seeded, prompt_logprobs=None)
                continuations.append(Continuation(index=len(continuations), prompt=i, sampling=seeded))
        stream_options = request.stream_options
        eos = () if request.ignore_eos else self._config.eos_token_ids
        job = Job(
            chat=isinstance(request, ChatRequest),
            prompts=tuple(prompts),
            continuations=tuple(continuations),
            stops=request.stops,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            stop_ids=frozenset(eos) | frozenset(request.stop_token_ids or ()),
            stream=bool(request.stream),
            include_usage=stream_options is not None and bool(stream_options.include_usage),
            continuous_usage=stream_options is not None and bool(stream_options.continuous_usage_stats),
            # Where there is no text they are all there is to say.
            return_token_ids=not self._codec.has_text if request.return_token_ids is None else request.return_token_ids,
            echo=echo,
            logprobs=logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )
        if job.num_scores > _MAX_SCORES:
            message = f"{job.num_scores} logprobs of prompt tokens, at most {_MAX_SCORES} are given in one answer"
            raise bad_request(message, "logprobs" if request.prompt_logprobs is None else "prompt_logprobs")
        return job

    def _sampling(
        self, request: CompletionRequest | ChatRequest, prompt_tokens: int, logprobs: int | None, *, echo: bool
    ) -> SamplingParams:
        """Every field explicit. A request without a seed gets a random one per prompt, so equal prompts may differ."""
        scores = [count for count in (request.prompt_logprobs, logprobs if echo else None) if count is not None]
        max_tokens = self._max_tokens(request, prompt_tokens)
        min_tokens = request.min_tokens or 0
        if min_tokens > max_tokens:
            raise bad_request(f"'min_tokens': {min_tokens} is above max_tokens {max_tokens}", "min_tokens")
        self._check_ids(request.stop_token_ids or [], "stop_token_ids")
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=min(max(request.top_k or 0, 0), self._config.vocab_size),
            min_p=request.min_p or 0.0,
            seed=secrets.randbits(63) if request.seed is None else request.seed % _SEEDS,
            repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=self._logit_bias(request.logit_bias or {}),
            stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
            ignore_eos=bool(request.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=max(scores, default=None),
        )

    def _max_tokens(self, request: CompletionRequest | ChatRequest, prompt_tokens: int) -> int:
        limit = self._config.max_model_len
        room = limit - prompt_tokens
        asked = request.max_tokens
        field = "prompt"
        if isinstance(request, ChatRequest):
            asked = request.max_completion_tokens if asked is None else asked
            field = "messages"
        if room < (0 if asked == 0 else 1):
            message = (
                f"the prompt has {prompt_tokens} tokens, which leaves no room in the model's limit of {limit} tokens"
            )
            raise ApiError(400, message, param=field, reason="prompt_too_long")
        if asked is None:
            return room if isinstance(request, ChatRequest) else min(room, DEFAULT_COMPLETION_TOKENS)
        if asked > room:
            message = (
                f"the prompt's {prompt_tokens} tokens and max_tokens={asked} are {prompt_tokens + asked}, "
                f"above the model's limit of {limit} tokens"
            )
            raise ApiError(400, message, param="max_tokens", reason="prompt_too_long")
        return asked

    def _logit_bias(self, given: dict[str, float]) -> dict[int, float]:
        bias: dict[int, float] = {}
        for key, value in given.items():
            if not (key.isascii() and key.isdigit() and len(key) < 20):
                raise bad_request(f"'logit_bias': '{key:.40}' is not a token id", "logit_bias")
            bias[int(key)] = value
        self._check_ids(list(bias), "logit_bias")
        return bias


def _render(template: ChatTemplate, request: ChatRequest) -> str:
    """The prompt of a chat; unless it goes on with its last message, it asks for an answer by default."""
    going_on = bool(request.continue_final_message)
    asks = request.add_generation_prompt
    return template.render(
        [m.model_dump(exclude_none=True) for m in request.messages],
        add_generation_prompt=not going_on if asks is None else asks,
        continue_final_message=going_on,
        variables=request.chat_template_kwargs or {},
    )
