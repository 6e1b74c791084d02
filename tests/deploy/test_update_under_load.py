"""A real `moeyard serve` changes its weights while clients stream: no request fails, and no answer is a mixture.

Every answer names the versions of its spans. A span must be what a fresh fleet with that version computes behind the
tokens before it, log-probabilities included.
"""

import contextlib
import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.checkpoints import VOCAB_SIZE, add_drafts, make_checkpoint
from tests.deploy.test_serve import Command
from tests.fleet import ProcessPool, start_fleet
from tests.limits import HANG_SECONDS

from moeyard_worker.config.engine_config import EngineConfig

CLIENTS, PROMPTS = 6, 24
OPTIONS: dict[str, Any] = {"speculate": "mtp", "draft_tokens": 2}


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB_SIZE, 20 + 9 * seed).tolist()


def sampling(seed: int) -> dict[str, Any]:
    return {"max_tokens": 30 + 4 * (seed % 8), "temperature": 0.9, "seed": seed, "ignore_eos": True, "logprobs": 0}


@dataclass(slots=True)
class Answer:
    """An answer to the prompt of `seed`: ids, log-probabilities, spans and fingerprint."""

    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""
    fingerprint: str = ""

    def take(self, body: dict[str, Any]) -> None:
        """Take a whole answer, or one event of a stream."""
        self.fingerprint = body["system_fingerprint"]
        for choice in body["choices"]:
            self.ids += choice["token_ids"]
            if choice["logprobs"] is not None:
                self.logprobs += [each["logprob"] for each in choice["logprobs"]["content"]]
            self.spans = choice.get("weight_versions", self.spans)
            self.reason = choice["finish_reason"] or self.reason


class Load:
    """Clients that ask without pause, half of them with streams. `failures` are answers that are none."""

    def __init__(self, url: str) -> None:
        self.answers: list[Answer] = []
        self.failures: list[str] = []
        self._url, self._over = url, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(HANG_SECONDS)

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(timeout=HANG_SECONDS) as client:
            while not self._over.is_set():
                answer = Answer(rng.randrange(PROMPTS))
                try:
                    self._ask(client, answer, stream=number % 2 == 0)
                except Exception as error:  # boundary: the test names it
                    self.failures.append(f"{type(error).__name__}: {error}")
                    return

    def _ask(self, client: httpx.Client, answer: Answer, *, stream: bool) -> None:
        body = {"token_ids": prompt(answer.seed), "sampling_params": sampling(answer.seed), "stream": stream}
        with client.stream("POST", f"{self._url}/inference/v1/generate", json=body) as reply:
            if not stream or reply.status_code != 200:
                reply.read()
                assert reply.status_code == 200, reply.text
                answer.take(reply.json())
            else:
                lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
                assert lines[-1] == "[DONE]", lines[-1]
                for line in lines[:-1]:
                    answer.take(json.loads(line))
        assert answer.reason in ("length", "abort"), answer
        self.answers.append(answer)


class Trainer:
    """Speaks to the control socket."""

    def __init__(self, served: Command) -> None:
        (path,) = served.temporary.glob("moeyard-control-*/*.sock")
        transport = httpx.HTTPTransport(uds=str(path))
        self._client = httpx.Client(transport=transport, base_url="http://trainer", timeout=HANG_SECONDS)

    def post(self, path: str, *, status: int = 200, **body: Any) -> dict[str, Any]:
        answer = self._client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return dict(answer.json())

    def get(self, path: str) -> dict[str, Any]:
        return dict(self._client.get(path).json())

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints whose layers have states per sequence and drafts."""
    root = tmp_path_factory.mktemp("models")
    # The ready line names the first one.
    found = {
        letter: make_checkpoint(root / name, "qwen3_5_moe_text", seed=seed, tokenizer=True)
        for seed, (letter, name) in enumerate((("a", "demo"), ("b", "b")))
    }
    for each in found.values():
        add_drafts(each)
    return found


@pytest.fixture
def served(models: dict[str, Path], tmp_path: Path) -> Iterator[Command]:
    flags = ("--workers", "2", "--port", "0", "--kv-memory", "8MiB", "--speculate", "mtp", "--draft-tokens", "2")
    flags = (*flags, "--restart-limit", "100")
    with contextlib.closing(Command(tmp_path, "serve", str(models["a"]), *flags)) as command:
        command.wait_ready()
        yield command


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPool]:
    pool = ProcessPool()
    yield pool
    pool.close()


def check(answers: list[Answer], models: dict[str, Path], processes: ProcessPool) -> Counter[str]:
    """Compare every span with a fresh fleet of its version. Return how many answers have which letters, in order.

    A version's first letter names its checkpoint; "default" is a.
    """
    letter_of = lambda version: "a" if version == "default" else version[0]  # noqa: E731
    wanted: dict[str, dict[str, tuple[Answer, int, int]]] = defaultdict(dict)
    for number, answer in enumerate(answers):
        places = [(span["start"], span["end"]) for span in answer.spans]
        assert [start for start, _ in places] == [0, *(end for _, end in places)][: len(places)], answer.spans
        assert (places[-1][1] if places else 0) == len(answer.ids) == len(answer.logprobs), answer
        for span in answer.spans:
            wanted[letter_of(span["version"])][f"{number}-{span['start']}"] = answer, span["start"], span["end"]
    for letter, spans in wanted.items():
        config = EngineConfig(model_path=str(models[letter]), num_workers=1, kv_memory=64 << 20, **OPTIONS)
        with start_fleet(processes, config) as fleet:
            for name, (answer, start, _) in spans.items():
                forced = {"trace_decode_token_ids": tuple(answer.ids[:start])}
                fleet.client.submit(0, name, prompt(answer.seed), **sampling(answer.seed), **forced)
            for name, found in zip(spans, fleet.client.wait(*spans, timeout=600.0), strict=True):
                answer, start, end = spans[name]
                assert answer.ids[start:end] == found.token_ids[start:end], f"tokens {start} to {end} of {answer}"
                fresh = [each.logprob for each in found.logprobs[start:end]]
                assert answer.logprobs[start:end] == fresh, f"log-probabilities {start} to {end} of {answer}"
    prints = defaultdict(set)
    for answer in answers:
        if answer.spans:
            prints[letter_of(answer.spans[-1]["version"])].add(answer.fingerprint)
    assert all(len(each) == 1 for each in prints.values()), prints
    assert len(set.union(*prints.values())) == len(prints), "the fingerprint must change with the weights"
    return Counter("".join(letter_of(span["version"]) for span in answer.spans) for answer in answers)


def cycle(trainer: Trainer, models: dict[str, Path], number: int) -> None:
    """Change to the other weights, in one of four ways in turn."""
    letter = "ba"[number % 2]
    body = {"model_path": str(models[letter]), "weight_version": f"{letter}{number}"}
    way = number // 2 % 4
    if way == 0:
        trainer.post("/update_weights_from_disk", **body, is_async=True)
    elif way == 1:
        trainer.post("/update_weights_from_disk", **body)
    elif way == 2:
        trainer.post("/pause?mode=keep")
        assert trainer.get("/is_paused") == {"is_paused": True}
        trainer.post("/update_weights_from_disk", **body)
        trainer.post("/resume")
    else:
        trainer.post("/update_weights_from_disk", **body, abort_all_requests=True)
    assert trainer.get("/weight_info")["weight_version"] == body["weight_version"]


def changing(
    served: Command, models: dict[str, Path], cycles: int, between: Callable[[int], None] = lambda number: None
) -> Load:
    """Run updates under load, with pauses in which answers begin. Return the load, which is over."""
    with contextlib.closing(Trainer(served)) as trainer, Load(served.url) as load:
        served.wait_for(lambda: len(load.answers) > CLIENTS or bool(load.failures))
        for number in range(cycles):
            between(number)
            cycle(trainer, models, number)
            done = len(load.answers)
            served.wait_for(lambda done=done: len(load.answers) > done + CLIENTS // 2 or bool(load.failures))  # type: ignore[misc]
    return load


@pytest.mark.slow
def test_twenty_updates_under_load(served: Command, models: dict[str, Path], processes: ProcessPool) -> None:
    load = changing(served, models, 20)
    assert load.failures == []
    kinds = check(load.answers, models, processes)
    print(f"20 updates: {sum(kinds.values())} answers, {dict(kinds)}, 0 failed, 0 mixed")
    aborted = sum(answer.reason == "abort" for answer in load.answers)
    assert kinds["a"] > 20
    assert kinds["b"] > 20
    assert min(kinds["ab"], kinds["ba"]) > 2, "too few answers were under way during an update"
    assert aborted > 0
    assert served.incidents()[0]["planned"], "an update is no incident"


@pytest.mark.slow
def test_rank_killed_in_the_middle_of_updates(served: Command, models: dict[str, Path], processes: ProcessPool) -> None:
    """A rank dies at random moments of the updates. Whatever each update says, no answer is a mixture."""
    rng, outcomes = random.Random(5), Counter[str]()
    with contextlib.closing(Trainer(served)) as trainer, Load(served.url) as load:
        for number in range(8):
            letter, before = "ba"[number % 2], trainer.get("/weight_info")["weight_version"]
            rank, delay = served.ranks()[rng.randrange(2)], rng.choice([0.0, 0.03, 0.06, 0.09, 0.12, 0.2])
            kill = threading.Timer(delay, rank.kill)
            kill.start()
            version = f"{letter}{number}"
            body = {"model_path": str(models[letter]), "weight_version": version, "is_async": True}
            said = trainer._client.post("/update_weights_from_disk", json=body)
            kill.join()
            now = trainer.get("/weight_info")["weight_version"]
            assert now == (version if said.status_code == 200 else before), said.text
            assert said.status_code == 200 or "the old weights remain in service" in said.text
            outcomes["committed" if said.status_code == 200 else "refused"] += 1
            served.wait_for(lambda rank=rank: len(served.ranks()) == 2 and not rank.is_running())  # type: ignore[misc]
            served.wait_for(served.is_ready)
            done = len(load.answers)
            served.wait_for(lambda done=done: len(load.answers) > done + CLIENTS or bool(load.failures))  # type: ignore[misc]
    print(f"8 kills: {dict(outcomes)}, {len(load.answers)} answers")
    assert load.failures == []
    check(load.answers, models, processes)
