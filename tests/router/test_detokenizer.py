"""Streamed text equals the decoding of all tokens, and stop strings cut it at the same place."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moeyard_router.text.detokenizer import Detokenizer, StopMatcher, TokenBytes


def byte_level():
    """Return a tokenizer with every byte, some runs of bytes and added tokens of both kinds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    for extra in ["ab", "Ġthe", "Ã¤", "ä½", "æĬĢ"]:
        vocab[extra] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>", "<｜begin▁of▁sentence｜>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("你好", special=False)])
    return tokenizer


def byte_fallback():
    """Return a sentencepiece-like tokenizer."""
    vocab = {"<unk>": 0, "<s>": 1}
    for b in range(256):
        vocab[f"<0x{b:02X}>"] = len(vocab)
    for piece in ["▁Hello", "▁", "w", "▁▁", "你", "lo▁wo"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


LEVEL, FALLBACK = byte_level(), byte_fallback()
LEVEL_BYTES, FALLBACK_BYTES = TokenBytes(LEVEL), TokenBytes(FALLBACK)
level_ids = st.lists(st.integers(min_value=0, max_value=LEVEL.get_vocab_size() + 3), max_size=40)
stop_strings = st.lists(st.text("ab�ä ", min_size=1, max_size=4), min_size=1, max_size=4)


def pieces_of(tokens, ids, cuts, **options):
    detokenizer = Detokenizer(tokens, **options)
    bounds = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    pieces = [detokenizer.push(ids[a:b]) for a, b in pairwise(bounds)]
    return [*pieces, detokenizer.finish()]


@given(level_ids, st.lists(st.integers(min_value=0), max_size=40), st.booleans())
def test_byte_level_equals_the_whole_decoding(ids, cuts, skip):
    known = [i for i in ids if i < LEVEL.get_vocab_size()]
    text = "".join(pieces_of(LEVEL_BYTES, ids, cuts, skip_special_tokens=skip))
    assert text == LEVEL.decode(known, skip_special_tokens=skip)


@given(st.text(max_size=30), st.lists(st.integers(min_value=0), max_size=40))
def test_no_piece_has_half_a_character(text, cuts):
    alphabet = {b: c for c, b in zip(*_alphabet(), strict=True)}
    ids = [LEVEL.token_to_id(alphabet[b]) for b in text.encode()]
    pieces = pieces_of(LEVEL_BYTES, ids, cuts)
    assert "".join(pieces) == text
    assert pieces[-1] == ""


def _alphabet():
    # The byte-level pre-tokenizer defines which character represents a byte at the start or inside a text.
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    decoded = [LEVEL_BYTES.of(LEVEL.token_to_id(c)) for c in characters]
    return characters, [d[0] for d in decoded]


def test_every_byte_has_one_token():
    assert sorted(_alphabet()[1]) == list(range(256))


@given(st.text("Helo wo你好🙂é", max_size=20), st.lists(st.integers(min_value=0), max_size=20))
def test_byte_fallback_decodes_valid_text(text, cuts):
    ids = []
    for char in text:
        piece = FALLBACK.token_to_id("▁" if char == " " else char)
        ids += [FALLBACK.token_to_id(f"<0x{b:02X}>") for b in char.encode()] if piece is None else [piece]
    first = FALLBACK.token_to_id("w")  # output follows a prompt, so no leading space is stripped
    assert "w" + "".join(pieces_of(FALLBACK_BYTES, ids, cuts)) == FALLBACK.decode([first, *ids])


def test_complete_characters_are_sent_at_once():
    detokenizer = Detokenizer(FALLBACK_BYTES)
    ids = [FALLBACK.token_to_id(f"<0x{b:02X}>") for b in "🙂é".encode()]
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "🙂", "", "é"]


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC()])
def test_other_decoders_are_refused(decoder):
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ValueError, match="decoder"):
        TokenBytes(tokenizer)


def first_stop(text, stops):
    """Return the reference result: the stop string that completes first, then the longer one."""
    found = [(text.index(s) + len(s), -len(s), s) for s in stops if s in text]
    return min(found, default=None)


@given(st.text("ab�ä ", max_size=40), stop_strings, st.lists(st.integers(min_value=0), max_size=40), st.booleans())
def test_stop_strings_cut_the_whole_text(text, stops, cuts, include):
    matcher = StopMatcher(stops, include_stop=include)
    bounds = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    out, stop = "", None
    for a, b in pairwise(bounds):
        matched = matcher.push(text[a:b])
        out += matched.text
        assert text.startswith(out)
        if matched.stop is not None:
            stop = matched.stop
            break
        # Held text is always the beginning of a stop string.
        held = text[len(out) : b]
        assert held == "" or any(s.startswith(held) for s in stops)
    else:
        out += matcher.finish()
    expected = first_stop(text, stops)
    if expected is None:
        assert (out, stop) == (text, None)
    else:
        end, minus_length, name = expected
        assert stop == name
        assert out == text[: end if include else end + minus_length]
