"""Takes the tokens that a step yielded: which one ends its request, and the messages about both. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moeyard_worker.protocol import (
    MAX_PROMPT_EXPERTS,
    MAX_PROMPT_LOGPROBS,
    Done,
    PromptExperts,
    PromptLogprobs,
    Rejected,
    SamplingParams,
    TokenLogprob,
    Tokens,
)
from moeyard_worker.scheduling.request import Accepted, Reply, Request, SchedulerStats, Waits
from moeyard_worker.scheduling.step import Chunk
from moeyard_worker.state.routing import PageRouting


def take_tokens(
    request: Request,
    chunk: Chunk,
    result: Accepted,
    *,
    eos_token_ids: tuple[int, ...],
    stats: SchedulerStats,
    now: float,
    row: int,
    experts: bytes = b"",
    weight_version: str | None = None,
) -> tuple[Tokens, str | None]:
    """Append tokens to their request, and count them. The first follows row `row` of the completed chunk, and `experts`
    are those of the chunk's rows. `weight_version`: of the weights that computed it.

    Return the message about them and the finish reason, or None. Accepted tokens after the last one are dropped.
    """
    for j in range(chunk.num_sampled - 1):
        stats.drafts[j] += 1
        stats.accepted[j] += j + 1 < len(result.token_ids)
    start = len(request.output)
    reason = _extend(request, result.token_ids, eos_token_ids)
    count = len(request.output) - start
    stats.generation_tokens += count
    if request.first_token is None:
        stats.prefilled(request, now)
    # Tokens that another rank generated, or that were known, were not timed here.
    num_gaps = len(request.output) - request.num_given - 1
    if reason is not None and num_gaps > 0 and request.first_token is not None:
        stats.token_seconds.append((now - request.first_token) / num_gaps)
    known, request.weight_version = request.weight_version, weight_version
    tokens = Tokens(
        request_id=request.request_id,
        start=start,
        token_ids=result.token_ids[:count],
        logprobs=result.logprobs[:count],
        cached_tokens=None if start else request.cached_tokens,
        routed_experts=_behind(request, chunk, experts, range(row, row + count)),
        weight_version=None if known == weight_version else weight_version,
    )
    return tokens, reason


def _behind(request: Request, chunk: Chunk, experts: bytes, rows: range) -> bytes:
    """Return the experts of these rows of the chunk, if the request wants them."""
    if request.sampling.routed_experts_start is None:
        return b""
    width = len(experts) // chunk.num_tokens
    return experts[rows.start * width : rows.stop * width]


def _extend(request: Request, token_ids: tuple[int, ...], eos_token_ids: tuple[int, ...]) -> str | None:
    """Append accepted tokens up to the one that ends the request. Return its finish reason, or None."""
    for token_id in token_ids:
        request.output.append(token_id)
        # Each token is checked alone, because stop tokens before `min_tokens` do not count.
        reason = finish_reason(request.output, request.sampling, eos_token_ids)
        if reason is not None:
            return reason
    return None


def finish_reason(output: Sequence[int], params: SamplingParams, eos_token_ids: tuple[int, ...]) -> str | None:
    """Return the finish reason if the last token ends the output, else None.

    A forced token ends it only by its length. With a grammar, an end-of-sequence token always ends the output: the mask
    allows it only where the text may end.
    """
    token_id, ends = output[-1], () if params.grammar is None else eos_token_ids
    free = len(output) > len(params.trace_decode_token_ids)
    if token_id in ends or (
        len(output) >= params.min_tokens
        and free
        and (token_id in params.stop_token_ids or (not params.ignore_eos and token_id in eos_token_ids))
    ):
        return "stop"
    return "length" if len(output) >= params.max_tokens else None


def done(
    request: Request,
    reason: str,
    waits: Waits,
    error: str | None = None,
    *,
    retryable: bool = True,
    weight_version: str | None = None,
) -> Done:
    """Return the last message about a request. `waits`: the rank's totals now. `weight_version`: of its weights."""
    started, first, waited = request.started, request.first_token, waits.since(request.waits)
    return Done(
        request_id=request.request_id,
        finish_reason=reason,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached_tokens,
        completion_tokens=len(request.output),
        stop_token_id=request.output[-1] if reason == "stop" else None,
        error=error,
        retryable=retryable,
        queue_seconds=0.0 if started is None else started - request.arrived,
        prefill_seconds=0.0 if started is None or first is None else first - started,
        preempted_seconds=() if started is None else tuple(at - started for at in request.preempted),
        lockstep_seconds=waited.lockstep,
        fetch_seconds=waited.fetch,
        weight_version=weight_version,
    )


def expired(request: Request, waited: float, limit: float | None) -> Rejected:
    """Return the answer to a request that waited `waited` seconds, at least `limit`, and never ran."""
    message = f"the request waited {waited:.1f} s and did not start; the limit is {limit:g} s"
    return Rejected(request_id=request.request_id, reason="queue_timeout", message=message, retry_after=1.0)


def routing_replies(request: Request, chunk: Chunk, routing: PageRouting) -> Iterator[Reply]:
    """Yield the experts of prompt positions that are known now and were not sent, in messages of bounded size.

    The last position's experts are sent with the first output token.
    """
    end = min(chunk.end, len(request.prompt) - 1)
    each = max(MAX_PROMPT_EXPERTS // routing.width, 1)
    while request.num_routed < end:
        start = request.num_routed
        request.num_routed = min(start + each, end)
        experts, count = routing.read(chunk.pages, start, request.num_routed), request.num_routed - start
        message = PromptExperts(request_id=request.request_id, start=start, count=count, experts=experts)
        yield Reply(request.client, message)


def score_replies(request: Request, chunk: Chunk, scores: Sequence[TokenLogprob]) -> Iterator[Reply]:
    """Count the scores of a completed chunk, one per target. Yield those of the prompt in messages of bounded size."""
    assert chunk.scoring is not None, "nothing was to be scored"
    assert len(scores) == len(chunk.scoring.targets), f"{len(scores)} scores of {len(chunk.scoring.targets)} tokens"
    first = chunk.start + chunk.scoring.first
    request.num_scored = first + len(scores)
    scores = _cut(scores[: _num_of_prompt(request, chunk)], request.sampling.prompt_logprobs)
    for i in range(0, len(scores), MAX_PROMPT_LOGPROBS):
        part = tuple(scores[i : i + MAX_PROMPT_LOGPROBS])
        message = PromptLogprobs(request_id=request.request_id, start=first + i + 1, logprobs=part)
        yield Reply(request.client, message)


def forced_results(request: Request, chunk: Chunk, scores: Sequence[TokenLogprob]) -> Iterator[tuple[int, Accepted]]:
    """Yield the forced tokens that a completed chunk has scored, in parts of bounded size, each with the row before its
    first token."""
    if chunk.scoring is None:
        return
    first, targets = chunk.scoring.first, chunk.scoring.targets
    for i in range(_num_of_prompt(request, chunk), len(targets), MAX_PROMPT_LOGPROBS):
        part = slice(i, i + MAX_PROMPT_LOGPROBS)
        yield first + i, Accepted(targets[part], tuple(_cut(scores[part], request.sampling.logprobs)))


def _num_of_prompt(request: Request, chunk: Chunk) -> int:
    """Return how many of the chunk's targets belong to the prompt. They come first."""
    assert chunk.scoring is not None, "nothing was to be scored"
    return max(min(len(request.prompt) - 1 - chunk.start - chunk.scoring.first, len(chunk.scoring.targets)), 0)


def _cut(scores: Sequence[TokenLogprob], num_top: int | None) -> Sequence[TokenLogprob]:
    """Return scores with at most `num_top` alternatives: a chunk of both kinds has computed the larger number."""
    if all(len(entry.top) <= (num_top or 0) for entry in scores):
        return scores
    return [replace(entry, top=entry.top[:num_top]) for entry in scores]
