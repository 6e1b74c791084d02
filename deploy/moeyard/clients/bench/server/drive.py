"""Conversations against a server: so many at once, or as they arrive."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from moeyard.clients.bench.server.answer import Answer
from moeyard.clients.bench.server.wire import Client
from moeyard.clients.bench.workload import Turn, Workload, arrivals, body


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a workload is brought to a server.

    `rate` None: closed loop, `concurrency` conversations at once, each followed by another. Else conversations arrive
    at `rate` per second, and at most `concurrency` (None: any number) run at once. Whichever of `num_requests` and
    `duration` (seconds) is reached first ends it: no request is begun then, those that run are waited for.
    """

    chat: bool
    model: str
    temperature: float
    extra: dict[str, Any]
    concurrency: int | None
    rate: float | None
    burstiness: float
    num_requests: int | None
    duration: float | None
    seed: int


@dataclass(slots=True)
class Course:
    """All answers of a run in the order of their end; `time.perf_counter` seconds, and CPU seconds of this process."""

    begun: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0
    interrupted: bool = False
    answers: list[Answer] = field(default_factory=list)


class Load:
    """One run. `on_answer` is called with each answer as it ends."""

    def __init__(self, client: Client, plan: Plan, workload: Workload, on_answer: Callable[[Answer], None]) -> None:
        self._client = client
        self._plan = plan
        self._workload = workload
        self._on_answer = on_answer
        self._begun_requests = 0
        self._conversations = itertools.count()
        self._group: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self.course = Course()

    async def run(self) -> Course:
        """To its end, or until `stop`."""
        cpu, self.course.begun = time.process_time(), time.perf_counter()
        async with asyncio.TaskGroup() as self._group:
            self._start(self._closed() if self._plan.rate is None else self._open(self._plan.rate))
        self.course.cpu_seconds = time.process_time() - cpu
        self.course.ended = max((a.ended for a in self.course.answers), default=time.perf_counter())
        return self.course

    def stop(self) -> None:
        """Break off: requests that run are cancelled and not counted."""
        self.course.interrupted = True
        for task in self._running:
            task.cancel()

    def _more(self) -> bool:
        plan = self._plan
        if self.course.interrupted or (plan.num_requests is not None and self._begun_requests >= plan.num_requests):
            return False
        return plan.duration is None or time.perf_counter() - self.course.begun < plan.duration

    async def _closed(self) -> None:
        async def one_after_the_other() -> None:
            while self._more():
                await self._converse(time.perf_counter())

        for _ in range(self._plan.concurrency or 1):
            self._start(one_after_the_other())

    async def _open(self, rate: float) -> None:
        room = None if self._plan.concurrency is None else asyncio.Semaphore(self._plan.concurrency)

        async def when_there_is_room(due: float) -> None:
            if room is None:
                await self._converse(due)
            else:
                async with room:
                    await self._converse(due)

        for due in self._dues(rate):
            await asyncio.sleep(due - time.perf_counter())
            self._start(when_there_is_room(due))

    def _dues(self, rate: float) -> Iterator[float]:
        """When conversations are due, as many as there are requests for."""
        plan = self._plan
        count = None if plan.num_requests is None else -(-plan.num_requests // self._workload.turns)
        last = float("inf") if plan.duration is None else plan.duration
        due = itertools.islice(arrivals(rate, plan.burstiness, plan.seed), count)
        return (self.course.begun + at for at in itertools.takewhile(lambda at: at < last, due))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._group is not None
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _converse(self, due: float) -> None:
        """Turn after turn; each resends what was said, and the first that fails ends it."""
        said: Any = [] if self._plan.chat else None
        for turn in self._workload.conversation(next(self._conversations)):
            if not self._more():
                return
            self._begun_requests += 1
            said = add(said, turn)
            answer = await self._ask(said, turn.max_tokens, due)
            self.course.answers.append(answer)
            self._on_answer(answer)
            if answer.error is not None:
                return
            said = answered(said, answer.text)
            due = time.perf_counter()

    async def _ask(self, prompt: Any, max_tokens: int, due: float) -> Answer:
        plan = self._plan
        endpoint = "chat/completions" if plan.chat else "completions"
        asked = body(
            prompt,
            chat=plan.chat,
            model=plan.model,
            max_tokens=max_tokens,
            temperature=plan.temperature,
            extra=plan.extra,
        )
        answer = await self._client.stream(endpoint, asked, due=due)
        if answer.error is None and answer.usage is None:
            answer.error = "the answer has no usage, so its tokens cannot be counted (stream_options.include_usage)"
        return answer


def add(said: Any, turn: Turn) -> Any:
    """A conversation with the user's next words: messages, text or ids, None for one that begins as text or ids."""
    if isinstance(said, list):
        return [*said, {"role": "user", "content": turn.prompt}]
    return turn.prompt if said is None else f"{said}\n{turn.prompt}"


def answered(said: Any, text: str) -> Any:
    """A conversation with an answer. Ids have one turn: nobody says which ids the text would be."""
    if isinstance(said, str):
        return said + text
    return [*said, {"role": "assistant", "content": text}] if isinstance(said[0], dict) else said
