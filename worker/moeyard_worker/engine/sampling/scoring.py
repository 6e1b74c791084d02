"""Log-probabilities of known tokens, of prompts and forced outputs: the head over rows from which no token is sampled.

The head processes a block of rows at a time, since logits of all rows of a prompt would take more memory than the rest
of the step. Sampled rows use the same product, in which a row's bits do not depend on the number of rows. So blocks,
chunks and neighbours do not change a score.
"""

from collections.abc import Callable, Sequence

import torch

from moeyard_kernels.backend import Backend
from moeyard_kernels.types.sampling import MAX_TOP, SampledTokens
from moeyard_kernels.types.sending import to_device
from moeyard_worker.engine.memory.plan import SCORED_ROWS
from moeyard_worker.engine.sampling.sampling import read_tokens
from moeyard_worker.protocol import TokenLogprob
from moeyard_worker.scheduling.step import Chunk, Step

# For each chunk of `step.scored`, the log-probabilities of its targets.
Scores = list[tuple[TokenLogprob, ...]]


def score(
    backend: Backend,
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    step: Step,
    *,
    whole: bool = False,
) -> list[SampledTokens]:
    """Score the targets of `step.scored` under head(rows of hidden [num_rows, H]), without waiting for the device.
    `whole`: every block has SCORED_ROWS rows, some repeated, and MAX_TOP alternatives, so that kernels see one size."""
    rows, targets, num_top = _wanted(step)
    count = len(targets)
    if whole:
        num_top, missing = MAX_TOP, -count % SCORED_ROWS
        rows, targets = rows + rows[:1] * missing, targets + targets[:1] * missing
    where, ids = to_device(torch.tensor([rows, targets]), hidden.device)
    blocks = []
    for begin in range(0, count, SCORED_ROWS):
        block = slice(begin, begin + SCORED_ROWS)
        logits = head(hidden.index_select(0, where[block])).float()
        found = backend.token_logprobs(logits, ids[block], num_top)
        blocks.append(found.each(lambda x, left=count - begin: x[:left]))  # type: ignore[misc]
    return blocks


def warm_scoring(backend: Backend, head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> None:
    """Compile the kernels of a whole block, with a row of any values, hidden [1, H]."""
    rows = hidden.expand(SCORED_ROWS, -1).contiguous()
    ids = torch.zeros(SCORED_ROWS, dtype=torch.int64, device=hidden.device)
    backend.token_logprobs(head(rows).float(), ids, MAX_TOP)


def _wanted(step: Step) -> tuple[list[int], list[int], int]:
    """Return the scored rows of the step, the tokens after them, and the largest number of alternatives."""
    rows: list[int] = []
    targets: list[int] = []
    num_top = begin = 0
    for chunk in step.chunks:
        if chunk.scoring is not None:
            first = begin + chunk.scoring.first
            rows += range(first, first + len(chunk.scoring.targets))
            targets += chunk.scoring.targets
            num_top = max(num_top, chunk.scoring.num_top)
        begin += chunk.num_tokens
    return rows, targets, num_top


def read_scores(step: Step, blocks: Sequence[SampledTokens]) -> Scores:
    """Return the log-probabilities that `score` found; waits for the device."""
    num_alternatives = [n for chunk in step.scored for n in _num_alternatives(chunk)]
    entries: list[TokenLogprob] = []
    for block in blocks:
        some = read_tokens(block, num_alternatives[len(entries) : len(entries) + len(block.ids)])
        entries += (found for _, found in some if found is not None)
    remaining = iter(entries)
    return [tuple(next(remaining) for _ in _num_alternatives(chunk)) for chunk in step.scored]


def _num_alternatives(chunk: Chunk) -> list[int]:
    assert chunk.scoring is not None, "a scored chunk has targets"
    return [chunk.scoring.num_top] * len(chunk.scoring.targets)


def unsound_scores(step: Step, scores: Scores) -> tuple[str, ...]:
    """Return the requests with a scored row whose logits are not finite, so that its log-probabilities are NaN."""
    return tuple(
        chunk.key[1]
        for chunk, found in zip(step.scored, scores, strict=True)
        if any(entry.logprob != entry.logprob for entry in found)
    )
