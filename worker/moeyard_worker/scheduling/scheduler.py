"""Continuous batching of one rank as a pure state machine: messages and step results in, steps and messages out.

No torch, no sockets, no clock: `now` (seconds, monotonic) arrives with each event. The scheduler knows a model only
through page counts. One chunk per sequence and step; decode rows are planned before prompt chunks within one token
budget; sequences that run out of pages are preempted latest-first and recomputed (prompt positions with the prompt
formula, output positions with the decode formula).
"""

from collections import deque
from collections.abc import Sequence as Seq

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.protocol import Done, Rejected, Submit, Tokens
from moeyard_worker.scheduling.request import Key, Reply, Sampled, SchedulerStats, Sequence
from moeyard_worker.scheduling.sampling_check import sampling_error
from moeyard_worker.scheduling.step import Chunk, Step
from moeyard_worker.state.pages import PagePool, page_hashes


class Scheduler:
    """Owner of a rank's requests and pages. Not thread-safe; every method is called between steps."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.stats = SchedulerStats()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._live: dict[Key, Sequence] = {}
        self._planned: dict[str, Sequence] = {}

    @property
    def num_running(self) -> int:
        """Sequences that hold pages and take part in steps."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Positions that the queued sequences will have to compute."""
        return sum(s.length for s in self._waiting)

    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self._running or self._waiting)

    def add(self, submit: Submit, client: bytes, now: float) -> Rejected | None:
        """Queue a request, or say why it can never run or cannot be queued now."""
        rejected = self._refusal(submit, client)
        if rejected is not None:
            return rejected
        prompt = submit.prompt_token_ids
        hashes = page_hashes(prompt, self.config.page_size) if self.config.prefix_caching else []
        sequence = Sequence(
            client=client,
            request_id=submit.request_id,
            prompt=prompt,
            sampling=submit.sampling,
            arrived=now,
            hashes=hashes,
            key=f"{client.hex()}:{submit.request_id}",
        )
        self._live[client, submit.request_id] = sequence
        self._waiting.append(sequence)
        return None

    def _refusal(self, submit: Submit, client: bytes) -> Rejected | None:
        config, prompt, params = self.config, submit.prompt_token_ids, submit.sampling

        def no(reason: str, message: str, retry_after: float | None = None) -> Rejected:
            return Rejected(request_id=submit.request_id, reason=reason, message=message, retry_after=retry_after)

        if (client, submit.request_id) in self._live:
            return no("duplicate", f"request {submit.request_id!r} is already running")
        if not prompt:
            return no("bad_request", "the prompt is empty")
        wrong = sampling_error(params, config.vocab_size)
        if wrong is not None:
            return no("bad_request", wrong)
        outside = next((t for t in prompt if not 0 <= t < config.vocab_size), None)
        if outside is not None:
            return no("bad_request", f"token id {outside} is outside the vocabulary of {config.vocab_size}")
        if len(prompt) + 1 > config.max_model_len:
            return no(
                "prompt_too_long",
                f"the prompt has {len(prompt)} tokens, which leaves no room for output within the limit of "
                f"{config.max_model_len}",
            )
        if params.min_tokens > 0 and len({*params.stop_token_ids, *config.eos_token_ids}) >= config.vocab_size:
            return no("bad_request", "min_tokens holds back every stop token, and here that is the whole vocabulary")
        total = len(prompt) + params.max_tokens
        if total > config.max_model_len:
            return no(
                "prompt_too_long",
                f"{len(prompt)} prompt tokens + max_tokens {params.max_tokens} exceed the limit of "
                f"{config.max_model_len}",
            )
        # The last output token is never fed back, so its state is never stored.
        pages = self._pages_for(total - 1)
        if pages > config.num_pages:
            return no("never_fits", f"the request needs {pages} KV pages, this worker has {config.num_pages}")
        if len(self._waiting) >= config.max_waiting:
            return no("queue_full", f"{len(self._waiting)} requests are waiting", retry_after=1.0)
        return None

    def abort(self, client: bytes, request_id: str) -> Done | None:
        """End a request now and free what it holds; None when it is unknown or already ended."""
        sequence = self._live.get((client, request_id))
        return None if sequence is None else self._finish(sequence, "abort")

    def abort_client(self, client: bytes) -> None:
        """End all requests of a client that can no longer be reached."""
        for sequence in [s for s in self._live.values() if s.client == client]:
            self._finish(sequence, "abort")

    def fail_all(self, error: str) -> list[Reply]:
        """End every request with a named error."""
        return [Reply(s.client, self._finish(s, "error", error=error)) for s in list(self._live.values())]

    def schedule(self, now: float) -> Step:
        """Plan the next step. Whatever it plans must be completed by `complete` before the next call."""
        assert not self._planned, "the previous step was not completed"
        budget = self.config.max_batch_tokens
        decode: list[Chunk] = []
        prefill: list[Chunk] = []
        num_preemptions = self.stats.num_preemptions
        # Single rows first: a long recompute must not take the step away from the others' next tokens.
        for sequence in sorted((s for s in self._running if s.decoding), key=lambda s: s.length - s.num_computed > 1):
            budget -= self._plan(sequence, self._rows(sequence, budget), decode)
        for sequence in [s for s in self._running if not s.decoding]:
            budget -= self._plan(sequence, self._rows(sequence, budget), prefill)
        if self.stats.num_preemptions == num_preemptions:
            self._admit(budget, prefill, now)
        return Step(prefill=tuple(prefill), decode=tuple(decode))

    def _rows(self, sequence: Sequence, budget: int) -> int:
        """Rows of the sequence's next chunk; a chunk never crosses the end of the prompt."""
        end = sequence.length if sequence.decoding else len(sequence.prompt)
        return min(budget, self.config.prefill_chunk, end - sequence.num_computed)

    def _admit(self, budget: int, prefill: list[Chunk], now: float) -> None:
        """Start waiting sequences, first come first served, while rows, slots and pages for their whole prompt last."""
        while self._waiting and budget > 0 and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            # At least the last prompt position is computed, because its logits choose the first output token.
            reusable = (len(sequence.prompt) - 1) // self.config.page_size
            cached = self.pool.match(sequence.hashes[:reusable])
            needed = self._pages_for(sequence.length) - len(cached)
            if needed > self.pool.num_free - self.pool.num_idle(cached):
                assert self._running, f"{sequence.key} does not fit into an empty pool"
                return
            self._waiting.popleft()
            self.pool.acquire(cached)
            # All pages of the prompt at once: prompts that are still being computed must not starve each other.
            sequence.pages = cached + self.pool.allocate(needed)
            sequence.running = True
            sequence.num_computed = len(cached) * self.config.page_size
            sequence.num_registered = len(cached)
            if sequence.started is None:
                sequence.started = now
                sequence.cached_tokens = sequence.num_computed
                self.stats.queue_seconds.append(now - sequence.arrived)
            self.stats.prefix_query_tokens += len(sequence.prompt)
            self.stats.prefix_hit_tokens += sequence.num_computed
            self._running.append(sequence)
            budget -= self._plan(sequence, self._rows(sequence, budget), prefill)

    def _plan(self, sequence: Sequence, rows: int, out: list[Chunk]) -> int:
        """Append the sequence's chunk of at most `rows` rows; returns the rows planned (0 when it was preempted)."""
        if rows <= 0 or not sequence.running:
            return 0
        start = sequence.num_computed
        if not self._reserve(sequence, start + rows):
            return 0
        prompt = start < len(sequence.prompt)
        out.append(
            Chunk(
                request_id=sequence.key,
                start=start,
                token_ids=sequence.tokens(start, start + rows),
                pages=tuple(sequence.pages),
                prompt=prompt,
                sample=start + rows == sequence.length,
            )
        )
        self._planned[sequence.key] = sequence
        return rows

    def _reserve(self, sequence: Sequence, length: int) -> bool:
        """Give the sequence pages for `length` positions, preempting later ones; False when it had to yield itself."""
        missing = self._pages_for(length) - len(sequence.pages)
        while missing > self.pool.num_free:
            # Planned sequences keep their pages: their chunk already names them. The latest unplanned one yields.
            victim = next((s for s in reversed(self._running) if s.key not in self._planned), None)
            assert victim is not None, "the sequence itself is not planned yet"
            self._preempt(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.pages += self.pool.allocate(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        sequence.running = False
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.num_computed = sequence.num_registered = 0
        # Preempted latest-first, so putting each at the front keeps the queue in order of arrival.
        self._waiting.appendleft(sequence)
        self.stats.num_preemptions += 1

    def complete(self, step: Step, sampled: Seq[Sampled], now: float) -> list[Reply]:
        """Take the results of a planned step: `sampled[i]` belongs to `step.sampled[i]`. Returns replies in order."""
        assert len(sampled) == len(step.sampled), f"{len(sampled)} tokens for {len(step.sampled)} sampled chunks"
        results = iter(sampled)
        replies: list[Reply] = []
        for chunk in step.chunks:
            sequence = self._planned.pop(chunk.request_id)
            sequence.num_computed = chunk.end
            if chunk.prompt:
                self.stats.prefill_tokens += chunk.num_tokens
                self._register(sequence)
            if chunk.sample:
                replies += self._accept(sequence, next(results), now)
        assert not self._planned, "a planned chunk is not part of the step"
        return replies

    def _register(self, sequence: Sequence) -> None:
        """Make newly filled prompt pages findable; a page shared with output positions never is."""
        full = min(sequence.num_computed // self.config.page_size, len(sequence.hashes))
        for i in range(sequence.num_registered, full):
            self.pool.register(sequence.pages[i], sequence.hashes[i])
        sequence.num_registered = max(sequence.num_registered, full)

    def _accept(self, sequence: Sequence, sampled: Sampled, now: float) -> list[Reply]:
        sequence.output.append(sampled.token_id)
        self.stats.generation_tokens += 1
        if sequence.first_token is None:
            assert sequence.started is not None
            sequence.first_token = now
            self.stats.prefill_seconds.append(now - sequence.started)
        tokens = Tokens(
            request_id=sequence.request_id,
            start=len(sequence.output) - 1,
            token_ids=(sampled.token_id,),
            logprobs=() if sampled.logprob is None else (sampled.logprob,),
        )
        replies = [Reply(sequence.client, tokens)]
        if self._stops(sequence, sampled.token_id):
            replies.append(Reply(sequence.client, self._finish(sequence, "stop", stop_token_id=sampled.token_id)))
        elif len(sequence.output) >= sequence.sampling.max_tokens:
            replies.append(Reply(sequence.client, self._finish(sequence, "length")))
        return replies

    def _stops(self, sequence: Sequence, token_id: int) -> bool:
        params = sequence.sampling
        if len(sequence.output) < params.min_tokens:
            return False
        return token_id in params.stop_token_ids or (not params.ignore_eos and token_id in self.config.eos_token_ids)

    def _finish(
        self, sequence: Sequence, reason: str, *, stop_token_id: int | None = None, error: str | None = None
    ) -> Done:
        del self._live[sequence.client, sequence.request_id]
        self._planned.pop(sequence.key, None)
        if sequence.running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self.pool.release(sequence.pages)
        sequence.pages = []
        started, first = sequence.started, sequence.first_token
        return Done(
            request_id=sequence.request_id,
            finish_reason=reason,
            prompt_tokens=len(sequence.prompt),
            cached_tokens=sequence.cached_tokens,
            completion_tokens=len(sequence.output),
            stop_token_id=stop_token_id,
            error=error,
            queue_seconds=0.0 if started is None else started - sequence.arrived,
            prefill_seconds=0.0 if started is None or first is None else first - started,
        )

    def sequence(self, chunk: Chunk) -> Sequence:
        """The sequence behind a planned chunk, for the sampler."""
        return self._planned[chunk.request_id]

    def _pages_for(self, length: int) -> int:
        return -(-length // self.config.page_size)

    def validate(self) -> None:
        """Assert every invariant; called by tests after each event and by an idle engine."""
        self.pool.validate(s.pages for s in self._live.values())
        queued = list(self._waiting) + self._running
        assert len(queued) == len(self._live), "a request is lost or queued twice"
        assert {id(s) for s in queued} == {id(s) for s in self._live.values()}, "queues and live requests differ"
        assert len(self._running) <= self.config.max_num_seqs
        for s in self._waiting:
            assert (s.pages, s.num_computed, s.running) == ([], 0, False), f"waiting {s.key} holds state"
        for s in self._running:
            assert s.num_computed < s.length or s.key in self._planned, f"running {s.key} has nothing to compute"
            assert len(s.pages) >= self._pages_for(s.num_computed), f"{s.key} computed past its pages"
            assert len(s.output) < s.sampling.max_tokens
