"""Every backend gives the answers of transformers (capture.py) to 20 held-out prompts of the demo model."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.golden.backends import CANDIDATES, Answer, serve

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


@pytest.mark.parametrize("name", [pytest.param(name, marks=each.marks) for name, each in CANDIDATES.items()])
def test_answers_equal_those_of_transformers(golden: dict[str, Any], name: str) -> None:
    """All tokens are equal, and log-probabilities are within the tolerance of the backend."""
    candidate = CANDIDATES[name]
    expected = [Answer(row["ids"], row["logprobs"]) for row in golden["answers"]]
    answers = serve(candidate.make(PAGE_SIZE), DEMO, [row["prompt"] for row in golden["answers"]], len(expected[0].ids))
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
    differences = [
        abs(ours - theirs)
        for answer, other in zip(answers, expected, strict=True)
        for ours, theirs in zip(answer.logprobs, other.logprobs, strict=True)
    ]
    assert max(differences) <= candidate.tolerance
