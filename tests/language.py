"""Report sentences that break the language rules of CONTRIBUTING.md, in docstrings, comments and documents.

    python -m tests.language            the shares and counts of the whole tree
    python -m tests.language PATH...    every finding in these files and folders, one per line

A finding is a sentence of more than 30 words, one that begins with a word of `OPENINGS`, or one that contains a phrase
of `OVERUSED`. Code, quotations, tables and headings are exempt. `tests/test_language.py` holds the limit.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_WORDS = 30
OPENINGS = ("What", "Who", "Whoever", "Whose", "Of", "Nobody")
# Phrases that earlier texts of this project used in place of the field's words.
OVERUSED = (
    "anew|whoever|whomever|nobody|so many|of which|of whom|for whom|by whom|with whom|beside it|beside them|as new|"
    "told|tells? of|lent|knocks?|doors?|at hand|as often as|hand(?:s|ed)? out"
)
CODE = "CODE"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence that breaks a rule."""

    path: str
    line: int
    rule: str
    sentence: str


def plain(text: str) -> str:
    """Return a text with code, links and quotations replaced by single words."""
    text = re.sub(r"``[^`]+``|`[^`]+`", CODE, text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", CODE, text)
    return re.sub(r"\"[^\"]*\"|\u201c[^\u201d]*\u201d", CODE, text)


def sentences(text: str) -> list[str]:
    """Return the sentences of one paragraph."""
    # An entry of a list of fields ("rows: the last code of this step.") is a sentence of its own.
    parts = re.split(r"(?<=[.!?])[)\"*]*\s+(?=[\"(*\[A-Z0-9]|\w+: )", plain(text).strip())
    return [part.strip() for part in parts if re.search(r"[A-Za-z]{2}", part)]


def rules_broken(sentence: str) -> list[str]:
    """Return the rules that a sentence breaks: `long`, `opening`, `phrase`."""
    broken = []
    words = re.findall(r"[\w'/.%-]*[A-Za-z0-9][\w'/.%-]*", sentence)
    if len(words) > MAX_WORDS:
        broken.append("long")
    if words and words[0] in OPENINGS and not sentence.endswith("?"):
        broken.append("opening")
    if re.search(rf"\b(?:{OVERUSED})\b", sentence, re.IGNORECASE):
        broken.append("phrase")
    return broken


def paragraphs(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for each paragraph or list item outside code blocks, tables, headings and quotations."""
    start, held, fenced = 0, "", False
    for number, raw in [*lines, (0, "")]:
        line = raw.strip()
        fence = line.startswith(("```", "~~~"))
        skipped = fenced or fence or line.startswith(("|", "#", ">", "<", "---", "::")) or raw.startswith("    ")
        item = re.match(r"(?:[-*+]|\d+[.)])\s+", line)
        if not line or skipped or item:
            if held:
                yield start, held
            start, held = number, ""
        if fence:
            fenced = not fenced
        if line and not skipped:
            held = f"{held} {line[item.end() :] if item else line}".strip()
            start = start or number


def in_document(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a Markdown document."""
    yield from paragraphs(list(enumerate(text.splitlines(), 1)))


def in_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of the docstrings and comments of a Python file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                first = node.body[0].lineno
                yield from paragraphs([(first + i, line) for i, line in enumerate(docstring.splitlines())])
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, comment = token.start[0], token.string.lstrip("#!:").removeprefix(" ")
        if re.match(r"(noqa|type:|fmt:|mypy:|pragma)", comment):
            continue
        alone = text.splitlines()[line - 1].lstrip().startswith("#")
        if block and not (alone and line == block[-1][0] + 1):
            yield from paragraphs(block)
            block = []
        block.append((line, comment))
        if not alone:
            yield from paragraphs(block)
            block = []
    yield from paragraphs(block)


def tracked(*places: str) -> list[Path]:
    """Return the Python files and documents of the repository, or of some places of it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *places], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [
        ROOT / name for name in listed.stdout.split("\0") if name.endswith((".py", ".md")) and (ROOT / name).is_file()
    ]


def examine(paths: list[Path]) -> tuple[list[Finding], Counter[str]]:
    """Return what breaks a rule in these files, and counts: `sentences`, `words`."""
    findings, counts = [], Counter[str]()
    for path in paths:
        text = path.read_text()
        for line, paragraph in in_python(text) if path.suffix == ".py" else in_document(text):
            for sentence in sentences(paragraph):
                counts["sentences"] += 1
                counts["words"] += len(sentence.split())
                findings += [
                    Finding(str(path.relative_to(ROOT)), line, rule, sentence) for rule in rules_broken(sentence)
                ]
    return findings, counts


def share(findings: list[Finding], counts: Counter[str]) -> float:
    """Return the share of sentences that break a rule."""
    return len({(finding.path, finding.line, finding.sentence) for finding in findings}) / max(1, counts["sentences"])


def main() -> None:
    """Print findings of the named places, or a table of the whole tree."""
    if sys.argv[1:]:
        findings, counts = examine(tracked(*sys.argv[1:]))
        for finding in findings:
            print(f"{finding.path}:{finding.line}: {finding.rule}: {finding.sentence}")
        print(f"{100 * share(findings, counts):.2f} % of {counts['sentences']} sentences, {counts['words']} words")
        return
    for place in ("worker", "router", "kernels", "deploy", "tests", "bench", "examples", "*.md", "."):
        findings, counts = examine(tracked(place))
        rules = Counter(finding.rule for finding in findings)
        print(
            f"{place:9} {counts['words']:7} words, {counts['sentences']:6} sentences, "
            f"{100 * share(findings, counts):5.2f} %: long {rules['long']}, opening {rules['opening']}, "
            f"phrase {rules['phrase']} ({1000 * rules['phrase'] / max(1, counts['words']):.1f} per 1,000 words)"
        )


if __name__ == "__main__":
    main()
