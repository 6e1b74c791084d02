"""The answers of /v1/messages: a message with its content blocks, whole or as the events that build it."""

from collections.abc import Sequence
from typing import Any

from moeyard_router.api.blocks import Block, BlockWriter, sse
from moeyard_router.api.choice import Choice
from moeyard_router.api.messages import INVALID_JSON
from moeyard_router.errors import ApiError
from moeyard_router.text import exact_json


class MessageWriter(BlockWriter):
    """Writes what the model thinks, says and calls as blocks of type thinking, text and tool_use."""

    def begin(self, choices: Sequence[Choice]) -> bytes:
        """The message without content, and a ping, as Anthropic has it."""
        message = self._message(choices, ended=False)
        return sse("message_start", {"type": "message_start", "message": message}) + sse("ping", {"type": "ping"})

    def opened(self, block: Block) -> bytes:
        """An empty block."""
        kind = "content_block_start"
        return sse(kind, {"type": kind, "index": block.index, "content_block": _block(block, empty=True)})

    def added(self, block: Block, text: str) -> bytes:
        """A piece of it."""
        if block.kind == "content":
            delta = {"type": "text_delta", "text": text}
        elif block.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "input_json_delta", "partial_json": text}
        return sse("content_block_delta", {"type": "content_block_delta", "index": block.index, "delta": delta})

    def closed(self, block: Block) -> bytes:
        """Its end."""
        return sse("content_block_stop", {"type": "content_block_stop", "index": block.index})

    def end(self, choices: Sequence[Choice]) -> bytes:
        """Why it ended, and all counts, which go before those of the beginning."""
        delta = {"stop_reason": self._reason, "stop_sequence": self.stop_string}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage(choices)}
        return sse("message_delta", last) + sse("message_stop", {"type": "message_stop"})

    def failed(self, error: ApiError, choices: Sequence[Choice]) -> bytes:
        """An error in the stream."""
        return sse("error", error.anthropic_body())

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The message."""
        return self._message(choices, ended=True)

    @property
    def _reason(self) -> str:
        if self.stop_string is not None:
            return "stop_sequence"
        if self.cut:
            return "max_tokens"
        return "tool_use" if any(block.kind == "call" for block in self.blocks) else "end_turn"

    def _message(self, choices: Sequence[Choice], *, ended: bool) -> dict[str, Any]:
        return {
            "id": self.reply_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [_block(block) for block in self.blocks],
            "stop_reason": self._reason if ended else None,
            "stop_sequence": self.stop_string,
            "usage": self._usage(choices),
        }

    def _usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        """Token counts; those read from the cache are apart, once the worker has told them."""
        (choice,) = choices
        prompt, cached = len(self.job.prompts[0].token_ids), choice.cached_tokens or 0
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": choice.num_tokens,
            **self.job.kept,
        }


def _block(block: Block, *, empty: bool = False) -> dict[str, Any]:
    text = "" if empty else block.text
    if block.kind == "content":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": {} if empty else _input(text)}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object. What the model wrote may be none, or cut off: then its text, as Anthropic

    advises for such input, under the name INVALID_JSON.
    """
    try:
        values = exact_json.loads(arguments)
    except ValueError:
        values = None
    return values if isinstance(values, dict) else {INVALID_JSON: arguments}
