"""How many of a thing one request may have: more would keep router and workers busy, and nobody asks for it."""

from collections.abc import Mapping
from typing import Any

from moeyard_router.errors import bad_request

MAX_MESSAGES = 8192  # of a chat, and parts of their contents together
MAX_STOP_CHARACTERS = 1024  # of one stop string: so much text is held back while it may still become one
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024  # OpenAI allows 300; each sequence of a request carries them


def check_sizes(data: Mapping[str, Any]) -> None:
    """Raise `ApiError` 400 naming the field that has too many. Knows no types: what is no list is judged later."""
    for name in ("messages", "input"):  # of chats and Anthropic's messages; of responses
        messages = data.get(name)
        if isinstance(messages, list):
            _check(name, len(messages), "messages", MAX_MESSAGES)
            parts = 0
            for message in messages:
                content = message.get("content") if isinstance(message, dict) else None
                parts += len(content) if isinstance(content, list) else 0
            _check(name, parts, "parts of content", MAX_MESSAGES)
    for name in ("stop", "stop_sequences"):
        stop = data.get(name)
        for text in stop[:MAX_STOP_TOKENS] if isinstance(stop, list) else [stop]:
            if isinstance(text, str):
                _check(name, len(text), "characters in a stop string", MAX_STOP_CHARACTERS)
    ids = data.get("stop_token_ids")
    if isinstance(ids, list):
        _check("stop_token_ids", len(ids), "ids", MAX_STOP_TOKENS)
    bias = data.get("logit_bias")
    if isinstance(bias, dict):
        _check("logit_bias", len(bias), "tokens", MAX_BIASES)


def _check(param: str, count: int, what: str, limit: int) -> None:
    if count > limit:
        raise bad_request(f"'{param}': {count} {what}, at most {limit} are allowed", param)
