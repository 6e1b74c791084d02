"""`moeyard bench URL`: ask a server for much, and say how it did."""

import argparse
import asyncio
import datetime
import json
import platform
import random
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvloop
from tqdm import tqdm

from moeyard import __version__
from moeyard.clients.api_client import first_model
from moeyard.clients.bench.server.answer import Answer
from moeyard.clients.bench.server.drive import Course, Load, Plan
from moeyard.clients.bench.server.figures import errors, figures, parse_slo, request_rows
from moeyard.clients.bench.server.report import compare, describe
from moeyard.clients.bench.server.wire import Client
from moeyard.clients.bench.server.words import WORDS
from moeyard.clients.bench.workload import Workload, Yardstick, body
from moeyard.clients.target_config import Target, parse_target
from moeyard.entry import load

KIND = "moeyard bench server"
DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8
# Words of the prompts that say how many tokens a server makes of them.
PROBES = (4, 28)
MAX_PROBE_TOKENS = 2048
WARMUP_SEED = -1


def bench_server(args: argparse.Namespace) -> int:
    """Measure as the flags say; returns the exit code: 1 if no request came whole, 130 if broken off.

    Raises ValueError with one line for flags that do not go together and for a server that cannot be measured.
    """
    slo = check(args)
    stored = [read_result(path) for path in args.compare]
    if len(stored) == 2:
        print(compare(stored[0], stored[1], (str(args.compare[0]), str(args.compare[1]))))
        return 0
    result = measure(args, slo)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.png is not None:
        load("moeyard.clients.bench.server.chart").draw(result, args.png)
    print(describe(result))
    if stored:
        print("\n" + compare(stored[0], result, (str(args.compare[0]), "this run")))
    if result["facts"]["interrupted"]:
        return 130
    return 0 if result["figures"]["completed"] else 1


def check(args: argparse.Namespace) -> dict[str, float]:
    """The objectives of --slo. Raises ValueError for flags that cannot be followed, before anything is sent."""
    if len(args.compare) > 2:
        raise ValueError(f"--compare takes one or two files, got {len(args.compare)}; put the URL before it")
    if args.prompts == "ids" and args.endpoint != "completions":
        raise ValueError("--prompts ids goes with --endpoint completions: a chat has text")
    if args.prompts == "ids" and args.turns > 1:
        raise ValueError("--turns goes with --prompts words: an answer has text, and history resends it")
    if args.rate is None and args.burstiness != 1.0:
        raise ValueError("--burstiness goes with --rate: a closed loop has no arrivals")
    if args.png is not None and find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib: pip install 'moeyard[bench]'")
    for path in (args.json, args.png):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"{path} is no place for a file; name a file in a directory that is there")
    return {} if args.slo is None else parse_slo(args.slo)


def read_result(path: Path) -> dict[str, Any]:
    """A result of --json. Raises ValueError for another file."""
    try:
        result = json.loads(path.read_text())
    except ValueError:
        result = None
    if not isinstance(result, dict) or result.get("kind") != KIND:
        raise ValueError(f"{path} is no result of `moeyard bench URL --json`; name one with --compare")
    return result


def measure(args: argparse.Namespace, slo: dict[str, float]) -> dict[str, Any]:
    """The result of one run."""
    target = parse_target(args.url, args.api_key)
    model = args.model or first_model(target)
    seed = secrets.randbits(31) if args.seed is None else args.seed
    plan = plan_of(args, model, seed)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        course = runner.run(_run(args, target, plan=plan))
    found = {"facts": facts_of(args, target, plan=plan, interrupted=course.interrupted)}
    return {
        "kind": KIND,
        "version": 1,
        **found,
        "figures": figures(course, slo),
        "errors": errors(course.answers),
        "requests": request_rows(course),
    }


def plan_of(args: argparse.Namespace, model: str, seed: int) -> Plan:
    """How it goes, with the defaults that depend on each other."""
    return Plan(
        chat=args.endpoint == "chat",
        model=model,
        temperature=args.temperature,
        extra={**({"ignore_eos": True} if args.ignore_eos else {}), **args.extra_body},
        concurrency=args.concurrency or (DEFAULT_CONCURRENCY if args.rate is None else None),
        rate=args.rate,
        burstiness=args.burstiness,
        num_requests=args.num_requests or (DEFAULT_REQUESTS if args.duration is None else None),
        duration=args.duration,
        seed=seed,
    )


def facts_of(args: argparse.Namespace, target: Target, *, plan: Plan, interrupted: bool) -> dict[str, Any]:
    """What was measured, by whom and how."""
    at_once = f"concurrency {plan.concurrency}" if plan.concurrency else "any number at once"
    rate = "" if plan.rate is None else f"rate {plan.rate:g}/s, burstiness {plan.burstiness:g}, "
    parts = [f"prompts of {args.prompt_tokens.text} tokens", f"answers of {args.output_tokens.text}"]
    parts += [f"{args.shared_prefix} shared"] if args.shared_prefix else []
    parts += [f"{args.turns} turns"] if args.turns > 1 else []
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "url": target.url,
        "model": plan.model,
        "endpoint": args.endpoint,
        "prompts": args.prompts,
        "load": rate + at_once,
        "lengths": ", ".join(parts),
        "seed": plan.seed,
        "temperature": plan.temperature,
        "extra_body": plan.extra,
        "interrupted": interrupted,
        "client": f"moeyard {__version__}, Python {platform.python_version()}",
    }


async def _run(args: argparse.Namespace, target: Target, *, plan: Plan) -> Course:
    client = Client(target, timeout=args.timeout)
    try:
        yardstick = await _yardstick(client, plan, args) if args.prompts == "words" else Yardstick()
        workload = Workload(
            kind=args.prompts,
            prompt=args.prompt_tokens,
            output=args.output_tokens,
            shared_prefix=args.shared_prefix,
            turns=args.turns,
            seed=plan.seed,
            vocab_size=args.vocab_size,
            yardstick=yardstick,
        )
        if args.warmup:
            await _warm_up(client, plan, workload, args.warmup)
        total = plan.num_requests
        with tqdm(total=total, desc="requests", unit="req", leave=False, disable=None, file=sys.stderr) as bar:
            load = Load(client, plan, workload, _progress(bar))
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, load.stop)
            try:
                return await load.run()
            finally:
                loop.remove_signal_handler(signal.SIGINT)
    finally:
        client.close()


def _progress(bar: Any) -> Callable[[Answer], None]:
    """Counts answers on the bar, with output tokens per second so far."""
    begun, tokens, failed = time.perf_counter(), 0, 0

    def on_answer(answer: Answer) -> None:
        nonlocal tokens, failed
        tokens += answer.output_tokens
        failed += answer.error is not None
        rate = tokens / (time.perf_counter() - begun)
        bar.set_postfix_str(f"{rate:,.0f} tok/s" + (f", {failed} failed" if failed else ""), refresh=False)
        bar.update()

    return on_answer


async def _warm_up(client: Client, plan: Plan, workload: Workload, count: int) -> None:
    """Requests of the same kind and of other words. Raises ValueError if the first of them fails."""
    from_elsewhere = Workload(
        **{name: getattr(workload, name) for name in Workload.__slots__ if name != "seed"}, seed=WARMUP_SEED - plan.seed
    )
    fields = {name: getattr(plan, name) for name in Plan.__slots__}
    closed = {"rate": None, "duration": None, "num_requests": count}
    concurrency = min(count, plan.concurrency or DEFAULT_CONCURRENCY)
    warm = Load(client, Plan(**{**fields, **closed, "concurrency": concurrency}), from_elsewhere, lambda _: None)
    course = await warm.run()
    failed = [answer for answer in course.answers if answer.error is not None]
    if len(failed) == len(course.answers):
        raise _refused(failed[0])


async def _yardstick(client: Client, plan: Plan, args: argparse.Namespace) -> Yardstick:
    """How many tokens the server makes of words, asked with prompts of other lengths, the last near those wanted."""
    points: list[tuple[int, int]] = []
    rng = random.Random(0)
    for words in (*PROBES, None):
        if words is None:
            words = fit(points).words(min(round(args.prompt_tokens.middle), MAX_PROBE_TOKENS))
            if words <= PROBES[-1]:
                break
        text = " ".join(rng.choice(WORDS) for _ in range(words))
        prompt: Any = [{"role": "user", "content": text}] if plan.chat else text
        asked = body(
            prompt, chat=plan.chat, model=plan.model, max_tokens=1, temperature=plan.temperature, extra=plan.extra
        )
        endpoint = "chat/completions" if plan.chat else "completions"
        answer = await client.stream(endpoint, asked, due=time.perf_counter())
        if answer.error is None and answer.usage is None:
            answer.error = "its answers have no usage (stream_options.include_usage), so tokens cannot be counted"
        if answer.error is not None:
            raise _refused(answer)
        points.append((words, answer.prompt_tokens))
    return fit(points)


def fit(points: list[tuple[int, int]]) -> Yardstick:
    """The yardstick of (words, prompt tokens) pairs: the least-squares line, or the mean ratio where that falls."""
    slope, intercept = statistics.linear_regression([w for w, _ in points], [t for _, t in points])
    if slope <= 0:
        return Yardstick(per_word=sum(t for _, t in points) / sum(w for w, _ in points))
    return Yardstick(base=max(0.0, intercept), per_word=slope)


def _refused(answer: Answer) -> ValueError:
    status = f"HTTP {answer.status}: " if answer.status not in (0, 200) else ""
    return ValueError(f"the server does not answer such requests: {status}{answer.error}")
