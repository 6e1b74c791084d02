"""Grammars: the tokens that may follow an answer's tokens so far, as one bit per token of the vocabulary.

llguidance compiles grammars and computes masks in separate processes, which have limits and may die
(`grammar_process.py`). A grammar is compiled once and kept for later requests. A mask is requested as soon as the token
before it is known, so it is computed during the forward pass of the next step. The total mask time of a request is
bounded; a request that exceeds it ends with an error.

No step waits for a compilation: requests wait in `GrammarQueue`, threads of `Grammars` wait for the processes, and each
turn of the engine's loop collects finished ones.
"""

import itertools
import json
import logging
import threading
import time
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeyard_worker.engine.sampling.grammar_client import (
    SHORT_SECONDS,
    CompiledGrammar,
    ForkServer,
    GrammarError,
    GrammarsFull,
    MaskReply,
)
from moeyard_worker.engine.sampling.grammar_process import ERROR, FREE, QUESTION
from moeyard_worker.protocol import Done, Grammar, Rejected, SamplingParams, Submit
from moeyard_worker.scheduling.request import Mask
from moeyard_worker.tokenizer import read_tokenizer

log = logging.getLogger(__name__)

_KEPT = 16
# Bytes of memory of all grammars of a rank above which another one is refused.
MAX_BYTES = 1 << 30
# The process is killed when a call exceeds its remaining time by this much.
_GRACE_SECONDS = 0.02
# Steps wait for masks of costly requests for a share of all time, with at most `_MOST_WAITING` seconds saved up. When
# nothing is left, one costly request ends and the others get `_NEXT_WAITING` seconds.
WAITING_SHARE, _MOST_WAITING, _NEXT_WAITING = 0.05, 0.05, 0.005
# How often the process of a grammar is replaced for its other requests.
_MOST_GENERATIONS = 3
_TOO_MUCH = "the grammar cannot be followed any further: its masks take more time or memory than a request may use"
# Seconds that a request waits for its grammar.
QUEUE_SECONDS = 10.0
MAX_COMPILING = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskLimits:
    """Limits on the cost of a request's masks.

    `seconds` of processor time at first, and `seconds_per_token` more for each token, up to `seconds` saved up. A
    request is costly once steps have waited `costly_wait` seconds for its masks, and `costly_wait_per_token` for each
    of its tokens.
    """

    seconds: float
    seconds_per_token: float
    costly_wait: float
    costly_wait_per_token: float

    @classmethod
    def of(cls, vocab_size: int) -> "MaskLimits":
        """Return the limits for a vocabulary. A mask that visits every token takes 24 ns per token; one in six masks of
        an ordinary schema does so. With an ambiguous grammar the time of a mask grows with the answer."""
        return cls(
            seconds=0.05 + 1e-6 * vocab_size,
            seconds_per_token=0.001 + 30e-9 * vocab_size,
            costly_wait=0.01 + 200e-9 * vocab_size,
            costly_wait_per_token=0.0003 + 10e-9 * vocab_size,
        )


class Grammars:
    """Compiles grammars for one vocabulary.

    `refusal` says why grammars are refused: `tokenizer_json` is None, llguidance cannot read it, or the model has no
    EOS token.
    """

    def __init__(self, tokenizer_json: str | None, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(t for t in eos_token_ids if t < vocab_size)
        self.refusal: str | None = None
        self.numbers = itertools.count()
        self.waiting, self.limits = WaitBudget(), MaskLimits.of(vocab_size)
        self._compiling = ThreadPoolExecutor(2, "grammar-compile")
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        # A set must not change while another thread iterates over it.
        self._lock = threading.Lock()
        self._live: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()
        self._forks: ForkServer | None = None
        if tokenizer_json is None:
            self.refusal = "this server has no tokenizer, which grammars need"
        elif not self.eos_token_ids:
            self.refusal = "this model has no end-of-sequence token, which grammars need"
        else:
            vocabulary = {"tokenizer": tokenizer_json, "vocab_size": vocab_size, "eos_token_ids": self.eos_token_ids}
            self._forks = ForkServer(json.dumps(vocabulary).encode())
            if error := self._forks.refusal:
                log.warning("grammars are refused, llguidance cannot read the tokenizer: %s", error)
                self.refusal = f"grammars are not served here: llguidance cannot read the tokenizer ({error})"

    @staticmethod
    def of_directory(directory: str | None, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "Grammars":
        """Return the grammars of a checkpoint's tokenizer. Raises `ValueError` naming a file that cannot be read."""
        files = None if directory is None else read_tokenizer(Path(directory))
        text = None if files is None else files.json_within(vocab_size)
        return Grammars(text, vocab_size=vocab_size, eos_token_ids=eos_token_ids)

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Return the compiled grammar; its exception is a GrammarError, or GrammarsFull. One thread calls this, and it
        may cancel the future. Recent results and errors are cached."""
        assert self.refusal is None, self.refusal
        found = self._compiled.pop(grammar, None)
        if found is None or found.cancelled() or not _is_lasting(found):
            found = self._compiling.submit(self._compile, grammar)
        self._compiled[grammar] = found
        while len(self._compiled) > (_KEPT if self._num_bytes <= MAX_BYTES else 1):
            self._compiled.popitem(last=False)
        return found

    @property
    def _num_bytes(self) -> int:
        with self._lock:
            return sum(compiled.num_bytes for compiled in self._live)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if (held := self._num_bytes) > MAX_BYTES:
            raise GrammarsFull(f"the grammars of running requests take {held >> 20} MiB, {MAX_BYTES >> 20} are allowed")
        assert self._forks is not None, "the caller checks the refusal"
        compiled = CompiledGrammar(grammar, self._forks)
        with self._lock:
            self._live.add(compiled)
        return compiled

    def replacement(self, compiled: CompiledGrammar) -> CompiledGrammar:
        """Return another process for the grammar of one that has exited. Raises GrammarError, GrammarsFull."""
        if compiled.successor is None or not compiled.successor.usable:
            if compiled.first.seconds > SHORT_SECONDS or compiled.generation == _MOST_GENERATIONS:
                raise GrammarError("its process has ended too often, or takes too long to start again")
            compiled.successor = self._compile(compiled.grammar)
            compiled.successor.generation = compiled.generation + 1
        return compiled.successor

    def constraint(self, compiled: CompiledGrammar, sampling: SamplingParams) -> "GrammarConstraint":
        """Return the constraint that holds one sequence to a compiled grammar."""
        return GrammarConstraint(compiled, sampling, self)

    def close(self) -> None:
        """Stop threads and processes without waiting for compilations."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._compiled.clear()
        if self._forks is not None:
            self._forks.close()


class WaitBudget:
    """The seconds that steps may still wait for the masks of costly requests."""

    def __init__(self) -> None:
        self._left, self._since = _MOST_WAITING, time.monotonic()

    def charge(self, seconds: float) -> None:
        """Count a wait that has just ended."""
        now = time.monotonic()
        self._left = min(_MOST_WAITING, self._left + WAITING_SHARE * (now - self._since)) - seconds
        self._since = now

    def is_over(self) -> bool:
        """Return whether one costly request must end now."""
        self.charge(0.0)
        if self._left > 0:
            return False
        self._left = _NEXT_WAITING
        return True


def _is_lasting(found: Future[CompiledGrammar]) -> bool:
    """Return whether later requests may reuse this result."""
    if not found.done():
        return True
    error = found.exception()
    if error is not None:
        return isinstance(error, GrammarError)
    return found.result().usable and not found.result().worn


class GrammarConstraint:
    """One sequence and its copy of `compiled`. Used by one thread at a time; see `scheduling.request.Constraint`."""

    def __init__(self, compiled: CompiledGrammar, sampling: SamplingParams, grammars: Grammars) -> None:
        self._compiled, self._grammars = compiled, grammars
        self._number = next(grammars.numbers)
        self._forget = weakref.finalize(self, compiled.over.append, self._number)
        eos = grammars.eos_token_ids
        self._min_tokens = sampling.min_tokens
        self._stops = tuple(t for t in sampling.stop_token_ids if 0 <= t < grammars.vocab_size)
        # Tokens that may not end the request while it is too short, and tokens that never may.
        self._ends = tuple({*eos, *self._stops})
        self._unwanted = tuple({*eos} - {*self._stops}) if sampling.ignore_eos else ()
        self._limits = grammars.limits
        self._seconds_left, self._waited, self._num_tokens = self._limits.seconds, 0.0, 0
        self._error: str | None = None
        # The output of the last question; the unanswered questions, each with its number of new tokens; and the masks.
        self._last_output: list[int] = []
        self._questions: deque[tuple[list[int], int]] = deque()
        self._masks: deque[tuple[list[int], Mask]] = deque([([], self._mask(compiled.first, 0))])

    def mask(self, output: Sequence[int]) -> Mask:
        """See `scheduling.request.Constraint.mask`."""
        wanted = list(output)
        while self._error is None:
            while self._masks and self._masks[0][0] != wanted:
                self._masks.popleft()
            if self._masks:
                return self._masks[0][1]
            if self._is_costly and self._grammars.waiting.is_over():
                self._error = _TOO_MUCH
            elif self._is_pending(wanted):
                self._compiled.take()
            else:
                self._request(wanted)
        return Mask(error=self._error)

    def expect(self, output: Sequence[int]) -> None:
        """See `scheduling.request.Constraint.expect`."""
        wanted = list(output)
        known = any(answered == wanted for answered, _ in self._masks)
        if self._error is None and not known and not self._is_pending(wanted):
            self._request(wanted)

    @property
    def _is_costly(self) -> bool:
        limits = self._limits
        return self._waited > max(limits.costly_wait, limits.costly_wait_per_token * self._num_tokens)

    def _is_pending(self, output: list[int]) -> bool:
        return any(pending == output for pending, _ in self._questions)

    def _request(self, output: list[int]) -> None:
        if not self._compiled.usable:
            self._move()
            return
        same = min(len(self._last_output), len(output))
        # Only tokens at the end are taken back: refused drafts.
        while same and self._last_output[same - 1] != output[same - 1]:
            same -= 1
        new = output[same:]
        allowed = max(0.0, self._seconds_left + self._limits.seconds_per_token * len(new)) + _GRACE_SECONDS
        question = QUESTION.pack(self._number, same, len(new), allowed) + array("I", new).tobytes()
        if self._compiled.request(self, question):
            self._last_output = output
            self._questions.append((output, len(new)))

    def _move(self) -> None:
        """Continue with another process that has the grammar."""
        try:
            self._compiled = self._grammars.replacement(self._compiled)
        except (GrammarError, GrammarsFull) as error:
            self._error = f"the grammar cannot be followed any further: {error}"
            return
        self._forget.detach()
        self._forget = weakref.finalize(self, self._compiled.over.append, self._number)
        self._last_output = []

    def on_reply(self, reply: MaskReply, waited: float) -> None:
        """Take the reply to the oldest question."""
        output, num_new = self._questions.popleft()
        # Time beyond the reply's processor time was a wait for a core.
        waited, limits = min(waited, reply.seconds), self._limits
        self._waited, self._num_tokens = self._waited + waited, self._num_tokens + num_new
        if self._is_costly:
            self._grammars.waiting.charge(waited)
        left = self._seconds_left + limits.seconds_per_token * num_new - reply.seconds
        self._seconds_left = min(limits.seconds, left)
        if self._seconds_left < 0:
            self._error = _TOO_MUCH
        # Sequences share an automaton, which may have reached its limit of states.
        self._compiled.worn |= reply.status == ERROR
        self._masks.append((output, self._mask(reply, len(output))))

    def on_exit(self, *, at_fault: bool) -> None:
        """Forget the questions of the exited process. The request ends with an error if its own question caused the
        exit."""
        self._questions.clear()
        if at_fault:
            self._error = _TOO_MUCH

    def _mask(self, reply: MaskReply, num_output: int) -> Mask:
        if reply.status == FREE:
            return Mask()
        if reply.status == ERROR:
            return Mask(error=f"the grammar cannot be followed any further: {reply.payload.decode()}")
        # It may have one word more than the vocabulary needs.
        words = np.frombuffer(reply.payload, dtype=np.uint32, count=-(-self._grammars.vocab_size // 32)).copy()
        eos = self._grammars.eos_token_ids[0]
        complete = bool(words[eos >> 5] >> np.uint32(eos & 31) & np.uint32(1))
        held = num_output < self._min_tokens
        if complete and not held:
            for token_id in self._stops:
                words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        if held or self._unwanted:
            # Unless no other token is left.
            others = words.copy()
            for token_id in self._ends if held else self._unwanted:
                others[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
            words = others if others.any() else words
        if not words.any():
            return Mask(error="the grammar cannot be followed any further: no token of the vocabulary fits")
        return Mask(words=words.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingGrammar:
    """A waiting request; `arrived` in monotonic seconds."""

    client: bytes
    submit: Submit
    arrived: float
    compiled: Future[CompiledGrammar]


class GrammarQueue:
    """The requests that wait for a grammar, by client and id: `waiting`.

    Another thread calls `wake` when a grammar is compiled.
    """

    def __init__(self, grammars: Grammars | None, wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._wake = wake
        self.waiting: dict[tuple[bytes, str], PendingGrammar] = {}

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of the waiting requests."""
        return sum(len(each.submit.prompt_token_ids) for each in self.waiting.values())

    def add(self, client: bytes, submit: Submit, now: float) -> Rejected | None:
        """Compile a request's grammar, or return why it is refused."""
        grammar = submit.sampling.grammar
        assert grammar is not None, "only a request with a grammar waits for one"
        key = (client, submit.request_id)
        reason = "this rank compiles no grammars" if self._grammars is None else self._grammars.refusal
        if reason is not None or self._grammars is None:
            return _bad(submit, str(reason))
        if key in self.waiting:
            message = f"request {submit.request_id!r} is already running"
            return Rejected(request_id=submit.request_id, reason="duplicate", message=message)
        if len(self.waiting) >= MAX_COMPILING and not submit.output_token_ids:
            return _full(submit, f"{len(self.waiting)} grammars are being compiled")
        compiled = self._grammars.compile(grammar)
        self.waiting[key] = PendingGrammar(client=client, submit=submit, arrived=now, compiled=compiled)
        compiled.add_done_callback(lambda _: self._wake())
        return None

    def ready(self, now: float) -> Iterator[tuple[PendingGrammar, GrammarConstraint | Rejected]]:
        """Yield the requests whose wait is over, in order of arrival: each with its constraint, or a refusal. The
        caller may call `abort_client` between two of them; those requests are left out."""
        for key, each in list(self.waiting.items()):
            done = each.compiled.done()
            if (done or now - each.arrived > QUEUE_SECONDS) and self.waiting.pop(key, None) is not None:
                self._leave(each)
                yield each, self._result(each) if done else _late(each)

    def _result(self, each: PendingGrammar) -> GrammarConstraint | Rejected:
        assert self._grammars is not None, "a compiled grammar has its compiler"
        try:
            matcher = each.compiled.result()
        except GrammarError as error:
            return _bad(each.submit, f"the grammar cannot be compiled: {error}")
        except GrammarsFull as error:
            return _full(each.submit, str(error))
        constraint = self._grammars.constraint(matcher, each.submit.sampling)
        constraint.expect(tuple(each.submit.output_token_ids))
        return constraint

    def abort(self, client: bytes, request_id: str) -> Done | None:
        """End a waiting request; None if there is none with this id."""
        each = self.waiting.pop((client, request_id), None)
        if each is None:
            return None
        self._leave(each)
        return Done(
            request_id=request_id,
            finish_reason="abort",
            prompt_tokens=len(each.submit.prompt_token_ids),
            cached_tokens=0,
            completion_tokens=len(each.submit.output_token_ids),
        )

    def abort_client(self, client: bytes) -> None:
        """Forget all requests of a client that can no longer be reached."""
        for key in [key for key in self.waiting if key[0] == client]:
            self._leave(self.waiting.pop(key))

    def _leave(self, each: PendingGrammar) -> None:
        """End a wait. Cancel a compilation that has not begun if no other request waits for it."""
        if not each.compiled.done() and all(other.compiled is not each.compiled for other in self.waiting.values()):
            each.compiled.cancel()


def _bad(submit: Submit, message: str) -> Rejected:
    return Rejected(request_id=submit.request_id, reason="bad_request", message=message, param="grammar")


def _full(submit: Submit, message: str) -> Rejected:
    return Rejected(request_id=submit.request_id, reason="queue_full", message=message, retry_after=1.0)


def _late(each: PendingGrammar) -> Rejected:
    if each.compiled.running():
        return _bad(each.submit, f"the grammar was not compiled within {QUEUE_SECONDS:.0f} s")
    return _full(each.submit, f"{QUEUE_SECONDS:.0f} s were not enough for the grammars of earlier requests")
