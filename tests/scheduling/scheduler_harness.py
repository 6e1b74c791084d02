"""A scheduler with a fake device, and checks of every promise of the scheduler at every event.

The device runs planned steps in order, at once (`eager`) or as late as possible. Every request's tokens are compared
with those of the request alone.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from tests.scheduling.fake_device import Device, Kept, kept_of, score_alone, states_alone, tokens_alone, with_trace

from moeyard_worker.config.engine_config import SchedulerConfig, window_rows
from moeyard_worker.protocol import (
    MAX_PROMPT_LOGPROBS,
    Done,
    PromptExperts,
    PromptLogprobs,
    Rejected,
    Submit,
    TokenLogprob,
    Tokens,
)
from moeyard_worker.scheduling.request import Accepted, Reply
from moeyard_worker.scheduling.scheduler import Scheduler
from moeyard_worker.scheduling.step import Chunk, Scoring, Step

BEGUN = 1_000_000


@dataclass(slots=True, eq=False)
class Live:
    """The harness' record of an accepted request."""

    submit: Submit
    arrival: int
    output: list[int] = field(default_factory=list)
    computed: int | None = None  # positions with a state; None while it holds none
    scored: int = 0  # prompt tokens with a reported log-probability
    routed: int = 0  # the prompt's experts were reported up to this position
    pages: tuple[int, ...] = ()
    # Pages that the kept part of its prompt is copied to; afterwards they are its `pages`.
    compact: tuple[int, ...] = ()
    first_start: int | None = None
    in_flight: list[Chunk] = field(default_factory=list)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.submit.prompt_token_ids

    @property
    def kept(self) -> Kept:
        return kept_of(self.submit.sampling, self.prompt)

    @property
    def dropped(self) -> int:
        return 0 if self.kept is None else len(self.prompt) - self.kept[0]

    def pages_to_start(self, size: int) -> int:
        """Return the pages for all known tokens, plus the whole prompt if only a part of it is kept."""
        return -(-(self.num_fed - self.dropped) // size) + (-(-len(self.prompt) // size) if self.dropped else 0)

    @property
    def forced(self) -> tuple[int, ...]:
        params = self.submit.sampling
        return params.trace_decode_token_ids[: params.max_tokens] if params.as_decoded else ()

    @property
    def num_fed(self) -> int:
        return len(self.prompt) + min(len(self.known) - len(self.prompt), max(self.submit.sampling.max_tokens - 1, 0))

    @property
    def known(self) -> tuple[int, ...]:
        return self.prompt + (tuple(self.output) if len(self.output) >= len(self.forced) else self.forced)


@dataclass(slots=True, eq=False)
class Planned:
    """A step in flight: its chunks' requests, the pages that each names first, and its results once it ran."""

    step: Step
    requests: list[Live]
    fresh: list[list[int]]
    results: list[Accepted] | None = None


class Harness:
    """A scheduler, the fake device, and the terminal replies of each accepted request."""

    def __init__(self, config: SchedulerConfig, *, eager: bool = True) -> None:
        self.config = config
        self.eager = eager
        self.scheduler = Scheduler(config)
        self.device = Device(config)
        self.live: dict[tuple[bytes, str], Live] = {}
        self.leaving: list[Live] = []
        self.flights: deque[Planned] = deque()
        self.num_accepted = 0
        self.num_ended = 0
        self.num_late_ends = 0
        self.num_steps = 0

    def expected_refusal(self, submit: Submit, client: bytes) -> str | None:
        """Return the refusal reason by the contract, for submits with valid sampling parameters."""
        config = self.config
        prompt, total = submit.prompt_token_ids, len(submit.prompt_token_ids) + submit.sampling.max_tokens
        if (client, submit.request_id) in self.live:
            return "duplicate"
        if not prompt or not all(0 <= t < config.vocab_size for t in prompt):
            return "bad_request"
        if total > config.max_model_len:
            return "prompt_too_long"
        positions = max(total - (not config.num_drafts or config.max_in_flight == 1), len(prompt))
        kept = kept_of(submit.sampling, prompt)
        if kept is not None and kept[1] > window_rows(config, config.chunk_alignment):
            return "bad_request"
        first = submit.sampling.routed_experts_start
        if first is not None and (not config.routing_bytes or first >= len(prompt)):
            return "bad_request"
        both = 0 if kept is None else -(-len(prompt) // config.page_size)
        positions -= 0 if kept is None else len(prompt) - kept[0]
        if -(-positions // config.page_size) + both > config.num_pages:
            return "never_fits"
        waiting = sorted((r for r in self.live.values() if r.computed is None), key=lambda r: r.arrival)
        excess = len(waiting) + 1 - config.max_waiting
        if submit.output_token_ids:
            return None
        return "queue_full" if excess > 0 and not self._can_start(waiting[:excess], excess) else None

    def _can_start(self, first: list[Live], count: int) -> bool:
        """Return whether `count` waiting requests, including these, find places, slots and pages."""
        config = self.config
        running = sum(1 for r in self.live.values() if r.computed is not None)
        holders = [r for r in (*self.live.values(), *self.leaving) if r.computed is not None]
        used = {page for r in holders for page in r.pages} | self._reserved()
        needed = sum(r.pages_to_start(config.page_size) for r in first)
        return (
            running + count <= config.max_num_seqs
            and (not config.num_state_slots or len(holders) + count <= config.num_state_slots)
            and needed <= config.num_pages - len(used)
        )

    def submit(self, submit: Submit, client: bytes = b"a") -> Rejected | Done | None:
        """Send a request and check the answer. Its trace becomes the tokens that the device will sample."""
        submit = replace(submit, sampling=with_trace(self.config, submit.prompt_token_ids, submit.sampling))
        expected = self.expected_refusal(submit, client)
        rejected = self.scheduler.add(submit, client, now=float(self.num_steps))
        assert (rejected.reason if isinstance(rejected, Rejected) else rejected) == expected
        if rejected is None:
            begun = list(submit.output_token_ids)
            # Requests that had begun precede all new ones.
            arrival = self.num_accepted - (BEGUN if begun else 0)
            routed = max(submit.num_routed, submit.sampling.routed_experts_start or 0)
            live = Live(submit, arrival, output=begun, scored=submit.num_scored, routed=routed)
            self.live[client, submit.request_id] = live
            self.num_accepted += 1
        else:
            assert isinstance(rejected, Rejected)
            assert rejected.request_id == submit.request_id
        self.check()
        return rejected

    def abort(self, request_id: str, client: bytes = b"a") -> Done | None:
        """Abort a request and check that its pages are free at once, or when no step names them any more."""
        known = (client, request_id) in self.live
        done = self.scheduler.abort(client, request_id)
        assert (done is not None) == known
        if done is not None:
            assert done.finish_reason == "abort"
            self._end(client, done)
        self.check()
        return done

    def abort_client(self, client: bytes) -> None:
        """Disconnect a client: its requests end without a reply."""
        self.scheduler.abort_client(client)
        for key in [key for key in self.live if key[0] == client]:
            self._leave(self.live.pop(key))
        self.check()

    def roll_back(self) -> None:
        """Lose a peer: nothing is in flight any more, and every request resumes after its completed steps."""
        self.scheduler.roll_back(now=float(self.num_steps))
        for request in self.live.values():
            if request.in_flight and self.config.num_state_slots:
                request.computed, request.pages, request.compact = None, (), ()
            request.in_flight.clear()
        self.flights.clear()
        self.leaving.clear()
        self.check()
        assert not self.scheduler._flights

    def carry(self, request_id: str, client: bytes = b"a") -> None:
        """Interrupt a request and resume it like one that began at another rank."""
        request = self.live.get((client, request_id))
        if request is None:
            return
        self.abort(request_id, client)
        carried = {"output_token_ids": tuple(request.output), "num_scored": request.scored}
        submit = replace(request.submit, **carried, num_routed=request.routed)
        self.submit(submit, client)

    def fail(self, request_id: str, client: bytes = b"a") -> None:
        """Fail one request because of an error; only it ends, with its name."""
        others = {key for key in self.live if key[1] != request_id}
        for reply in self.scheduler.fail([request_id], "not finite"):
            assert isinstance(reply.message, Done)
            assert (reply.message.finish_reason, reply.message.error) == ("error", "not finite")
            self._end(reply.client, reply.message)
        self.check()
        assert set(self.live) == others

    def step(self) -> Step:
        """Plan until the pipeline is full, then finish the oldest step. Return the last plan."""
        self.num_steps += 1
        step = Step.empty()
        while len(self.flights) < self.config.max_in_flight:
            step = self.plan()
            if not step.chunks:
                break
        self.finish_oldest()
        return step

    def plan(self) -> Step:
        """Plan a step and check it; `finish`, `finish_oldest` or `roll_back` must follow."""
        scheduler, config = self.scheduler, self.config
        had_work = scheduler.has_work()
        assert had_work == bool(self.live)
        step = scheduler.schedule(now=float(self.num_steps))
        assert step.num_tokens > 0 or self.flights or not had_work, "a step with work must compute rows"
        assert step.num_tokens <= config.max_batch_tokens
        assert len({c.key for c in step.chunks}) == len(step.chunks), "a request may have one chunk per step"
        running = {r.key for r in scheduler._roster.running}
        for key, request in self.live.items():
            if key not in running:
                assert not request.in_flight, "a request yields pages that a step in flight names"
                request.computed, request.pages, request.compact = None, (), ()
        planned = Planned(step, [self.live[chunk.key] for chunk in step.chunks], [])
        for chunk, request in zip(step.chunks, planned.requests, strict=True):
            planned.fresh.append(self._check_chunk(chunk, request, prompt=chunk in step.prefill))
        ends = [sum(c.num_tokens for c in step.chunks[: i + 1]) for i in range(len(step.chunks))]
        rows = [end - j for end, c in zip(ends, step.chunks, strict=True) for j in range(c.num_sampled, 0, -1)]
        assert list(step.sample_rows) == rows
        assert [r.key for r in scheduler.requests(step)] == [c.key for c in step.sampled]
        if step.chunks:
            self.flights.append(planned)
        self.check()
        self._check_tables()
        if self.eager and step.chunks:
            self._run(planned)
        return step

    def _check_chunk(self, chunk: Chunk, request: Live, *, prompt: bool) -> list[int]:
        """Check one planned chunk against the record; return the pages that it names first."""
        config, size, num_prompt = self.config, self.config.page_size, len(request.prompt)
        limit = num_prompt + max(request.submit.sampling.max_tokens, 1) - 1
        started = self._check_start(chunk, request) if request.computed is None else None
        kept = bool(chunk.dropped and request.compact)
        table = request.compact if kept else request.pages
        num_old = len(table) if started is None else started
        assert chunk.pages[:num_old] == table[:num_old], "a page table must only grow"
        assert chunk.prompt == prompt == (chunk.start < num_prompt)
        assert (chunk.state_slot >= 0) == bool(config.num_state_slots)
        assert (chunk.restored >= 0) == bool(started and config.num_state_slots), "state is restored only at the start"
        self._check_snapshots(chunk)
        before = request.in_flight[-1] if request.in_flight else None
        start = request.computed if before is None else request.computed + before.num_tokens
        if before is not None and before.num_sampled:
            self._check_fed(chunk, before, end=start, limit=limit)
        else:
            assert (chunk.start, chunk.max_start, chunk.fed) == (start, start, None), "scored out of order"
            known = request.known[chunk.start : chunk.end]
            num_drafts = chunk.num_tokens - len(known)
            assert chunk.token_ids[: len(known)] == known
            sampled = chunk.end >= len(request.known) and request.submit.sampling.max_tokens
            assert chunk.num_sampled == (num_drafts + 1 if sampled else 0)
            assert 0 <= num_drafts <= config.num_drafts
            assert num_drafts == 0 or len(known) == 1, "drafts must be verified after the last token"
            assert 0 < len(known) <= config.prefill_chunk
            assert chunk.end <= limit
        if prompt:
            assert chunk.end <= num_prompt, "a prompt chunk crosses the end of the prompt"
            assert chunk.end == num_prompt or chunk.end % config.chunk_alignment == 0
        assert chunk.scoring == self._expected_scoring(chunk, request)
        assert chunk.dropped == (0 if prompt else request.dropped)
        assert len(chunk.pages) * size >= chunk.max_start + chunk.num_tokens - chunk.dropped
        fresh = list(chunk.pages[num_old:])
        if kept:
            request.compact = chunk.pages
        else:
            request.pages = chunk.pages
        fresh += self._check_compaction(chunk, request)
        request.in_flight.append(chunk)
        return fresh

    def _check_snapshots(self, chunk: Chunk) -> None:
        """Check that snapshots lie between whole pages of the prompt, each in a slot that no sequence uses."""
        config, before = self.config, chunk.start
        for position, slot in chunk.snapshots:
            assert before < position <= chunk.end
            assert position % config.page_size == position % config.chunk_alignment == 0
            assert 0 <= slot - config.num_state_slots * config.state_ring < config.num_snapshots
            before = position
        assert not chunk.snapshots or chunk.prompt

    def _check_compaction(self, chunk: Chunk, request: Live) -> list[int]:
        """Check the part of a prompt that its last chunk keeps, in separate pages that the chunk names first."""
        found, num_prompt = chunk.compaction, len(request.prompt)
        if request.kept is None or chunk.end != num_prompt or not chunk.prompt:
            assert found is None
            return []
        assert found is not None
        assert (found.kept, found.dropped, found.window) == (request.kept[0], request.dropped, request.kept[1])
        assert chunk.num_tokens >= found.window, "the window must be in the chunk"
        assert len(found.pages) * self.config.page_size >= found.kept
        fresh = [page for page in found.pages if page not in request.compact]
        request.compact = found.pages
        return fresh

    def _reserved(self) -> set[int]:
        """Return the pages for kept parts of prompts that no step names yet."""
        return {page for request in self.scheduler._roster.holders() for page in request.compact}

    def _expected_scoring(self, chunk: Chunk, request: Live) -> Scoring | None:
        """Every wanted token is reported once, whatever is recomputed."""
        params, forced = request.submit.sampling, request.forced
        counts = [params.prompt_logprobs, params.logprobs if forced else None]
        wanted = [count for count in counts if count is not None]
        sent = request.scored if params.prompt_logprobs is not None and not request.output else len(request.prompt) - 1
        first = max(chunk.start, sent + len(request.output))
        targets = (*request.prompt, *forced)[first + 1 : chunk.end + 1] if chunk.fed is None else ()
        if not wanted or not targets:
            return None
        return Scoring(first=first - chunk.start, targets=targets, num_top=max(wanted))

    def _scores(self, planned: Planned) -> list[list[TokenLogprob]]:
        found = []
        for chunk, request in zip(planned.step.chunks, planned.requests, strict=True):
            if chunk.scoring is not None:
                start, s = chunk.start + 1 + chunk.scoring.first, chunk.scoring
                found.append([self._score(request, start + i, s.num_top) for i in range(len(s.targets))])
        return found

    def _score(self, request: Live, position: int, num_top: int) -> TokenLogprob:
        return score_alone(self.config, request.prompt, request.submit.sampling, position, num_top)

    def _check_scores(self, message: PromptLogprobs, request: Live) -> None:
        """Scores come in order, each token once, before all output."""
        num_top = request.submit.sampling.prompt_logprobs
        assert num_top is not None
        assert not request.output
        assert 1 <= len(message.logprobs) <= MAX_PROMPT_LOGPROBS
        assert message.start == request.scored + 1
        for i, found in enumerate(message.logprobs, start=message.start):
            assert found == self._score(request, i, num_top)
        request.scored += len(message.logprobs)

    def _experts(self, planned: Planned) -> bytes:
        """Return the experts of all rows, with wrong ones for refused drafts and ended requests."""
        width, found = self.config.routing_bytes, bytearray()
        results = iter(planned.results or ())
        for chunk, request in zip(planned.step.chunks, planned.requests, strict=True):
            accepted = len(next(results).token_ids) if chunk.num_sampled else 0
            rows = chunk.num_tokens - chunk.num_sampled + accepted
            right = b""
            if request not in self.leaving:
                assert request.computed is not None
                right = self._experts_alone(request, request.computed, request.computed + rows)
            found += right.ljust(width * chunk.num_tokens, b"?")
        return bytes(found)

    def _experts_alone(self, request: Live, start: int, end: int) -> bytes:
        """Return the experts of positions [start, end), which depend on all tokens up to each."""
        alone, _ = tokens_alone(self.config, request.prompt, request.submit.sampling)
        known, width = (*request.prompt, *alone), self.config.routing_bytes
        rows = [hash((known[: position + 1], 7)) for position in range(start, min(end, len(known)))]
        return b"".join((row % 256**width).to_bytes(width, "little") for row in rows)

    def _check_experts(self, message: PromptExperts, request: Live) -> None:
        """Experts of the prompt come in order, each position once, before all output, without the last one."""
        assert request.submit.sampling.routed_experts_start is not None
        assert not request.output
        assert message.count > 0
        assert message.start == request.routed
        request.routed += message.count
        assert request.routed < len(request.prompt)
        assert message.experts == self._experts_alone(request, message.start, request.routed)

    def _check_start(self, chunk: Chunk, request: Live) -> int:
        """A new request begins after whole reused pages and computes at least its last prompt position."""
        size = self.config.page_size
        assert chunk.start % size == chunk.start % self.config.chunk_alignment == 0
        assert chunk.start < len(request.prompt)
        assert chunk.start == 0 or self.config.prefix_caching
        assert request.kept is None or chunk.start <= len(request.prompt) - request.kept[1]
        assert request.submit.sampling.prompt_logprobs is None or chunk.start <= request.scored
        reused = [cell for page in chunk.pages[: chunk.start // size] for cell in self.device.cells[page]]
        assert reused == states_alone(request.prompt, self.config.vocab_size, chunk.start), (
            "the prefix hit has other tokens"
        )
        if request.first_start is None:
            request.first_start = chunk.start
        request.computed, request.pages = chunk.start, chunk.pages[: chunk.start // size]
        return chunk.start // size

    def _check_fed(self, chunk: Chunk, before: Chunk, *, end: int, limit: int) -> None:
        """Check rows after a sampled chunk in flight, whose last row is at end - 1."""
        assert chunk.fed is not None
        assert self.flights[-1].step.sampled[chunk.fed] is before
        assert (chunk.start, chunk.max_start) == (end - before.num_sampled + 1, end)
        assert 1 <= chunk.num_tokens == chunk.num_sampled <= 1 + self.config.num_drafts
        assert chunk.start < limit, "the request ends with the step in flight"
        assert chunk.max_start + chunk.num_tokens <= max(limit, chunk.max_start + 1)

    def _check_tables(self) -> None:
        """Two holders share a page only as the same full, computed page of the same prompt prefix."""
        holders: dict[int, list[tuple[Live, int]]] = {}
        for request in (*self.live.values(), *self.leaving):
            for index, page in enumerate(request.pages):
                holders.setdefault(page, []).append((request, index))
            done = request.computed is not None and request.computed >= len(request.prompt)
            for page in request.compact or (request.pages if done and request.dropped else ()):
                assert page not in self.scheduler.pool._hash_of, f"page {page} is compacted and can be found"
                holders.setdefault(page, [(request, 0)])
                assert len(holders[page]) == 1, f"page {page} is compacted and shared"
        for page, held in holders.items():
            if len(held) > 1:
                ends = {(index + 1) * self.config.page_size for _, index in held}
                assert len(ends) == 1, f"page {page} sits at different positions"
                end = ends.pop()
                prefixes = {request.prompt[:end] for request, _ in held}
                assert len(prefixes) == 1, f"page {page} is shared by different prompts"
                assert len(prefixes.pop()) == end, f"page {page} is shared but not full of prompt"
                assert None not in self.device.cells[page], f"page {page} was shared before it was computed"

    def finish_oldest(self) -> list[Reply]:
        """Complete the oldest step in flight, if there is one."""
        if self.flights:
            return self.finish(self.flights[0].step)
        assert self.scheduler.complete(Step.empty(), [], now=float(self.num_steps)) == []
        return []

    def finish(self, step: Step) -> list[Reply]:
        """Run the oldest planned step, unless it has run, and return its tokens to the scheduler."""
        planned = self.flights.popleft()
        assert planned.step is step
        if planned.results is None:
            self._run(planned)
        assert planned.results is not None
        scores, experts = self._scores(planned), self._experts(planned)
        replies = self.scheduler.complete(step, planned.results, float(self.num_steps), scores, experts)
        expected, results = [], iter(planned.results)
        for chunk, request in zip(step.chunks, planned.requests, strict=True):
            request.in_flight.pop(0)
            result = next(results) if chunk.num_sampled else None
            if request in self.leaving:
                if not request.in_flight:
                    self.leaving.remove(request)
                continue
            assert request.computed is not None
            if chunk.compaction is not None:
                request.pages, request.compact = request.compact, ()
            request.computed += chunk.num_tokens - chunk.num_sampled
            if chunk.scoring is not None:
                first = chunk.start + chunk.scoring.first + 1
                forced = chunk.scoring.targets[max(len(request.prompt) - first, 0) :]
                parts = range(0, len(forced), MAX_PROMPT_LOGPROBS)
                expected += [(request, forced[i : i + MAX_PROMPT_LOGPROBS]) for i in parts]
            if result is not None:
                request.computed += len(result.token_ids)
                expected.append((request, result.token_ids))
        self._check_replies(replies, expected)
        for request in self.live.values():
            if self.config.num_drafts and not request.in_flight:
                # Reservations for refused drafts are released.
                length = len(request.known) - (request.dropped if (request.computed or 0) >= len(request.prompt) else 0)
                request.pages = request.pages[: -(-length // self.config.page_size)]
        self.check()
        return replies

    def _run(self, planned: Planned) -> None:
        prompts = [(request.prompt, request.kept) for request in planned.requests]
        planned.results = self.device.run(planned.step, prompts, planned.fresh)

    def _check_replies(self, replies: list[Reply], expected: list[tuple[Live, tuple[int, ...]]]) -> None:
        """Expect one `Tokens` per living request, in order of rows, each followed by its end if it ends."""
        for reply in replies:
            message = reply.message
            if isinstance(message, PromptLogprobs):
                self._check_scores(message, self.live[reply.client, message.request_id])
            elif isinstance(message, PromptExperts):
                self._check_experts(message, self.live[reply.client, message.request_id])
            elif isinstance(message, Tokens):
                request = self.live[reply.client, message.request_id]
                wanted, accepted = expected.pop(0)
                assert request is wanted
                assert message.start == len(request.output)
                assert message.cached_tokens == (None if message.start else request.first_start)
                assert message.token_ids == accepted[: len(message.token_ids)]
                wants = request.submit.sampling.routed_experts_start is not None
                before = len(request.prompt) + message.start - 1
                rows = self._experts_alone(request, before, before + len(message.token_ids)) if wants else b""
                assert message.routed_experts == rows
                num_top, first = request.submit.sampling.logprobs, len(request.prompt) + message.start
                if message.start < len(request.forced):
                    assert num_top is not None
                    scores = [self._score(request, first + i, num_top) for i in range(len(message.token_ids))]
                    assert list(message.logprobs) == scores
                assert not wants or request.routed == len(request.prompt) - 1, "experts of the prompt are withheld"
                request.output += message.token_ids
                alone, _ = tokens_alone(self.config, request.prompt, request.submit.sampling)
                assert request.output == alone[: len(request.output)], "tokens depend on what else ran"
                assert message.token_ids == accepted or len(request.output) == len(alone), "tokens are withheld"
            else:
                assert isinstance(message, Done)
                request = self.live[reply.client, message.request_id]
                alone, reason = tokens_alone(self.config, request.prompt, request.submit.sampling)
                assert (request.output, message.finish_reason) == (alone, reason)
                asked = request.submit.sampling.prompt_logprobs is not None
                assert request.scored == (len(request.prompt) - 1 if asked else 0), "prompt tokens without a score"
                if request.submit.sampling.routed_experts_start is not None:
                    assert request.routed == len(request.prompt) - 1, "prompt tokens without experts"
                assert message.stop_token_id == (alone[-1] if reason == "stop" else None)
                self._end(reply.client, message)
        assert expected == [], "tokens are withheld"
        for request in self.live.values():
            alone, _ = tokens_alone(self.config, request.prompt, request.submit.sampling)
            done = request.computed == len(request.prompt) if not alone else len(request.output) == len(alone)
            assert not done, "a request has all its tokens and was not ended"

    def drain(self) -> None:
        """Run until all requests ended, within a number of steps that only starvation would exceed."""
        bound = 2 * sum(len(r.prompt) + r.submit.sampling.max_tokens for r in self.live.values())
        # Each time it needs a page, a request may have to wait a step for others in flight.
        bound *= self.config.max_in_flight
        while self.live:
            assert bound > 0, f"starving: {[r.submit.request_id for r in self.live.values()]}"
            bound -= 1
            self.step()
        while self.flights:
            self.finish_oldest()
        self.check()
        assert self.num_ended == self.num_accepted, "not every request got exactly one end"
        assert self.scheduler.pool.num_free == self.config.num_pages, "pages are lost"
        assert self.scheduler._holdings.slots.num_free == self.config.num_state_slots, "slots are lost"
        assert self.scheduler.schedule(now=0.0) == Step.empty()

    def check(self) -> None:
        """Check invariants that hold between events."""
        scheduler = self.scheduler
        scheduler.validate()
        roster = scheduler._roster
        assert set(roster.live) == set(self.live)
        assert len(scheduler._flights) == len(self.flights)
        if self.config.max_in_flight == 1:
            order = [self.live[r.key].arrival for r in (*roster.running, *roster.waiting)]
            assert order == sorted(order), "requests must start in order of arrival"
        used = {page for request in (*self.live.values(), *self.leaving) for page in request.pages} | self._reserved()
        assert scheduler.pool.num_free == self.config.num_pages - len(used)
        slots = [
            c.state_slot for r in (*self.live.values(), *self.leaving) for c in r.in_flight[:1] if c.state_slot >= 0
        ]
        assert len(set(slots)) == len(slots), "two requests in flight share a slot"
        for planned in self.flights:
            named = {page for chunk in planned.step.chunks for page in chunk.pages}
            assert named <= used, "a page is free while a step in flight names it"

    def _end(self, client: bytes, done: Done) -> None:
        request = self.live.pop((client, done.request_id))
        assert done.prompt_tokens == len(request.prompt)
        assert done.completion_tokens == len(request.output)
        assert done.cached_tokens == (request.first_start or 0)
        alone, _ = tokens_alone(self.config, request.prompt, request.submit.sampling)
        assert request.output == alone[: len(request.output)], "tokens depend on what else ran"
        self._leave(request)

    def _leave(self, request: Live) -> None:
        self.num_ended += 1
        if request.in_flight:
            self.num_late_ends += 1
            self.leaving.append(request)
