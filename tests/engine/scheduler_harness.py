"""A fake model over real page tables, and every promise of the scheduler checked at every event.

The fake state of a position is a hash of all earlier states, read through the page table of the chunk, of its own token
and of its formula (prompt or decode). Pages are blank when they are handed out. So a lost, shared, stale or skipped
position, or one computed with the wrong formula, changes the tokens, and they are compared with those of the request
alone, which `tokens_alone` computes without a scheduler.
"""

from dataclasses import dataclass, field

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.protocol import Done, Rejected, SamplingParams, Submit, Tokens
from moeyard_worker.scheduling.request import Reply, Sampled
from moeyard_worker.scheduling.scheduler import Scheduler
from moeyard_worker.scheduling.step import Chunk, Step

Cell = int | None


def state_of(earlier: list[Cell], token_id: int, *, prompt: bool) -> int:
    """The fake state of the position after `earlier`."""
    assert None not in earlier, "a position reads a state that nobody computed"
    return hash((*earlier, token_id, prompt))


def prompt_states(prompt: tuple[int, ...]) -> list[Cell]:
    """The fake states of all prompt positions."""
    states: list[Cell] = []
    for token_id in prompt:
        states.append(state_of(states, token_id, prompt=True))
    return states


def tokens_alone(config: SchedulerConfig, prompt: tuple[int, ...], params: SamplingParams) -> tuple[list[int], str]:
    """Output tokens and finish reason of a request that nothing else touches."""
    states = prompt_states(prompt)
    output: list[int] = []
    while True:
        assert states[-1] is not None
        token_id = states[-1] % config.vocab_size
        output.append(token_id)
        stops = token_id in params.stop_token_ids or (not params.ignore_eos and token_id in config.eos_token_ids)
        if stops and len(output) >= params.min_tokens:
            return output, "stop"
        if len(output) == params.max_tokens:
            return output, "length"
        states.append(state_of(states, token_id, prompt=False))


@dataclass(slots=True, eq=False)
class Live:
    """What the harness knows of an accepted request from the outside."""

    submit: Submit
    arrival: int
    output: list[int] = field(default_factory=list)
    next_position: int | None = None  # None while it holds no state
    pages: tuple[int, ...] = ()
    first_start: int | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.submit.prompt_token_ids


class Harness:
    """A scheduler, the fake model's pages, and the terminal replies that each accepted request got."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.live: dict[tuple[bytes, str], Live] = {}
        self.num_accepted = 0
        self.num_ended = 0
        self.num_steps = 0
        self.cells: list[list[Cell]] = [[None] * config.page_size for _ in range(config.num_pages)]

    def expected_refusal(self, submit: Submit, client: bytes) -> str | None:
        """The reason by the contract's words, for submits whose sampling parameters are in range."""
        prompt, total = submit.prompt_token_ids, len(submit.prompt_token_ids) + submit.sampling.max_tokens
        if (client, submit.request_id) in self.live:
            return "duplicate"
        if not prompt or not all(0 <= t < self.config.vocab_size for t in prompt):
            return "bad_request"
        if total > self.config.max_model_len:
            return "prompt_too_long"
        if total - 1 > self.config.num_pages * self.config.page_size:
            return "never_fits"
        if sum(1 for r in self.live.values() if r.next_position is None) >= self.config.max_waiting:
            return "queue_full"
        return None

    def submit(self, submit: Submit, client: bytes = b"a") -> Rejected | None:
        """Send a request and check the answer."""
        expected = self.expected_refusal(submit, client)
        rejected = self.scheduler.add(submit, client, now=float(self.num_steps))
        assert (None if rejected is None else rejected.reason) == expected
        if rejected is None:
            self.live[client, submit.request_id] = Live(submit, self.num_accepted)
            self.num_accepted += 1
        else:
            assert rejected.request_id == submit.request_id
        self.check()
        return rejected

    def abort(self, request_id: str, client: bytes = b"a") -> Done | None:
        """Abort a request and check that its pages are free at once."""
        known = (client, request_id) in self.live
        done = self.scheduler.abort(client, request_id)
        assert (done is not None) == known
        if done is not None:
            assert done.finish_reason == "abort"
            self._end(client, done)
        self.check()
        return done

    def abort_client(self, client: bytes) -> None:
        """A client left: its requests end without a reply."""
        self.scheduler.abort_client(client)
        gone = [key for key in self.live if key[0] == client]
        for key in gone:
            del self.live[key]
        self.num_ended += len(gone)
        self.check()

    def fail_all(self) -> None:
        """The fleet failed: one named error to each request."""
        replies = self.scheduler.fail_all("rank 1 is silent")
        assert len(replies) == len(self.live)
        for reply in replies:
            assert isinstance(reply.message, Done)
            assert (reply.message.finish_reason, reply.message.error) == ("error", "rank 1 is silent")
            self._end(reply.client, reply.message)
        self.check()
        assert not self.live
        assert not self.scheduler.has_work()

    def step(self) -> Step:
        """One step: plan, check the plan, compute it with the fake model, complete, check the replies."""
        self.num_steps += 1
        step = self.plan()
        self.finish(step)
        return step

    def plan(self) -> Step:
        """Plan a step and check it; `finish` or `fail_all` must follow."""
        scheduler, config = self.scheduler, self.config
        had_work = scheduler.has_work()
        assert had_work == bool(self.live)
        step = scheduler.schedule(now=float(self.num_steps))
        scheduler.validate()
        assert (step.num_tokens > 0) == had_work, "a step with work computes something"
        assert step.num_tokens <= config.max_batch_tokens
        assert len({c.request_id for c in step.chunks}) == len(step.chunks), "one chunk per sequence"
        running = {(s.client, s.request_id) for s in scheduler._running}
        for key, request in self.live.items():
            if key not in running:
                request.next_position, request.pages = None, ()
        for chunk in step.chunks:
            self._check_chunk(chunk, prompt=chunk in step.prefill)
        self._check_tables()
        return step

    def _check_chunk(self, chunk: Chunk, *, prompt: bool) -> None:
        request, size = self._request(chunk), self.config.page_size
        num_prompt = len(request.prompt)
        known = request.prompt + tuple(request.output)
        if request.next_position is None:
            # Newly started: it begins behind whole reused pages, and at least the last prompt position is computed.
            assert chunk.start % size == 0
            assert chunk.start < num_prompt
            assert chunk.start == 0 or self.config.prefix_caching
            num_reused = chunk.start // size
            reused = [cell for page in chunk.pages[:num_reused] for cell in self.cells[page]]
            assert reused == prompt_states(request.prompt[: chunk.start]), "a prefix hit on other tokens"
            if request.first_start is None:
                request.first_start = chunk.start
        else:
            assert chunk.start == request.next_position, "positions are computed once each, in order"
            num_reused = len(request.pages)
            assert chunk.pages[:num_reused] == request.pages, "a page table only grows"
        for page in chunk.pages[num_reused:]:
            self.cells[page] = [None] * size
        request.pages, request.next_position = chunk.pages, chunk.end
        assert 0 < chunk.num_tokens <= self.config.prefill_chunk
        assert chunk.token_ids == known[chunk.start : chunk.end]
        assert chunk.prompt == prompt == (chunk.start < num_prompt)
        assert not prompt or chunk.end <= num_prompt, "a prompt chunk crosses the end of the prompt"
        assert chunk.sample == (chunk.end == len(known))
        assert len(chunk.pages) * size >= chunk.end

    def _check_tables(self) -> None:
        """Two sequences share a page only as the same full, already computed page of the same prompt prefix."""
        holders: dict[int, list[tuple[Live, int]]] = {}
        for request in self.live.values():
            for index, page in enumerate(request.pages):
                holders.setdefault(page, []).append((request, index))
        for page, held in holders.items():
            if len(held) > 1:
                ends = {(index + 1) * self.config.page_size for _, index in held}
                assert len(ends) == 1, f"page {page} sits at different positions"
                end = ends.pop()
                prefixes = {request.prompt[:end] for request, _ in held}
                assert len(prefixes) == 1, f"page {page} is shared by different prompts"
                assert len(prefixes.pop()) == end, f"page {page} is shared but not full of prompt"
                assert None not in self.cells[page], f"page {page} was shared before it was computed"

    def _compute(self, chunk: Chunk) -> int:
        size = self.config.page_size
        earlier = [self.cells[chunk.pages[i // size]][i % size] for i in range(chunk.start)]
        for position, token_id in enumerate(chunk.token_ids, start=chunk.start):
            page, slot = chunk.pages[position // size], position % size
            assert self.cells[page][slot] is None, "a position is written twice"
            state = state_of(earlier, token_id, prompt=chunk.prompt)
            self.cells[page][slot] = state
            earlier.append(state)
        return state % self.config.vocab_size

    def finish(self, step: Step) -> list[Reply]:
        """Run a planned step on the fake model and hand its tokens back."""
        tokens = {chunk.request_id: self._compute(chunk) for chunk in step.chunks}
        sampled = [Sampled(tokens[chunk.request_id]) for chunk in step.sampled]
        expected = [(self._request(chunk), tokens[chunk.request_id]) for chunk in step.sampled]
        replies = self.scheduler.complete(step, sampled, now=float(self.num_steps))
        streamed = [r for r in replies if isinstance(r.message, Tokens)]
        assert len(streamed) == len(expected)
        for reply in replies:
            message = reply.message
            if isinstance(message, Tokens):
                request = self.live[reply.client, message.request_id]
                assert expected.pop(0) == (request, message.token_ids[0])
                assert (message.start, len(message.token_ids)) == (len(request.output), 1)
                request.output += message.token_ids
            else:
                assert isinstance(message, Done)
                request = self.live[reply.client, message.request_id]
                alone, reason = tokens_alone(self.config, request.prompt, request.submit.sampling)
                assert (request.output, message.finish_reason) == (alone, reason)
                assert message.stop_token_id == (alone[-1] if reason == "stop" else None)
                self._end(reply.client, message)
        self.check()
        return replies

    def drain(self) -> None:
        """Run until all requests ended, within a number of steps that only starvation would exceed."""
        bound = 2 * sum(len(r.prompt) + r.submit.sampling.max_tokens for r in self.live.values())
        while self.live:
            assert bound > 0, f"starving: {[r.submit.request_id for r in self.live.values()]}"
            bound -= 1
            self.step()
        self.check()
        assert self.num_ended == self.num_accepted, "not every request got exactly one end"
        assert self.scheduler.pool.num_free == self.config.num_pages, "pages are lost"
        assert self.scheduler.schedule(now=0.0) == Step.empty()

    def check(self) -> None:
        """Invariants that hold between events."""
        scheduler = self.scheduler
        scheduler.validate()
        assert set(scheduler._live) == set(self.live)
        order = [self.live[s.client, s.request_id].arrival for s in (*scheduler._running, *scheduler._waiting)]
        assert order == sorted(order), "first come is not first served"
        used = {page for request in self.live.values() for page in request.pages}
        assert scheduler.pool.num_free == self.config.num_pages - len(used)

    def _end(self, client: bytes, done: Done) -> None:
        request = self.live.pop((client, done.request_id))
        assert done.prompt_tokens == len(request.prompt)
        assert done.completion_tokens == len(request.output)
        assert done.cached_tokens == (request.first_start or 0)
        alone, _ = tokens_alone(self.config, request.prompt, request.submit.sampling)
        assert request.output == alone[: len(request.output)], "tokens depend on what else ran"
        self.num_ended += 1

    def _request(self, chunk: Chunk) -> Live:
        sequence = self.scheduler.sequence(chunk)
        return self.live[sequence.client, sequence.request_id]
