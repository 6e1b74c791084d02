"""Tokens and text: incremental decoding, stop strings, offsets of tokens, and the least tokens that a text can have.

Every tokenizer that the served families use maps a token to a fixed run of bytes (byte-level BPE, or sentencepiece BPE
with byte fallback). So text is those bytes through an incremental UTF-8 decoder: constant time per token, and a
character that is split over tokens is held back until it is whole.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from moeyard_router.errors import ApiError

# Canonical composition makes one character of at most four (U+1FA2 is a letter and three marks).
_COMPOSED = 4
_NORMALIZERS = frozenset(("NFC", "NFD", "NFKC", "NFKD"))
_KEEPING = frozenset(("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation"))  # pre-tokenizers that drop nothing
_PIECE = 2_000_000  # characters tokenized at once to see whether a text is too long: 0.3 GB while it lasts
_MAX_IDS = 1 << 22  # tables have an entry for each id; published vocabularies have up to 262,144 (2026-11)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's printable characters for bytes: visible Latin-1 as itself, others as characters from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in visible}
    hidden = (b for b in range(256) if b not in visible)
    alphabet.update({chr(256 + i): b for i, b in enumerate(hidden)})
    return alphabet


class TokenBytes:
    """The bytes of every token of a tokenizer, if there is one. Ids without a token (padding) have no bytes.

    Raises `ValueError` for a decoder that does not map each token to bytes (WordPiece, CTC), or that replaces by a
    regular expression, whose dialect is not Python's. A sentencepiece decoder would strip a leading space. It stays
    here, because output follows a prompt.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._bytes: list[bytes] = []
        self._visible: list[bytes] = []
        self._added: dict[str, int] = {}
        # Texts met so far of tokens that begin and end with a character, without special tokens.
        self.texts: dict[int, str] = {}
        if tokenizer is None:
            return
        spec = json.loads(tokenizer.to_str())
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        to_bytes = _decoder_rule(spec["decoder"])
        largest = max(vocab.values(), default=-1)
        if largest >= _MAX_IDS:
            token = next(token for token, token_id in vocab.items() if token_id == largest)
            raise ValueError(f"token {token!r:.80} has the id {largest}, ids below {_MAX_IDS} are served")
        self._bytes = [b""] * (largest + 1)
        for token, token_id in vocab.items():
            self._bytes[token_id] = to_bytes(token)
        self._visible = self._bytes.copy()
        for added in spec["added_tokens"]:
            self._added[added["content"]] = added["id"]
            if added["special"]:
                self._visible[added["id"]] = b""

    def of(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    @property
    def longest(self) -> int:
        return max(map(len, self._bytes), default=1) or 1

    def added(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the ids of those texts that are added tokens of the vocabulary."""
        return {text: self._added[text] for text in texts if text in self._added}

    def table_with(self, texts: Iterable[str]) -> list[bytes]:
        """Return a new table of all tokens' bytes by id. It omits special tokens except these texts."""
        table = self._visible.copy()
        for token_id in self.added(texts).values():
            table[token_id] = self._bytes[token_id]
        return table

    def is_special(self, token_id: int) -> bool:
        return bool(self.of(token_id)) and not self._visible[token_id]

    def table(self, *, skip_special_tokens: bool) -> list[bytes]:
        """Return the shared table of all tokens' bytes by id. Skipped special tokens are empty."""
        return self._visible if skip_special_tokens else self._bytes


def _decoder_rule(decoder: dict[str, Any] | None) -> Any:
    """Return the function from token to bytes for a `decoder` entry of tokenizer.json."""
    if decoder is None:
        raise ValueError("no decoder; ByteLevel or ByteFallback is needed")
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [p["type"] for p in parts]
    if kinds == ["ByteLevel"]:
        alphabet = _byte_level_alphabet()

        def byte_level(token: str) -> bytes:
            try:
                return bytes([alphabet[c] for c in token])
            except KeyError:  # an added token is plain text
                return token.encode()

        return byte_level
    if "ByteFallback" not in kinds or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        raise ValueError(f"cannot stream decoder {'+'.join(kinds)}; ByteLevel or ByteFallback is needed")
    for part in parts:
        if part["type"] == "Replace" and "String" not in part["pattern"]:
            raise ValueError(f"cannot stream a decoder that replaces the pattern {part['pattern']}; a string is needed")
    replacements = [(p["pattern"]["String"], p["content"]) for p in parts if p["type"] == "Replace"]

    def byte_fallback(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token.encode()

    return byte_fallback


class Detokenizer:
    """Text of a growing list of token ids. The concatenation of all results is the decoding of all ids.

    `table` (of `TokenBytes.table_with`) replaces the table with or without special tokens.

    Bytes that can never become a character turn into U+FFFD, as `tokenizers` does for byte-level decoders. (For a run
    of byte-fallback tokens that is not valid UTF-8, `tokenizers` replaces every byte; here text already sent stays.)
    """

    def __init__(
        self, tokens: TokenBytes, *, skip_special_tokens: bool = True, table: list[bytes] | None = None
    ) -> None:
        self._table = tokens.table(skip_special_tokens=skip_special_tokens) if table is None else table
        self._texts = tokens.texts if table is None and skip_special_tokens else {}
        self._held = b""  # the beginning of a character

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete. "" while a character is incomplete."""
        if len(token_ids) == 1 and not self._held and (known := self._texts.get(token_ids[0])) is not None:
            return known
        table, size = self._table, len(self._table)
        data = self._held + b"".join([table[i] for i in token_ids if i < size])
        # The same as the incremental decoder of `codecs`, which is written in Python and takes 1.4 us per token.
        text, used = codecs.utf_8_decode(data, "replace", False)
        if len(token_ids) == 1 and not self._held and used == len(data):
            self._texts[token_ids[0]] = text
        self._held = data[used:]
        return text

    def finish(self) -> str:
        """Return the end of the text: U+FFFD if it ends inside a character, else ""."""
        text, _ = codecs.utf_8_decode(self._held, "replace", True)
        self._held = b""
        return text


@dataclass(frozen=True, slots=True)
class Matched:
    """The text that `StopMatcher.push` passes on, and the stop string that ended the text, or None."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces. Holds back text that may become one.

    The first stop string is the one that is complete first, and of two that end together the longer one. So the cuts
    between pieces make no difference. It uses Knuth-Morris-Pratt per stop string, which is linear in the text.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(_borders(s) for s in self._stops)
        self._states = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, piece: str, *, may_end: bool = True) -> Matched:
        """Take the next piece of text. After a match, no more pieces may follow.

        Without `may_end`, no stop string ends in this piece, but one may begin in it.
        """
        text = self._held + piece
        first: tuple[int, int] | None = None  # (end of the match, minus its length)
        for i, stop in enumerate(self._stops):
            end = self._advance(i, piece, may_end)
            if end is not None:
                found = (len(self._held) + end, -len(stop))
                first = found if first is None else min(first, found)
        if first is not None:
            end, start = first[0], first[0] + first[1]
            return Matched(text[: end if self._include_stop else start], text[start:end])
        keep = len(text) - max(self._states, default=0)
        self._held = text[keep:]
        return Matched(text[:keep])

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, i: int, piece: str, may_end: bool) -> int | None:
        """Run automaton `i` over `piece`. Return the end of its first match that `may_end` the text, or None."""
        stop, borders, state = self._stops[i], self._borders[i], self._states[i]
        if state == 0 and stop[0] not in piece:
            return None
        for position, char in enumerate(piece):
            while state and stop[state] != char:
                state = borders[state]
            if stop[state] == char:
                state += 1
                if state == len(stop):
                    if may_end:
                        return position + 1
                    state = borders[state]
        self._states[i] = state
        return None


def _borders(pattern: str) -> list[int]:
    """Return for each k the length of the longest proper prefix of pattern[:k] that is also its suffix."""
    borders, state = [0, 0], 0
    for char in pattern[1:]:
        while state and pattern[state] != char:
            state = borders[state]
        state += pattern[state] == char
        borders.append(state)
    return borders


class TextOffsets:
    """Offsets of tokens in their text. A token inside a character has the offset of the character."""

    def __init__(self, tokens: TokenBytes, *, skip_special_tokens: bool, start: int = 0) -> None:
        self._detokenizer = Detokenizer(tokens, skip_special_tokens=skip_special_tokens)
        self._end = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            self._end += len(self._detokenizer.push((token_id,)))
        return offsets


def prompt_offsets(tokens: TokenBytes, token_ids: Sequence[int], text: str) -> list[int]:
    """Return the offsets of a prompt's tokens in `text`.

    Added tokens and a prefixed space have no length there. If the tokenizer changed characters, tokens have the length
    of their own text.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    offsets, end = [], 0
    for token_id in token_ids:
        offsets.append(end)
        piece = decode(tokens.of(token_id))
        if text.startswith(piece, end):
            end += len(piece)
        elif piece.startswith(" ") and text.startswith(piece[1:], end):
            end += len(piece) - 1
        elif not tokens.is_special(token_id):
            end = min(end + len(piece), len(text))
    return offsets


def most_characters(spec: Mapping[str, Any], longest: int) -> int | None:
    """Return the most characters that one token can represent, or None if the tokenizer may drop text.

    A token represents at most `longest` characters (its bytes) of normalized text. A normalizer can compose several
    characters into one.
    """
    if any(added["lstrip"] or added["rstrip"] for added in spec["added_tokens"]):
        return None  # such a token includes any number of blanks next to it
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
    """Refuses texts that surely exceed a limit of tokens. `count` tokenizes; `per_token` is `most_characters`."""

    per_token: int | None
    count: Callable[[str], int]

    def __call__(self, text: str, limit: int, param: str) -> None:
        """Raise `ApiError` 400 with the numbers, and never for a text that fits.

        A text of more than 8 characters per allowed token (English has 4 to 5) is also tokenized in pieces, until it
        surely has twice the allowed tokens. A cut adds at most one token per character of the token that it cuts.
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
