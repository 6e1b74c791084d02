"""Texts that cannot fit a model, told by their characters instead of being tokenized."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moeyard_router.errors import ApiError

# Canonical composition makes one character of at most four (U+1FA2 is a letter and three marks).
_COMPOSED = 4
_NORMALIZERS = frozenset(("NFC", "NFD", "NFKC", "NFKD"))
_KEEPING = frozenset(("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation"))  # pre-tokenizers that drop nothing
_PIECE = 2_000_000  # characters tokenized at once to see whether a text is too long: 0.3 GB while it lasts


def most_characters(spec: Mapping[str, Any], longest: int) -> int | None:
    """The most characters of text that one token can stand for; None where a part of the tokenizer may drop text.

    `spec` is a tokenizer.json, `longest` the bytes of its longest token. A character has at least one byte, so a token
    covers at most `longest` characters of what the model sees; a normalizer can make fewer characters of a text.
    """
    if any(added["lstrip"] or added["rstrip"] for added in spec["added_tokens"]):
        return None  # such a token takes any amount of blanks beside it
    model = spec["model"]
    if model.get("fuse_unk") and not model.get("byte_fallback"):
        return None
    factor = 1
    for part in _parts(spec["normalizer"], "normalizers"):
        if part["type"] in _NORMALIZERS:
            factor = _COMPOSED
        elif part["type"] == "Replace":
            pattern = part["pattern"].get("String")
            if pattern is None or len(part["content"]) < len(pattern):
                return None
        elif part["type"] != "Prepend":
            return None
    for part in _parts(spec["pre_tokenizer"], "pretokenizers"):
        if part["type"] not in _KEEPING or part.get("behavior") == "Removed":
            return None
    return factor * longest


def _parts(entry: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if entry is None:
        return []
    if entry["type"] != "Sequence":
        return [entry]
    return [part for each in entry[inner] for part in _parts(each, inner)]


@dataclass(frozen=True, slots=True)
class LengthCheck:
    """Refuses texts that cannot have `limit` tokens or fewer. `per_token` is `most_characters`; None: nothing is known.

    `count` tokenizes a piece of text and says how many tokens it has.
    """

    per_token: int | None
    count: Callable[[str], int]

    def __call__(self, text: str, limit: int, param: str) -> None:
        """Raise `ApiError` 400 with the numbers; never for a text that fits.

        A text of more than 8 characters for each token allowed (English has 4 to 5) is also read piece by piece until
        there are twice as many as allowed. A cut makes at most one token more of each character that a token covers.
        """
        per_token, size = self.per_token, len(text)
        if per_token is None:
            return
        fewest = -(-size // per_token)
        if fewest > limit:
            raise _too_long(f"the prompt has {size} characters, which are at least {fewest} tokens", limit, param)
        piece = min(8 * limit, _PIECE)
        if size <= 8 * limit:
            return
        found = 0
        for cuts, start in enumerate(range(0, size, piece), 1):
            found += self.count(text[start : start + piece])
            surely = found - cuts * per_token
            if surely > 2 * limit:
                read = min(start + piece, size)
                message = f"the first {read} of the prompt's {size} characters are at least {surely} tokens"
                raise _too_long(message, limit, param)


def _too_long(what: str, limit: int, param: str) -> ApiError:
    message = f"{what}; the model's limit is {limit} tokens"
    return ApiError(400, message, param=param, reason="prompt_too_long")
