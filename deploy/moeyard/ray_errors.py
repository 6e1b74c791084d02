"""Ray's errors in one line."""

import re


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something; of an actor's failed start, the last: its cause."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if "creation task" in lines[0] else lines[0]
