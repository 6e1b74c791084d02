"""Tokenizer.json patterns with catastrophic backtracking are refused by name; those of real models are accepted."""

import json
import os
import re
from pathlib import Path

import pytest

from moeyard_router.text.patterns import check_patterns, patterns_of

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo" / "tokenizer.json"
# Split patterns of the supported families: GPT-2's (OLMoE), Qwen's, DeepSeek-V3's three, Kimi-K2's.
SOUND = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
)


def write(folder: Path, *patterns: str) -> Path:
    """Write a tokenizer.json with these patterns in every place that may have one."""
    first, *others = patterns
    splits = [{"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated"} for each in others]
    path = folder / "tokenizer.json"
    path.write_text(
        json.dumps(
            {
                "normalizer": {"type": "Replace", "pattern": {"Regex": first}, "content": " "},
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
                "model": {"vocab": {"Regex": 1}},
            }
        )
    )
    return path


def test_patterns_of_real_models_pass(tmp_path: Path) -> None:
    path = write(tmp_path, *SOUND)
    assert patterns_of(json.loads(path.read_text())) == list(SOUND)
    check_patterns(path)
    check_patterns(DEMO)


@pytest.mark.timing
@pytest.mark.parametrize("bad", [r"(a+)+$", r"(\w+\s?)+\d!", r"(?:\p{L}|[a-z])+\d", r"(.*)(.*)(.*)(.*)(.*)\1z"])
def test_backtracking_patterns_are_named(tmp_path: Path, bad: str) -> None:
    path = write(tmp_path, SOUND[0], bad, SOUND[2])
    began = os.times()
    with pytest.raises(ValueError, match=re.escape(f"{path}: its regular expression {bad!r} ")):
        check_patterns(path)
    took = os.times()
    assert took.user - began.user < took.children_user - began.children_user, "another check must try it"


def test_invalid_tokenizer_file_passes_this_check(tmp_path: Path) -> None:
    check_patterns(tmp_path / "tokenizer.json")
    for text in ("", "[]", '{"pre_tokenizer": null}', '{"pre_tokenizer": {"Regex": 3}}'):
        path = tmp_path / "tokenizer.json"
        path.write_text(text)
        check_patterns(path)
