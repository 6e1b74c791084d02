"""Tokens missing from tokenizer.json: ids, text and special flags equal those of transformers' tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import EOS_ID, SPECIAL_TOKENS, VOCAB_SIZE, write_tokenizer
from transformers import AutoTokenizer

from moeyard_router.text.chat import TextCodec
from moeyard_router.text.detokenizer import Detokenizer
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.engine.sampling.grammars import Grammars
from moeyard_worker.models.families import load_model_config
from moeyard_worker.protocol import Grammar, SamplingParams
from moeyard_worker.tokenizer import read_tokenizer

PLAIN: Mapping[str, Any] = {"special": False, "lstrip": False, "rstrip": False, "normalized": False}
END_ID = 256 + SPECIAL_TOKENS.index("<|end|>")
END: Mapping[str, Any] = {**PLAIN, "content": "<|im_end|>", "special": True}
TEXT = "hi<|im_end|> a<tool>b <img></img>c<|eos|>d <|end|><|new|>"
# Files of a checkpoint besides its tokenizer.json, which has 256 bytes and then SPECIAL_TOKENS.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": {"262": END}}},
    "not at the next id": {
        "tokenizer_config.json": {"added_tokens_decoder": {"300": END, "280": {**PLAIN, "content": "<tool>"}}}
    },
    "rstrip": {"tokenizer_config.json": {"added_tokens_decoder": {"262": {**END, "rstrip": True}}}},
    "a known token made special": {
        "tokenizer_config.json": {"added_tokens_decoder": {"258": {**END, "content": "<|system|>", "normalized": True}}}
    },
    "a known token made ordinary": {
        "tokenizer_config.json": {"added_tokens_decoder": {"261": {**END, "content": "<|end|>", "special": False}}}
    },
    "only its name": {"tokenizer_config.json": {"eos_token": "<|im_end|>", "pad_token": "<|new|>"}},
    "as an object": {"tokenizer_config.json": {"eos_token": {"__type": "AddedToken", **END}}},
    "a name of the model's own": {"tokenizer_config.json": {"image_token": "<img>", "add_bos_token": True}},
    "without names": {"tokenizer_config.json": {"additional_special_tokens": ["<|im_end|>", "<|end|>", "<tool>"]}},
    "extra, named": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<img>"}}},
    "extra, without names": {"tokenizer_config.json": {"extra_special_tokens": ["<img>", "</img>"]}},
    "added_tokens.json": {"added_tokens.json": {"<tool>": 263, "<|im_end|>": 262}},
    "special_tokens_map.json": {"special_tokens_map.json": {"eos_token": {**PLAIN, "content": "<|im_end|>"}}},
    "a map against the config": {
        "tokenizer_config.json": {"eos_token": "<|end|>", "extra_special_tokens": ["<tool>"]},
        "special_tokens_map.json": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<img>"]},
        "added_tokens.json": {"<tool>": 262, "<img>": 264, "<|im_end|>": 270},
    },
    "a map that does not count": {
        "tokenizer_config.json": {"added_tokens_decoder": {"262": END}},
        "special_tokens_map.json": {"eos_token": "<tool>", "additional_special_tokens": ["<img>"]},
        "added_tokens.json": {"<tool>": 263},
    },
}


def write(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> Path:
    write_tokenizer(directory)
    for name, values in files.items():
        path = directory / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, **values}))
    (directory / "config.json").write_text(json.dumps({"model_type": "mixtral", "vocab_size": VOCAB_SIZE}))
    return directory


@pytest.mark.parametrize("case", CASES)
def test_ids_and_text_equal_transformers(tmp_path: Path, case: str) -> None:
    theirs = AutoTokenizer.from_pretrained(write(tmp_path, CASES[case]))
    codec = TextCodec(tmp_path)
    ids = theirs(TEXT).input_ids
    assert codec.encode(TEXT, add_special_tokens=True) == ids
    assert codec.decode(ids) == theirs.decode(ids)
    shown = Detokenizer(codec.token_bytes, skip_special_tokens=True)
    assert shown.push(ids) + shown.finish() == theirs.decode(ids, skip_special_tokens=True)
    assert dict(codec.special_tokens) == theirs.special_tokens_map
    files = read_tokenizer(tmp_path)
    assert files is not None
    # Grammars read the tokenizer as text.
    added = json.loads(files.json)["added_tokens"]
    assert {token["id"]: token["content"] for token in added} == {
        number: token.content for number, token in theirs.added_tokens_decoder.items()
    }


def test_tokenizer_without_added_tokens_is_unchanged(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    files = read_tokenizer(tmp_path)
    assert files is not None
    assert files.json == (tmp_path / "tokenizer.json").read_text()
    assert read_tokenizer(tmp_path / "nowhere") is None


def test_grammars_know_added_tokens(tmp_path: Path) -> None:
    """A grammar may name a token of tokenizer_config.json. A token without a logit is not allowed."""
    tokens = {"262": {**PLAIN, "content": "tool"}, "400": {**PLAIN, "content": "text"}}
    write(tmp_path, {"tokenizer_config.json": {"added_tokens_decoder": tokens}})
    t, x = ord("t") - 33, ord("x") - 33
    for size, allowed in ((VOCAB_SIZE, {t, x, 262}), (262, {t, x})):
        grammars = Grammars.of_directory(str(tmp_path), vocab_size=size, eos_token_ids=(EOS_ID,))
        assert grammars.refusal is None
        compiled = grammars.compile(Grammar(kind="choice", text='["tool", "x"]')).result()
        mask = grammars.constraint(compiled, SamplingParams(max_tokens=4)).mask(())
        assert mask.words is not None
        words = int.from_bytes(mask.words, "little")
        assert {i for i in range(len(mask.words) * 8) if words >> i & 1} == allowed
        grammars.close()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": {"added_tokens_decoder": [END]}}, "tokenizer_config.json: added_tokens_decoder"),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"x": END}}},
            "tokenizer_config.json: added_tokens_decoder",
        ),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"262": {"special": True}}}}, "added_tokens_decoder 262"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"262": {**END, "lstrip": 1}}}}, "neither true nor false"),
        ({"tokenizer_config.json": {"eos_token": 5}}, "tokenizer_config.json: eos_token"),
        ({"added_tokens.json": {"<tool>": "262"}}, "added_tokens.json: '<tool>'"),
        ({"special_tokens_map.json": {"eos_token": ["x"]}}, "special_tokens_map.json: a special token"),
    ],
)
def test_errors_name_file_and_token(tmp_path: Path, files: dict[str, dict[str, Any]], message: str) -> None:
    write(tmp_path, files)
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "generation", "eos"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|end|>"}}, {"eos_token_id": 3}, (3, 7, END_ID)),
        ({"special_tokens_map.json": {"eos_token": "<|end|>"}}, {}, (7, END_ID)),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, {}, (7, 256 + len(SPECIAL_TOKENS))),
        ({"tokenizer_config.json": {"eos_token": None}}, {}, (7,)),
    ],
)
def test_eos_token_of_the_tokenizer_is_a_stop_id(
    tmp_path: Path, files: dict[str, dict[str, Any]], generation: dict[str, Any], eos: tuple[int, ...]
) -> None:
    write(tmp_path, files)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "vocab_size": 300, "eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_model_config(tmp_path).eos_token_ids == eos


def test_eos_token_beyond_the_vocabulary_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer_config.json": {"eos_token": "<|im_end|>"}})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "vocab_size": 262, "eos_token_id": 7}))
    assert load_model_config(tmp_path).eos_token_ids == (7,)


def test_unreadable_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    write(tmp_path, {})
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: "):
        load_model_config(tmp_path)
