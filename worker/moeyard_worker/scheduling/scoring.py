"""Log-probabilities of prompt tokens: which rows of a chunk give some, and how they are told. Pure."""

from collections.abc import Iterator, Sequence

from moeyard_worker.protocol import MAX_PROMPT_LOGPROBS, PromptLogprobs, TokenLogprob
from moeyard_worker.scheduling.request import Reply, Request
from moeyard_worker.scheduling.step import Chunk, Scoring


def rows_to_score(request: Request, start: int, end: int) -> Scoring | None:
    """What is to be scored in rows [start, end) of a request; None if that is nothing.

    A row scores the prompt token behind its own; the last prompt token has none. Rows that were scored before their
    request had to yield its pages are computed again, not told again.
    """
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return None
    first = max(start, request.num_scored)
    targets = request.prompt[first + 1 : end + 1]
    return Scoring(first=first - start, targets=targets, num_top=num_top) if targets else None


def tell_scores(request: Request, chunk: Chunk, scores: Sequence[TokenLogprob]) -> Iterator[Reply]:
    """Count the scores of a completed chunk, one for each of its targets, and tell them in messages of bounded size."""
    assert chunk.scoring is not None, "nothing was to be scored"
    assert len(scores) == len(chunk.scoring.targets), f"{len(scores)} scores of {len(chunk.scoring.targets)} tokens"
    first = chunk.start + chunk.scoring.first
    request.num_scored = first + len(scores)
    for i in range(0, len(scores), MAX_PROMPT_LOGPROBS):
        part = tuple(scores[i : i + MAX_PROMPT_LOGPROBS])
        message = PromptLogprobs(request_id=request.request_id, start=first + i + 1, logprobs=part)
        yield Reply(request.client, message)
