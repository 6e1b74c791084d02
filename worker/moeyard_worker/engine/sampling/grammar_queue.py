"""Requests whose grammars are being compiled: they wait here, and the scheduler sees them when they can run.

No step waits for a compilation: threads of `Grammars` wait for its process, and the engine's loop asks at each turn
which are done.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from moeyard_worker.engine.sampling.grammar_forks import Compiled, GrammarError, GrammarsFull
from moeyard_worker.engine.sampling.grammars import Constraint, Grammars
from moeyard_worker.protocol import Done, Rejected, Submit

# How long a request waits for its grammar, in seconds.
COMPILE_SECONDS = 10.0
MAX_COMPILING = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """A request that waits; `arrived` in monotonic seconds."""

    client: bytes
    submit: Submit
    arrived: float
    compiled: Future[Compiled]


class GrammarQueue:
    """Owner of the requests that wait for a grammar, by client and id: `waiting`.

    `wake` is called by another thread when one is compiled.
    """

    def __init__(self, grammars: Grammars | None, wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._wake = wake
        self.waiting: dict[tuple[bytes, str], Compiling] = {}

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of the requests that wait."""
        return sum(len(each.submit.prompt_token_ids) for each in self.waiting.values())

    def add(self, client: bytes, submit: Submit, now: float) -> Rejected | None:
        """Have a request's grammar compiled, or say why not."""
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
        self.waiting[key] = Compiling(client=client, submit=submit, arrived=now, compiled=compiled)
        compiled.add_done_callback(lambda _: self._wake())
        return None

    def ready(self, now: float) -> Iterator[tuple[Compiling, Constraint | Rejected]]:
        """Those whose wait is over, in order of arrival: with what holds them to their grammar, or a refusal.

        Between two of them the caller may end others, by `abort_client`: these are left out.
        """
        for key, each in list(self.waiting.items()):
            done = each.compiled.done()
            if (done or now - each.arrived > COMPILE_SECONDS) and self.waiting.pop(key, None) is not None:
                self._leave(each)
                yield each, self._result(each) if done else _late(each)

    def _result(self, each: Compiling) -> Constraint | Rejected:
        assert self._grammars is not None, "somebody compiled it"
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
        """End one that waits; None when there is none of this name."""
        each = self.waiting.pop((client, request_id), None)
        if each is None:
            return None
        self._leave(each)
        return _aborted(each.submit)

    def abort_client(self, client: bytes) -> None:
        """Forget all requests of a client that can no longer be reached."""
        for key in [key for key in self.waiting if key[0] == client]:
            self._leave(self.waiting.pop(key))

    def _leave(self, each: Compiling) -> None:
        """One waits no more. What nobody waits for is not begun: others, in a while, would wait for that."""
        if not each.compiled.done() and all(other.compiled is not each.compiled for other in self.waiting.values()):
            each.compiled.cancel()


def _bad(submit: Submit, message: str) -> Rejected:
    return Rejected(request_id=submit.request_id, reason="bad_request", message=message)


def _full(submit: Submit, message: str) -> Rejected:
    return Rejected(request_id=submit.request_id, reason="queue_full", message=message, retry_after=1.0)


def _late(each: Compiling) -> Rejected:
    """Refuse a request that has waited too long: by its grammar if that is being compiled, else by those before it."""
    if each.compiled.running():
        return _bad(each.submit, f"the grammar was not compiled within {COMPILE_SECONDS:.0f} s")
    return _full(each.submit, f"{COMPILE_SECONDS:.0f} s were not enough for the grammars of earlier requests")


def _aborted(submit: Submit) -> Done:
    return Done(
        request_id=submit.request_id,
        finish_reason="abort",
        prompt_tokens=len(submit.prompt_token_ids),
        cached_tokens=0,
        completion_tokens=len(submit.output_token_ids),
    )
