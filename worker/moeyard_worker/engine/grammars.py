"""Grammars by llguidance: what may follow an answer's tokens so far, as one bit per token of the vocabulary.

A grammar is compiled once, by a thread of its own, and kept for the requests that name it again; a request has a
matcher copied from that. Masks are computed beside the step: for the next token as soon as one is known, while the next
step's forward pass runs. llguidance lets go of the interpreter's lock in all of this; only making a tokenizer of
150,000 tokens holds it, for a second and a half, which is why that is part of loading.
"""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from moeyard_worker.protocol import Grammar, SamplingParams
from moeyard_worker.scheduling.request import Mask
from moeyard_worker.tokenizer import read_tokenizer

log = logging.getLogger(__name__)

# Between the parts of a JSON text a model may write this and no more, a few blanks or a line break with indentation: a
# model that has lost its way writes empty lines until it may write nothing at all.
_WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"
# Of an automaton, at 1 to 2 kB each. llguidance allows 250,000.
_MAX_STATES = 50_000
# An automaton that counts modulo n has n states, made before any of llguidance's limits is asked: a million took 8 s
# and 250 MB (2026-11-22).
_MAX_MULTIPLE = 10_000
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(-?[0-9.]+(?:[eE][-+]?[0-9]+)?)')
_KEPT = 16
_MAX_MESSAGE = 500


class GrammarError(ValueError):
    """A grammar that cannot be compiled; says why."""


class Grammars:
    """Compiles grammars for one vocabulary. `tokenizer_json` None, or one that llguidance cannot read: for none.

    Raises nothing for that; `refusal` then says why grammars are refused.
    """

    def __init__(self, tokenizer_json: str | None, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(t for t in eos_token_ids if t < vocab_size)
        self.refusal: str | None = None
        self._compiling = ThreadPoolExecutor(2, "grammar-compile")
        self.ahead = ThreadPoolExecutor(1, "grammar-masks")
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._limits = LLParserLimits(max_lexer_states=_MAX_STATES, verbose_errors=False)
        if tokenizer_json is None:
            self.refusal = "this server has no tokenizer, and a grammar is about text"
        elif not self.eos_token_ids:
            self.refusal = "this model has no end-of-sequence token, which ends what a grammar has completed"
        else:
            try:
                self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(self.eos_token_ids))
            except ValueError as error:
                log.warning("grammars are refused, llguidance cannot read the tokenizer: %s", error)
                self.refusal = f"grammars are not served here: llguidance cannot read the tokenizer ({error!s:.200})"

    @staticmethod
    def of_directory(directory: str | None, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "Grammars":
        """Return those of a checkpoint's tokenizer. Raises `ValueError` naming a file that cannot be read."""
        files = None if directory is None else read_tokenizer(Path(directory))
        text = None if files is None else files.json_within(vocab_size)
        return Grammars(text, vocab_size=vocab_size, eos_token_ids=eos_token_ids)

    def compile(self, grammar: Grammar) -> "Future[LLMatcher]":
        """The grammar's matcher, to be copied and never used; its exception is a GrammarError.

        Called by one thread, which may cancel it. What was asked for before, its error too, is remembered.
        """
        assert self.refusal is None, self.refusal
        found = self._compiled.pop(grammar, None)
        if found is None or found.cancelled():
            found = self._compiling.submit(self._compile, grammar)
        self._compiled[grammar] = found
        while len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return found

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            source = _source(grammar)
        except Exception as error:  # boundary: of any kind, and told to the one who sent the grammar
            raise GrammarError(_cut(str(error))) from error
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        # The first mask fills the tables that copies share.
        if matcher.is_error() or not any(matcher.compute_bitmask()):
            raise GrammarError(_cut(matcher.get_error() or "no token of the vocabulary can begin an answer"))
        return matcher

    def constraint(self, matcher: LLMatcher, sampling: SamplingParams) -> "Constraint":
        """What holds one sequence to a compiled grammar."""
        return Constraint(matcher, sampling, self)

    def close(self) -> None:
        """End the threads; what is being compiled is waited for by nobody."""
        self.ahead.shutdown(wait=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)


class Constraint:
    """One sequence and its copy of `compiled`. Used by one thread at a time; see `scheduling.request.Constraint`."""

    def __init__(self, compiled: LLMatcher, sampling: SamplingParams, grammars: Grammars) -> None:
        self._compiled, self._matcher = compiled, compiled.deep_copy()
        self._grammars = grammars
        eos = grammars.eos_token_ids
        self._min_tokens = sampling.min_tokens
        self._stops = tuple(t for t in sampling.stop_token_ids if 0 <= t < grammars.vocab_size)
        # What does not end the request while it is too short, and what never does.
        self._ends = tuple({*eos, *self._stops})
        self._unwanted = tuple({*eos} - {*self._stops}) if sampling.ignore_eos else ()
        self._seen: list[int] = []
        self._mask: Mask | None = None
        self._coming: Future[Mask] | None = None

    def mask(self, output: Sequence[int]) -> Mask:
        """See `scheduling.request.Constraint.mask`."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            coming.result()
        return self._look(output)

    def expect(self, output: Sequence[int]) -> None:
        """See `scheduling.request.Constraint.expect`."""
        # One thread computes ahead for all: what was expected before this is done before it.
        self._coming = self._grammars.ahead.submit(self._look, output)

    def _look(self, output: Sequence[int]) -> Mask:
        seen = self._seen
        same = min(len(seen), len(output))
        # Tokens are only ever taken back from the end: drafts that were refused.
        while same and seen[same - 1] != output[same - 1]:
            same -= 1
        if same == len(seen) == len(output) and self._mask is not None:
            return self._mask
        if same < len(seen) and not self._matcher.rollback(len(seen) - same):
            # It cannot where a rule counts its tokens or has a stop (`max_tokens=`, `stop=`): a copy reads them anew.
            self._matcher, same = self._compiled.deep_copy(), 0
        del seen[same:]
        new = list(output[same:])
        count = self._matcher.try_consume_tokens(new) if new else 0
        seen += new[:count]
        if count < len(new) and not self._matcher.is_error():
            # A draft that will be refused, or the row after the one that ended the request: nobody reads its token.
            self._mask = None
            return Mask()
        self._mask = self._compute(len(output))
        return self._mask

    def _compute(self, num_output: int) -> Mask:
        # It may say a word more than the vocabulary has.
        count = -(-self._grammars.vocab_size // 32)
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32, count=count).copy()
        if self._matcher.is_error():
            return Mask(error=_cut(f"the grammar cannot be followed any further: {self._matcher.get_error()}"))
        complete = _has(words, self._grammars.eos_token_ids[0])
        held = num_output < self._min_tokens
        if complete and not held:
            for token_id in self._stops:
                words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        if held or self._unwanted:
            # Unless they are all that is left.
            others = words.copy()
            for token_id in self._ends if held else self._unwanted:
                others[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
            words = others if others.any() else words
        if not words.any():
            return Mask(error="the grammar cannot be followed any further: no token of the vocabulary fits")
        return Mask(words=words.tobytes())


def _has(words: NDArray[np.uint32], token_id: int) -> bool:
    return bool(words[token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1))


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own words. Raises ValueError."""
    text = grammar.text
    if grammar.kind in ("json_schema", "lark"):
        _check_multiples(text)
    if grammar.kind == "json_object":
        return _json('{"type": "object"}')
    if grammar.kind == "json_schema":
        return _json(text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if grammar.kind == "choice":
        choices = json.loads(text)
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise ValueError("a choice is a list of strings, none of them empty")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
    return LLMatcher.grammar_from_lark(any_to_lark(text))


def _json(text: str) -> str:
    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"no answer can satisfy {text:.20}, a schema is an object")
    own = schema.get("x-guidance")
    # A default pattern would win over "whitespace_flexible": false.
    chosen = isinstance(own, dict) and any(name.startswith("whitespace_") for name in own)
    # The schema is passed as text because llguidance refuses Python's integers above 64 bits.
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), defaults=None if chosen else {"whitespace_pattern": _WHITESPACE}
    )


def _check_multiples(text: str) -> None:
    plain = re.sub(r"\\u00([0-7][0-9a-fA-F])", lambda found: chr(int(found[1], 16)), text)
    for number in _MULTIPLE.findall(plain):
        mantissa = re.split("[eE]", number)[0].replace(".", "").strip("-0") or "0"
        if int(mantissa) > _MAX_MULTIPLE or float(number) > _MAX_MULTIPLE:
            raise ValueError(f"multipleOf {number} is not served: an automaton of so many states would be needed")


def _cut(message: str) -> str:
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
