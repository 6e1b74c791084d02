"""Where tokens begin in a text: `text_offset` of a completion's log-probabilities."""

import codecs
from collections.abc import Sequence

from moeyard_router.text.detokenizer import Detokenizer, TokenBytes


class TextOffsets:
    """Offsets of tokens in a text that is made of them, beginning at `start` (characters).

    A token that completes no character begins where the character does; one that is not shown takes no place.
    """

    def __init__(self, tokens: TokenBytes, *, skip_special_tokens: bool, start: int = 0) -> None:
        self._detokenizer = Detokenizer(tokens, skip_special_tokens=skip_special_tokens)
        self._end = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            self._end += len(self._detokenizer.push((token_id,)))
        return offsets


def prompt_offsets(tokens: TokenBytes, token_ids: Sequence[int], text: str) -> list[int]:
    """Offsets of a prompt's tokens in `text`, of which the tokenizer made them.

    Tokens that a tokenizer adds (a first one, say) take no place, nor does the space that some put before a text. Where
    it changed characters, tokens count for as many as their own text has.
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
