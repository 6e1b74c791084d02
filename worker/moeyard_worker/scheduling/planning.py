"""The arithmetic of a request's next chunk: whose turn it is, where it begins, its rows, what it says. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.scheduling.request import Request
from moeyard_worker.scheduling.step import Chunk, Compaction, Scoring, Step


class Place(NamedTuple):
    """Where a request's next chunk begins: `start` to `max_start`, its `fed` (see `Chunk`), and drafts to verify."""

    start: int
    max_start: int
    fed: int | None
    num_drafts: int = 0


@dataclass(slots=True)
class StepBuilder:
    """A step in the making. `budget`: rows left. `closed`: nobody is admitted any more. `held` is not planned.

    `num_drafts`: what is drafted behind every sampled token, `least_drafts` where prompts are among them.
    """

    budget: int
    num_drafts: int = 0
    least_drafts: int = 0
    closed: bool = False
    held: Request | None = None
    prefill: list[tuple[Request, Chunk]] = field(default_factory=list)
    decode: list[tuple[Request, Chunk]] = field(default_factory=list)

    def add(self, request: Request, chunk: Chunk) -> None:
        """Make a chunk part of the step; from here on its request is in flight."""
        request.in_flight.append(chunk)
        request.restored = -1
        (self.prefill if chunk.prompt else self.decode).append((request, chunk))
        self.budget -= len(chunk.token_ids)

    def finish(self) -> tuple[Step, tuple[Request, ...]]:
        """The step and the requests behind its chunks, which learn their place among the sampled ones."""
        planned = self.prefill + self.decode
        index = 0
        for request, chunk in planned:
            if chunk.num_sampled:
                request.sample_index = index
                index += 1
        # Rows that nothing is sampled from keep what drafts will attend to: one pass does that.
        num_drafts = self.num_drafts if index else min(self.num_drafts, len(planned))
        num_drafts = max(num_drafts, self.least_drafts if self.prefill else 0)
        step = Step(
            prefill=tuple(c for _, c in self.prefill), decode=tuple(c for _, c in self.decode), num_drafts=num_drafts
        )
        return step, tuple(r for r, _ in planned)


def next_place(request: Request, num_drafts: int) -> Place:
    """Where the request goes on after its chunk in flight, if there is one (never two: the older step is completed).

    `num_drafts` are made by the step in flight, though not known yet.
    """
    start = request.num_computed
    if not request.in_flight:
        return Place(start, start, None, len(request.drafts))
    # The steps before the chunk's are completed, so its own start is known by now, whether it was fed or not.
    (chunk,) = request.in_flight
    end = start + chunk.num_tokens
    if not chunk.num_sampled:
        return Place(end, end, None)
    # One of its sampled tokens is accepted at least, all of them at most.
    return Place(end - chunk.num_sampled + 1, end, request.sample_index, num_drafts)


def by_urgency(
    running: Iterable[Request], num_drafts: int
) -> tuple[list[tuple[Request, Place]], list[tuple[Request, Place]]]:
    """Those whose next chunk is of their output and those whose is of their prompt; each by age, with the places.

    Next tokens come first: a long recompute must not take the step away from the others. `num_drafts`: those that the
    step in flight makes behind each.
    """
    single: list[tuple[Request, Place]] = []
    several: list[tuple[Request, Place]] = []
    prompts: list[tuple[Request, Place]] = []
    for request in running:
        place = next_place(request, num_drafts)
        if place.start < len(request.prompt):
            prompts.append((request, place))
        else:
            (several if request.length - place.start > 1 else single).append((request, place))
    return single + several, prompts


def num_rows(request: Request, place: Place, *, budget: int, config: SchedulerConfig) -> int:
    """Rows of the request's next chunk, 0 for none; a chunk never crosses the end of the prompt."""
    start, num_prompt = place.start, len(request.prompt)
    if start < num_prompt:
        left = num_prompt - start
        rows = min(budget, config.prefill_chunk, left)
        if rows == left:
            return rows
        # The last chunk is never shorter than what chooses in it, however the others are cut.
        rows = min(rows, left - request.window)
        return rows - (start + rows) % config.chunk_alignment
    if start >= request.limit:
        # Certain to end with the step in flight.
        return 0
    known = request.length - start
    if known > 1:
        return min(budget, config.prefill_chunk, known)
    if not place.num_drafts:
        return min(budget, 1)
    # Drafts end where the request does. In a fed chunk one row stays when the step in flight may reach that end.
    return min(budget, 1 + place.num_drafts, max(request.limit - place.max_start, 1))


def num_wanted(request: Request, length: int, config: SchedulerConfig) -> int:
    """Positions that a step wants pages for which computes `length` of them and samples: all drafts but the first are
    made by rows behind those.
    """
    return min(length + max(config.num_drafts - 1, 0), max(request.limit, length))


def make_chunk(
    request: Request, place: Place, rows: int, snapshots: tuple[tuple[int, int], ...] = (), *, state_ring: int = 1
) -> Chunk:
    """The next `rows` rows of a request, whose pages are reserved, as are the slots of its `snapshots` on the way."""
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
    """Return what is to be scored in rows [start, end) of a request that asks for it; None for nothing.

    A row scores the prompt token behind its own; the last prompt token has none. Rows that were scored before their
    request had to yield its pages are computed again, not told again.
    """
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return None
    first = max(start, request.num_scored)
    targets = request.prompt[first + 1 : end + 1]
    return Scoring(first=first - start, targets=targets, num_top=num_top) if targets else None


def _compaction(request: Request) -> Compaction | None:
    """What the chunk that ends the prompt is to keep of it; None for all."""
    dropped = request.num_dropped
    if not dropped:
        return None
    return Compaction(
        kept=len(request.prompt) - dropped, dropped=dropped, window=request.window, pages=tuple(request.compact)
    )


def _token_at(request: Request, position: int) -> int | None:
    """The token at a position, if it is known: of the prompt or of the output."""
    if position >= request.length:
        return None
    num_prompt = len(request.prompt)
    return request.prompt[position] if position < num_prompt else request.output[position - num_prompt]
