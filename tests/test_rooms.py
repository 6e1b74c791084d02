"""docs/rooms.md is up to date."""

import re

from tests.rooms import PAGE, page

COUNT = re.compile(r"(?:[0-9,]+|below 50) lines")


def test_page_of_rooms_is_up_to_date() -> None:
    """`python -m tests.rooms` writes it."""
    assert COUNT.sub("", PAGE.read_text()) == COUNT.sub("", page())
