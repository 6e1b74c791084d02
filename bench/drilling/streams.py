"""Answers as clients saw them, and the tokens that an answer lost, repeated or changed. Pure.

The contract of one answer makes this exact. Tokens, text and every log-probability of a request are equal whatever
happens to the fleet, so any difference is an error.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any


@dataclass(slots=True)
class Choice:
    """One of an answer's `n` sequences. `logprobs` has one entry per token, as JSON text, or is empty."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    prompt_logprobs: str = ""
    finish_reason: str | None = None


@dataclass(slots=True)
class Answer:
    """An answer on the wire. `error` is None for a complete answer; `usage` is (prompt, completion) tokens."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens received so far."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def take(self, event: dict[str, Any]) -> int:
        """Process an event of a stream, or a whole body. Return its number of output tokens."""
        if event.get("error"):
            self.error = error_message(event)
        if (usage := event.get("usage")) is not None:
            self.usage = (usage["prompt_tokens"], usage["completion_tokens"])
        return sum(self._take_choice(choice) for choice in event.get("choices") or ())

    def _take_choice(self, said: dict[str, Any]) -> int:
        choice = self.choices.setdefault(said["index"], Choice())
        words = said.get("delta") or said.get("message") or said
        choice.text += words.get("content") or words.get("text") or ""
        choice.token_ids += said.get("token_ids") or []
        choice.logprobs += logprob_entries(said.get("logprobs"))
        choice.finish_reason = said.get("finish_reason") or choice.finish_reason
        if said.get("prompt_logprobs") is not None:
            choice.prompt_logprobs = canonical(said["prompt_logprobs"])
        return len(said.get("token_ids") or ())


@dataclass(frozen=True, slots=True)
class Difference:
    """Tokens that an answer lacks, repeats, or changes against its reference (another id, text or figure)."""

    lost: int = 0
    repeated: int = 0
    different: int = 0

    def __add__(self, other: "Difference") -> "Difference":
        return Difference(self.lost + other.lost, self.repeated + other.repeated, self.different + other.different)

    def __bool__(self) -> bool:
        return bool(self.lost or self.repeated or self.different)


def compare(reference: Answer, answer: Answer) -> Difference:
    """Return what `answer` lost, repeated or changed. A failed answer is compared up to its end."""
    partial = answer.error is not None
    total = Difference()
    for index, expected in reference.choices.items():
        total += _compare_choice(expected, answer.choices.get(index, Choice()), partial=partial)
    total += Difference(different=len(answer.choices.keys() - reference.choices.keys()))
    if not partial and not total and answer.usage != reference.usage:
        total += Difference(different=1)
    return total


def _compare_choice(expected: Choice, got: Choice, *, partial: bool) -> Difference:
    wanted = expected.token_ids[: len(got.token_ids)] if partial else expected.token_ids
    if got.token_ids != wanted:
        return compare_ids(wanted, got.token_ids)
    if partial:
        figures = zip(expected.logprobs, got.logprobs, strict=False)
        changed = sum(a != b for a, b in figures)
        return Difference(different=changed or int(not expected.text.startswith(got.text)))
    changed = sum(a != b for a, b in zip(expected.logprobs, got.logprobs, strict=False))
    changed += abs(len(expected.logprobs) - len(got.logprobs))
    # The tokens agree, so any other difference is one error.
    rest = (expected.text, expected.finish_reason, expected.prompt_logprobs)
    return Difference(different=changed or int(rest != (got.text, got.finish_reason, got.prompt_logprobs)))


def compare_ids(wanted: Sequence[int], got: Sequence[int]) -> Difference:
    """Return the edits between two sequences of token ids.

    Deletions are lost tokens. Insertions that equal the adjacent tokens are repeated ones. Other insertions and
    substitutions are different tokens.
    """
    total = Difference()
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, wanted, got, autojunk=False).get_opcodes():
        if tag == "delete":
            total += Difference(lost=i2 - i1)
        elif tag == "insert":
            run, size = list(got[j1:j2]), j2 - j1
            again = run in (list(got[max(j1 - size, 0) : j1]), list(got[j2 : j2 + size]))
            total += Difference(repeated=size) if again else Difference(different=size)
        elif tag == "replace":
            total += Difference(lost=max(0, i2 - i1 - (j2 - j1)), different=j2 - j1)
    return total


def logprob_entries(logprobs: dict[str, Any] | None) -> list[str]:
    """Return one text per token of the `logprobs` of a chat or completion. Equal texts are equal bits.

    JSON writes the shortest decimal that reads back as the same float.
    """
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [canonical(entry) for entry in logprobs["content"] or ()]
    columns = [logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
    return [canonical(row) for row in zip(*columns, strict=True)]


def canonical(value: Any) -> str:
    """Return JSON in which equal values have equal text."""
    return json.dumps(value, sort_keys=True)


def error_message(body: Any) -> str:
    """Return the message of an error body."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") if isinstance(error, dict) else body)
