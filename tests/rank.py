"""One rank in the test's process, stepped by hand like its engine: no sockets, no peers, no clock."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.assembly.worker import Worker
from moeyard_worker.engine.sampling.forced_output import forced_output
from moeyard_worker.protocol import Done, PromptExperts, PromptLogprobs, SamplingParams, Submit, TokenLogprob, Tokens
from moeyard_worker.scheduling.request import Constraint, SchedulerStats
from moeyard_worker.scheduling.scheduler import Scheduler

Requests = Mapping[str, tuple[list[int], SamplingParams]]
Depth = Callable[[int, int], int]


@dataclass(slots=True)
class Reply:
    """All messages about one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    experts: bytes = b""
    end: tuple[str, int | None] | None = None


def as_wanted(_number: int, wanted: int) -> int:
    """Return the depth that the scheduler wants."""
    return wanted


class Rank:
    """A loaded worker. `stop` its `worker`, or use it in a `with`.

    Otherwise the garbage collector closes its sockets, and the warning fails the test that runs then.
    """

    def __init__(self, model: Path, **options: Any) -> None:
        config = EngineConfig(model_path=str(model), **{"kv_memory": 4 << 20, **options})
        self.worker = Worker(WorkerSpec(config=config, rank=0, epoch=1, host="127.0.0.1", version="test"))
        try:
            self.worker.connect([self.worker.endpoints()["mesh"]])
            self.worker.load(1)
        except BaseException:
            self.worker.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.stop()

    def scheduler(self, **changes: Any) -> Scheduler:
        """Return an empty scheduler over the rank's pages; `changes` are fields of its config."""
        return Scheduler(replace(self.worker.scheduler.config, **changes))

    def run(
        self, requests: Requests, depth: Depth = as_wanted, **changes: Any
    ) -> tuple[dict[str, Reply], SchedulerStats]:
        """Run the first request, then all others at once.

        `depth` maps a step's number and wanted depth to the depth that its ranks agree on.
        """
        scheduler = self.scheduler(**changes)
        names = list(requests)
        replies = {}
        for some in (names[:1], names[1:]):
            replies |= self.serve(scheduler, {name: requests[name] for name in some}, depth)
        assert scheduler.pool.num_free == scheduler.config.num_pages
        self.worker.experts.validate()
        return replies, scheduler.stats

    def serve(
        self,
        scheduler: Scheduler,
        requests: Requests,
        depth: Depth = as_wanted,
        begun: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> dict[str, Reply]:
        """Run all requests at once, until nothing is left. `begun` maps names to the output to continue."""
        replies = {name: Reply() for name in requests}
        for name, (prompt, params) in requests.items():
            held: Constraint | None = None
            if params.grammar is not None:
                grammars = self.worker.grammars
                assert grammars is not None
                held = grammars.constraint(grammars.compile(params.grammar).result(), params)
            else:
                held = forced_output(params, vocab_size=scheduler.config.vocab_size)
            submit = Submit(
                request_id=name,
                prompt_token_ids=tuple(prompt),
                sampling=params,
                output_token_ids=begun.get(name, ()),
            )
            assert scheduler.add(submit, b"client", 0.0, held) is None
        self.step(scheduler, replies, depth)
        return replies

    def step(self, scheduler: Scheduler, replies: dict[str, Reply], depth: Depth = as_wanted) -> None:
        """Run steps until the scheduler has no work. Add the messages to `replies`."""
        flights: deque[Any] = deque()
        number = 0
        while scheduler.has_work() or flights:
            step = scheduler.schedule(0.0)
            if step.chunks:
                number += 1
                before = flights[-1] if flights else None
                self.worker.experts.begin_step(number)
                flights.append(
                    self.worker.runner.launch(
                        step, scheduler.requests(step), before=before, num_drafts=depth(number, step.num_drafts)
                    )
                )
                if len(flights) < scheduler.config.max_in_flight:
                    continue
            launched = flights.popleft()
            assert not launched.unsound
            replied = scheduler.complete(
                launched.step, launched.results, number * 0.01, launched.scores, launched.experts
            )
            for reply in replied:
                add_message(replies, reply.message)
            scheduler.validate()


def add_message(replies: dict[str, Reply], message: Any) -> None:
    """Add a message to its request's record; an end with an error is a failure."""
    if isinstance(message, Tokens):
        replies[message.request_id].token_ids += message.token_ids
        replies[message.request_id].logprobs += message.logprobs
        replies[message.request_id].experts += message.routed_experts
    elif isinstance(message, PromptExperts):
        replies[message.request_id].experts += message.experts
    elif isinstance(message, PromptLogprobs):
        replies[message.request_id].prompt_logprobs += message.logprobs
    else:
        assert isinstance(message, Done), message
        assert message.error is None, message
        replies[message.request_id].end = (message.finish_reason, message.stop_token_id)
