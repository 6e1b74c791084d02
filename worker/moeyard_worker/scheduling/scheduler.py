"""Continuous batching of one rank as a pure state machine: messages and step results in, steps and messages out.

It uses no torch, socket or clock: `now` (seconds, monotonic) arrives with each event. It knows a model only through
counts of pages and slots. A request has at most one chunk in a step. Decode rows are planned before prompt chunks,
within one token budget. When pages run out, the latest request is preempted and recomputed later: prompt positions with
the prompt formula, output positions with the decode formula.

With `max_in_flight` 2, a step is planned while the previous one runs. A request whose tokens are not known yet gets
rows that the device feeds (`Chunk.fed`), and its end is seen one step late. Pages and slots that a step in flight uses
stay allocated until that step is completed.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.protocol import MAX_PREEMPTIONS, Done, Rejected, Submit, TokenLogprob
from moeyard_worker.scheduling.admission import duplicate, queue_full, refusal
from moeyard_worker.scheduling.completion import (
    done,
    expired,
    finish_reason,
    forced_results,
    routing_replies,
    score_replies,
    take_tokens,
)
from moeyard_worker.scheduling.depth import Drafting
from moeyard_worker.scheduling.holdings import Holdings
from moeyard_worker.scheduling.planning import Place, StepBuilder, by_urgency, make_chunk, num_rows, num_wanted
from moeyard_worker.scheduling.request import Accepted, Constraint, Reply, Request, SchedulerStats
from moeyard_worker.scheduling.roster import Roster
from moeyard_worker.scheduling.step import Chunk, Step
from moeyard_worker.state.pages import page_hashes
from moeyard_worker.state.routing import PageRouting


class _Flight(NamedTuple):
    """A planned step that is not completed, and the requests of `step.chunks`."""

    step: Step
    requests: tuple[Request, ...]


class Scheduler:
    """Owner of a rank's requests, pages and slots. Not thread-safe."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._holdings = Holdings(config)
        # Read-only for others.
        self.pool, self.snapshots = self._holdings.pool, self._holdings.snapshots
        self.stats = SchedulerStats(drafts=[0] * config.num_drafts, accepted=[0] * config.num_drafts)
        self._routing: PageRouting | None = None
        if config.routing_bytes:
            sizes = {"num_pages": config.num_pages, "page_size": config.page_size}
            self._routing = PageRouting(**sizes, width=config.routing_bytes)
        self._state_ring = config.state_ring
        self._drafting = Drafting(config.num_drafts, adaptive=config.adaptive_drafts) if config.num_drafts else None
        self._roster = Roster()
        self._flights: deque[_Flight] = deque()
        # The version of the weights in use, as answers name it. None before the first epoch.
        self.weight_version: str | None = None

    @property
    def num_running(self) -> int:
        """Number of requests that hold pages and take part in steps."""
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue, with preempted ones."""
        return len(self._roster.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of positions that the queued requests have to compute."""
        return sum(r.length for r in self._roster.waiting)

    def has_work(self) -> bool:
        """Return whether any request is live. If so and no step is in flight, the next step has rows."""
        return bool(self._roster.running or self._roster.waiting)

    def add(
        self, submit: Submit, client: bytes, now: float, constraint: Constraint | None = None
    ) -> Rejected | Done | None:
        """Queue a request, or return why it can never run or cannot be queued now.

        constraint: the compiled grammar, if the request has one. A request that was begun on another rank is queued
        even if the queue is full. If its output is already complete, the result is its `Done`.
        """
        request_id, prompt = submit.request_id, tuple(submit.prompt_token_ids)
        if (client, request_id) in self._roster.live:
            return duplicate(request_id)
        if (rejected := refusal(submit, self.config)) is not None:
            return rejected
        waiting = self._roster.waiting
        # The limit counts requests that cannot start. The first ones may start in the next step.
        num_before = 1 + len(waiting) - self.config.max_waiting
        if not (submit.output_token_ids or self._holdings.can_start_first(waiting, num_before, self.num_running)):
            return queue_full(request_id, len(waiting))
        caches, salt = self.config.prefix_caching, submit.sampling.cache_salt
        hashes = page_hashes(prompt, self.config.page_size, salt) if caches else []
        request = Request.of(submit, prompt, client=client, arrived=now, hashes=hashes, constraint=constraint)
        reason = finish_reason(request.output, submit.sampling, self.config.eos_token_ids) if request.output else None
        if reason is not None:
            return done(request, reason, self.stats.waits)
        self._roster.enter(request)
        return None

    def abort(self, client: bytes, request_id: str) -> Done | None:
        """End a request now. Return None if it is unknown. Its pages are freed once no step in flight uses them."""
        request = self._roster.live.get((client, request_id))
        return None if request is None else self._finish(request, "abort")

    def expire(self, now: float) -> list[Reply]:
        """End requests that never started and waited for `max_queue_seconds` while steps ran."""
        limit = self.config.max_queue_seconds
        late = [] if limit is None or not self._roster.waiting else self._roster.late(now - limit)
        for request in late:
            self._finish(request, "abort")
        return [Reply(r.client, expired(r, now - r.arrived - r.excused, limit)) for r in late]

    def abort_client(self, client: bytes) -> None:
        """End all requests of a client that is gone."""
        for request in [r for r in self._roster.live.values() if r.client == client]:
            self._finish(request, "abort")

    def fail(self, request_ids: Collection[str], error: str) -> list[Reply]:
        """End the requests with these ids with an error."""
        named = [r for r in self._roster.live.values() if r.request_id in request_ids]
        return [Reply(r.client, self._finish(r, "error", error)) for r in named]

    def running(self) -> list[str]:
        """Return the ids of the requests that take part in steps, oldest first."""
        return [r.request_id for r in self._roster.running]

    def roll_back(self, now: float) -> None:
        """Discard the steps in flight. The device must not run them any more when the next step is planned.

        Requests return to their state after the last completed step. State in slots cannot be undone, so requests that
        have such state are preempted and recomputed.
        """
        self._roster.hold(now)
        self._flights.clear()
        for request in self._roster.leaving:
            request.in_flight.clear()
            self._holdings.release(request)
        self._roster.leaving.clear()
        for request in list(self._roster.running):
            chunks, request.in_flight = request.in_flight, []
            if chunks and request.state_slot >= 0:
                self._preempt(request, now)

    def hold(self, now: float) -> None:
        """Note that no step is planned until the next `schedule`. This time does not count as waiting."""
        self._roster.hold(now)

    def renew(self, weight_version: str) -> None:
        """Continue with other weights. No step may be in flight.

        All state of the old weights is dropped: prefixes, snapshots, drafts, and what requests have computed. Running
        requests are computed again with their output so far. Data about a prompt without output are sent again.
        """
        assert not self._flights, "a step in flight uses the old weights"
        for request in list(self._roster.running):
            self._preempt(request, None)
        self._holdings.pool.forget()
        self.weight_version = weight_version
        for request in self._roster.waiting:
            request.weight_version = None
            if not request.output:
                request.num_routed = request.sampling.routed_experts_start or 0
                # Without `prompt_logprobs` a forced output is scored from its first token on.
                forced_only = request.forced and request.sampling.prompt_logprobs is None
                request.num_scored = len(request.prompt) - 1 if forced_only else 0

    def forget_prefixes(self) -> None:
        """Drop the prefix index and its snapshots. Requests keep what they hold."""
        self._holdings.pool.forget()

    def schedule(self, now: float, *, beside_output: bool = False) -> Step:
        """Plan the next step. Steps with chunks must be completed by `complete`, in order of planning.

        beside_output: whether decode rows of other ranks will wait for this step's prompt rows.
        """
        assert len(self._flights) < self.config.max_in_flight, "the previous step was not completed"
        if self._roster.held is not None:
            self._roster.resume(now)
        depths = (0, 0) if self._drafting is None else (self._drafting.wish(self.num_running), self._drafting.least)
        builder = StepBuilder(now, self.config.max_batch_tokens, *depths)
        outputs, prompts = by_urgency(self._roster.running, self._flights[-1].step.num_drafts if self._flights else 0)
        num_preemptions = self.stats.num_preemptions
        for request, place in outputs:
            self._plan(request, place, builder)
        if (builder.decode or beside_output) and self.config.mixed_prefill_tokens is not None:
            builder.budget = min(builder.budget, self.config.mixed_prefill_tokens)
        for request, place in prompts:
            if request.running and not self._plan(request, place, builder):
                # The remaining budget is below `chunk_alignment`. Later requests must not starve this one by using it.
                builder.closed = True
                break
        if self.stats.num_preemptions == num_preemptions:
            self._admit(builder, now)
        step, requests = builder.finish()
        if requests:
            self._flights.append(_Flight(step, requests))
        return step

    def _admit(self, builder: StepBuilder, now: float) -> None:
        """Start waiting requests in order of arrival, while there are rows, slots and pages for their whole prompts."""
        config, roster, holdings = self.config, self._roster, self._holdings
        while roster.waiting and builder.budget > 0 and not builder.closed and self.num_running < config.max_num_seqs:
            request = roster.waiting[0]
            prefix = holdings.known_prefix(request)
            if not holdings.can_start(request, prefix.pages):
                assert roster.running or roster.leaving, f"{request.key} does not fit into an empty pool"
                return
            start = len(prefix.pages) * config.page_size
            place = Place(start, start, None)
            if not num_rows(request, place, budget=builder.budget, config=config):
                return
            roster.start_first()
            holdings.start(request, prefix)
            if request.started is None:
                request.started, request.waits = now, self.stats.waits
                request.cached_tokens = start
                self.stats.queue_seconds.append(now - request.arrived)
            self.stats.prefix_query_tokens += len(request.prompt)
            self.stats.prefix_hit_tokens += start
            self._plan(request, place, builder)

    def _plan(self, request: Request, place: Place, builder: StepBuilder) -> bool:
        """Add the request's next chunk to the step. Return False if it gets none."""
        # The request may have been preempted earlier in this call of `schedule`.
        if not request.running or request is builder.held:
            return False
        holdings = self._holdings
        if not (rows := num_rows(request, place, budget=builder.budget, config=self.config)):
            return False
        if rows > 1 and place.start >= request.length - 1:
            # Drafts are optional, so they use free pages only and preempt no request.
            reach = holdings.reach(request) + holdings.num_free_positions
            rows = max(1, min(rows, reach - place.max_start))
        length = place.max_start + rows
        if length > holdings.reach(request) and not self._reserve(request, length, builder):
            return False
        if place.fed is not None or length >= request.length:
            holdings.extend(request, num_wanted(request, length, self.config), len(self._roster.running))
        snapshots = holdings.take_snapshots(request, place.start, rows)
        builder.add(request, make_chunk(request, place, rows, snapshots, state_ring=self._state_ring))
        return True

    def _reserve(self, request: Request, length: int, builder: StepBuilder) -> bool:
        """Allocate pages for `length` positions, preempting later requests. Return False if that is not possible."""
        missing = self._holdings.missing(request, length)
        while missing > self.pool.num_free:
            victim = self._victim(request, builder)
            if victim is None:
                # The request waits for one step. Later requests cannot overtake it, because no page is free.
                return False
            self._preempt(victim, builder.now)
            if victim is request:
                return False
        self._holdings.grow(request, missing)
        return True

    def _victim(self, request: Request, builder: StepBuilder) -> Request | None:
        """Return the request to preempt for `request`: the latest after it that is not in flight, or itself.

        None if no request can be preempted before the step in flight is completed.
        """
        if self._roster.leaving:
            # An ended request is about to free its pages.
            return None
        later = self._roster.running[self._roster.running.index(request) + 1 :]
        if (victim := next((r for r in reversed(later) if not r.in_flight), None)) is None and later:
            # All are in flight. The latest is left out of this step, so that it can be preempted in the next one.
            builder.held = later[-1]
        elif victim is None and not request.in_flight:
            victim = request
        return victim

    def _preempt(self, request: Request, now: float | None) -> None:
        """Take pages and slot from a request. `now`: the time, for `Done`, if pages ran out."""
        if now is not None and len(request.preempted) < MAX_PREEMPTIONS:
            request.preempted.append(now)
        self._roster.stand_back(request)
        self._holdings.release(request)
        request.drafts = ()
        request.num_computed = request.num_registered = 0
        self.stats.num_preemptions += 1

    def requests(self, step: Step) -> list[Request]:
        """Return the requests of `step.sampled` of a step in flight. Some may have ended meanwhile."""
        flight = next(f for f in self._flights if f.step is step) if step.chunks else _Flight(step, ())
        return [r for c, r in zip(step.chunks, flight.requests, strict=True) if c.num_sampled]

    def complete(
        self,
        step: Step,
        results: Sequence[Accepted],
        now: float,
        scores: Sequence[Sequence[TokenLogprob]] = (),
        experts: bytes = b"",
    ) -> list[Reply]:
        """Take the results of the oldest step in flight. Return the replies in order.

        `results[i]` belongs to `step.sampled[i]`, `scores[i]` to `step.scored[i]`. `experts`: the chosen experts of all
        rows, if they are kept.
        """
        assert len(results) == len(step.sampled), f"{len(results)} results for {len(step.sampled)} sampled chunks"
        assert len(scores) == len(step.scored), f"{len(scores)} scores for {len(step.scored)} scored chunks"
        width, row = self.config.routing_bytes, 0
        assert len(experts) == step.num_tokens * width, f"{len(experts)} bytes of experts for {step.num_tokens} rows"
        if not step.chunks:
            return []
        assert self._flights[0].step is step, "another step was planned before this one"
        if self._drafting is not None:
            self._drafting.completed(step, results, now)
        flight, remaining, remaining_scores = self._flights.popleft(), iter(results), iter(scores)
        replies: list[Reply] = []
        for chunk, request in zip(step.chunks, flight.requests, strict=True):
            request.in_flight.pop(0)
            result = next(remaining) if chunk.num_sampled else None
            scored = next(remaining_scores) if chunk.scoring is not None else ()
            chosen = experts[row * width : (row + chunk.num_tokens) * width]
            row += chunk.num_tokens
            if not request.ended:
                replies += score_replies(request, chunk, scored) if scored else ()
                replies += self._advance(request, chunk, result, now, chosen, scored)
            elif not request.in_flight:
                self._roster.leaving.remove(request)
                self._holdings.release(request)
        return replies

    def _advance(
        self,
        request: Request,
        chunk: Chunk,
        result: Accepted | None,
        now: float,
        experts: bytes,
        scores: Sequence[TokenLogprob],
    ) -> list[Reply]:
        """Count the rows of a completed chunk, which chose these experts, and take its tokens: forced, then sampled."""
        assert 0 <= request.num_computed - chunk.start <= chunk.slack, "the chunk does not start where it may"
        num_accepted = 0 if result is None else len(result.token_ids)
        assert num_accepted <= chunk.num_sampled, f"{num_accepted} tokens of {chunk.num_sampled} sampled rows"
        assert result is None or num_accepted, "a sampled chunk yields a token at least"
        request.num_computed += len(chunk.token_ids) - chunk.num_sampled + num_accepted
        replies: list[Reply] = []
        if chunk.prompt:
            self.stats.computed(chunk)
            if self._routing is not None:
                # Before the pages are in the index, or are freed by compression.
                self._routing.write(chunk.pages, chunk.start, experts)
                if request.sampling.routed_experts_start is not None:
                    replies += routing_replies(request, chunk, self._routing)
            self._holdings.register(request)
        for row, forced in forced_results(request, chunk, scores):
            replies += self._take(request, chunk, forced, now, experts, row=row)
        if result is not None:
            return replies + self._accept(request, chunk, result, now, experts)
        if request.sampling.max_tokens or request.num_computed < len(request.prompt):
            return replies
        # A request with max_tokens 0 ends after its prompt.
        self.stats.prefilled(request, now)
        return [*replies, Reply(request.client, self._finish(request, "length"))]

    def _accept(self, request: Request, chunk: Chunk, result: Accepted, now: float, experts: bytes) -> list[Reply]:
        if result.error is not None:
            return [Reply(request.client, self._finish(request, "error", result.error, retryable=False))]
        replies = self._take(request, chunk, result, now, experts, row=chunk.num_tokens - chunk.num_sampled)
        if not request.ended:
            request.drafts = result.drafts
            if self.config.num_drafts and not request.in_flight:
                self._holdings.give_back(request)
        return replies

    def _take(
        self, request: Request, chunk: Chunk, result: Accepted, now: float, experts: bytes, *, row: int
    ) -> list[Reply]:
        """Take tokens of which the first follows row `row` of the chunk, and end the request if one of them does."""
        eos = self.config.eos_token_ids
        tokens, reason = take_tokens(
            request,
            chunk,
            result,
            eos_token_ids=eos,
            stats=self.stats,
            now=now,
            row=row,
            experts=experts,
            weight_version=self.weight_version,
        )
        replies = [Reply(request.client, tokens)]
        if reason is not None:
            replies.append(Reply(request.client, self._finish(request, reason)))
        return replies

    def _finish(self, request: Request, reason: str, error: str | None = None, *, retryable: bool = True) -> Done:
        self._roster.end(request)
        if not request.in_flight:
            self._holdings.release(request)
        version = self.weight_version
        return done(request, reason, self.stats.waits, error, retryable=retryable, weight_version=version)

    def validate(self) -> None:
        """Assert every invariant. Tests call this after each event, and the engine when it is idle."""
        assert len(self._roster.running) <= self.config.max_num_seqs
        assert len(self._flights) <= self.config.max_in_flight
        self._roster.validate(pair for f in self._flights for pair in zip(f.requests, f.step.chunks, strict=True))
        self._holdings.validate(self._roster.holders())
        for r in self._roster.running:
            assert len(r.drafts) <= self.config.num_drafts, f"{r.key} has {len(r.drafts)} drafts"
