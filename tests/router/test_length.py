"""Prompts refused by their text length cannot fit, and prompts that may fit are not refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard_router.errors import ApiError
from moeyard_router.text.detokenizer import LengthCheck, most_characters

PLAIN = {"added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "ByteLevel"}, "model": {"type": "BPE"}}
SPLIT = {"type": "Split", "behavior": "Isolated"}


@pytest.mark.parametrize(
    ("change", "most"),
    [
        ({}, 10),
        ({"pre_tokenizer": None}, 10),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, {"type": "ByteLevel"}]}}, 10),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, {"type": "WhitespaceSplit"}]}}, None),
        ({"pre_tokenizer": {**SPLIT, "behavior": "Removed"}}, None),
        ({"normalizer": {"type": "NFC"}}, 40),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Strip"}]}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}, 10),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}}, None),
        ({"normalizer": {"type": "Prepend", "prepend": "▁"}}, 10),
        ({"added_tokens": [{"lstrip": False, "rstrip": True}]}, None),
        ({"added_tokens": [{"lstrip": False, "rstrip": False}]}, 10),
        ({"model": {"type": "BPE", "fuse_unk": True}}, None),
        ({"model": {"type": "BPE", "fuse_unk": True, "byte_fallback": True}}, 10),
    ],
)
def test_how_much_text_a_token_covers(change, most):
    assert most_characters({**PLAIN, **change}, 10) == most


def count(codec, text):
    return len(codec.encode(text, add_special_tokens=False))


def check(codec, limit):
    spec = json.loads(codec._tokenizer.to_str())
    per_token = most_characters(spec, codec.token_bytes.longest)
    return lambda text: LengthCheck(per_token, lambda piece: count(codec, piece))(text, limit, "prompt")


texts = st.lists(
    st.tuples(st.sampled_from(["The quick brown fox", " ", "a", "你", "🙂", "Hello world. ", "é"]), st.integers(1, 40)),
    max_size=8,
).map(lambda parts: "".join(text * times for text, times in parts))


@given(texts, st.integers(1, 60))
def test_prompts_that_fit_are_accepted(codec, text, limit):
    try:
        check(codec, limit)(text)
    except ApiError as error:
        assert (error.status, error.reason) == (400, "prompt_too_long")  # noqa: PT017 - either outcome is fine
        assert count(codec, text) > limit


def test_refused_by_characters_alone(codec):
    longest = codec.token_bytes.longest
    with pytest.raises(ApiError, match=f"has {6 * longest} characters, .* at least 6 tokens; .* limit is 5 tokens"):
        LengthCheck(longest, lambda _: pytest.fail("the text must not be tokenized"))("x" * 6 * longest, 5, "prompt")


def test_long_prompt_is_refused_early(codec):
    pieces = []
    text = "你好" * 300_000
    checked = LengthCheck(codec.token_bytes.longest, lambda piece: pieces.append(piece) or count(codec, piece))
    with pytest.raises(ApiError, match="the first 560000 of the prompt's 600000 characters are at least"):
        checked(text, 70_000, "prompt")
    assert [len(piece) for piece in pieces] == [560_000]


def test_some_tokenizers_have_no_length_bound():
    LengthCheck(None, lambda _: pytest.fail("the text must not be tokenized"))("x" * 10_000, 5, "prompt")


def test_long_and_short_texts_have_the_same_tokens(codec):
    """Long texts use the library's batch call without offsets, short ones use `encode`."""
    text = "The quick brown fox 你好 says 🙂 " * 60
    for special in (False, True):
        assert len(text) > 512
        assert (
            codec.encode(text, add_special_tokens=special)
            == codec._tokenizer.encode(text, add_special_tokens=special).ids
        )
