"""A checkpoint's text files, scripted workers behind real ZMQ sockets, and a real router before them."""

import asyncio
import dataclasses
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvloop
import zmq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from moeyard.listen import bind
from moeyard.routers import RouterProcesses
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.http.server import RouterServer
from moeyard_router.text.chat import TextCodec
from moeyard_worker.keys import WorkerKeys
from moeyard_worker.protocol import (
    Abort,
    Done,
    ExpertLoads,
    Hello,
    Inspect,
    Message,
    PromptLogprobs,
    Rejected,
    Snapshot,
    Submit,
    TokenLogprob,
    Tokens,
)
from moeyard_worker.sockets import Gate, lock
from moeyard_worker.wire import decode, encode

VOCAB_SIZE = 400  # a little more than the tokenizer has, as padded embeddings do
MAX_MODEL_LEN = 256
STORY = "The quick brown fox 你好 says 🙂 to the lazy dog, again and again. "
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Like Qwen3's in what it knows: tools, calls, tool messages, and a block of thinking that a switch closes at once.
TOOL_TEMPLATE = (
    "{% if tools %}<|system|>Tools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call: <tool_call>{"name": ..., "arguments": ...}</tool_call>{{ eos_token }}\n{% endif %}'
    "{% for m in messages %}{% if m.role == 'tool' %}<|user|><tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|{{ m.role }}|>{% if m.content is not none %}{{ m.content }}{% endif %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
KIMI_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{# <|tool_calls_section_begin|> #}<|assistant|>"
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small byte-level BPE tokenizer, its config and a chat template."""
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Characters beyond Latin-1 are not in the corpus, so each is spread over several tokens.
    known = STORY.encode("latin-1", "ignore").decode("latin-1")
    tokenizer.train_from_iterator([known, "Hello world. " * 3, "one two three stop"] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|eos|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def codec(checkpoint: Path) -> TextCodec:
    """The router's view of that tokenizer."""
    return TextCodec(checkpoint)


@pytest.fixture(scope="session")
def tool_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer with Qwen3's markers as added tokens and Kimi's as special ones, and a template with tools."""
    directory = tmp_path_factory.mktemp("tools")
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>", "<think>", "</think>")]
    )
    kimi = ("section_begin", "section_end"), ("begin", "end", "argument_begin")
    markers = [f"<|tool_calls_{end}|>" for end in kimi[0]] + [f"<|tool_call_{end}|>" for end in kimi[1]]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in markers])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text((checkpoint / "tokenizer_config.json").read_text())
    (directory / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    (directory / "kimi.jinja").write_text(KIMI_TEMPLATE)
    (directory / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return directory


@pytest.fixture(scope="session")
def tool_codec(tool_checkpoint: Path) -> TextCodec:
    """The router's view of it."""
    return TextCodec(tool_checkpoint)


@dataclasses.dataclass
class _Running:
    peer: bytes
    submit: Submit
    output: list[int]
    sent: int = 0
    scored: int = 0


class ScriptedWorker:
    """Speaks the worker's side of protocol.py over a real socket and emits the tokens that its script names.

    A sequence that comes with output goes on behind it, and what `scripted_logprob` says depends on the token alone: so
    an answer does not tell who gave it.

    Test knobs: `script` (Submit -> output ids), `chunk` (tokens per message), `score_chunk` (prompt tokens per message
    of their logprobs), `pace` (seconds per message), `paused`
    (accept but emit nothing), `reject` (answer every Submit with this), `loads` (the answer to Inspect, if any), `do`
    (run something in its thread). `hold` and `go_on` are what a survivor does while a peer is missing.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        script: Callable[[Submit], list[int]],
        *,
        epoch: int = 0,
        state: str = "ready",
        keys: WorkerKeys | None = None,
    ) -> None:
        self.rank = rank
        self.default_script = script
        self.submits: list[Submit] = []
        self.aborts: list[str] = []
        self.snapshot = Snapshot(
            rank=rank, world_size=world_size, epoch=epoch, step=0, state=state, failure=None, num_running=0,
            num_waiting=0, num_waiting_tokens=0, kv_pages_total=64, kv_pages_free=64, page_size=16,
            max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE,
        )  # fmt: skip
        self.reset()
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._peers: set[bytes] = set()
        self._running: dict[str, _Running] = {}
        self._sampled = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # as workers have it: this one writes faster than it is read
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        if keys is not None:
            Gate(self._context, key=keys.router)
            lock(self._socket, keys.own)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._alive = True
        self._thread = threading.Thread(target=self._run, name=f"worker-{rank}")
        self._thread.start()

    def reset(self) -> None:
        """Back to the defaults, records forgotten."""
        self.script = self.default_script
        self.chunk, self.pace, self.paused = 1, 0.0, False
        self.score_chunk = 4
        self.reject: Rejected | None = None
        self.loads: ExpertLoads | None = None
        self.submits.clear()
        self.aborts.clear()

    def die(self) -> None:
        """Close the socket at once, as the kernel does for a killed process."""
        self._alive = False
        self._thread.join()

    def do(self, action: Callable[[], None]) -> None:
        """Run `action` in the worker's thread, where `say` is allowed."""
        self._todo.put(action)

    def say(self, message: Message) -> None:
        """Send to every router. Only in the worker's thread."""
        self.say_raw(encode(message))

    def say_raw(self, frame: bytes) -> None:
        """Send bytes to every router. Only in the worker's thread."""
        for peer in self._peers:
            self._socket.send_multipart([peer, frame])

    def fail(self, failure: str) -> None:
        """Report that the fleet is broken, from any thread."""
        self.snapshot = dataclasses.replace(self.snapshot, state="failed", failure=failure)
        self.do(lambda: self.say(self.snapshot))

    def hold(self, why: str) -> None:
        """A peer is lost: run nothing, and say so; from any thread."""

        def recover() -> None:
            self.snapshot = dataclasses.replace(self.snapshot, state="recovering", failure=why)
            self.say(self.snapshot)

        self.do(recover)

    def go_on(self, epoch: int) -> None:
        """The fleet is whole again, under a new epoch; from any thread."""

        def ready() -> None:
            self.snapshot = dataclasses.replace(self.snapshot, state="ready", failure=None, epoch=epoch)
            self.say(self.snapshot)

        self.do(ready)

    def hang_up(self) -> None:
        """Break all connections of this process to it, and go on listening; from any thread."""
        port = int(self.endpoint.rpartition(":")[2])
        for connection in psutil.Process().net_connections("tcp"):
            if connection.raddr and connection.raddr.port == port:
                with socket.socket(fileno=os.dup(connection.fd)) as end:
                    end.shutdown(socket.SHUT_RDWR)

    @property
    def runs(self) -> list[str]:
        """What clients' sequences it has now."""
        return [name for name in self._running.copy() if not name.startswith("canary-")]

    def _run(self) -> None:
        while self._alive:
            busy = bool(self._running) and not self.paused and self.snapshot.state != "recovering"
            if self._socket.poll(0 if busy else 5):
                self._take()
            while not self._todo.empty():
                self._todo.get()()
            if busy:
                if self.pace:
                    time.sleep(self.pace)
                for running in list(self._running.values()):
                    self._emit(running)
        self._socket.close(0)
        self._context.term()

    def _take(self) -> None:
        peer, frame = self._socket.recv_multipart()
        message = decode(frame)
        if isinstance(message, Hello):
            self._peers.add(peer)
            self._socket.send_multipart([peer, encode(self.snapshot)])
        elif isinstance(message, Inspect):
            if self.loads is not None:
                self._socket.send_multipart([peer, encode(self.loads)])
        elif isinstance(message, Abort):
            self.aborts.append(message.request_id)
            running = self._running.pop(message.request_id, None)
            if running is not None:
                self._end(running, "abort")
        elif isinstance(message, Submit):
            canary = message.request_id.startswith("canary-")
            if not canary:
                self.submits.append(message)
                if self.reject is not None:
                    answer = dataclasses.replace(self.reject, request_id=message.request_id)
                    self._socket.send_multipart([peer, encode(answer)])
                    return
            output = [1] * message.sampling.max_tokens if canary else self.script(message)
            running = _Running(peer, message, output, len(message.output_token_ids), message.num_scored)
            assert list(message.output_token_ids) == output[: running.sent], "it was told something else"
            reason = self._ended(running) if running.sent else None
            if reason is not None:
                self._end(running, reason, output[running.sent - 1] if reason == "stop" else None)
                return
            self._running[message.request_id] = running
            self._load()

    def _load(self) -> None:
        self.snapshot = dataclasses.replace(
            self.snapshot,
            num_running=len(self._running),
            step=self.snapshot.step + 1,
            generation_tokens=self._sampled,
            kv_pages_free=self.snapshot.kv_pages_total - len(self._running),
        )
        self.say(self.snapshot)

    def _emit(self, running: _Running) -> None:
        sampling = running.submit.sampling
        if sampling.prompt_logprobs is not None and self._score(running):
            return
        if not sampling.max_tokens:
            del self._running[running.submit.request_id]
            self._end(running, "length")
            return
        ids: list[int] = []
        reason, start = None, running.sent
        while reason is None and len(ids) < self.chunk and running.sent < len(running.output):
            ids.append(running.output[running.sent])
            running.sent += 1
            reason = self._ended(running)
        logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.logprobs is not None:
            logprobs = tuple(scripted_logprob(i, sampling.logprobs) for i in ids)
        message = Tokens(
            request_id=running.submit.request_id, start=start, token_ids=tuple(ids), logprobs=logprobs,
            cached_tokens=None if start else 3,
        )  # fmt: skip
        self._sampled += len(ids)
        self._socket.send_multipart([running.peer, encode(message)])
        if reason is not None:
            del self._running[running.submit.request_id]
            self._end(running, reason, ids[-1] if reason == "stop" else None)

    def _ended(self, running: _Running) -> str | None:
        """The finish reason, if its last token ended it."""
        sampling, token_id = running.submit.sampling, running.output[running.sent - 1]
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos and not sampling.grammar else {1})
        if token_id in ends and running.sent > sampling.min_tokens:
            return "stop"
        return "length" if running.sent == sampling.max_tokens else None

    def _score(self, running: _Running) -> bool:
        """The next `score_chunk` log-probabilities of the prompt; False if there are no more."""
        top, ids = running.submit.sampling.prompt_logprobs or 0, running.submit.prompt_token_ids
        start = running.scored + 1
        some = tuple(scripted_logprob(i, top) for i in ids[start : start + self.score_chunk])
        if not some:
            return False
        running.scored += len(some)
        message = PromptLogprobs(request_id=running.submit.request_id, start=start, logprobs=some)
        self._socket.send_multipart([running.peer, encode(message)])
        return True

    def _end(self, running: _Running, reason: str, stop_token_id: int | None = None) -> None:
        done = Done(
            request_id=running.submit.request_id,
            finish_reason=reason,
            prompt_tokens=len(running.submit.prompt_token_ids),
            cached_tokens=3,
            completion_tokens=running.sent,
            stop_token_id=stop_token_id,
        )
        self._socket.send_multipart([running.peer, encode(done)])
        self._load()


def scripted_logprob(token_id: int, top: int) -> TokenLogprob:
    """The chosen token second, behind its neighbours."""
    likeliest = tuple((token_id + 1 + i, -0.25 * (i + 1)) for i in range(top))
    return TokenLogprob(logprob=-1.5, rank=2, top=likeliest)


@dataclasses.dataclass
class Service:
    """A running router, its workers and a client. `lost` are the ranks that it reported, `failures` the reasons."""

    url: str
    client: httpx.Client
    workers: list[ScriptedWorker]
    server: RouterServer | RouterProcesses
    failures: list[str]
    lost: list[int]

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST a JSON body."""
        return self.client.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, **body: Any) -> dict[str, Any]:
        """A chat completion that must succeed."""
        answer = self.post("/v1/chat/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All events of a stream that must end with [DONE]."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]

    def wait_idle(self) -> None:
        """Until nothing is in flight; fails if a sequence leaked."""
        wait_for(lambda: self.client.get("/v1/fleet").json()["inflight"] == 0, "sequences still in flight")

    @property
    def submits(self) -> list[Submit]:
        """What all workers were given."""
        return [s for w in self.workers for s in w.submits]

    @property
    def aborts(self) -> list[str]:
        """What all workers were told to stop."""
        return [a for w in self.workers for a in w.aborts]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 5.0) -> float:
    """Poll until `condition` holds; how long it took. Fails with `what` after `seconds`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, what
        time.sleep(0.005)
    return time.monotonic() - start


@pytest.fixture(name="wait_for")
def wait_for_fixture() -> Callable[..., float]:
    """Poll until a condition holds."""
    return wait_for


class Starter:
    """Starts services and ends them all."""

    def __init__(self, checkpoint: Path, script: Callable[[Submit], list[int]]) -> None:
        self._checkpoint = checkpoint
        self._script = script
        self._started: list[tuple[Service, threading.Thread]] = []

    def __call__(
        self,
        num_workers: int = 2,
        *,
        ready: bool = True,
        through: Callable[[str], str] = lambda endpoint: endpoint,
        prepare: Callable[[ScriptedWorker], None] = lambda worker: None,
        num_routers: int = 1,
        locked: WorkerKeys | None = None,
        **overrides: Any,
    ) -> Service:
        """A router with `num_workers` scripted workers; `overrides` are fields of RouterConfig.

        `prepare` sets up each worker before the router knows it; `through` reroutes endpoints. Several routers are
        processes of their own.
        """
        workers = [ScriptedWorker(rank, num_workers, self._script, keys=locked) for rank in range(num_workers)]
        for worker in workers:
            prepare(worker)
        addresses = tuple(
            WorkerAddress(
                rank=w.rank, endpoint=through(w.endpoint), metrics_url=f"http://127.0.0.1:{9100 + w.rank}/metrics"
            )
            for w in workers
        )
        options: dict[str, Any] = {
            "model_name": "tiny",
            "model_path": self._checkpoint,
            "workers": addresses,
            "max_model_len": MAX_MODEL_LEN,
            "vocab_size": VOCAB_SIZE,
            "eos_token_ids": (1,),
            "shutdown_grace": 0.2,
            "step_deadline": 2.0,
        }
        config = RouterConfig(**{**options, **overrides})
        sock = socket.create_server(("127.0.0.1", 0)) if num_routers == 1 else bind("127.0.0.1", 0, shared=True)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        is_ready, failures, lost = threading.Event(), [], []

        def on_lost(rank: int, reason: str) -> None:
            lost.append(rank)
            failures.append(reason)

        callbacks: dict[str, Any] = {"on_ready": is_ready.set, "on_lost": on_lost}
        server: RouterServer | RouterProcesses
        if num_routers == 1:
            server = RouterServer(config, sock, **callbacks)
        else:
            server = RouterProcesses(config, sock, count=num_routers, **callbacks)

        def run() -> None:
            if isinstance(server, RouterProcesses):
                server.run()
                return
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(server.serve())

        thread = threading.Thread(target=run, name="router")
        thread.start()
        client = httpx.Client(base_url=url, timeout=10)
        service = Service(url, client, workers, server, failures, lost)
        self._started.append((service, thread))
        if ready:
            assert is_ready.wait(5 if num_routers == 1 else 30), client.get("/readyz").text
        return service

    def close(self) -> None:
        """Stop everything."""
        for service, thread in self._started:
            service.client.close()
            service.server.stop()
            thread.join(10)
            for worker in service.workers:
                worker.die()
            assert not thread.is_alive(), "the router did not stop"


@pytest.fixture(scope="session")
def story(codec: TextCodec) -> Callable[[Submit], list[int]]:
    """The default script: the story's tokens, over and over."""
    ids = codec.encode(STORY, add_special_tokens=False)

    def script(submit: Submit) -> list[int]:
        return (ids * (submit.sampling.max_tokens // len(ids) + 1))[: submit.sampling.max_tokens]

    return script


@pytest.fixture
def start(checkpoint: Path, story: Callable[[Submit], list[int]]) -> Iterator[Starter]:
    """Start services of one's own."""
    starter = Starter(checkpoint, story)
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def starter(checkpoint: Path, story: Callable[[Submit], list[int]]) -> Iterator[Starter]:
    """Start services for all tests of a module."""
    starter = Starter(checkpoint, story)
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def shared_service(starter: Starter) -> Service:
    """One service for all tests of a module; use `service`."""
    return starter()


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    """The module's service with workers as new; afterwards nothing may be in flight."""
    for worker in shared_service.workers:
        worker.reset()
    yield shared_service
    for worker in shared_service.workers:
        worker.paused = False
    shared_service.wait_idle()
