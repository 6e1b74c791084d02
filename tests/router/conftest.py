"""A checkpoint's text files, scripted workers behind real ZMQ sockets, and a real router in front of them."""

import asyncio
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from tests.browser import Browser, find_browser
from tests.limits import HANG_SECONDS
from tests.router.launcher import WORLD, Launcher, prepared, validate
from tests.router.scripted_worker import MAX_MODEL_LEN, VOCAB_SIZE, ScriptedWorker
from tests.router.tool_model import LONG, Model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from moeyard.fleet.routers import RouterProcesses
from moeyard.listen import bind
from moeyard_router.api.large import Bodies
from moeyard_router.config import RoutedShape, RouterConfig, WorkerAddress
from moeyard_router.http.server import RouterServer
from moeyard_router.text.chat import TextCodec
from moeyard_worker.keys import WorkerKeys
from moeyard_worker.protocol import Submit

STORY = "The quick brown fox 你好 says 🙂 to the lazy dog, again and again. "
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# The same features as Qwen3's template: tools, calls, tool messages, and a thinking block that a switch closes at once.
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
    # The corpus has no characters beyond Latin-1, so each of them takes several tokens.
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
    return TextCodec(checkpoint)


@pytest.fixture(scope="session")
def tool_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer with Qwen3's markers as added tokens, Kimi's as special tokens, and a template with tools."""
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
    return TextCodec(tool_checkpoint)


@dataclasses.dataclass
class Service:
    """A running router, its workers and a client. `lost` and `failures` are the ranks and reasons that it reported."""

    url: str
    client: httpx.Client
    workers: list[ScriptedWorker]
    server: RouterServer | RouterProcesses
    failures: list[str]
    lost: list[int]

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        """Return a completion that must succeed."""
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, **body: Any) -> dict[str, Any]:
        """Return a chat completion that must succeed."""
        answer = self.post("/v1/chat/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Return all events of a stream that must end with [DONE]."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]

    def wait_idle(self) -> None:
        """Wait until nothing is in flight and every worker has ended its sequences; fail if a sequence leaked."""
        wait_for(lambda: self.client.get("/v1/fleet").json()["inflight"] == 0, "sequences still in flight")
        wait_for(lambda: not any(w.busy for w in self.workers), "sequences still run")

    @property
    def submits(self) -> list[Submit]:
        """Requests that all workers received."""
        return [s for w in self.workers for s in w.submits]

    @property
    def aborts(self) -> list[str]:
        """Aborts that all workers received."""
        return [a for w in self.workers for a in w.aborts]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll until `condition` holds; fail with `what` after a time limit."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < HANG_SECONDS, what
        time.sleep(0.005)


@pytest.fixture(name="wait_for")
def wait_for_fixture() -> Callable[..., None]:
    return wait_for


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests whose answers a test reads later."""
    with ThreadPoolExecutor(32) as pool:
        yield pool


class BodiesOnDemand(Bodies):
    """Bodies whose processes start with the first large body."""

    def start(self) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def bodies_on_demand() -> Iterator[None]:
    """Save each router's two processes for large bodies, half a second of a core each. Few tests send such a body."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moeyard_router.http.server.Bodies", BodiesOnDemand)
        yield


class Starter:
    """Start services and stop them all at the end."""

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
        """Start a router with `num_workers` scripted workers; `overrides` are fields of RouterConfig.

        Workers accept sequences as long as the router promises. `prepare` sets up each worker before the router
        connects; `through` reroutes endpoints. With several routers, each is a process.
        """
        workers = [ScriptedWorker(rank, num_workers, self._script, keys=locked) for rank in range(num_workers)]
        longest = overrides.get("max_model_len", MAX_MODEL_LEN)
        for worker in workers:
            length = max(longest, worker.snapshot.max_model_len)
            worker.snapshot = dataclasses.replace(worker.snapshot, max_model_len=length)
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
            "step_deadline": HANG_SECONDS,
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
        client = httpx.Client(base_url=url, timeout=HANG_SECONDS)
        service = Service(url, client, workers, server, failures, lost)
        self._started.append((service, thread))
        if ready:
            assert is_ready.wait(HANG_SECONDS), client.get("/readyz").text
        return service

    def close(self) -> None:
        """Stop everything; until then all invariants of the fleet hold."""
        for service, thread in self._started:
            service.client.close()
            fleet = service.server._fleet if isinstance(service.server, RouterServer) else None
            admission = None if fleet is None else fleet.admission
            if thread.is_alive() and admission is not None and admission.stopping is None and not admission.given_up:
                validate(service)
            service.server.stop()
            thread.join(HANG_SECONDS)
            for worker in service.workers:
                worker.die()
            assert not thread.is_alive(), "the router did not stop"


@pytest.fixture(scope="session")
def story(codec: TextCodec) -> Callable[[Submit], list[int]]:
    """The default script: the story's tokens, repeated."""
    ids = codec.encode(STORY, add_special_tokens=False)

    def script(submit: Submit) -> list[int]:
        return (ids * (submit.sampling.max_tokens // len(ids) + 1))[: submit.sampling.max_tokens]

    return script


@pytest.fixture
def start(checkpoint: Path, story: Callable[[Submit], list[int]]) -> Iterator[Starter]:
    """A starter for one test."""
    starter = Starter(checkpoint, story)
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def starter(checkpoint: Path, story: Callable[[Submit], list[int]]) -> Iterator[Starter]:
    """A starter for all tests of a module."""
    starter = Starter(checkpoint, story)
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def shared_service(starter: Starter) -> Service:
    """One service for all tests of a module; tests use `service`."""
    return starter()


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    """The module's service with reset workers; at the end nothing may be in flight."""
    for worker in shared_service.workers:
        worker.reset()
    yield shared_service
    for worker in shared_service.workers:
        worker.paused = False
    shared_service.wait_idle()


@pytest.fixture(scope="module")
def tool_service(starter: Starter, tool_checkpoint: Path) -> Service:
    """One service with tools and reasoning for all tests of a module; tests use `model`."""
    return starter(1, model_path=tool_checkpoint, **LONG)


@pytest.fixture
def model(tool_service: Service, tool_codec: TextCodec) -> Iterator[Model]:
    """The module's tool service with a reset worker; at the end nothing may be in flight."""
    tool_service.workers[0].reset()
    yield Model(tool_service, tool_codec)
    tool_service.wait_idle()


@pytest.fixture(scope="session")
def script(codec: TextCodec) -> Callable[[Submit], list[int]]:
    """The story, starting at a place that depends on the prompt, so that requests have different answers."""
    ids = codec.encode(STORY, add_special_tokens=False)

    def script(submit: Submit) -> list[int]:
        start = sum(submit.prompt_token_ids) % len(ids)
        return (ids * (submit.sampling.max_tokens // len(ids) + 2))[start : start + submit.sampling.max_tokens]

    return script


@pytest.fixture
def launched(start: Starter, script: Callable[[Submit], list[int]]) -> tuple[Service, Launcher]:
    """A service of three workers and its launcher."""
    shape = RoutedShape(top_k=2, id_bytes=1, places=(0, 1, 2), num_layers=3)
    service = start(WORLD, prepare=lambda worker: prepared(worker, script), routing=shape)
    return service, Launcher(service, script)


@pytest.fixture(scope="module")
def browser_or_none() -> Iterator[Browser | None]:
    program = find_browser()
    if program is None:
        yield None
        return
    browser = Browser(program)
    yield browser
    browser.close()


@pytest.fixture
def browser(browser_or_none: Browser | None) -> Browser:
    if browser_or_none is None:
        pytest.skip("no Chromium on PATH")
    return browser_or_none
