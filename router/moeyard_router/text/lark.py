"""Pieces of a grammar in llguidance's dialect of Lark (its docs/syntax.md)."""

import json
import re
from collections.abc import Mapping
from typing import Any

# Blanks between the parts of a JSON text, in llguidance's words. Arguments are written in one line everywhere. A model
# that has lost its way fills what room it has: the demo model did, 20 to a gap, until its tokens were spent.
BLANKS, BLANKS_OF_ARGUMENTS = r"[ \t\n\r]{1,20}", " "
# Keys of a schema whose values are maps of schemas, and those that say nothing about valid values.
_MAPS = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
_NOTES = frozenset(("default", "description", "examples", "title"))
ANY_TEXT = "(?s:.*)"


def json_text(schema: Mapping[str, Any], blanks: str = BLANKS) -> str:
    """A JSON text that `schema` validates."""
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": blanks}, **schema})


def lost_integer(schema: Any) -> int | None:
    """Find an integer among the constants of a schema that llguidance would change: it reads numbers as doubles."""
    waiting: list[tuple[Any, bool]] = [(schema, False)]  # a part of the schema, and whether it is a constant
    while waiting:
        part, constant = waiting.pop()
        if constant and isinstance(part, int) and not _is_kept(part):
            return part
        if isinstance(part, list):
            waiting += ((each, constant) for each in part)
        elif isinstance(part, dict):
            for key, value in part.items():
                if not constant and key in _MAPS and isinstance(value, dict):
                    waiting += ((each, False) for each in value.values())
                elif constant or key not in _NOTES:
                    waiting.append((value, constant or key in ("const", "enum")))
    return None


def _is_kept(number: int) -> bool:
    largest = 2**63 - 1
    return number == largest or (abs(number) < largest and int(float(number)) == number)


def literal(text: str, token_ids: Mapping[str, int]) -> str:
    """A text as a sequence of literals and tokens; {index} is any number."""
    known = [re.escape(m) for m in sorted(token_ids, key=len, reverse=True)]
    out = []
    for part in re.split(f"({'|'.join([*known, re.escape('{index}')])})", text):
        if part == "{index}":
            out.append("/[0-9]{1,4}/")
        elif part in token_ids:
            out.append(f"<[{token_ids[part]}]>")
        elif part:
            out.append(json.dumps(part, ensure_ascii=False))
    return " ".join(out)


def text_until(rule: str, marker: str, token_ids: Mapping[str, int], *, text: str = ANY_TEXT) -> list[str]:
    """`rule`: what the regular expression `text` matches, up to the first `marker`, and the marker."""
    tokens = [(marker.index(token), token) for token in token_ids if token in marker]
    if not tokens:
        return [f"{rule}[suffix={json.dumps(marker, ensure_ascii=False)}]: /{text}/"]
    # A token ends the text in front of it, and the part of the marker that comes before the token is still of that.
    place, token = min(tokens)
    terminal, before = rule.upper(), slashed(re.escape(marker[:place]))
    without = f"~/{ANY_TEXT}{slashed(re.escape(token))}{ANY_TEXT}/"  # one that is not special is text too
    return [
        f"{rule}: {terminal} {literal(marker[place:], token_ids)}",
        f"{terminal}: /{text}{before}/ & {without}",
    ]


def slashed(pattern: str) -> str:
    """A regular expression as it stands between slashes."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL).replace("\n", r"\n")
