"""Answers as bytes: OpenAI's objects with vLLM's extensions, whole or as server-sent events."""

import binascii
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import orjson

from moeyard_router.api.choice import Choice, Delta
from moeyard_router.api.intake import Job
from moeyard_router.config import RoutedShape
from moeyard_router.errors import ApiError
from moeyard_router.text.detokenizer import TextOffsets, TokenBytes, prompt_offsets
from moeyard_router.text.events import CallArguments, CallBegin, Content, Reasoning, TextEvent
from moeyard_worker.protocol import TokenLogprob

PIECE_BYTES = 64 * 1024  # largest part of a body that is encoded or sent in one call
# With more log-probabilities than this, of prompts and output, an answer is encoded in a thread, item by item. Encoding
# fewer takes less time than waking the thread.
MANY_SCORES = 512
_BASE64_BYTES = PIECE_BYTES // 4 * 3  # bytes that become one piece of base64 text; a multiple of 3
# Returns the fields of an answer that say what computed it.
Served = Callable[[], dict[str, str]]
LOWEST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI and vLLM write this for it
_NULL = b"null"
DONE_EVENT = b"data: [DONE]\n\n"


def routed_bytes(shape: RoutedShape, experts: bytes | bytearray, *, id_bytes: int) -> bytes | bytearray:
    """Return experts as ids of `id_bytes`, [rows, layers of the model, top_k]. Layers without experts have zeros."""
    if len(shape.places) == shape.num_layers and id_bytes == shape.id_bytes:
        return experts
    width = shape.num_layers * shape.top_k * id_bytes
    out = bytearray(len(experts) // shape.row_bytes * width)
    for layer, place in enumerate(shape.places):
        for k, byte in itertools.product(range(shape.top_k), range(shape.id_bytes)):
            # Each assignment writes one byte of the ids of all rows.
            to = (place * shape.top_k + k) * id_bytes + byte
            out[to::width] = experts[(layer * shape.top_k + k) * shape.id_bytes + byte :: shape.row_bytes]
    return out


def npy_header(shape: RoutedShape, rows: int) -> bytes:
    """Return the bytes that make experts [rows, layers of the model, top_k] a file that `numpy.load` reads.

    Source: numpy.lib.format, version 1.0, whose headers have multiples of 64 bytes. This one has a multiple of 192, so
    that its base64 text can be followed by that of the experts.
    """
    kind = {1: "|u1", 2: "<u2"}[shape.id_bytes]
    dims = f"({rows}, {shape.num_layers}, {shape.top_k})"
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {dims}, }}"
    text += " " * (-(len(text) + 11) % 192) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


class LongLists:
    """Long lists of one answer. `add` returns a placeholder, which `pieces` replaces.

    Encoding, joining or freeing a list in one call would hold the interpreter lock too long. It takes orjson 3.13
    0.2 s for 13 MB of 240,000 log-probabilities, 13 ms if the items are already encoded (2026-11-22).
    """

    def __init__(self) -> None:
        self._lists: list[list[bytes]] = []

    def add(self, items: Iterable[bytes | bytearray]) -> orjson.Fragment:
        """Store a list of encoded items, or of runs of them with commas between, and return its placeholder."""
        pieces, waiting, size = [b"["], list[bytes | bytearray](), 0
        for item in items:
            waiting.append(item)
            size += len(item)
            if size >= PIECE_BYTES:
                pieces.append(b",".join(waiting) + b",")
                waiting, size = [], 0
        # All pieces but the last end with a comma. In an empty list the only piece is the bracket.
        last = b",".join(waiting) if waiting else pieces.pop()[:-1] if len(pieces) > 1 else b""
        pieces += [last, b"]"]
        self._lists.append(pieces)
        # JSON contains no zero byte: it writes \u0000.
        return orjson.Fragment(b"\0%d\0" % (len(self._lists) - 1))

    def add_experts(self, job: Job, choice: Choice) -> dict[str, orjson.Fragment]:
        """Store a choice's routed experts. Return the answer's field with them.

        Return nothing if they are not wanted, or if the choice was aborted before those of its prompt were known.
        """
        if job.routing is None or not choice.has_experts:
            return {}
        header = npy_header(job.routing, len(choice.experts) // job.routing.row_bytes)
        experts = routed_bytes(job.routing, choice.experts, id_bytes=job.routing.id_bytes)
        return {"routed_experts": self.add_base64([header, experts])}

    def add_base64(self, parts: Iterable[bytes | bytearray]) -> orjson.Fragment:
        """Store bytes as base64 text. Each part but the last has a multiple of 3 bytes."""
        views = (memoryview(part) for part in parts)
        slices = (view[i : i + _BASE64_BYTES] for view in views for i in range(0, len(view), _BASE64_BYTES))
        self._lists.append([b'"', *(binascii.b2a_base64(part, newline=False) for part in slices), b'"'])
        return orjson.Fragment(b"\0%d\0" % (len(self._lists) - 1))

    def pieces(self, data: bytes) -> list[bytes]:
        """Return `data` in pieces, with the lists in place of their placeholders, and drop the lists."""
        if not self._lists:
            return [data]
        parts = data.split(b"\0")
        found = parts[:1]
        for number, rest in zip(parts[1::2], parts[2::2], strict=True):
            found += [*self._lists[int(number)], rest]
        self._lists.clear()
        return found


def chat_deltas(events: Iterable[TextEvent]) -> list[dict[str, Any]]:
    """Return the deltas of a stream, one per event. The end of a call has none; the next delta implies it."""
    out: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Content):
            out.append({"content": event.text})
        elif isinstance(event, Reasoning):
            out.append({"reasoning_content": event.text})
        elif isinstance(event, CallBegin):
            call = {"index": event.index, "id": event.id, "type": "function"}
            out.append({"tool_calls": [{**call, "function": {"name": event.name, "arguments": ""}}]})
        elif isinstance(event, CallArguments):
            out.append({"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]})
    return out


def chat_message(events: Sequence[TextEvent]) -> dict[str, Any]:
    """Return a whole message. `content` is None if there is only reasoning or calls."""
    content = "".join(e.text for e in events if isinstance(e, Content))
    reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
    calls = [
        {
            "id": begin.id,
            "type": "function",
            "function": {
                "name": begin.name,
                "arguments": "".join(e.text for e in events if isinstance(e, CallArguments) and e.index == begin.index),
            },
        }
        for begin in events
        if isinstance(begin, CallBegin)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if reasoning or calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def usage_of(job: Job, choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the token counts, each prompt once. Cached tokens are absent until the workers report them."""
    prompt = sum(len(p.token_ids) for p in job.prompts)
    output = sum(c.num_tokens for c in choices)
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    per_prompt = len(choices) // len(job.prompts)
    cached = [c.cached_tokens for c in choices[::per_prompt]]
    details = job.kept_tokens
    if None not in cached:
        details = {"cached_tokens": sum(c for c in cached if c is not None), **details}
    if details:
        usage["prompt_tokens_details"] = details
    return usage


def prompt_scores(job: Job, index: int, choices: Sequence[Choice]) -> Iterator[tuple[int, TokenLogprob]]:
    """Yield the prompt's tokens after the first with their scores, from this choice or the first of the prompt."""
    per_prompt = len(choices) // len(job.prompts)
    scored = choices[index] if choices[index].num_scores else choices[index - index % per_prompt]
    ids = job.prompts[choices[index].prompt].token_ids
    return zip(ids[1:], scored.prompt_scores(), strict=True)


def prompt_logprobs(
    job: Job, index: int, choices: Sequence[Choice], text: Callable[[int], str | None]
) -> Iterator[bytes]:
    """Yield vLLM's form: null for the first token, then for each a map from ids to scores, the token's id first."""

    def described(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(logprob, LOWEST_LOGPROB), "rank": rank, "decoded_token": text(token_id)}

    yield _NULL
    for token_id, entry in prompt_scores(job, index, choices):
        ranked = [(token_id, entry.logprob, entry.rank)]
        top = enumerate(entry.top[: job.prompt_logprobs], 1)
        ranked += ((t, value, rank) for rank, (t, value) in top if t != token_id)
        yield orjson.dumps({str(t): described(t, value, rank) for t, value, rank in ranked})


class ReplyWriter:
    """Writes the answer to one job. Chunks share a prebuilt head, so that a token costs one small JSON object.

    served: returns the fields of the answer that say what computed it, `model` and `system_fingerprint`.

    As in vLLM, `prompt_token_ids` (with `return_token_ids`) are in each choice of a completion, at the top of a chat
    answer, and in the first chunk of a streamed choice. The same holds for `prompt_logprobs`, which are not streamed.
    With `echo`, the repeated prompt has log-probabilities too, except for its first token.
    """

    def __init__(self, job: Job, *, reply_id: str, served: Served, created: int, tokens: TokenBytes) -> None:
        self._job = job
        self._tokens = tokens
        self._offsets = [
            TextOffsets(tokens, skip_special_tokens=job.skip_special_tokens, start=len(self._prefix(c.index)))
            for c in job.continuations
        ]
        self._long = LongLists()
        self._started = [False] * len(job.continuations)
        whole, part = ("chat.completion", "chat.completion.chunk") if job.chat else ("text_completion",) * 2
        self._served, self._part = served, part
        self._base: dict[str, Any] = {"id": reply_id, "object": whole, "created": created}
        self._tail = b'],"usage":null}\n\n' if job.include_usage else b"]}\n\n"
        # Both sides of the text in the event of a choice that adds only text: nearly every event of a stream.
        self._reports_tokens = job.return_token_ids or job.logprobs is not None or job.continuous_usage
        self._head, self._plain, self._fields = b"", list[tuple[bytes, bytes]](), dict[str, str]()
        self._refresh()
        # Makes the event of text that is added to a choice that has begun. None: events have more than text.
        self.text_event: Callable[[int, str], bytes] | None = self._text if self._plain else None

    def _refresh(self) -> None:
        """Make the head of chunks again if the weights have changed."""
        if (fields := self._served()) == self._fields:
            return
        self._fields = fields
        head = orjson.dumps({**self._base, **fields, "object": self._part})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._plain = [] if self._reports_tokens else [self._around(c.index) for c in self._job.continuations]

    def chunk(self, index: int, delta: Delta, choices: Sequence[Choice]) -> list[bytes]:
        """Return the events of a delta of choice `index`, in pieces."""
        self._refresh()
        return self._long.pieces(self._chunk(index, delta, choices))

    def _chunk(
        self, index: int, delta: Delta, choices: Sequence[Choice], message: dict[str, Any] | None = None
    ) -> bytes:
        """Return the events of a delta without long lists. `message` is a chat's delta, which replaces the text."""
        if self._plain and self._started[index] and delta.finish_reason is None and message is None:
            text = _only_text(delta)
            if text is not None:
                return self._text(index, text) if text else b""
        if delta.events is not None:
            return self._event_chunks(index, delta, choices)
        job, first = self._job, not self._started[index]
        if not (first or message or delta.text or delta.finish_reason or (delta.token_ids and self._reports_tokens)):
            return b""
        self._started[index] = True
        choice: dict[str, Any] = {"index": index}
        if job.chat:
            added = {"content": delta.text} if message is None else message
            choice["delta"] = {"role": "assistant", "content": None, **added} if first else added
        else:
            choice["text"] = self._prefix(index) + delta.text if first else delta.text
        echoed = self._echoed(index, choices) if first and job.echo else None
        choice["logprobs"] = self._logprobs(index, delta, echoed) if delta.token_ids or echoed else None
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.stop_reason
        if delta.finish_reason is not None:
            choice |= choices[index].versions
            choice |= self._long.add_experts(job, choices[index])
        prompt_ids: tuple[int, ...] | None = None
        if job.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first and job.chat:
                prompt_ids = tuple(job.prompts[0].token_ids)
            elif first:
                choice["prompt_token_ids"] = tuple(job.prompts[job.continuations[index].prompt].token_ids)
        if prompt_ids is None and not job.continuous_usage:
            return self._head + orjson.dumps(choice) + self._tail
        more: dict[str, Any] = {"prompt_token_ids": prompt_ids} if prompt_ids is not None else {}
        if job.include_usage or job.continuous_usage:
            more["usage"] = usage_of(self._job, choices) if job.continuous_usage else None
        return self._head + orjson.dumps(choice) + b"]," + orjson.dumps(more)[1:] + b"\n\n"

    def _text(self, index: int, text: str) -> bytes:
        before, after = self._plain[index]
        return before + orjson.dumps(text) + after

    def _around(self, index: int) -> tuple[bytes, bytes]:
        empty = {"delta": {"content": ""}} if self._job.chat else {"text": ""}
        choice = {"index": index, **empty, "logprobs": None, "finish_reason": None, "stop_reason": None}
        before, _, after = orjson.dumps(choice).partition(b'""')
        return self._head + before, after + self._tail

    def _event_chunks(self, index: int, delta: Delta, choices: Sequence[Choice]) -> bytes:
        """Return one chunk per event of the text, because clients expect one kind of content per chunk."""
        messages = chat_deltas(delta.events or ()) or [{} if self._started[index] else {"content": ""}]
        out = []
        for i, message in enumerate(messages):
            part = Delta(token_ids=delta.token_ids, logprobs=delta.logprobs) if i == 0 else Delta()
            if delta.finish_reason is not None and i == len(messages) - 1:
                part.finish_reason, part.stop_reason = choices[index].reported_reason, delta.stop_reason
            out.append(self._chunk(index, part, choices, message))
        return b"".join(out)

    def end(self, choices: Sequence[Choice]) -> bytes:
        """Return the last events of a stream. With `include_usage` the first has the token counts and no choices."""
        if not self._job.include_usage:
            return DONE_EVENT
        return self._head + b'],"usage":' + orjson.dumps(usage_of(self._job, choices)) + b"}\n\n" + DONE_EVENT

    def failed(self, error: ApiError, choices: Sequence[Choice]) -> bytes:
        """Return the event that ends a failed stream. No [DONE] follows it."""
        return b"data: " + orjson.dumps(error.body()) + b"\n\n"

    def body(self, deltas: Sequence[Delta], choices: Sequence[Choice]) -> list[bytes]:
        """Return the answer of a request that is not streamed, in pieces. `deltas[i]` is all of choice i."""
        job = self._job
        out = []
        for index, delta in enumerate(deltas):
            choice: dict[str, Any] = {"index": index}
            if job.chat:
                plain = {"role": "assistant", "content": delta.text}
                choice["message"] = plain if delta.events is None else chat_message(delta.events)
            else:
                choice["text"] = self._prefix(index) + delta.text
            choice["logprobs"] = self._logprobs(index, delta, self._echoed(index, choices) if job.echo else None)
            choice["finish_reason"] = choices[index].reported_reason
            choice["stop_reason"] = delta.stop_reason
            choice |= choices[index].versions
            choice |= self._long.add_experts(job, choices[index])
            if job.prompt_logprobs is not None and not job.chat:
                choice["prompt_logprobs"] = self._long.add(self._prompt_logprobs(index, choices))
            if job.return_token_ids:
                choice["token_ids"] = delta.token_ids
                if not job.chat:
                    choice["prompt_token_ids"] = tuple(job.prompts[job.continuations[index].prompt].token_ids)
            out.append(choice)
        answer = {**self._base, **self._served(), "choices": out, "usage": usage_of(self._job, choices)}
        if job.chat and job.return_token_ids:
            answer["prompt_token_ids"] = tuple(job.prompts[0].token_ids)
        if job.chat and job.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._long.add(self._prompt_logprobs(0, choices))
        return self._long.pieces(orjson.dumps(answer))

    def _prefix(self, index: int) -> str:
        return self._job.prompts[self._job.continuations[index].prompt].text if self._job.echo else ""

    def _prompt_logprobs(self, index: int, choices: Sequence[Choice]) -> Iterator[bytes]:
        return prompt_logprobs(self._job, index, choices, lambda i: self._tokens.of(i).decode("utf-8", "replace"))

    def _echoed(self, index: int, choices: Sequence[Choice]) -> dict[str, list[Any]] | None:
        """Return the log-probabilities of the echoed prompt in the form of a completion's, None if not requested."""
        if self._job.logprobs is None:
            return None
        prompt = self._job.prompts[choices[index].prompt]
        values: list[float | None] = [None]
        tops = [_NULL]
        for token_id, entry in prompt_scores(self._job, index, choices):
            values.append(max(entry.logprob, LOWEST_LOGPROB))
            tops.append(orjson.dumps(self._top(token_id, entry)))
        return {
            "text_offset": prompt_offsets(self._tokens, prompt.token_ids, prompt.text),
            "token_logprobs": values,
            "tokens": [self._spell(i) for i in prompt.token_ids],
            "top_logprobs": tops,
        }

    def _logprobs(self, index: int, delta: Delta, echoed: dict[str, list[Any]] | None = None) -> dict[str, Any] | None:
        """Return the log-probabilities of the delta's tokens, after those of the echoed prompt."""
        if self._job.logprobs is None:
            return None
        pairs = list(zip(delta.token_ids, delta.logprobs, strict=True))
        many = self._job.output_scores(len(pairs)) >= MANY_SCORES
        if self._job.chat:
            scores = (self._chat_logprob(i, lp) for i, lp in pairs)
            return {"content": self._long.add(map(orjson.dumps, scores)) if many else list(scores)}
        tops = (self._top(i, lp) for i, lp in pairs)
        found: dict[str, list[Any]] = {
            "text_offset": self._offsets[index].of(delta.token_ids),
            "token_logprobs": [max(lp.logprob, LOWEST_LOGPROB) for _, lp in pairs],
            "tokens": [self._spell(i) for i, _ in pairs],
        }
        if echoed is None:
            return {**found, "top_logprobs": self._long.add(map(orjson.dumps, tops)) if many else list(tops)}
        joined = {name: echoed[name] + values for name, values in found.items()}
        return {**joined, "top_logprobs": self._long.add((*echoed["top_logprobs"], *map(orjson.dumps, tops)))}

    def _top(self, token_id: int, entry: TokenLogprob) -> dict[str, float]:
        """Return the likeliest tokens and the chosen one (as OpenAI). Tokens with one text share the highest value."""
        found: dict[str, float] = {}
        # A prompt's entry may have more alternatives, which `prompt_logprobs` requested.
        for each, value in (*entry.top[: self._job.logprobs], (token_id, entry.logprob)):
            text = self._spell(each)
            found[text] = max(value, found.get(text, LOWEST_LOGPROB))
        return found

    def _chat_logprob(self, token_id: int, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._chat_token(t, value) for t, value in entry.top]
        return {**self._chat_token(token_id, entry.logprob), "top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = f"token_id:{token_id}".encode() if self._job.tokens_as_ids else self._tokens.of(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}

    def _spell(self, token_id: int) -> str:
        """Spell a token by its text, by `bytes:` and hex if it splits a character, by `token_id:` if it has no text."""
        raw = self._tokens.of(token_id)
        if not raw or self._job.tokens_as_ids:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def _only_text(delta: Delta) -> str | None:
    """Return the text of a delta that is content alone, else None."""
    events = delta.events
    if events is None:
        return delta.text
    if not events:
        return ""
    return events[0].text if len(events) == 1 and isinstance(events[0], Content) else None
