"""Turn validated requests into jobs: prompts as tokens, and one continuation per choice with explicit sampling."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from pydantic import InstanceOf

from moeyard_router.api.limits import SEEDS, RequestLimits
from moeyard_router.api.messages import template_messages
from moeyard_router.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from moeyard_router.api.structured import Constraint, constraint_of
from moeyard_router.api.thinking import template_variables
from moeyard_router.api.tools import ToolUse, answering, check_served
from moeyard_router.api.validation import RequestT, parse
from moeyard_router.config import RoutedShape, RouterConfig
from moeyard_router.errors import bad_request, unknown_model
from moeyard_router.text.answer_formats import AnswerFormats, answer_formats
from moeyard_router.text.chat import Codec
from moeyard_router.text.extraction import Extraction
from moeyard_router.text.template import ChatTemplate
from moeyard_worker.protocol import SamplingParams, TokenIds

THREAD_TEXT = 2048  # characters or bytes: 2 ms of tokenizing, twenty times the cost of waking a thread
_THREADS = 2
_MESSAGE_TEXT = 64  # rendering a message costs as much as this many characters more

P = ParamSpec("P")
T = TypeVar("T")
# Log-probabilities of prompt tokens per request, alternatives included: about 10 MB of JSON, or one alternative for
# each of 131072 tokens.
_MAX_SCORES = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt. `token_ids` is a `TokenIds` if it came from a client; `text` is set if `echo` repeats it."""

    token_ids: Sequence[int]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Choice `index` of a request, which continues prompt number `prompt`."""

    index: int
    prompt: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request, ready to run.

    `ignored` names fields without effect. `repeated` holds request fields that the answer repeats. `routing` is the
    form of the routed experts that the answer has, if any. `output_start`: the one prompt's ids from there on are a
    forced output for the workers, and a part of the prompt for the client. `grammar_fields` names the client's fields
    that the grammar enforces.
    """

    chat: bool
    prompts: tuple[Prompt, ...]
    continuations: tuple[Continuation, ...] = ()
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    stop_ids: frozenset[int] = frozenset()
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    echo: bool = False
    logprobs: int | None = None
    client: str | None = None
    ignored: tuple[str, ...] = ()
    extraction: InstanceOf[Extraction] | None = None  # holds objects of this process: see large.py
    prompt_logprobs: int | None = None
    repeated: dict[str, Any] | None = None
    routing: RoutedShape | None = None
    output_start: int | None = None
    grammar_fields: tuple[str, ...] = ()

    @property
    def num_forced(self) -> int:
        """Number of the prompt's ids that are a forced output for the workers."""
        return 0 if self.output_start is None else len(self.prompts[0].token_ids) - self.output_start

    def submitted(self, continuation: Continuation) -> Sequence[int]:
        """Return a choice's prompt as a worker gets it."""
        ids = self.prompts[continuation.prompt].token_ids
        return ids if self.output_start is None else TokenIds.of(ids[: self.output_start])

    @property
    def num_scores(self) -> int:
        """Log-probabilities of prompt tokens that the workers compute, alternatives included."""
        wanted = ((c.sampling.prompt_logprobs, self.prompts[c.prompt].token_ids) for c in self.continuations)
        return sum(len(ids) * (count + 1) for count, ids in wanted if count is not None)

    def output_scores(self, num_tokens: int) -> int:
        """Return the number of log-probabilities in an answer of `num_tokens` tokens, alternatives included."""
        return 0 if self.logprobs is None else num_tokens * (self.logprobs + 1)

    @property
    def kept_tokens(self) -> dict[str, int]:
        """The usage field `kept_tokens`: prompt tokens that stay in the KV cache. Empty without compression."""
        sampling = self.continuations[0].sampling
        if sampling.kv_compression is None:
            return {}
        forced = self.num_forced
        return {"kept_tokens": sum(sampling.kept(len(p.token_ids) - forced) + forced for p in self.prompts)}


class Intake:
    """Turns requests into jobs. Raises `ApiError` for requests beyond the model or the limits."""

    def __init__(self, config: RouterConfig, codec: Codec) -> None:
        self._config = config
        self._codec = codec
        self._formats = formats_of(config, codec)
        self.limits = RequestLimits(config)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="intake")

    async def work(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function`, in a thread if it processes THREAD_TEXT characters or more."""
        if size < THREAD_TEXT:
            return function(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))

    async def parse(self, body: bytes, kind: type[RequestT]) -> RequestT:
        """Validate a request body. Raises `ApiError` 400 naming the first field at fault."""
        ignore = self._config.unknown_fields == "ignore"
        return await self.work(len(body), parse, body, kind, ignore_unknown=ignore)

    async def completion(self, request: CompletionRequest) -> Job:
        """Return the job of /v1/completions. Special tokens are added to text prompts by default."""
        self._check_model(request.model)
        self.limits.check_choices(request.n or 1, len(request.prompt))
        special = request.add_special_tokens is not False
        prompts = [await self._prompt(p, special=special, echo=bool(request.echo)) for p in request.prompt]
        constraint = constraint_of(request)
        job = self._job(request, prompts, logprobs=request.logprobs, echo=request.echo, constraint=constraint)
        return job if request.output_start is None else _scored(job, request.output_start)

    async def chat(self, request: ChatRequest) -> Job:
        """Return the job of a chat. The template writes the special tokens, so none are added by default."""
        self._check_model(request.model)
        self.limits.check_choices(request.n or 1, 1)
        template = self._template(request.tool_use)
        text, unseen = await self._rendered(request, template)
        extraction, constraint = answering(
            request.tool_use,
            self._formats,
            shown="tools" in template.traits.variables,
            prompt=text,
            begun=(request.messages[-1].content or "") if request.continue_final_message else None,
            include_reasoning=request.shows_reasoning,
            body=constraint_of(request),
        )
        prompt = await self._prompt(text, special=bool(request.add_special_tokens), echo=False, param="messages")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        job = self._job(request, [prompt], logprobs=logprobs, constraint=constraint)
        return dataclasses.replace(job, ignored=(*job.ignored, *unseen), extraction=extraction)

    async def tokenize(self, request: TokenizeRequest) -> Job:
        """Return a job whose one prompt is the prompt or chat of /tokenize."""
        self._check_model(request.model)
        unseen: tuple[str, ...] = ()
        text, special = request.prompt or "", request.add_special_tokens is not False
        if request.messages is not None:
            chat = request.as_chat()
            text, unseen = await self._rendered(chat, self._template(chat.tool_use))
            prompt = await self._prompt(text, special=bool(chat.add_special_tokens), echo=False, param="messages")
        elif text:
            prompt = await self._prompt(text, special=special, echo=False)
        else:  # an empty prompt cannot run, but it can be counted
            prompt = Prompt(token_ids=tuple(self._codec.encode(text, add_special_tokens=special)))
        ignored = (*request.ignored, *unseen)
        return Job(chat=True, prompts=(prompt,), echo=bool(request.return_token_strs), ignored=ignored)

    async def detokenize(self, request: DetokenizeRequest) -> Job:
        """Return a job whose one prompt has the text of the token ids, special tokens included."""
        self._check_model(request.model)
        count, limit = len(request.tokens), self._config.max_model_len
        if count > limit:
            raise bad_request(f"{count} tokens are above the model's limit of {limit}", "tokens")
        self.limits.check_ids(request.tokens, "tokens")
        if not self._codec.has_text:
            raise bad_request("this server has no tokenizer: token ids have no text", "tokens")
        prompt = Prompt(token_ids=(), text=self._codec.decode(request.tokens))
        return Job(chat=True, prompts=(prompt,), ignored=request.ignored)

    def _template(self, use: ToolUse) -> ChatTemplate:
        """Return the template for a chat with or without tools. Raises `ApiError` 400 if there is none."""
        template = self._codec.template if use.shown is None else self._codec.tool_template
        if template is not None:
            return template
        only = "" if self._codec.tool_template is None else " for chats without tools"
        raise bad_request(f"model '{self._config.model_name}' has no chat template{only}", "messages")

    async def _rendered(self, request: ChatRequest, template: ChatTemplate) -> tuple[str, tuple[str, ...]]:
        """Return the prompt's text, and the names of fields that the template does not use."""
        use = request.tool_use
        check_served(use, self._formats, template.traits)
        size = sum(m.num_chars + _MESSAGE_TEXT for m in request.messages) + use.num_chars
        if request.chat_template_kwargs or request.chat_template_args:
            size = max(size, THREAD_TEXT)  # the cost of unknown variables is unknown
        text, unseen = await self.work(size, _render, template, request, use)
        if not text:
            raise bad_request("the chat template made an empty prompt of these messages", "messages")
        return text, unseen

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._config.model_names:
            raise unknown_model(name, self._config.model_names)

    async def _prompt(self, prompt: str | list[int], *, special: bool, echo: bool, param: str = "prompt") -> Prompt:
        text = ""
        if isinstance(prompt, str):
            ids = await self.work(len(prompt), self._encode, prompt, special, param)
            text = prompt if echo else ""
        else:
            self.limits.check_room(len(prompt), "prompt", least=0)
            self.limits.check_ids(prompt, "prompt")
            ids, text = TokenIds.of(prompt), self._codec.decode(prompt) if echo else ""
        if not ids:
            raise bad_request("the prompt has no tokens", "prompt")
        return Prompt(token_ids=ids, text=text)

    def _encode(self, text: str, special: bool, param: str) -> TokenIds:
        self._codec.check_length(text, self._config.max_model_len, param)
        return TokenIds.of(self._codec.encode(text, add_special_tokens=special))

    def _job(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[Prompt],
        *,
        logprobs: int | None,
        constraint: Constraint | None,
        echo: bool | None = False,
    ) -> Job:
        self.limits.check_logprobs(request, logprobs)
        if request.stop and not self._codec.has_text:
            raise bad_request("'stop': this server has no tokenizer to find it with; use 'stop_token_ids'", "stop")
        grammar, fields = (None, ()) if constraint is None else (constraint.grammar, constraint.fields)
        if grammar is not None and not self._codec.has_text:
            message = f"'{fields[0]}': structured output is about text, and this server has no tokenizer"
            raise bad_request(message, fields[0])
        continuations: list[Continuation] = []
        for i, prompt in enumerate(prompts):
            sampling = self.limits.sampling(request, len(prompt.token_ids), logprobs, echo=bool(echo))
            for choice in range(request.n or 1):
                seed = (sampling.seed + choice) % SEEDS
                # Choices of one prompt share the first one's scores. In a stream they would have to wait for them.
                scores = None if choice and not request.stream else sampling.prompt_logprobs
                seeded = dataclasses.replace(sampling, seed=seed, grammar=grammar, prompt_logprobs=scores)
                continuations.append(Continuation(index=len(continuations), prompt=i, sampling=seeded))
        stream_options = request.stream_options
        # A completed grammar allows only end-of-sequence tokens, even with `ignore_eos`.
        eos = () if request.ignore_eos and grammar is None else self._config.eos_token_ids
        job = Job(
            chat=isinstance(request, ChatRequest),
            prompts=tuple(prompts),
            continuations=tuple(continuations),
            stops=request.stop,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            stop_ids=frozenset(eos) | frozenset(request.stop_token_ids or ()),
            stream=bool(request.stream),
            include_usage=request.include_usage,
            continuous_usage=stream_options is not None and bool(stream_options.continuous_usage_stats),
            # Without a tokenizer the ids are the only output.
            return_token_ids=not self._codec.has_text if request.return_token_ids is None else request.return_token_ids,
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
            echo=bool(echo),
            logprobs=logprobs,
            client=request.user,
            ignored=request.ignored,
            prompt_logprobs=request.prompt_logprobs,
            routing=None if continuations[0].sampling.routed_experts_start is None else self._config.routing,
            grammar_fields=fields,
        )
        if job.num_scores > _MAX_SCORES:
            message = f"{job.num_scores} logprobs of prompt tokens, at most {_MAX_SCORES} are given in one answer"
            raise bad_request(message, "logprobs" if request.prompt_logprobs is None else "prompt_logprobs")
        return job


def _scored(job: Job, start: int) -> Job:
    """Return a job that scores its prompt's ids from `start` on like an output. Raises `ApiError` 400."""
    if len(job.prompts) > 1:
        raise bad_request(f"'output_start': {len(job.prompts)} prompts are given, one can be scored", "output_start")
    if len(job.continuations) > 1:
        raise bad_request("'n': 'score' is about one output and excludes n above 1", "n")
    ids, only = job.prompts[0].token_ids, job.continuations[0]
    params = only.sampling
    if params.grammar is not None:
        raise bad_request("'score' excludes structured output", "score")
    if start >= len(ids):
        raise bad_request(
            f"'output_start': {start} is not below the {len(ids)} tokens of prompt and output", "output_start"
        )
    if (params.routed_experts_start or 0) >= start:
        message = f"'routed_experts_prompt_start': {params.routed_experts_start} is not below output_start {start}"
        raise bad_request(message, "routed_experts_prompt_start")
    output = tuple(ids[start:])
    forced = dataclasses.replace(
        params,
        trace_decode_token_ids=output,
        as_decoded=True,
        max_tokens=params.max_tokens + len(output),
        min_tokens=params.min_tokens + len(output),
        logprobs=max(job.logprobs or 0, params.prompt_logprobs or 0),
    )
    return dataclasses.replace(job, continuations=(dataclasses.replace(only, sampling=forced),), output_start=start)


def formats_of(config: RouterConfig, codec: Codec) -> AnswerFormats:
    """Return the formats of this router's answers. Raises `ValueError` for an unknown or missing parser."""
    return answer_formats(
        codec, tools=config.tool_call_parser, reasoning=config.reasoning_parser, auto=config.enable_auto_tool_choice
    )


def _render(template: ChatTemplate, request: ChatRequest, use: ToolUse) -> tuple[str, tuple[str, ...]]:
    """Return a chat's prompt, and the names of fields that the template does not use."""
    continued = bool(request.continue_final_message)
    generates = request.add_generation_prompt
    messages, unseen = template_messages(request.messages, template.traits, continued=continued)
    variables, unused = template_variables(request, template.traits)
    if use.shown is not None:
        variables = {**variables, "tools": use.shown}
    text = template.render(
        messages,
        add_generation_prompt=not continued if generates is None else generates,
        continue_final_message=continued,
        variables=variables,
    )
    return text, (*unused, *unseen)
