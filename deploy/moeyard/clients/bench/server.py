"""`moeyard bench URL`: load a server with conversations, in a closed or open loop, and report its figures."""

import argparse
import asyncio
import datetime
import itertools
import json
import platform
import random
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvloop
from tqdm import tqdm

from moeyard import __version__
from moeyard.clients.api_client import StreamedAnswer, first_model, streamed
from moeyard.clients.bench.bench_config import ServerBenchConfig
from moeyard.clients.bench.figures import LoadRun, errors, figures, parse_slo, request_rows
from moeyard.clients.bench.http_client import Client
from moeyard.clients.bench.report import compare, describe, draw
from moeyard.clients.bench.workload import WORDS, PromptTurn, Workload, Yardstick, arrivals
from moeyard.clients.target_config import Target, parse_target
from moeyard.options import values

KIND = "moeyard bench server"
DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8
# Prompt lengths, in words, that measure tokens per word.
PROBES = (4, 28)
MAX_PROBE_TOKENS = 2048
WARMUP_SEED = -1
FACTS = ("model", "endpoint", "prompts", "seed", "temperature", "extra_body")


def bench_server(args: argparse.Namespace) -> int:
    """Measure as the flags say; returns the exit code: 1 if no request came whole, 130 if broken off.

    Raises ValueError with one line for flags that do not go together and for a server that cannot be measured.
    """
    config = ServerBenchConfig(**values(ServerBenchConfig, args))
    slo = check(config)
    stored = [read_result(path) for path in config.compare]
    if len(stored) == 2:
        print(compare(stored[0], stored[1], (str(config.compare[0]), str(config.compare[1]))))
        return 0
    target = parse_target(args.url, args.api_key)
    result = measure(target, resolved(config, args.model or first_model(target)), slo)
    if config.json is not None:
        config.json.write_text(json.dumps(result, indent=1) + "\n")
    if config.png is not None:
        draw(result, config.png)
    print(describe(result))
    if stored:
        print("\n" + compare(stored[0], result, (str(config.compare[0]), "this run")))
    if result["facts"]["interrupted"]:
        return 130
    return 0 if result["figures"]["completed"] else 1


def check(config: ServerBenchConfig) -> dict[str, float]:
    """The objectives of --slo. Raises ValueError for flags that cannot be followed, before anything is sent."""
    if len(config.compare) > 2:
        raise ValueError(f"--compare takes one or two files, got {len(config.compare)}; put the URL before it")
    if config.prompts == "ids" and config.endpoint != "completions":
        raise ValueError("--prompts ids goes with --endpoint completions: a chat has text")
    if config.prompts == "ids" and config.turns > 1:
        raise ValueError("--turns goes with --prompts words: an answer has text, and history resends it")
    if config.rate is None and config.burstiness != 1.0:
        raise ValueError("--burstiness goes with --rate: a closed loop has no arrivals")
    if config.png is not None and find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib: pip install 'moeyard[bench]'")
    for flag, path in (("--json", config.json), ("--png", config.png)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"{flag} {path} is no place for a file; name a file in a directory that is there")
    return {} if config.slo is None else parse_slo(config.slo)


def read_result(path: Path) -> dict[str, Any]:
    """A result of --json. Raises ValueError for another file."""
    try:
        result = json.loads(path.read_text())
    except ValueError:
        result = None
    if not isinstance(result, dict) or result.get("kind") != KIND:
        raise ValueError(f"{path} is no result of `moeyard bench URL --json`; name one with --compare")
    return result


def resolved(config: ServerBenchConfig, model: str) -> ServerBenchConfig:
    """The same with the defaults that depend on each other."""
    return replace(
        config,
        model=model,
        concurrency=config.concurrency or (DEFAULT_CONCURRENCY if config.rate is None else None),
        num_requests=config.num_requests or (DEFAULT_REQUESTS if config.duration is None else None),
        seed=secrets.randbits(31) if config.seed is None else config.seed,
        extra_body={**({"ignore_eos": True} if config.ignore_eos else {}), **config.extra_body},
    )


def measure(target: Target, config: ServerBenchConfig, slo: dict[str, float]) -> dict[str, Any]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run = runner.run(_run(target, config))
    return {
        "kind": KIND,
        "version": 1,
        "facts": facts_of(target, config, interrupted=run.interrupted),
        "figures": figures(run, slo),
        "errors": errors(run.answers),
        "requests": request_rows(run),
    }


def facts_of(target: Target, config: ServerBenchConfig, *, interrupted: bool) -> dict[str, Any]:
    """The model, the load and the client of a run."""
    at_once = f"concurrency {config.concurrency}" if config.concurrency else "any number at once"
    rate = "" if config.rate is None else f"rate {config.rate:g}/s, burstiness {config.burstiness:g}, "
    parts = [f"prompts of {config.prompt_tokens.text} tokens", f"answers of {config.output_tokens.text}"]
    parts += [f"{config.shared_prefix} shared"] if config.shared_prefix else []
    parts += [f"{config.turns} turns"] if config.turns > 1 else []
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "url": target.url,
        **{
            name: getattr(config, name)
            for name in ("model", "endpoint", "prompts", "seed", "temperature", "extra_body")
        },
        "load": rate + at_once,
        "lengths": ", ".join(parts),
        "interrupted": interrupted,
        "client": f"moeyard {__version__}, Python {platform.python_version()}",
    }


class Load:
    """One run against a server. `on_answer` is called with each answer as it ends.

    `rate` None: closed loop, `concurrency` conversations at once, each followed by another. Else conversations arrive
    at `rate` per second, and at most `concurrency` (None: any number) run at once. No request is begun after
    `num_requests` or `duration`, whichever is first; those in flight are waited for.
    """

    def __init__(
        self, client: Client, config: ServerBenchConfig, workload: Workload, on_answer: Callable[[StreamedAnswer], None]
    ) -> None:
        self._client = client
        self._config = config
        self._workload = workload
        self._on_answer = on_answer
        self._begun_requests = 0
        self._conversations = itertools.count()
        self._group: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self.record = LoadRun()

    async def run(self) -> LoadRun:
        """Run to the end, or until `stop`."""
        cpu, self.record.begun = time.process_time(), time.perf_counter()
        async with asyncio.TaskGroup() as self._group:
            self._start(self._closed() if self._config.rate is None else self._open(self._config.rate))
        self.record.cpu_seconds = time.process_time() - cpu
        self.record.ended = max((a.ended for a in self.record.answers), default=time.perf_counter())
        return self.record

    def stop(self) -> None:
        """Stop the run. Cancel requests under way and do not count them."""
        self.record.interrupted = True
        for task in self._running:
            task.cancel()

    def _more(self) -> bool:
        config = self._config
        if self.record.interrupted or (config.num_requests is not None and self._begun_requests >= config.num_requests):
            return False
        return config.duration is None or time.perf_counter() - self.record.begun < config.duration

    async def _closed(self) -> None:
        async def one_after_the_other() -> None:
            while self._more():
                await self._converse(time.perf_counter())

        for _ in range(self._config.concurrency or 1):
            self._start(one_after_the_other())

    async def _open(self, rate: float) -> None:
        room = None if self._config.concurrency is None else asyncio.Semaphore(self._config.concurrency)

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
        """Yield the start times of conversations, as many as there are requests."""
        config = self._config
        count = None if config.num_requests is None else -(-config.num_requests // self._workload.turns)
        last = float("inf") if config.duration is None else config.duration
        due = itertools.islice(arrivals(rate, config.burstiness, config.seed or 0), count)
        return (self.record.begun + at for at in itertools.takewhile(lambda at: at < last, due))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._group is not None
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _converse(self, due: float) -> None:
        """Run the turns of a conversation. Each resends the history, and the first failure ends it."""
        config = self._config
        said: Any = [] if config.is_chat else None
        for turn in self._workload.conversation(next(self._conversations)):
            if not self._more():
                return
            self._begun_requests += 1
            said = add(said, turn)
            answer = await ask(self._client, config, said, max_tokens=turn.max_tokens, due=due)
            self.record.answers.append(answer)
            self._on_answer(answer)
            if answer.error is not None:
                return
            said = answered(said, answer.text)
            due = time.perf_counter()


def add(said: Any, turn: PromptTurn) -> Any:
    """Append the user's next turn to a conversation of messages, text or ids (None: begins as text or ids)."""
    if isinstance(said, list):
        return [*said, {"role": "user", "content": turn.prompt}]
    return turn.prompt if said is None else f"{said}\n{turn.prompt}"


def answered(said: Any, text: str) -> Any:
    """Append an answer to a conversation. A conversation of ids has one turn: the answer's ids are unknown."""
    if isinstance(said, str):
        return said + text
    return [*said, {"role": "assistant", "content": text}] if isinstance(said[0], dict) else said


async def ask(client: Client, config: ServerBenchConfig, prompt: Any, *, max_tokens: int, due: float) -> StreamedAnswer:
    """One streaming request; `prompt`: messages of a chat, or a completion's text or ids."""
    body = {
        "model": config.model,
        ("messages" if config.is_chat else "prompt"): prompt,
        "max_tokens": max_tokens,
        "temperature": config.temperature,
        **streamed(),
        **config.extra_body,
    }
    answer = await client.stream("chat/completions" if config.is_chat else "completions", body, due=due)
    if answer.error is None and answer.usage is None:
        answer.error = "the answer has no usage, so its tokens cannot be counted (stream_options.include_usage)"
    return answer


async def _run(target: Target, config: ServerBenchConfig) -> LoadRun:
    client = Client(target, timeout=config.timeout)
    try:
        yardstick = await _yardstick(client, config) if config.prompts == "words" else Yardstick()
        workload = Workload(
            kind=config.prompts,
            prompt=config.prompt_tokens,
            output=config.output_tokens,
            shared_prefix=config.shared_prefix,
            turns=config.turns,
            seed=config.seed or 0,
            vocab_size=config.vocab_size,
            yardstick=yardstick,
        )
        if config.warmup:
            await _warm_up(client, config, workload, config.warmup)
        with tqdm(
            total=config.num_requests, desc="requests", unit="req", leave=False, disable=None, file=sys.stderr
        ) as bar:
            load = Load(client, config, workload, _progress(bar))
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, load.stop)
            try:
                return await load.run()
            finally:
                loop.remove_signal_handler(signal.SIGINT)
    finally:
        client.close()


def _progress(bar: Any) -> Callable[[StreamedAnswer], None]:
    """Counts answers on the bar, with output tokens per second so far."""
    begun, tokens, failed = time.perf_counter(), 0, 0

    def on_answer(answer: StreamedAnswer) -> None:
        nonlocal tokens, failed
        tokens += answer.output_tokens
        failed += answer.error is not None
        rate = tokens / (time.perf_counter() - begun)
        bar.set_postfix_str(f"{rate:,.0f} tok/s" + (f", {failed} failed" if failed else ""), refresh=False)
        bar.update()

    return on_answer


async def _warm_up(client: Client, config: ServerBenchConfig, workload: Workload, count: int) -> None:
    """Send warm-up requests of the same kind with other words. Raises ValueError if all of them fail."""
    concurrency = min(count, config.concurrency or DEFAULT_CONCURRENCY)
    closed = replace(config, rate=None, duration=None, num_requests=count, concurrency=concurrency)
    warm = Load(client, closed, replace(workload, seed=WARMUP_SEED - workload.seed), lambda _: None)
    run = await warm.run()
    failed = [answer for answer in run.answers if answer.error is not None]
    if len(failed) == len(run.answers):
        raise _refused(failed[0])


async def _yardstick(client: Client, config: ServerBenchConfig) -> Yardstick:
    """Measure the server's tokens per word with prompts of several lengths, the last near the wanted one."""
    points: list[tuple[int, int]] = []
    rng = random.Random(0)
    for words in (*PROBES, None):
        if words is None:
            words = fit(points).words(min(round(config.prompt_tokens.middle), MAX_PROBE_TOKENS))
            if words <= PROBES[-1]:
                break
        text = " ".join(rng.choice(WORDS) for _ in range(words))
        prompt: Any = [{"role": "user", "content": text}] if config.is_chat else text
        answer = await ask(client, config, prompt, max_tokens=1, due=time.perf_counter())
        if answer.error is not None:
            raise _refused(answer)
        points.append((words, answer.prompt_tokens))
    return fit(points)


def fit(points: list[tuple[int, int]]) -> Yardstick:
    """Fit (words, prompt tokens) pairs with a least-squares line, or with the mean ratio if its slope is negative."""
    slope, intercept = statistics.linear_regression([w for w, _ in points], [t for _, t in points])
    if slope <= 0:
        return Yardstick(per_word=sum(t for _, t in points) / sum(w for w, _ in points))
    return Yardstick(base=max(0.0, intercept), per_word=slope)


def _refused(answer: StreamedAnswer) -> ValueError:
    status = f"HTTP {answer.status}: " if answer.status not in (0, 200) else ""
    return ValueError(f"the server does not answer such requests: {status}{answer.error}")
