"""The arithmetic of a request's next chunk: priority, start, number of rows, contents. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.scheduling.request import Request
from moeyard_worker.scheduling.step import Chunk, Compaction, Scoring, Step


class Place(NamedTuple):
    """The start of a request's next chunk (`start` to `max_start`), its `Chunk.fed`, and the drafts to verify."""

    start: int
    max_start: int
    fed: int | None
    num_drafts: int = 0


@dataclass(slots=True)
class StepBuilder:
    """A step that is being planned.

    now: the time of planning.
    budget: number of rows left.
    num_drafts, least_drafts: drafts per sampled token, and the least number of them in a step with prompt rows.
    closed: whether no further request is admitted.
    held: a request that is left out of this step.
    """

    now: float
    budget: int
    num_drafts: int = 0
    least_drafts: int = 0
    closed: bool = False
    held: Request | None = None
    prefill: list[tuple[Request, Chunk]] = field(default_factory=list)
    decode: list[tuple[Request, Chunk]] = field(default_factory=list)

    def add(self, request: Request, chunk: Chunk) -> None:
        """Add a chunk. Its request is in flight from now on."""
        request.in_flight.append(chunk)
        request.restored = -1
        (self.prefill if chunk.prompt else self.decode).append((request, chunk))
        self.budget -= len(chunk.token_ids)

    def finish(self) -> tuple[Step, tuple[Request, ...]]:
        """Return the step and the requests of its chunks. Sets their `sample_index`."""
        planned = self.prefill + self.decode
        index = 0
        for request, chunk in planned:
            if chunk.num_sampled:
                request.sample_index = index
                index += 1
        # Rows without sampling only store the keys that drafts will attend to, which takes one pass.
        num_drafts = self.num_drafts if index else min(self.num_drafts, len(planned))
        num_drafts = max(num_drafts, self.least_drafts if self.prefill else 0)
        step = Step(
            prefill=tuple(c for _, c in self.prefill), decode=tuple(c for _, c in self.decode), num_drafts=num_drafts
        )
        return step, tuple(r for r, _ in planned)


def next_place(request: Request, num_drafts: int) -> Place:
    """Return the start of the request's next chunk, after its chunk in flight, if any. There is at most one.

    num_drafts: number of drafts that the step in flight makes.
    """
    start = request.num_computed
    if not request.in_flight:
        return Place(start, start, None, len(request.drafts))
    # All earlier steps are completed, so the start of the chunk in flight is known, even if it was fed.
    (chunk,) = request.in_flight
    end = start + chunk.num_tokens
    if not chunk.num_sampled:
        return Place(end, end, None)
    # At least one of its sampled tokens is accepted, at most all.
    return Place(end - chunk.num_sampled + 1, end, request.sample_index, num_drafts)


def by_urgency(
    running: Iterable[Request], num_drafts: int
) -> tuple[list[tuple[Request, Place]], list[tuple[Request, Place]]]:
    """Return requests whose next chunk is output, and those whose next chunk is prompt, each by age.

    Single next tokens come before recomputed output, because a long recompute must not fill the step. A forced output
    counts as prompt: its rows would delay the next tokens of other requests as much.

    num_drafts: number of drafts that the step in flight makes for each request.
    """
    single: list[tuple[Request, Place]] = []
    several: list[tuple[Request, Place]] = []
    prompts: list[tuple[Request, Place]] = []
    for request in running:
        place = next_place(request, num_drafts)
        if place.start < len(request.prompt) + max(len(request.forced) - 1, 0):
            prompts.append((request, place))
        else:
            (several if request.length - place.start > 1 else single).append((request, place))
    return single + several, prompts


def num_rows(request: Request, place: Place, *, budget: int, config: SchedulerConfig) -> int:
    """Return the number of rows of the request's next chunk. A chunk never crosses the end of the prompt."""
    start, num_prompt = place.start, len(request.prompt)
    if start < num_prompt:
        left = num_prompt - start
        rows = min(budget, config.prefill_chunk, left)
        if rows == left:
            return rows
        # The last chunk must contain the whole window of the compression.
        rows = min(rows, left - request.window)
        return rows - (start + rows) % config.chunk_alignment
    if start >= request.limit:
        # The request ends with the step in flight.
        return 0
    known = request.length - start
    if known > 1:
        # The last token of a forced output may be that of the request, which is not fed back.
        return min(budget, config.prefill_chunk, known, request.limit - start)
    if not place.num_drafts:
        return min(budget, 1)
    # Drafts stop at the request's limit. A fed chunk keeps one row if the step in flight may reach the limit.
    return min(budget, 1 + place.num_drafts, max(request.limit - place.max_start, 1))


def num_wanted(request: Request, length: int, config: SchedulerConfig) -> int:
    """Return the number of positions that need pages in a sampling step that computes `length` of them.

    All drafts but the first are made by further rows.
    """
    return min(length + max(config.num_drafts - 1, 0), max(request.limit, length))


def make_chunk(
    request: Request, place: Place, rows: int, snapshots: tuple[tuple[int, int], ...] = (), *, state_ring: int = 1
) -> Chunk:
    """Return the next `rows` rows of a request. Its pages and the slots of `snapshots` must be allocated."""
    start, num_sampled, num_prompt = place.start, 0, len(request.prompt)
    if place.fed is not None:
        token_ids, num_sampled = (0,) * rows, rows
    else:
        num_drafts = start + rows - request.length
        if num_drafts >= 0 and request.sampling.max_tokens:
            num_sampled = 1 + num_drafts
        token_ids = request.tokens(start, start + rows)
        if num_drafts > 0:
            token_ids += request.drafts[:num_drafts]
    return Chunk(
        key=request.key,
        start=start,
        token_ids=token_ids,
        pages=tuple(request.pages if start < num_prompt else request.kept_pages),
        state_slot=request.state_slot,
        state_ring=state_ring,
        restored=request.restored,
        snapshots=snapshots,
        prompt=start < num_prompt,
        num_sampled=num_sampled,
        fed=place.fed,
        slack=place.max_start - start,
        scoring=_rows_to_score(request, start, start + rows),
        following=None if num_sampled or place.fed is not None else _token_at(request, start + rows),
        dropped=0 if start < num_prompt else request.num_dropped,
        compaction=_compaction(request) if start < num_prompt == start + rows else None,
    )


def _rows_to_score(request: Request, start: int, end: int) -> Scoring | None:
    """Return the rows to score among positions [start, end), or None.

    A row scores the next token of the prompt or of a forced output. Rows that are recomputed after a preemption are not
    reported twice.
    """
    params, num_prompt = request.sampling, len(request.prompt)
    wanted = (params.prompt_logprobs, params.logprobs if request.forced else None)
    if wanted == (None, None):
        return None
    first = max(start, request.num_scored)
    targets = request.prompt[first + 1 : end + 1]
    targets += request.forced[max(first + 1 - num_prompt, 0) : max(end + 1 - num_prompt, 0)]
    if not targets:
        return None
    return Scoring(first=first - start, targets=targets, num_top=max(count for count in wanted if count is not None))


def _compaction(request: Request) -> Compaction | None:
    """Return the compression of the prompt, or None."""
    dropped = request.num_dropped
    if not dropped:
        return None
    return Compaction(
        kept=len(request.prompt) - dropped, dropped=dropped, window=request.window, pages=tuple(request.compact)
    )


def _token_at(request: Request, position: int) -> int | None:
    """Return the token at a position of the prompt or the output, or None if it is not known yet."""
    if position >= request.length:
        return None
    num_prompt = len(request.prompt)
    return request.prompt[position] if position < num_prompt else request.known_output[position - num_prompt]
