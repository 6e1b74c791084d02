"""Determinism and its price: `python bench/deterministic.py MODEL [--of moeyard vllm vllm-invariant] [--device cuda]`.

Servers take turns on one device: moeyard, vLLM, and vLLM with VLLM_BATCH_INVARIANT=1 (if `vllm` is installed). The
figures are those of `moeyard bench URL` with random token ids: TPOT at each number of --streams, and prompt tokens/s of
one prompt of --prefill tokens. The last column counts answers with other bits among --checks greedy requests. Each runs
alone, then beside all others. Bits are token ids and log-probabilities.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peering.programs import free_port, start

from moeyard.clients.bench.report import table

START_SECONDS, STOP_SECONDS, REQUEST_SECONDS = 1800.0, 60.0, 600.0
# Prompts of one check differ in length, so that they leave the batch at different steps.
CHECK_PROMPT, CHECK_OUTPUT = (16, 700), 64


@dataclass(frozen=True, slots=True)
class Engine:
    """A server to measure: its command without port, and its environment variables."""

    name: str
    command: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()


def engines(args: argparse.Namespace) -> list[Engine]:
    """Return the engines that --of names. Leave out vLLM if it is not installed."""
    serve = (sys.executable, "-m", "moeyard", "serve", args.model, "--device", args.device)
    found = [Engine("moeyard", serve)]
    if (program := shutil.which("vllm")) is not None:
        vllm = (program, "serve", args.model, "--no-enable-prefix-caching")
        found += [Engine("vllm", vllm), Engine("vllm-invariant", vllm, (("VLLM_BATCH_INVARIANT", "1"),))]
    elif any(name != "moeyard" for name in args.of):
        print("vllm is not installed here, so moeyard is measured alone", file=sys.stderr)
    return [engine for engine in found if engine.name in args.of]


def bench(url: str, out: Path, *, streams: int, prompt: int, output: int, requests: int, vocab: int) -> dict[str, Any]:
    """Return the figures of `moeyard bench URL`. Raises SystemExit if a request failed."""
    flags = {"concurrency": streams, "prompt-tokens": prompt, "output-tokens": output, "num-requests": requests}
    flags |= {"warmup": streams, "vocab-size": vocab}
    command = [sys.executable, "-m", "moeyard", "bench", url, "--endpoint", "completions", "--prompts", "ids"]
    command += [f"--{name}={value}" for name, value in flags.items()] + ["--json", str(out)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{run.stdout}{run.stderr}")
    figures: dict[str, Any] = json.loads(out.read_text())["figures"]
    if figures["failed"]:
        raise SystemExit(f"{figures['failed']} requests failed:\n{run.stdout}")
    return figures


def bits(url: str, model: str, prompt: Sequence[int], seed: int) -> tuple[list[int], list[float]]:
    """Return token ids and log-probabilities of a greedy answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": CHECK_OUTPUT, "temperature": 0, "seed": seed}
    body |= {"logprobs": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
        (choice,) = json.load(answer)["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def count_changed(url: str, *, checks: int, vocab: int) -> int:
    """Return how many of `checks` answers have other bits beside each other than alone."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=REQUEST_SECONDS) as answer:
        model = json.load(answer)["data"][0]["id"]
    draw = random.Random(7)
    prompts = [[draw.randrange(vocab) for _ in range(draw.randint(*CHECK_PROMPT))] for _ in range(checks)]
    alone = [bits(url, model, prompt, i) for i, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(checks) as pool:
        together = list(pool.map(lambda i: bits(url, model, prompts[i], i), range(checks)))
    return sum(a != b for a, b in zip(alone, together, strict=True))


def measure(url: str, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Return the row of a running server."""
    row: dict[str, Any] = {}
    common = {"out": scratch / "result.json", "vocab": args.vocab_size}
    for streams in args.streams:
        found = bench(
            url, streams=streams, prompt=args.prompt, output=args.output, requests=max(8, 2 * streams), **common
        )
        row[f"tpot {streams}"] = found["tpot_ms"]["p50"]
    found = bench(url, streams=1, prompt=args.prefill, output=1, requests=3, **common)
    row["prefill"] = args.prefill / found["ttft_ms"]["p50"] * 1e3
    row["changed"] = f"{count_changed(url, checks=args.checks, vocab=args.vocab_size)} of {args.checks}"
    return row


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags."""
    names = ("moeyard", "vllm", "vllm-invariant")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--of", nargs="+", choices=names, default=names)
    parser.add_argument("--device", default="cuda", help="of moeyard; vLLM's build decides for vLLM")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompts of streams")
    parser.add_argument("--output", type=int, default=128, help="tokens of their answers")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of a prompt alone")
    parser.add_argument("--checks", type=int, default=32, help="requests whose bits are compared")
    parser.add_argument("--vocab-size", type=int, default=256, help="random token ids go up to here")
    return parser.parse_args(words)


def main() -> None:
    """Run all servers and print the table."""
    args, rows = parse(), []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for engine in engines(args):
            port = free_port()
            command, log = [*engine.command, "--port", port], scratch / f"{engine.name}.log"
            variables = dict(engine.variables)
            process = start(command, port, "/v1/models", log, seconds=START_SECONDS, variables=variables)
            try:
                rows.append({"engine": engine.name, **measure(f"http://127.0.0.1:{port}", args, scratch)})
            finally:
                # Not killed: the processes that hold the GPU's memory must end with it.
                process.terminate()
                process.wait(STOP_SECONDS)
    tpot = [(f"tpot {streams}", f"ms per token, {streams}") for streams in args.streams]
    print(table(rows, [("engine", "engine"), *tpot, ("prefill", "prompt tokens/s"), ("changed", "changed answers")]))


if __name__ == "__main__":
    main()
