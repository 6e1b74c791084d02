"""Every backend gives the answers of transformers (capture.py) to held-out prompts of the demo model and its forms."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.golden.backends import CANDIDATES, Answer, Candidate, serve
from tests.golden.capture import FORMS, NUM_FORM_PROMPTS, quantised

from moeyard.local.gguf_description import gguf_description

HERE = Path(__file__).resolve().parent
DEMO = HERE.parents[1] / "deploy" / "demo"
PAGE_SIZE = 16


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return dict(json.loads((HERE / "demo.json").read_text()))


def test_captures_match_the_model_files(golden: dict[str, Any]) -> None:
    """The files that demo.json was captured from are unchanged. capture.py says when to run it again."""
    for name, digest in golden["provenance"]["model"].items():
        assert hashlib.sha256((DEMO / name).read_bytes()).hexdigest() == digest, f"{name} has changed"
    rows = golden["answers"]
    assert [(len(r["prompt"]), len(r["ids"]), len(r["logprobs"])) for r in rows] == [(65, 64, 64)] * 20


def check(candidate: Candidate, rows: list[dict[str, Any]], checkpoint: Path, gguf: Path | None = None) -> None:
    """Compare all tokens, and log-probabilities within the tolerance of the backend."""
    expected = [Answer(row["ids"], row["logprobs"]) for row in rows]
    prompts = [row["prompt"] for row in rows]
    answers = serve(candidate.make(PAGE_SIZE), checkpoint, prompts, len(expected[0].ids), gguf)
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
    differences = [
        abs(ours - theirs)
        for answer, other in zip(answers, expected, strict=True)
        for ours, theirs in zip(answer.logprobs, other.logprobs, strict=True)
    ]
    assert max(differences) <= candidate.tolerance


NAMES = [pytest.param(name, marks=each.marks) for name, each in CANDIDATES.items()]


@pytest.mark.parametrize("name", NAMES)
def test_answers_equal_those_of_transformers(golden: dict[str, Any], name: str) -> None:
    check(CANDIDATES[name], golden["answers"], DEMO)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_answers_of_a_form_equal_those_of_transformers(
    golden: dict[str, Any], form: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`moeyard quantize` writes the same codes as before, and they are read as before."""
    captured = json.loads((HERE / f"{form}.json").read_text())
    assert captured["provenance"]["model"] == golden["provenance"]["model"]
    assert len(captured["answers"]) == NUM_FORM_PROMPTS
    monkeypatch.setenv("HOME", str(tmp_path))
    model = quantised(form, tmp_path)
    if model.is_file():
        check(CANDIDATES[name], captured["answers"], gguf_description(model, config=None, tokenizer=None), model)
    else:
        check(CANDIDATES[name], captured["answers"], model)
