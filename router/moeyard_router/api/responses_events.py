"""The answers of /v1/responses: a response with its items, whole or as the events that build it."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import orjson

from moeyard_router.api.blocks import Block, BlockWriter, sse
from moeyard_router.api.choice import Choice
from moeyard_router.api.intake import Job
from moeyard_router.api.response_tools import custom_input, offers_of
from moeyard_router.errors import ApiError
from moeyard_router.text.detokenizer import TokenBytes

_CODES = MappingProxyType({400: "invalid_prompt", 429: "rate_limit_exceeded"})
_PREFIXES = MappingProxyType({"content": "msg", "reasoning": "rs", "call": "fc"})
# Of a block's pieces: the event's name, without its ending.
_PIECES = MappingProxyType(
    {
        "content": "response.output_text",
        "reasoning": "response.reasoning_text",
        "call": "response.function_call_arguments",
    }
)


class ResponseWriter(BlockWriter):
    """Writes items: what the model thinks, says and calls. Every event has the next `sequence_number`.

    There is always one item at least: an answer without any text is a message of an empty text.
    """

    _sequence = 0
    _head = _middle = _tail = b""

    def __init__(self, job: Job, *, reply_id: str, model: str, created: int, tokens: TokenBytes) -> None:
        super().__init__(job, reply_id=reply_id, model=model, created=created, tokens=tokens)
        self._offers = offers_of((job.asked or {}).get("tools", ()))

    def begin(self, choices: Sequence[Choice]) -> bytes:
        """The response as it begins, twice, as OpenAI has it."""
        response = self._response("in_progress", choices)
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def opened(self, block: Block) -> bytes:
        """A new item, and its only part if it has parts."""
        item = self._item(block, "in_progress")
        added = self._event("output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        return added + self._event("content_part.added", **self._place(block), part=_part(block))

    def added(self, block: Block, text: str) -> bytes:
        """A piece of its text or arguments. There is one for every token: what all of a block have is made once.

        The input of a custom tool is inside of the arguments, so it comes whole, at their end.
        """
        if self._is_custom(block):
            return b""
        if len(block.pieces) == 1:
            kind = f"{_PIECES[block.kind]}.delta"
            self._head = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":'.encode()
            self._middle = b"," + orjson.dumps(self._place(block))[1:-1] + b',"delta":'
            self._tail = b',"logprobs":[]}\n\n' if block.kind == "content" else b"}\n\n"
        number, self._sequence = self._sequence, self._sequence + 1
        return b"%b%d%b%b%b" % (self._head, number, self._middle, orjson.dumps(text), self._tail)

    def closed(self, block: Block) -> bytes:
        """All of it once more: the text, its part, its item."""
        place, item = self._place(block), self._item(block, _status(block))
        done, name = self._event, f"{_PIECES[block.kind]}.done"
        if self._is_custom(block):
            text, name = custom_input(block.text), "response.custom_tool_call_input"
            out = self._named(f"{name}.delta", **place, delta=text) if text else b""
            out += self._named(f"{name}.done", **place, input=text)
        elif block.kind == "call":
            out = self._named(name, **place, name=item["name"], arguments=block.text)
        else:
            more: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
            out = self._named(name, **place, text=block.text, **more)
            out += done("content_part.done", **place, part=_part(block))
        return out + done("output_item.done", output_index=block.index, item=item)

    def end(self, choices: Sequence[Choice]) -> bytes:
        """The whole response."""
        missing = self._some()
        status = "incomplete" if self.cut else "completed"
        return missing + self._event(status, response=self._response(status, choices))

    def failed(self, error: ApiError, choices: Sequence[Choice]) -> bytes:
        """The response as far as it came, with its error."""
        return self._event("failed", response=self._response("failed", choices, error=error))

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The response."""
        self._some()
        return self._response("incomplete" if self.cut else "completed", choices)

    def _some(self) -> bytes:
        """The events of an empty message, where there is nothing else."""
        if self.blocks:
            return b""
        block = Block(kind="content", index=0, cut=self.cut)
        self.blocks.append(block)
        return self.opened(block) + self.closed(block)

    def _event(self, kind: str, **data: Any) -> bytes:
        return self._named(f"response.{kind}", **data)

    def _named(self, kind: str, **data: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return sse(kind, {"type": kind, "sequence_number": number, **data})

    def _id(self, block: Block) -> str:
        prefix = "ctc" if self._is_custom(block) else _PREFIXES[block.kind]
        return f"{prefix}_{self.reply_id.removeprefix('resp_')}{block.index:02x}"

    def _is_custom(self, block: Block) -> bool:
        offer = self._offers.get(block.name) if block.kind == "call" else None
        return offer is not None and offer.custom

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        begins = status == "in_progress"
        head = {"id": self._id(block), "status": status}
        if block.kind == "call":
            offer, written = self._offers.get(block.name), "" if begins else block.text
            called = {"call_id": block.id, "name": block.name if offer is None else offer.name}
            if offer is not None and offer.namespace is not None:
                called["namespace"] = offer.namespace
            if self._is_custom(block):
                return {**head, "type": "custom_tool_call", **called, "input": custom_input(written)}
            return {**head, "type": "function_call", **called, "arguments": written}
        content = [] if begins else [_part(block)]
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _response(self, status: str, choices: Sequence[Choice], error: ApiError | None = None) -> dict[str, Any]:
        running = status == "in_progress"
        sampling = self.job.continuations[0].sampling
        code = None if error is None else _CODES.get(error.status, "server_error")
        return {
            "id": self.reply_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": code, "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": [] if running else [self._item(b, _status(b)) for b in self.blocks if b is not self.open_block],
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "usage": None if running else self._usage(choices),
            **(self.job.asked or {}),
        }

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Token counts; cached ones are 0 until the worker has told them, with the first token."""
        (choice,) = choices
        prompt, cached = len(self.job.prompts[0].token_ids), choice.cached_tokens or 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0, **self.job.kept},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": prompt + choice.num_tokens,
        }


def _status(block: Block) -> str:
    return "incomplete" if block.cut else "completed"


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
