"""docs/rooms.md matches the code."""

import re

from tests.rooms import PAGE, page

COUNT = re.compile(r"(?:[0-9,]+|below 50) lines")


def test_the_page_of_rooms_is_up_to_date() -> None:
    """`python -m tests.rooms` writes the page."""
    assert COUNT.sub("", PAGE.read_text()) == COUNT.sub("", page())
