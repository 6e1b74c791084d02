"""The processes that run llguidance: a parent that has read the tokenizer, and one fork of it for each grammar.

Grammars come from clients. No limit of llguidance bounds the time or the memory of every call, because products of
automata and ambiguous rules defeat the limits. A call cannot be interrupted, but a process can be killed. So each
grammar has a process with a memory limit and a timer on each call. A fork inherits the tokenizer's tables and starts
within milliseconds. `grammars.py` is the other side.

The parent reads the tokenizer from standard input, then receives one socket per grammar over its control socket.
Imports must stay light: a bare interpreter loads this module.
"""

import gc
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import sys
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from moeyard_worker.protocol import SCHEMA_MAPS

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Frames. A grammar: the sizes of its kind and text in UTF-8 bytes, the seconds of processor time of its compilation,
# and the bytes of memory that the process may add. A question: the sequence, how many of its tokens stay, how many
# follow, and the seconds allowed. A reply: its status, the seconds used, the bytes of memory that the process has
# added, and how many bytes follow.
GRAMMAR = struct.Struct("<IIdQ")
QUESTION = struct.Struct("<QIId")
ANSWER = struct.Struct("<BdQI")
PID = struct.Struct("<I")
# Statuses. MASK: one bit for each token that may follow. FREE: the tokens violate the grammar, so any token may follow.
MASK, FREE, ERROR = range(3)
FORGET = 0xFFFFFFFF  # the number of tokens that stay when a sequence has ended

_MAX_MESSAGE = 500
# A compiled grammar is tried on random answers, so that it meets a limit of llguidance before a request runs.
_TRIALS, _TRIAL_TOKENS, _TRIAL_SECONDS = 2, 8, 0.02
# The whitespace that a model may write between the parts of a JSON text: a few blanks, or a line break and an
# indentation. A confused model would otherwise write empty lines until its token limit.
_WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"
# States of an automaton, 1 to 2 kB each. llguidance allows 250,000.
_MAX_STATES = 50_000
# An automaton that counts modulo n has n states, and llguidance builds them before it checks its limits. A million
# states took 8 s and 250 MB (2026-11-22).
_MAX_MULTIPLE = 10_000
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(-?[0-9.]+(?:[eE][-+]?[0-9]+)?)')
_SCHEMA = re.compile(r"%json\s*(?=\{)")
# JSON Schema keywords whose value contains no schema.
_PLAIN = frozenset(("const", "enum", "default", "examples", "x-guidance"))


def main() -> None:
    """Read the tokenizer, then fork for each socket that arrives, until the control socket closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    # The timer's default action ends the process wherever it is.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF,))
    control = socket.socket(fileno=int(sys.argv[2]))
    given = json.loads(sys.stdin.buffer.read())
    try:
        tokenizer = LLTokenizer(given["tokenizer"], n_vocab=given["vocab_size"], eos_token=given["eos_token_ids"])
    except ValueError as error:
        control.sendall(cut(str(error), 200).encode())
        return
    control.sendall(b"\0")
    del given
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that has objects
    while True:
        _, received, _, _ = socket.recv_fds(control, 1, 1)
        if not received:
            return
        if os.fork() == 0:
            control.close()
            _run(socket.socket(fileno=received[0]), tokenizer)
        os.close(received[0])


def _run(connection: socket.socket, tokenizer: LLTokenizer) -> None:
    """Serve one grammar, then exit this process."""
    try:
        # llguidance prints panics and failed allocations to stderr, and a client could fill the log with them.
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with connection, connection.makefile("rb") as questions:
            connection.sendall(PID.pack(os.getpid()))
            _serve(connection, questions, tokenizer)
    except (OSError, MemoryError):
        pass  # the client sees the closed connection
    finally:
        os._exit(0)


def _serve(connection: socket.socket, questions: BinaryIO, tokenizer: LLTokenizer) -> None:
    begun = _resident()

    def answer(status: int, seconds: float, payload: bytes = b"") -> None:
        memory = max(0, _resident() - begun)
        connection.sendall(ANSWER.pack(status, seconds, memory, len(payload)) + payload)

    *sizes, seconds, memory = GRAMMAR.unpack(questions.read(GRAMMAR.size))
    kind, text = (questions.read(size).decode() for size in sizes)
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        with _limited(seconds):
            compiled = _compile(kind, text, tokenizer)
            first = bytes(compiled.compute_bitmask())
    except MemoryError:
        raise
    except Exception as error:  # boundary: any error of the compilation goes to the client
        answer(ERROR, time.process_time(), cut(str(error)).encode())
        return
    answer(MASK, time.process_time(), first)
    sequences: dict[int, _Sequence] = {}
    while head := questions.read(QUESTION.size):
        number, kept, count, allowed = QUESTION.unpack(head)
        if kept == FORGET:
            sequences.pop(number, None)
            continue
        token_ids = array("I", questions.read(4 * count))
        sequence = sequences.setdefault(number, _Sequence(compiled))
        before = time.thread_time()
        with _limited(allowed):
            status, payload = sequence.follow(kept, token_ids)
        answer(status, time.thread_time() - before, payload)


class _Sequence:
    """A copy of a compiled grammar, and the tokens that it has consumed."""

    def __init__(self, compiled: LLMatcher) -> None:
        self._compiled, self._matcher = compiled, compiled.deep_copy()
        self._token_ids: list[int] = []
        self._consumed = 0

    def follow(self, kept: int, token_ids: Sequence[int]) -> tuple[int, bytes]:
        """Keep `kept` tokens, append others, and return what may come next: a status and its payload."""
        self._token_ids[kept:] = token_ids
        if kept < self._consumed:
            back, self._consumed = self._consumed - kept, kept
            if not self._matcher.rollback(back):
                # Rollback fails if a rule counts its tokens or has a stop (`max_tokens=`, `stop=`): start again.
                self._matcher, self._consumed = self._compiled.deep_copy(), 0
        new = self._token_ids[self._consumed :]
        self._consumed += self._matcher.try_consume_tokens(new) if new else 0
        if self._consumed < len(self._token_ids) and not self._matcher.is_error():
            # A draft that will be refused, or the row after the end of the request: its token is not used.
            return FREE, b""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            error = self._matcher.get_error()
            return ERROR, b"no token of the vocabulary fits" if "NoExtension" in error else cut(error).encode()
        return MASK, mask


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Kill the process if the block takes more processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _resident() -> int:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _compile(kind: str, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher to copy. Raises ValueError, and any error that a malformed grammar causes in llguidance."""
    matcher = _matcher_of(_source_of(kind, text, tokenizer), tokenizer)
    # The first mask fills tables that copies share. If nothing can begin, it allows the end and sets an error.
    possible = not matcher.is_error() and any(matcher.compute_bitmask())
    error = matcher.get_error()
    if "NoExtension" in error or not (possible or error):
        raise ValueError("nothing satisfies it: no token of the vocabulary can begin an answer")
    if error:
        raise ValueError(error)
    _try_out(matcher, tokenizer)
    return matcher


def _try_out(compiled: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Follow random answers for some tokens. Raises ValueError when llguidance meets one of its limits. Answers that
    run into a dead end of the grammar are ignored: a model's answers rarely do."""
    chance, begun = random.Random(0), time.thread_time()
    for _ in range(_TRIALS):
        matcher = compiled.deep_copy()
        for _ in range(_TRIAL_TOKENS):
            mask = bytearray(matcher.compute_bitmask())
            for token_id in tokenizer.eos_tokens:
                mask[token_id >> 3] &= ~(1 << (token_id & 7))
            places = [place for place, byte in enumerate(mask) if byte]
            if matcher.is_error() or not places or time.thread_time() - begun > _TRIAL_SECONDS:
                break
            place = chance.choice(places)
            bits = [bit for bit in range(8) if mask[place] >> bit & 1]
            if not matcher.consume_token(8 * place + chance.choice(bits)):
                break
        if matcher.is_error() and "NoExtension" not in matcher.get_error():
            raise ValueError(f"its answers cannot be followed: {matcher.get_error()}")


def cut(message: str, length: int = _MAX_MESSAGE) -> str:
    """Return a message in one line, without llguidance's notes for its own developers."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text if len(text) <= length else f"{text[:length]}..."


def _matcher_of(source: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher, which may be in an error state."""
    limits = LLParserLimits(max_lexer_states=_MAX_STATES, verbose_errors=False)
    return LLMatcher(tokenizer, source, log_level=0, limits=limits)


def _source_of(kind: str, text: str, tokenizer: LLTokenizer) -> str:
    """Return the grammar in llguidance's syntax. Raises ValueError."""
    if kind in ("json_schema", "lark"):
        _check_multiples(text)
    if kind == "json_object":
        return _json('{"type": "object"}', tokenizer)
    if kind == "json_schema":
        return _json(text, tokenizer)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = json.loads(text)
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise ValueError("a choice is a list of strings, none of them empty")
        # One terminal. A rule would make each string an item of the parser, which takes 2,000 at once.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))
    return LLMatcher.grammar_from_lark(_closed_within(any_to_lark(text), tokenizer))


def _json(text: str, tokenizer: LLTokenizer) -> str:
    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"no answer can satisfy {text:.20}, a schema is an object")
    own = schema.get("x-guidance")
    # A default pattern would override "whitespace_flexible": false.
    chosen = isinstance(own, dict) and any(name.startswith("whitespace_") for name in own)
    defaults: JsonCompileOptions | None = None if chosen else {"whitespace_pattern": _WHITESPACE}
    # The schema is passed as text because llguidance refuses Python's integers above 64 bits.
    return LLMatcher.grammar_from_json_schema(json.dumps(_closed(schema, schema, tokenizer)), defaults=defaults)


def _closed_within(text: str, tokenizer: LLTokenizer) -> str:
    """Return the Lark grammar with `_closed` schemas after `%json`."""
    parts, end = [], 0
    for found in _SCHEMA.finditer(text):
        if found.start() < end:
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(text, found.end())
        except ValueError:  # text of the grammar, or an error for llguidance to report
            continue
        if (closed := _closed(schema, schema, tokenizer)) != schema:
            parts += [text[end : found.end()], json.dumps(closed)]
            end = after
    return "".join([*parts, text[end:]])


def _closed(schema: Any, root: Mapping[str, Any], tokenizer: LLTokenizer) -> Any:
    """Return the schema with objects closed whose patterns only match names of their properties. Otherwise llguidance
    allows a comma after the last property and then nothing (https://github.com/guidance-ai/llguidance/issues/265)."""
    if isinstance(schema, list):
        return [_closed(each, root, tokenizer) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key in SCHEMA_MAPS and isinstance(value, dict):
            made[key] = {name: _closed(each, root, tokenizer) for name, each in value.items()}
        else:
            made[key] = value if key in _PLAIN else _closed(value, root, tokenizer)
    patterns, properties = made.get("patternProperties"), made.get("properties", {})
    if not patterns or not isinstance(patterns, dict) or not isinstance(properties, dict):
        return made
    names = [*properties, *(n for n in made.get("required", ()) if isinstance(n, str) and n not in properties)]
    if not names or not _is_complete(names, made, root, tokenizer):
        return made
    others = made.get("additionalProperties", True)
    del made["patternProperties"]
    made["properties"] = {}
    for name in names:
        parts = [properties[name]] if name in properties else []
        parts += [each for pattern, each in patterns.items() if re.search(pattern, name)]
        made["properties"][name] = {"allOf": parts} if len(parts) > 1 else (parts or [others])[0]
    return {**made, "additionalProperties": False}


def _is_complete(
    names: Sequence[str], schema: Mapping[str, Any], root: Mapping[str, Any], tokenizer: LLTokenizer
) -> bool:
    """Return whether no object of a schema can have a member with another name than these."""
    given = ("patternProperties", "additionalProperties")
    other = {
        **{key: root[key] for key in ("$schema", "$defs", "definitions") if key in root},
        **{key: schema[key] for key in given if key in schema},
        "type": "object",
        "properties": dict.fromkeys(names, False),
        "minProperties": 1,
        "x-guidance": {"whitespace_flexible": False},
    }
    matcher = _matcher_of(LLMatcher.grammar_from_json_schema(json.dumps(other)), tokenizer)
    if matcher.is_error():
        return "Unsatisfiable" in matcher.get_error()
    matcher.try_consume_tokens(tokenizer.tokenize_str("{"))
    return not any(matcher.compute_bitmask()) or "NoExtension" in matcher.get_error()


def _check_multiples(text: str) -> None:
    plain = re.sub(r"\\u00([0-7][0-9a-fA-F])", lambda found: chr(int(found[1], 16)), text)
    for number in _MULTIPLE.findall(plain):
        mantissa = re.split("[eE]", number)[0].replace(".", "").strip("-0") or "0"
        if int(mantissa) > _MAX_MULTIPLE or float(number) > _MAX_MULTIPLE:
            raise ValueError(f"multipleOf {number} is not served: its automaton would need too many states")
