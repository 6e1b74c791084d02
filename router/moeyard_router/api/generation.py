"""One request while it runs: events of the fleet in, deltas of its choices or one error out."""

import time
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from moeyard_router.api.choice import ABORTED, Choice, Delta
from moeyard_router.api.intake import Job
from moeyard_router.api.request_log import RequestLog
from moeyard_router.api.request_scope import Direct, RequestRecord
from moeyard_router.errors import ApiError
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.fleet.instructions import Aborted, Event, Lost
from moeyard_router.fleet.records import Phases
from moeyard_router.fleet.ticket import Ticket
from moeyard_router.metrics import RouterMetrics, Timing
from moeyard_router.text.detokenizer import TokenBytes
from moeyard_worker.protocol import Done, PromptExperts, PromptLogprobs, Rejected, Tokens

if TYPE_CHECKING:
    from moeyard_router.api.spans import RequestTrace

_REJECT_STATUS = MappingProxyType(
    {
        "queue_full": 429,
        "queue_timeout": 429,
        "prompt_too_long": 400,
        "never_fits": 400,
        "bad_request": 400,
        "fleet_failed": 503,
    }
)


class ClientGone(Exception):
    """The client closed its connection, so no answer is sent."""


class Generation:
    """Run a job. It ends with all choices finished, with an `ApiError`, or with `ClientGone`. Always `close` it.

    `log` and `trace` get every choice at its end. `names`: the names by which its client may end the request.

    Raises `ApiError` 429 or 503 at once if the fleet refuses the job.
    """

    def __init__(
        self,
        job: Job,
        *,
        reply_id: str,
        fleet: Fleet,
        tokens: TokenBytes,
        metrics: RouterMetrics,
        arrived: float,
        client: str | None = None,
        key: str | None = None,
        log: RequestLog | None = None,
        trace: "RequestTrace | None" = None,
        names: frozenset[str] = frozenset(),
    ) -> None:
        self._trace = trace
        self._log = log
        # The output of each choice, for the log.
        self._outputs: list[list[Tokens]] = [[] for _ in job.continuations]
        self.choices = [Choice(job, index=c.index, tokens=tokens) for c in job.continuations]
        self._job = job
        self._metrics = metrics
        self._id = reply_id
        self._recent = fleet.recent
        self._model, self._identified = fleet.config.model_name, fleet.admission.identified
        # The version of the weights that computed the latest tokens.
        self._version: str | None = None
        self._timings = [Timing(metrics, arrived) for _ in job.continuations]
        self._unfinished = set(range(len(job.continuations)))
        self._error: ApiError | None = None
        self._gone = False
        self.ticket: Ticket = fleet.submit(
            reply_id,
            [(job.submitted(c), c.sampling) for c in job.continuations],
            client=client,
            key=key,
            on_move=None if trace is None else trace.moved,
            names=names,
        )
        metrics.params_n.observe(len(job.continuations) // len(job.prompts))

    def served(self) -> dict[str, str]:
        """Return the fields of the answer that say what computed it: `model`, and `system_fingerprint` if known.

        If the weights have changed meanwhile, the fingerprint is that of the latest tokens.
        """
        return {"model": self._model, **self._identified(self._version)}

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason. False after an error, which `step` raises."""
        return not self._unfinished and self._error is None

    async def step(self) -> dict[int, Delta]:
        """Wait for events and return the deltas of their choices. An error is raised after the tokens before it."""
        deltas: dict[int, Delta] = {}
        while not deltas:
            if self._gone:
                raise ClientGone
            if self._error is not None:
                raise self._error
            self._take_all(await self.ticket.events(), deltas)
        return deltas

    async def push(
        self,
        direct: Direct,
        encode: Callable[[dict[int, Delta]], list[bytes]],
        text_event: Callable[[int, str], bytes] | None,
    ) -> None:
        """Write chunks to `direct` as tokens arrive, without waking a task.

        `text_event`, if given, makes the chunk of text added to a begun choice: nearly every token of a stream.
        Returns when `direct` is not ready, when all choices are finished, or when `step` has an error to raise.
        """
        if self._gone or self._error is not None:
            return  # it came with the tokens that `step` returned last, and no later event would wake this task
        faults: list[Exception] = []

        def read() -> None:
            try:
                if direct.ready():
                    events = self.ticket.take()
                    if text_event is not None and len(events) == 1 and self._write_text(*events[0], direct, text_event):
                        return
                    deltas: dict[int, Delta] = {}
                    self._take_all(events, deltas)
                    if data := b"".join(encode(deltas)):
                        direct.write(data)
                    if self._unfinished and self._error is None:
                        return
            except Exception as fault:  # boundary: raised in this answer's task, not in the fleet
                faults.append(fault)
            self.ticket.wake()

        await self.ticket.push(read)
        if faults:
            raise faults[0]

    def disconnect(self) -> None:
        """Abort the sequences because the client has left; `step` then raises `ClientGone`."""
        self._gone = True
        self.ticket.close()
        self.ticket.wake()

    def close(self) -> None:
        """Abort what still runs at the workers."""
        self.ticket.close()
        now = time.monotonic()
        for index in self._unfinished:
            self._ended(now, index, "abort" if self._error is None else "error", None)
        self._unfinished = set()

    def note(self, record: RequestRecord) -> None:
        """Write this request's counts into its log record."""
        record.prompt_tokens = sum(len(p.token_ids) for p in self._job.prompts)
        record.output_tokens = sum(c.num_tokens for c in self.choices)
        record.first_token = min((t.first for t in self._timings if t.first is not None), default=None)
        record.failure = None if self._error is None else self._error.status

    def _write_text(
        self, now: float, index: int, event: Event, direct: Direct, text_event: Callable[[int, str], bytes]
    ) -> bool:
        """Write an event that adds only text to a choice. Return False, with nothing done, for any other event."""
        timing = self._timings[index]
        if not isinstance(event, Tokens) or timing.first is None or self._error or index not in self._unfinished:
            return False
        text = self.choices[index].plain_text(event)
        if text is None:
            return False
        self._count(now, index, event)
        if text:
            direct.write(text_event(index, text))
        return True

    def _take_all(self, events: list[tuple[float, int, Event]], deltas: dict[int, Delta]) -> None:
        for now, index, event in events:
            if index in self._unfinished and self._error is None:
                self._take(now, index, event, deltas)

    def _take(self, now: float, index: int, event: Event, deltas: dict[int, Delta]) -> None:
        choice, timing = self.choices[index], self._timings[index]
        if isinstance(event, Tokens):
            if not event.logprobs and (self._job.logprobs is not None or self._job.num_forced):
                self._error = _missing("logprobs")
                return
            if self._job.routing is not None and not choice.is_routed(event):
                self._error = _missing("routed experts")
                return
            self._version = event.weight_version or self._version
            if self._job.num_forced:
                given, own = choice.forced(event)
                if given is not None and self._log is not None:
                    self._outputs[index].append(given)
                if own is None:
                    return
                event = own
            if timing.first is None and not self._prompt_is_done(index, event.cached_tokens):
                return
            delta = choice.tokens(event)
            self._count(now, index, event)
        elif isinstance(event, PromptLogprobs):
            if not choice.scores(event):
                self._error = _missing("logprobs")
            return
        elif isinstance(event, PromptExperts):
            if not choice.prompt_experts(event):
                self._error = _missing("routed experts")
            return
        elif isinstance(event, Done) and event.finish_reason in ("stop", "length"):
            if timing.first is None and not self._prompt_is_done(index, event.cached_tokens):
                return
            self._version = event.weight_version or self._version
            delta = choice.done(event)
        elif isinstance(event, Aborted) and choice.has_scores:
            delta = choice.aborted()
        else:
            self._error = _as_error(event, self._job)
            if isinstance(event, Rejected):
                self._unfinished.discard(index)
            return
        if delta.finish_reason is not None:
            self._unfinished.discard(index)
            self.ticket.abort(index)  # its worker does not know of stop strings
            self._ended(now, index, delta.finish_reason, event if isinstance(event, Done) else None)
        if index in deltas:
            deltas[index].extend(delta)
        else:
            deltas[index] = delta

    def _count(self, now: float, index: int, event: Tokens) -> None:
        """Time the tokens of a choice, and keep them for the log."""
        self._timings[index].tokens(now, len(event.token_ids))
        if self._log is not None:
            self._outputs[index].append(event)

    def _ended(self, now: float, index: int, reason: str, done: Done | None) -> None:
        """Record the end of a choice in the metrics and the recent requests. `done`: its worker's last message."""
        timing, continuation = self._timings[index], self._job.continuations[index]
        sampling, forced = continuation.sampling, self._job.num_forced
        num_prompt = len(self._job.prompts[continuation.prompt].token_ids)
        if self._log is not None:
            prompt, choice, output = self._job.submitted(continuation), self.choices[index], self._outputs[index]
            served = {"model": self._model, **self._identified(choice.weight_version)}
            self._log.add(
                self._id,
                index,
                prompt=prompt,
                sampling=sampling,
                output=output,
                count=choice.num_tokens + forced,
                reason=reason,
                served={**served, **choice.versions},
            )
        timing.finished(now, reason, prompt_tokens=num_prompt, max_tokens=sampling.max_tokens - forced)
        cached = self.choices[index].cached_tokens
        if self._trace is not None:
            self._trace.ended(now, index, reason, timing=timing, done=done, cached_tokens=cached)
        queue = None if done is None else done.queue_seconds
        prefill = None if done is None else done.prefill_seconds
        decode = None if timing.first is None else timing.last - timing.first
        if reason in ("stop", "length"):
            metrics = self._metrics
            for metric, figure in (
                (metrics.queue, queue),
                (metrics.prefill, prefill),
                (metrics.decode, decode),
                (metrics.inference, None if prefill is None or decode is None else prefill + decode),
                # A sequence that has moved may report cached output tokens, too.
                (metrics.computed_length, None if cached is None else max(0, num_prompt - cached)),
            ):
                if figure is not None:
                    metric.observe(figure)
            if not self._unfinished:
                metrics.longest_output.observe(max(each.num_tokens for each in self._timings))
        self._recent.append(
            Phases(
                id=self._id,
                index=index,
                kind="chat" if self._job.chat else "completion",
                rank=self.ticket.routes[index].rank,
                ended=time.time(),
                reason=reason,
                prompt_tokens=num_prompt,
                cached_tokens=cached,
                output_tokens=timing.num_tokens,
                queue=queue,
                prefill=prefill,
                ttft=None if timing.first is None else timing.first - timing.arrived,
                decode=decode,
                lockstep=None if done is None else done.lockstep_seconds,
                fetch=None if done is None else done.fetch_seconds,
                total=now - timing.arrived,
            )
        )

    def _prompt_is_done(self, index: int, cached: int | None) -> bool:
        """Count a choice's prompt and its `cached` tokens, each prompt once. Return False, with an error set, if data
        about it are missing."""
        choice = self.choices[index]
        if not (choice.has_scores and choice.has_experts):
            self._error = _missing("routed experts" if choice.has_scores else "logprobs")
            return False
        if index == 0 or choice.prompt != self.choices[index - 1].prompt:
            num_prompt = len(self._job.prompts[choice.prompt].token_ids)
            self._metrics.prompt_tokens.inc(num_prompt)
            self._metrics.cached_prompt_tokens.inc(min(cached or choice.cached_tokens or 0, num_prompt))
        return True


def _missing(data: str) -> ApiError:
    return ApiError(500, f"the worker did not send the {data} of this request", reason="")


def _as_error(event: Done | Rejected | Lost | Aborted, job: Job) -> ApiError:
    if isinstance(event, Lost):
        return ApiError(503, event.reason, reason="")
    if isinstance(event, Aborted):
        return ApiError(503, f"{ABORTED} before all data about its prompt were known", reason="")
    if isinstance(event, Rejected):
        status = _REJECT_STATUS.get(event.reason, 500)
        error = ApiError(status, event.message, param=event.param, reason=event.reason, retry_after=event.retry_after)
        return _of_grammar(error, job) if event.param == "grammar" else error
    if event.finish_reason == "abort":
        return ApiError(503, "the worker aborted the request", reason="")
    if not event.retryable:  # no token satisfies its grammar
        return _of_grammar(ApiError(400, str(event.error), reason=""), job)
    # The fleet is lost or stopping, or this request's logits broke a rank.
    return ApiError(503, f"the worker failed on this request: {event.error}", reason="")


def _of_grammar(error: ApiError, job: Job) -> ApiError:
    """Name the client's fields in an error of the grammar, because the worker does not know them."""
    fields = job.grammar_fields
    if not fields:
        return error
    return replace(error, message=f"{' or '.join(map(repr, fields))}: {error.message}", param=fields[0])
