"""The recorded part of a request: all names, types and short values, and the beginnings of texts."""

import re
from typing import Any

_LONGEST = 24  # characters of a text
_LONGEST_WORD = 64  # characters of a value without blanks: a name, a type, a pattern
_IDENTITY = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{24,}|/tmp/\w+")


def shape(value: Any) -> Any:
    """Return the same JSON without identities, long texts and descriptions."""
    if isinstance(value, str):
        text = _IDENTITY.sub("0", value)
        longest = _LONGEST if re.search(r"\s", text) else _LONGEST_WORD
        return text if len(text) <= longest else text[:longest] + "..."
    if isinstance(value, list):
        return [shape(each) for each in value]
    if isinstance(value, dict):
        return {
            shape(name): "..." if name == "description" and isinstance(each, str) else shape(each)
            for name, each in value.items()
        }
    return value
