"""Requests that can never run on a rank or cannot be queued now, and the answers to them. Pure."""

from moeyard_worker.config.engine_config import SchedulerConfig, window_rows
from moeyard_worker.protocol import Rejected, SamplingParams, Submit
from moeyard_worker.scheduling.request import num_dropped
from moeyard_worker.scheduling.sampling_check import sampling_error


def refusal(submit: Submit, config: SchedulerConfig) -> Rejected | None:
    """Return why a request can never run on this rank, or None if it can."""
    prompt, params = submit.prompt_token_ids, submit.sampling

    def no(reason: str, message: str, param: str | None = None) -> Rejected:
        return Rejected(request_id=submit.request_id, reason=reason, message=message, param=param)

    if not prompt:
        return no("bad_request", "the prompt is empty")
    wrong = sampling_error(params, config.vocab_size)
    if wrong is not None:
        return no("bad_request", wrong)
    # `min` and `max` run in C. A Python loop over a long prompt would delay the streams of this rank.
    if min(prompt) < 0 or max(prompt) >= config.vocab_size:
        outside = next(t for t in prompt if not 0 <= t < config.vocab_size)
        return no("bad_request", f"token id {outside} is outside the vocabulary of {config.vocab_size}")
    limit = config.max_model_len
    if len(prompt) + min(params.max_tokens, 1) > limit:
        return no(
            "prompt_too_long",
            f"the prompt has {len(prompt)} tokens, which leaves no room for output within the limit of {limit}",
        )
    output = submit.output_token_ids
    if output and not (min(output) >= 0 and max(output) < config.vocab_size and len(output) <= params.max_tokens):
        return no("bad_request", f"{len(output)} output tokens to go on from do not fit the request or the vocabulary")
    if not 0 <= submit.num_scored < len(prompt):
        return no("bad_request", f"{submit.num_scored} of {len(prompt)} prompt tokens cannot have been scored")
    if params.min_tokens > 0 and len({*params.stop_token_ids, *config.eos_token_ids}) >= config.vocab_size:
        return no("bad_request", "min_tokens holds back every stop token, and here that is the whole vocabulary")
    total = len(prompt) + params.max_tokens
    if total > limit:
        return no(
            "prompt_too_long",
            f"{len(prompt)} prompt tokens + max_tokens {params.max_tokens} exceed the limit of {limit}",
        )
    wrong = _compression_error(len(prompt), params, config)
    if wrong is not None:
        return no("bad_request", wrong, "kv_compression")
    wanted = params.routed_experts_start
    if wanted is not None and not config.routing_bytes:
        return no("bad_request", "this worker keeps no routing; it needs --enable-return-routed-experts")
    if wanted is not None and not 0 <= wanted < len(prompt):
        return no("bad_request", f"routed_experts_start {wanted} is not a position of the prompt's {len(prompt)}")
    if not 0 <= submit.num_routed < len(prompt):
        return no("bad_request", f"the experts of {submit.num_routed} of {len(prompt)} prompt tokens were not sent")
    pages = num_pages(len(prompt), params, config)
    if pages > config.num_pages:
        return no("never_fits", f"the request needs {pages} KV pages, this worker has {config.num_pages}")
    return None


def duplicate(request_id: str) -> Rejected:
    """Return the answer to a request whose client has a live one with the same id."""
    message = f"request {request_id!r} is already running"
    return Rejected(request_id=request_id, reason="duplicate", message=message)


def queue_full(request_id: str, num_waiting: int) -> Rejected:
    """Return the answer to a request that finds the queue full."""
    message = f"{num_waiting} requests are waiting"
    return Rejected(request_id=request_id, reason="queue_full", message=message, retry_after=1.0)


def _compression_error(num_prompt: int, params: SamplingParams, config: SchedulerConfig) -> str | None:
    """Return why this rank cannot compress the prompt as requested, or None."""
    if params.kv_compression is None:
        return None
    if not config.compressible:
        return "kv_compression is not supported for this model, whose cache holds one entry for several positions"
    rows, window = window_rows(config, config.chunk_alignment), params.kv_compression.window
    if window > rows and num_dropped(params, num_prompt):
        return f"kv_compression: the window of {window} exceeds the {rows} prompt rows that a step has at least"
    return None


def num_pages(num_prompt: int, params: SamplingParams, config: SchedulerConfig) -> int:
    """Return the most pages that a request holds. During compression it holds the pages of both versions."""
    positions = max(num_positions(num_prompt + params.max_tokens, config), num_prompt)
    dropped = num_dropped(params, num_prompt)
    kept = -(-(positions - dropped) // config.page_size)
    return kept + -(-num_prompt // config.page_size) if dropped else kept


def num_positions(total: int, config: SchedulerConfig) -> int:
    """Return the number of positions whose state may be written, of a request with `total` tokens.

    The last output token is not fed back, so its state is not stored. There is one exception: a step that is planned
    while drafts are in flight cannot know whether they complete the request. It then feeds that token, too.
    """
    return total if config.num_drafts and config.max_in_flight > 1 else total - 1
