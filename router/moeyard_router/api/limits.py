"""Limits of the model and the server on a request, and its sampling parameters with defaults filled in."""

import secrets

from moeyard_router.api.schema import ChatRequest, CompletionRequest, compression_of
from moeyard_router.config import RouterConfig
from moeyard_router.errors import ApiError, bad_request
from moeyard_worker.protocol import SamplingParams

SEEDS = 2**63


class RequestLimits:
    """The limits of one router. Methods raise `ApiError` for requests beyond them."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config

    def check_choices(self, n: int, num_prompts: int) -> None:
        """Refuse more sequences than one request may have."""
        limit = min(self._config.max_choices, self._config.max_inflight)
        if n * num_prompts > limit:
            cause = f"n={n}" if num_prompts == 1 else f"{num_prompts} prompts with n={n}"
            message = f"{cause} makes {n * num_prompts} sequences, at most {limit} are allowed in one request"
            raise bad_request(message, "n" if n > 1 else "prompt")

    def check_ids(self, ids: list[int], param: str) -> None:
        """Refuse ids outside the vocabulary."""
        size = self._config.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            outside = next(i for i in ids if not 0 <= i < size)
            raise bad_request(f"'{param}': token id {outside} is outside the vocabulary of {size} ids", param)

    def check_logprobs(self, request: CompletionRequest | ChatRequest, logprobs: int | None) -> None:
        """Refuse more alternatives per output or prompt token than this server gives."""
        field, limit = (
            "logprobs" if isinstance(request, CompletionRequest) else "top_logprobs",
            self._config.max_logprobs,
        )
        for name, count in ((field, logprobs), ("prompt_logprobs", request.prompt_logprobs)):
            if count is not None and count > limit:
                raise bad_request(f"'{name}': {count} is above the limit of {limit}", name)

    def sampling(
        self, request: CompletionRequest | ChatRequest, prompt_tokens: int, logprobs: int | None, *, echo: bool
    ) -> SamplingParams:
        """Return the sampling parameters: the request's values, else the server's defaults, else neutral ones."""
        scores = [count for count in (request.prompt_logprobs, logprobs if echo else None) if count is not None]
        max_tokens = self._max_tokens(request, prompt_tokens)
        min_tokens = request.min_tokens or 0
        if min_tokens > max_tokens:
            raise bad_request(f"'min_tokens': {min_tokens} is above max_tokens {max_tokens}", "min_tokens")
        self.check_ids(request.stop_token_ids or [], "stop_token_ids")
        defaults = self._config.sampling_defaults
        top_k = int(_first(request.top_k, defaults.top_k, 0))
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=_first(request.temperature, defaults.temperature, 1.0),
            top_p=_first(request.top_p, defaults.top_p, 1.0),
            top_k=min(max(top_k, 0), self._config.vocab_size),
            min_p=_first(request.min_p, defaults.min_p, 0.0),
            seed=secrets.randbits(63) if request.seed is None else request.seed % SEEDS,
            repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=self._logit_bias(request.logit_bias or {}),
            stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
            ignore_eos=bool(request.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=max(scores, default=None),
            kv_compression=compression_of(request.kv_compression, self._config.kv_compression),
            cache_salt=request.cache_salt or "",
            routed_experts_start=self._routed_start(request, prompt_tokens),
        )

    def _max_tokens(self, request: CompletionRequest | ChatRequest, prompt_tokens: int) -> int:
        limit = self._config.max_model_len
        if isinstance(request, ChatRequest):
            count, field, most = request.max_tokens, "messages", limit
            count = request.max_completion_tokens if count is None else count
        else:
            count, field, most = request.max_tokens, "prompt", request.default_tokens or limit
        available = self.check_room(prompt_tokens, field, least=0 if count == 0 else 1)
        if count is None:
            return min(available, self._config.sampling_defaults.max_tokens or available, most)
        if count > available:
            message = (
                f"the prompt's {prompt_tokens} tokens and max_tokens={count} are {prompt_tokens + count}, "
                f"above the model's limit of {limit} tokens"
            )
            raise ApiError(400, message, param="max_tokens", reason="prompt_too_long")
        return count

    def _routed_start(self, request: CompletionRequest | ChatRequest, prompt_tokens: int) -> int | None:
        """Return the first position whose experts are wanted. A server that keeps them returns them by default."""
        start = request.routed_experts_prompt_start or 0
        if request.return_routed_experts is False:
            return None
        if self._config.routing is None:
            field = "return_routed_experts" if request.return_routed_experts else "routed_experts_prompt_start"
            if request.return_routed_experts or start:
                needs = "this server keeps no routing: start it with --enable-return-routed-experts"
                raise bad_request(f"'{field}': {needs}", field)
            return None
        if start >= prompt_tokens:
            message = f"'routed_experts_prompt_start': {start} is not below the prompt's {prompt_tokens} tokens"
            raise bad_request(message, "routed_experts_prompt_start")
        return start

    def check_room(self, prompt_tokens: int, param: str, *, least: int) -> int:
        """Return the tokens that a prompt leaves for its answer, at least `least`."""
        limit = self._config.max_model_len
        if limit - prompt_tokens < least:
            message = f"the prompt's {prompt_tokens} tokens leave no room in the model's limit of {limit} tokens"
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


def _first(given: float | None, default: float | None, neutral: float) -> float:
    return given if given is not None else default if default is not None else neutral
