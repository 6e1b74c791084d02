"""What the model and the server allow a request, and its sampling with every field explicit."""

import secrets

from moeyard_router.api.schema import ChatRequest, CompletionRequest, compression_of
from moeyard_router.config import RouterConfig
from moeyard_router.errors import ApiError, bad_request
from moeyard_worker.protocol import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's and vLLM's default of max_tokens for /v1/completions
SEEDS = 2**63


class RequestLimits:
    """The limits of one router. Raises `ApiError` for everything that they rule out."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config

    def check_choices(self, n: int, num_prompts: int) -> None:
        """Raise `ApiError` 400 for more sequences than one request may have."""
        limit = min(self._config.max_choices, self._config.max_inflight)
        if n * num_prompts > limit:
            what = f"n={n}" if num_prompts == 1 else f"{num_prompts} prompts with n={n}"
            message = f"{what} makes {n * num_prompts} sequences, at most {limit} are allowed in one request"
            raise bad_request(message, "n" if n > 1 else "prompt")

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raise `ApiError` 400 for an id outside the vocabulary."""
        size = self._config.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            outside = next(i for i in ids if not 0 <= i < size)
            raise bad_request(f"'{param}': token id {outside} is outside the vocabulary of {size} ids", param)

    def check_logprobs(self, request: CompletionRequest | ChatRequest, logprobs: int | None) -> None:
        """Raise `ApiError` 400 for more alternatives of a token, of output or prompt, than this server gives."""
        if logprobs is not None and logprobs > self._config.max_logprobs:
            field = "logprobs" if isinstance(request, CompletionRequest) else "top_logprobs"
            raise bad_request(f"'{field}': {logprobs} is above the limit of {self._config.max_logprobs}", field)
        if request.prompt_logprobs is not None and request.prompt_logprobs > self._config.max_logprobs:
            message = f"'prompt_logprobs': {request.prompt_logprobs} is above the limit of {self._config.max_logprobs}"
            raise bad_request(message, "prompt_logprobs")

    def sampling(
        self, request: CompletionRequest | ChatRequest, prompt_tokens: int, logprobs: int | None, *, echo: bool
    ) -> SamplingParams:
        """Return sampling with every field explicit: the request's, else the server's default, else neutral."""
        scores = [count for count in (request.prompt_logprobs, logprobs if echo else None) if count is not None]
        max_tokens = self._max_tokens(request, prompt_tokens)
        min_tokens = request.min_tokens or 0
        if min_tokens > max_tokens:
            raise bad_request(f"'min_tokens': {min_tokens} is above max_tokens {max_tokens}", "min_tokens")
        self.check_ids(request.stop_token_ids or [], "stop_token_ids")
        usual = self._config.sampling_defaults
        top_k = int(_first(request.top_k, usual.top_k, 0))
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=_first(request.temperature, usual.temperature, 1.0),
            top_p=_first(request.top_p, usual.top_p, 1.0),
            top_k=min(max(top_k, 0), self._config.vocab_size),
            min_p=_first(request.min_p, usual.min_p, 0.0),
            seed=secrets.randbits(63) if request.seed is None else request.seed % SEEDS,
            repetition_penalty=_first(request.repetition_penalty, usual.repetition_penalty, 1.0),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=self._logit_bias(request.logit_bias or {}),
            stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
            ignore_eos=bool(request.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=max(scores, default=None),
            kv_compression=compression_of(request.kv_compression, self._config.kv_compression),
        )

    def _max_tokens(self, request: CompletionRequest | ChatRequest, prompt_tokens: int) -> int:
        limit = self._config.max_model_len
        asked = request.max_tokens
        field = "prompt"
        if isinstance(request, ChatRequest):
            asked = request.max_completion_tokens if asked is None else asked
            field = "messages"
        room = self.check_room(prompt_tokens, field, least=0 if asked == 0 else 1)
        if asked is None:
            usual = self._config.sampling_defaults.max_tokens or room
            return min(room, usual if isinstance(request, ChatRequest) else min(usual, DEFAULT_COMPLETION_TOKENS))
        if asked > room:
            message = (
                f"the prompt's {prompt_tokens} tokens and max_tokens={asked} are {prompt_tokens + asked}, "
                f"above the model's limit of {limit} tokens"
            )
            raise ApiError(400, message, param="max_tokens", reason="prompt_too_long")
        return asked

    def check_room(self, prompt_tokens: int, param: str, *, least: int) -> int:
        """Tokens that a prompt leaves for its answer; raises `ApiError` 400 if these are fewer than `least`."""
        limit = self._config.max_model_len
        if limit - prompt_tokens < least:
            message = (
                f"the prompt has {prompt_tokens} tokens, which leaves no room in the model's limit of {limit} tokens"
            )
            raise ApiError(400, message, param=param, reason="prompt_too_long")
        return limit - prompt_tokens

    def _logit_bias(self, given: dict[str, float]) -> dict[int, float]:
        bias: dict[int, float] = {}
        for key, value in given.items():
            if not (key.isascii() and key.isdigit() and len(key) < 20):
                raise bad_request(f"'logit_bias': '{key:.40}' is not a token id", "logit_bias")
            bias[int(key)] = value
        self.check_ids(list(bias), "logit_bias")
        return bias


def _first(asked: float | None, usual: float | None, neutral: float) -> float:
    return asked if asked is not None else usual if usual is not None else neutral
