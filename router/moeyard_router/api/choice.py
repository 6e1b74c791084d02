"""One choice of an answer in progress: tokens in, text with logprobs and the finish reason out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moeyard_router.api.intake import Job
from moeyard_router.text.detokenizer import Detokenizer, StopMatcher, TokenBytes
from moeyard_router.text.events import TextEvent, joined
from moeyard_router.text.extraction import Extractor
from moeyard_worker.protocol import Done, PromptExperts, PromptLogprobs, TokenLogprob, Tokens
from moeyard_worker.wire import decode, encode

ABORTED = "an operator or a trainer has aborted this request"


@dataclass(slots=True)
class Delta:
    """The output that one or more messages added to a choice. The last delta alone has a `finish_reason`.

    With `Job.extraction`, `events` hold the text and `text` is empty. `stop_reason` is the stop string or stop token
    that ended the choice, None for an end-of-sequence token (as in vLLM).
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    events: list[TextEvent] | None = None

    def extend(self, other: "Delta") -> None:
        """Append a later delta."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason
        if other.events is not None:
            self.events = joined((*(self.events or ()), *other.events))


class Choice:
    """State of one choice. It accepts nothing after a delta with a finish reason.

    A stop token is part of the output's ids but not of its text (unless `include_stop`). It may arrive before the
    message that says whether it ended the sequence, so its text waits for the next message.
    """

    def __init__(self, job: Job, *, index: int, tokens: TokenBytes) -> None:
        self.index = index
        self.prompt = job.continuations[index].prompt
        self.num_tokens = 0
        # Ids of a forced output that the client counts as prompt, and have not arrived.
        self._num_forced = job.num_forced
        # Log-probabilities of the prompt's tokens after the first, if this choice requests them. Encoded frames keep
        # them out of the garbage collector, which took 30 ms per pass over a million tuples.
        self._scores: list[bytes] = []
        self.num_scores = 0
        sampling = job.continuations[index].sampling
        scored = sampling.prompt_logprobs is not None
        self._num_requested_scores = len(job.prompts[self.prompt].token_ids) - 1 if scored else 0
        # The routed experts that the answer has: of the prompt's positions from the first wanted one on, and of each
        # output token but the last.
        self.experts = bytearray()
        self._row_bytes = 0 if job.routing is None else job.routing.row_bytes
        self._routed = self._first_routed = sampling.routed_experts_start or 0
        self._last_routed = len(job.prompts[self.prompt].token_ids) - 1 if job.routing is not None else self._routed
        # Tokens of messages that touch the reasoning block, its markers included.
        self.reasoning_tokens = 0
        # Each version of the weights that computed output, with the number of tokens before it. The first
        # `_num_prompt_versions` also computed what belongs to the prompt for the client, so their spans may be empty.
        self._versions: list[tuple[str, int]] = []
        self._num_prompt_versions = 0
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self._user_stop_ids = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self._stop_ids = job.stop_ids
        self._include_stop = job.include_stop
        self._extractor: Extractor | None = None
        table = None
        if job.extraction is not None:
            self._extractor = Extractor(job.extraction, index)
            self._ends_as_tool_calls = job.extraction.ends_as_tool_calls
            table = job.extraction.visible if job.skip_special_tokens else None
        self._detokenizer = Detokenizer(tokens, skip_special_tokens=job.skip_special_tokens, table=table)
        self._matcher = StopMatcher(job.stops, include_stop=job.include_stop) if job.stops else None
        self._plain = self._extractor is None and self._matcher is None
        self._waiting: list[int] = []  # at most one id: a possible stop token whose text waits
        self._searched = 0  # output tokens that have been detokenized

    @property
    def has_scores(self) -> bool:
        """Whether all requested log-probabilities of the prompt have arrived."""
        return self.num_scores == self._num_requested_scores

    def scores(self, message: PromptLogprobs) -> bool:
        """Store log-probabilities of the prompt. Return False if they are out of order.

        They begin again if the weights change before the first output token.
        """
        if message.start == 1:
            self._scores, self.num_scores = [], 0
        if message.start != self.num_scores + 1:
            return False
        self._scores.append(encode(message))
        self.num_scores += len(message.logprobs)
        return True

    def forced(self, message: Tokens) -> tuple[Tokens | None, Tokens | None]:
        """Split a message into tokens that the client counts as prompt, and others. Store scores, experts and version
        of the former."""
        count = min(self._num_forced, len(message.token_ids))
        if not count:
            return None, message
        self._note_prompt_version(message.weight_version)
        width = count * self._row_bytes
        given, own = (
            replace(
                message,
                start=message.start + part.start,
                token_ids=message.token_ids[part],
                logprobs=message.logprobs[part],
                routed_experts=message.routed_experts[rows],
            )
            for part, rows in ((slice(0, count), slice(0, width)), (slice(count, None), slice(width, None)))
        )
        if message.cached_tokens is not None:
            self.cached_tokens = message.cached_tokens
        self._num_forced -= count
        self._scores.append(encode(given))
        self.num_scores += count
        if self._row_bytes:
            self._routed += count
            self.experts += given.routed_experts
        return given, own if own.token_ids else None

    @property
    def has_experts(self) -> bool:
        """Whether all requested experts of the prompt, but those of its last position, have arrived."""
        return self._routed == self._last_routed

    def prompt_experts(self, message: PromptExperts) -> bool:
        """Store experts of the prompt. Return False if they are out of order or have another form.

        They begin again if the weights change before the first output token.
        """
        if message.start == self._first_routed:
            self.experts, self._routed = bytearray(), message.start
        if message.start != self._routed or len(message.experts) != message.count * self._row_bytes:
            return False
        self._routed += message.count
        self.experts += message.experts
        return True

    def is_routed(self, message: Tokens) -> bool:
        """Return whether tokens come with all experts that the request wants."""
        return len(message.routed_experts) == len(message.token_ids) * self._row_bytes

    def prompt_scores(self) -> Iterator[TokenLogprob]:
        """Decode and yield the log-probabilities of the prompt's tokens after the first."""
        for frame in self._scores:
            message = decode(frame)
            assert isinstance(message, PromptLogprobs | Tokens), "`scores` or `forced` encoded it"
            yield from message.logprobs

    def plain_text(self, message: Tokens) -> str | None:
        """Take tokens of plain text and return it. Return None, with nothing taken, if `tokens` must handle them.

        Routed experts are dropped.
        """
        ids = message.token_ids
        if not self._plain or self._waiting or ids[-1] in self._stop_ids or message.weight_version is not None:
            return None
        if message.cached_tokens is not None:
            return None
        self.num_tokens += len(ids)
        return self._detokenizer.push(ids)

    def tokens(self, message: Tokens) -> Delta:
        """Take new output tokens, at least one. Tokens after a stop string are dropped."""
        if message.cached_tokens is not None:
            self.cached_tokens = message.cached_tokens
        self._note_version(message.weight_version)
        ids: Sequence[int] = message.token_ids
        if self._waiting or ids[-1] in self._stop_ids:
            ids = self._waiting + list(ids)
            self._waiting = [ids.pop()] if ids[-1] in self._stop_ids else []
        text, stop = (self._detokenizer.push(ids), None) if self._matcher is None else self._text(ids)
        new_ids, new_logprobs = list(message.token_ids), list(message.logprobs)
        if stop is not None:
            count = self._searched - self.num_tokens
            new_ids, new_logprobs = new_ids[:count], new_logprobs[:count]
        self.num_tokens += len(new_ids)
        self.experts += message.routed_experts[: len(new_ids) * self._row_bytes]
        delta = Delta(text, new_ids, new_logprobs)
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
            self.finish_reason = "stop"
        if self._extractor is not None:
            thought = self._extractor.thinks
            _to_events(delta, self._extractor)
            if thought or self._extractor.thinks:
                self.reasoning_tokens += len(new_ids)
        return delta

    def done(self, message: Done) -> Delta:
        """Take the end that the worker reports, "stop" or "length"."""
        if self.cached_tokens is None:  # a sequence that resumed on another rank reports that rank's count
            self.cached_tokens = message.cached_tokens
        if not self._versions:
            self._note_prompt_version(message.weight_version)
        ended_by_token = message.finish_reason == "stop" and self._waiting == [message.stop_token_id]
        waiting = [] if ended_by_token and not self._include_stop else self._waiting
        self._waiting = []
        text, stop = self._text(waiting)
        if stop is None:
            tail, stop = self._finish_text()
            text += tail
        delta = Delta(text, finish_reason=message.finish_reason)
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
        elif message.stop_token_id in self._user_stop_ids:
            delta.stop_reason = message.stop_token_id
        self.finish_reason = delta.finish_reason
        if self._extractor is not None:
            _to_events(delta, self._extractor)
        return delta

    def aborted(self) -> Delta:
        """End with the output so far, because an operator ends all requests."""
        text, stop = self._text(self._waiting)
        self._waiting = []
        if stop is None:
            text += self._finish_text()[0]
        delta = Delta(text, finish_reason="abort")
        self.finish_reason = "abort"
        if self._extractor is not None:
            _to_events(delta, self._extractor)
        return delta

    @property
    def weight_version(self) -> str | None:
        """The version of the weights that computed the last output token, or the prompt if there is no output.

        None before that is known.
        """
        return self._versions[-1][0] if self._versions else None

    def _note_version(self, version: str | None) -> None:
        """Begin a span of output tokens if the weights have changed. `version`: None if they have not."""
        if version is not None and version != self.weight_version:
            self._versions.append((version, self.num_tokens))

    def _note_prompt_version(self, version: str | None) -> None:
        """Note the version of weights that have computed scores or experts of the prompt."""
        self._note_version(version)
        self._num_prompt_versions = len(self._versions)

    @property
    def versions(self) -> dict[str, list[dict[str, Any]]]:
        """The answer's field with the spans of output tokens, [start, end), that each version of the weights computed.

        A span is empty if its weights computed only the prompt, or scores of the output that a prompt ends with. There
        is no span if nothing was computed.
        """
        ends = [*(start for _, start in self._versions[1:]), self.num_tokens]
        found = [
            {"version": name, "start": start, "end": end}
            for i, ((name, start), end) in enumerate(zip(self._versions, ends, strict=False))
            if end > start or i < self._num_prompt_versions
        ]
        return {"weight_versions": found}

    @property
    def reported_reason(self) -> str | None:
        """The finish reason for clients: "tool_calls" after calls, but "stop" after a named function's call."""
        if self.finish_reason == "stop" and self._extractor is not None and self._extractor.called:
            return "tool_calls" if self._ends_as_tool_calls else "stop"
        return self.finish_reason

    def _text(self, ids: Sequence[int]) -> tuple[str, str | None]:
        """Return the text of the next ids, and its stop string, which may end only after `min_tokens` tokens (vLLM)."""
        if self._matcher is None:
            self._searched += len(ids)
            return self._detokenizer.push(ids), None
        text = ""
        for token_id in ids:
            piece = self._detokenizer.push((token_id,))
            self._searched += 1
            matched = self._matcher.push(piece, may_end=self._searched > self._min_tokens)
            text += matched.text
            if matched.stop is not None:
                return text, matched.stop
        return text, None

    def _finish_text(self) -> tuple[str, str | None]:
        """Return the last text: an incomplete character, and text that might have become a stop string."""
        rest = self._detokenizer.finish()
        if self._matcher is None:
            return rest, None
        matched = self._matcher.push(rest, may_end=self._searched > self._min_tokens)
        rest = "" if matched.stop is not None else self._matcher.finish()
        return matched.text + rest, matched.stop


def _to_events(delta: Delta, extractor: Extractor) -> None:
    """Replace a delta's text by its events. The last delta closes open events."""
    events = extractor.push(delta.text)
    if delta.finish_reason is not None:
        events += extractor.finish()
    delta.text, delta.events = "", events
