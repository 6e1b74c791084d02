"""The prose of these places keeps the language rules of CONTRIBUTING.md; `tests/language.py` has the rules."""

import pytest
from tests.language import Finding, examine, paragraphs, rules_broken, sentences, share, tracked

# Judgement has room for this share of the sentences.
LIMIT = 0.005
PLACES = (
    ("worker",),
    ("router",),
    ("deploy",),
    ("bench",),
    ("examples",),
    (":(glob)tests/*.py",),
    ("tests/clients", "tests/deploy", "tests/exchange", "tests/mutants", "tests/router", "tests/scheduling"),
    ("tests/kernels",),
    ("tests/engine",),
    ("tests/models", "tests/experts"),
    ("tests/e2e", "tests/gpu", "tests/golden"),
    (
        "README.md",
        "CODE_OF_CONDUCT.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "docs/concepts/recovery.md",
        "docs/api.md",
        "docs/clients.md",
        "docs/concepts/compression.md",
        "docs/concepts/exchange.md",
        "docs/concepts/expert_cache.md",
        "docs/concepts/one_answer.md",
        "docs/concepts/speculation.md",
        "docs/deployment.md",
        "docs/architecture.md",
        "docs/decisions.md",
        "docs/glossary.md",
        "docs/benchmarks.md",
        "docs/bench.md",
        "docs/dashboard.md",
        "docs/index.md",
        "docs/journal.md",
        "docs/incidents.md",
        "docs/limits.md",
        "docs/kernels.md",
        "docs/linear_attention.md",
        "docs/metrics.md",
        "docs/models.md",
        "docs/recipes.md",
        "docs/request.md",
        "docs/security.md",
        "docs/serving.md",
        "docs/rooms.md",
        "docs/quantised.md",
        "docs/snapkv.md",
        "docs/speculation.md",
        "docs/start.md",
        "docs/structured_output.md",
        "docs/tools.md",
        "docs/upgrades.md",
    ),
)


@pytest.mark.parametrize("places", PLACES, ids=lambda places: places[0])
def test_sentences_are_short_and_begin_with_their_subject(places: tuple[str, ...]) -> None:
    findings, counts = examine(tracked(*places))
    assert counts["sentences"] > 50
    shown = "\n".join(f"{f.path}:{f.line}: {f.rule}: {f.sentence}" for f in findings)
    assert share(findings, counts) <= LIMIT, f"{100 * share(findings, counts):.2f} % of the sentences:\n{shown}"


@pytest.mark.parametrize(
    ("sentence", "rules"),
    [
        ("What waits is told anew.", ["opening", "phrase"]),
        ("What does this flag do?", []),
        ("A rank waits for `whoever` it is.", []),
        ("A step " + "has rows and " * 10 + "ends.", ["long"]),
        ("Requests queue in the router.", []),
    ],
)
def test_rules_by_example(sentence: str, rules: list[str]) -> None:
    assert rules_broken(*sentences(sentence)) == rules


def test_code_tables_and_quotations_are_exempt() -> None:
    text = ["# Of a heading", "| What | a table |", "> Whoever", "```", "Of code", "```", "One sentence.", "- An item."]
    assert [paragraph for _, paragraph in paragraphs(list(enumerate(text, 1)))] == ["One sentence.", "An item."]


def test_a_sentence_with_two_findings_counts_once() -> None:
    both = [Finding("a.md", 1, rule, "What is told.") for rule in ("opening", "phrase")]
    counts = examine([])[1]
    counts["sentences"] = 2
    assert share(both, counts) == 0.5
