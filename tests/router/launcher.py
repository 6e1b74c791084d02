"""A launcher that kills and replaces workers of a real router, and requests whose answers show any change."""

import asyncio
import dataclasses
import json

from tests.limits import HANG_SECONDS
from tests.router.scripted_worker import ScriptedWorker

from moeyard_router.config import WorkerAddress

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORLD = 3


class Launcher:
    """Replace lost workers: the survivors pause, the epoch rises, and the router gets the new addresses."""

    def __init__(self, service, script):
        self.service, self.script = service, script
        self.epoch = 0

    @property
    def workers(self):
        return self.service.workers

    def kill(self, *ranks):
        for worker in self.workers:
            if worker.rank not in ranks:
                worker.hold(f"rank {ranks[0]} lost at step 812")
        for rank in ranks:
            self.workers[rank].die()

    def replace(self, *ranks, then=lambda: None, incident=None):
        """Start workers at these ranks; they are ready only after `together`."""
        self.epoch += 1
        for rank in ranks:
            old = self.workers[rank]
            self.workers[rank] = new = ScriptedWorker(
                rank, len(self.workers), self.script, epoch=self.epoch, state="recovering"
            )
            new.pace, new.score_chunk = old.pace, old.score_chunk
        addresses = tuple(WorkerAddress(rank=w.rank, endpoint=w.endpoint) for w in self.workers)
        self.service.server.replace_workers(addresses, then, incident)

    def leave(self, *ranks):
        """Let the other ranks serve without these, in a new epoch."""
        self.epoch += 1
        there = [w for w in self.workers if w.rank not in ranks]
        for worker in there:
            worker.snapshot = dataclasses.replace(worker.snapshot, world_size=len(there))
        addresses = tuple(
            WorkerAddress(rank=w.rank, endpoint="" if w.rank in ranks else w.endpoint) for w in self.workers
        )
        self.service.server.replace_workers(addresses, lambda: None)
        for worker in there:
            worker.go_on(self.epoch)

    def together(self):
        for worker in self.workers:
            worker.snapshot = dataclasses.replace(worker.snapshot, world_size=len(self.workers))
        for worker in self.workers:
            worker.go_on(self.epoch)

    def heal(self, *ranks, incident=None):
        self.replace(*ranks, incident=incident)
        self.together()


def prepared(worker, script):
    worker.script = script
    worker.pace, worker.score_chunk = 0.003, 1


def bodies():
    """Return requests that cover every way in which an interruption could change an answer."""
    scored = {"max_tokens": 9, "prompt_logprobs": 1, "score": "as_decoded", "output_start": 8}
    plain = [{"prompt": f"{i}: once upon a time", "max_tokens": 40 + 7 * i, "return_token_ids": True} for i in range(7)]
    return [
        *({**body, "stream": True, "logprobs": 2, "stream_options": {"include_usage": True}} for body in plain[:3]),
        *({**body, "stream": True} for body in plain[3:5]),
        *plain[5:],
        {"prompt": "two of it", "n": 2, "max_tokens": 50, "stream": True, "logprobs": 1},
        {"prompt": "three of it", "n": 3, "max_tokens": 50},
        {"prompt": "until it stops", "max_tokens": 90, "stop": ["lazy dog"], "stream": True},
        {"prompt": "until it stops, whole", "max_tokens": 90, "stop": ["again and"], "n": 2},
        {"prompt": "with its prompt scored " * 3, "max_tokens": 60, "echo": True, "logprobs": 3},
        {"prompt": "streamed with its prompt " * 3, "max_tokens": 60, "echo": True, "logprobs": 1, "stream": True},
        {"prompt": "scored alone " * 5, "max_tokens": 0, "echo": True, "logprobs": 0},
        {"prompt": "scored like an output " * 5, **scored},
        {"messages": [{"role": "user", "content": "tell"}], "max_tokens": 80, "stream": True, "logprobs": True},
        {"messages": [{"role": "user", "content": "tell all"}], "max_tokens": 80, "top_logprobs": 2, "logprobs": True},
    ]


def folded(service, body):
    """Return an answer, or all events of a stream merged, because the split of tokens over events depends on timing."""
    path = CHAT if "messages" in body else COMPLETIONS
    if not body.get("stream"):
        answer = service.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return {k: v for k, v in answer.json().items() if k not in ("id", "created")}
    found = {}
    for event in service.stream(path, **body):
        assert "error" not in event, event
        for choice in event["choices"]:
            put(found.setdefault(choice["index"], {}), choice)
        if event.get("usage"):
            found["usage"] = event["usage"]
    return found


def put(found, part):
    for key, value in part.items():
        if isinstance(value, dict):
            put(found.setdefault(key, {}), value)
        elif isinstance(value, str | list) and key not in ("finish_reason", "stop_reason", "role"):
            found[key] = found.get(key, type(value)()) + value
        elif value is not None:
            found[key] = value


def sampled(service):
    return sum(w._sampled for w in service.workers)


def validate(service):
    """Run the fleet's own assertions in its event loop."""

    async def check():
        service.server._fleet.validate()

    asyncio.run_coroutine_threadsafe(check(), service.server._loop).result(HANG_SECONDS)


def incidents(service):
    return service.client.get("/v1/fleet/incidents").json()["incidents"]


def in_flight(service, pool, wait_for, count=4, **body):
    """Start streams and wait for their first tokens; each is a future of its events. The last tokens take 2 s."""
    begun = set()

    def read(i):
        body_i = {"prompt": f"{i} x", "max_tokens": 200, "stream": True, **body}
        found = []
        with service.client.stream("POST", COMPLETIONS, json=body_i) as answer:
            for line in answer.iter_lines():
                if line and line != "data: [DONE]":
                    found.append(json.loads(line[6:]))
                    begun.add(i)
        return found

    for worker in service.workers:
        worker.pace = 0.01
    futures = [pool.submit(read, i) for i in range(count)]
    wait_for(lambda: len(begun) == count, "the requests must run")
    return futures


def errors(future):
    """Return the error messages of a stream."""
    return [event["error"]["message"] for event in future.result(HANG_SECONDS) if "error" in event]
