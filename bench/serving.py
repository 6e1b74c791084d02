"""moeyard's serving path (HTTP) against `transformers.generate` on the same checkpoint and the same cores.

    python bench/serving.py [--dtype float32 bfloat16] [--rounds 3] [--json FILE]
    python bench/serving.py --family qwen3_next --workload short --dtype float32 --rounds 1
    python bench/serving.py --base REV ...

The checkpoint is random (Qwen3-MoE architecture, or that of --family, hidden 512, 8 layers, 32 experts top-4).
Workloads:

- batch: 16 concurrent requests of mixed prompt and output length. transformers runs one left-padded static batch until
  its longest member ends.
- short: the same prompts with a quarter of the output, because transformers takes a second for two tokens of linear
  attention.
- single: one stream.

Tokens per second count the requested tokens, of the same requests on both sides. Rounds of both alternate in one run
after a warm-up (a round of moeyard; the same prompts with 4 tokens of transformers). The output has medians and their
ratio. Both get the same cores. The framework transformers uses torch's default threads. The batch runs on --workers
ranks of one thread each, and the single stream on one worker.

With --base the working tree of this file is compared with revision REV of its repository, and not with transformers.
Both serve at once, each from its own code, and answer in turns; which goes first alternates. A round's ratio is new /
base in tokens per second. The output has the median, minimum and maximum over the rounds.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("worker", "router", "kernels", "deploy")
VOCAB = 4096
HIDDEN, LAYERS, EXPERTS, TOP_K, INTERMEDIATE = 512, 8, 32, 4, 512
READY_SECONDS = 120.0
# Tokens of transformers' warm-up, and the divisor of the length of a short answer.
_WARM_TOKENS, _SHORT = 4, 4


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload: its prompt and its number of output tokens."""

    prompt: list[int]
    num_tokens: int


# Sizes of attention and experts by family. All families share the other sizes.
_QWEN: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 64, "num_experts": EXPERTS}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "shared_expert_intermediate_size": INTERMEDIATE,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", _QWEN),
    "qwen3_next": ("Qwen3Next", {**_QWEN, **_LINEAR}),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**_QWEN, **_LINEAR, "pad_token_id": None}),
    "kimi_linear": (
        "KimiLinear",
        {
            **{"num_local_experts": EXPERTS, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
            **{"v_head_dim": 64, "linear_num_heads": 8, "linear_head_dim": 64, "num_key_value_heads": 8},
            "pad_token_id": None,
        },
    ),
}


def make_checkpoint(directory: Path, dtype: torch.dtype, family: str) -> None:
    """Write the random checkpoint. Its tokenizer knows bytes only, because prompts are token ids."""
    torch.manual_seed(0)
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=4 * INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=INTERMEDIATE,
        max_position_embeddings=2048,
        eos_token_id=0,
        bos_token_id=None,
        **sizes,
    )
    # For Qwen3.5 use the text model alone, whose class has a shorter name than its config's.
    getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).to(dtype).save_pretrained(directory)
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def batch_workload(share: int = 1) -> list[Request]:
    """Return 16 requests: prompts of 16 to 256 tokens, answers of 32 to 128 tokens divided by `share`."""
    rng = random.Random(1)
    return [
        Request([rng.randrange(1, VOCAB) for _ in range(rng.randint(16, 256))], rng.randint(32, 128) // share)
        for _ in range(16)
    ]


def single_workload() -> list[Request]:
    """Return one request of 64 prompt tokens and 96 output tokens."""
    rng = random.Random(2)
    return [Request([rng.randrange(1, VOCAB) for _ in range(64)], 96)]


def run_transformers(model: Any, workload: list[Request]) -> float:
    """Return the seconds of one static batch."""
    longest = max(len(r.prompt) for r in workload)
    ids = torch.zeros(len(workload), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(workload):
        ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
        mask[row, longest - len(request.prompt) :] = 1
    wanted = max(r.num_tokens for r in workload)
    begun = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=wanted,
            min_new_tokens=wanted,
            do_sample=False,
            pad_token_id=0,
        )
    assert out.shape[1] == longest + wanted
    return time.perf_counter() - begun


async def run_moeyard(client: httpx.AsyncClient, workload: list[Request]) -> float:
    """Return the seconds until the last of the concurrent requests has ended."""

    async def one(request: Request) -> None:
        body = {
            "model": "bench",
            "prompt": request.prompt,
            "max_tokens": request.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = await client.post("/v1/completions", json=body)
        response.raise_for_status()
        assert len(response.json()["choices"][0]["token_ids"]) == request.num_tokens

    begun = time.perf_counter()
    await asyncio.gather(*map(one, workload))
    return time.perf_counter() - begun


class Server:
    """A `moeyard serve` process with the code of the repository at `tree`, ready to answer."""

    def __init__(self, model: Path, workers: int, tree: Path = ROOT) -> None:
        command = [sys.executable, "-m", "moeyard", "serve", str(model), "--workers", str(workers), "--port", "0"]
        # Without a prefix cache, because every round must compute its prompts.
        command += ["--served-model-name", "bench", "--no-prefix-caching"]
        # First in the path, for this process and for the ranks, which inherit its environment.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / folder) for folder in FOLDERS)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # see check_runs_from
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, cwd=tree
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready: "), line
        self.url = line.split()[1].removesuffix("/v1")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@contextlib.contextmanager
def serving(model: Path, workers: int, tree: Path = ROOT) -> Iterator[str]:
    """Start a server and yield its URL. It ends with the block."""
    server = Server(model, workers, tree)
    try:
        yield server.url
    finally:
        server.stop()


@contextlib.contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """Check out `revision` in a temporary folder. Raises CalledProcessError; git prints the reason."""
    with tempfile.TemporaryDirectory() as root:
        tree = Path(root) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def check_runs_from(tree: Path) -> None:
    """Raise RuntimeError unless ranks have loaded the kernels of a fresh `tree`.

    Only ranks import these modules, and the first import compiles them there.
    """
    if not list((tree / "kernels").rglob("*.pyc")):
        raise RuntimeError(f"the ranks of the base do not run the code in {tree}")


async def alternate(urls: tuple[str, str], workload: list[Request], rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of both in each round, after a warm-up round. The first one of a round alternates."""
    seconds = []
    open_client = functools.partial(httpx.AsyncClient, timeout=600)
    async with open_client(base_url=urls[0]) as a, open_client(base_url=urls[1]) as b:
        for i in range(rounds + 1):
            first, second = (a, b) if i % 2 else (b, a)
            times = await run_moeyard(first, workload), await run_moeyard(second, workload)
            seconds.append(times if i % 2 else times[::-1])
    return seconds[1:]


def measure_base(
    name: str, path: Path, tree: Path, workload: list[Request], workers: int, rounds: int
) -> dict[str, Any]:
    """Alternate rounds of the base (the code in `tree`) and of this tree on one workload."""
    tokens = sum(r.num_tokens for r in workload)
    with serving(path, workers, tree) as base, serving(path, workers) as new:
        seconds = asyncio.run(alternate((base, new), workload, rounds))
    check_runs_from(tree)
    ratios = [b / n for b, n in seconds]
    return {
        "workload": name,
        "workers": workers,
        "base": statistics.median(tokens / b for b, _ in seconds),
        "new": statistics.median(tokens / n for _, n in seconds),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def measure(name: str, model: Any, path: Path, workload: list[Request], workers: int, rounds: int) -> dict[str, Any]:
    """Alternate rounds of both on one workload, after a warm-up."""
    tokens = sum(r.num_tokens for r in workload)
    theirs, ours = [], []
    server = Server(path, workers)

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
            run_transformers(model, [Request(r.prompt, _WARM_TOKENS) for r in workload])
            await run_moeyard(client, workload)
            for _ in range(rounds):
                theirs.append(tokens / run_transformers(model, workload))
                ours.append(tokens / await run_moeyard(client, workload))

    try:
        asyncio.run(run())
    finally:
        server.stop()
    a, b = statistics.median(theirs), statistics.median(ours)
    return {"workload": name, "workers": workers, "transformers": a, "moeyard": b, "ratio": b / a}


def workload_of(name: str, workers: int) -> tuple[list[Request], int]:
    """Return the requests of a workload and its number of workers. `workers` is that of the batch."""
    if name == "single":
        return single_workload(), 1
    return batch_workload(_SHORT if name == "short" else 1), workers


def compare_with_transformers(args: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    """Print and return a row for each dtype and workload."""
    rows = []
    print(f"{'dtype':<9} {'workload':<9} {'workers':>7} {'transformers':>13} {'moeyard':>9} {'ratio':>6}   (tokens/s)")
    for dtype in args.dtype:
        path = root / dtype
        make_checkpoint(path, getattr(torch, dtype), args.family)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        for name in args.workload:
            workload, workers = workload_of(name, args.workers)
            row = {"dtype": dtype, **measure(name, model, path, workload, workers, args.rounds)}
            rows.append(row)
            print(
                f"{dtype:<9} {name:<9} {workers:>7} {row['transformers']:>13.1f} {row['moeyard']:>9.1f} "
                f"{row['ratio']:>6.2f}",
                flush=True,
            )
    return rows


def compare_with_base(args: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    """Print and return a row for each dtype and workload."""
    rows = []
    print(f"{'dtype':<9} {'workload':<9} {'workers':>7} {'base':>9} {'new':>9} {'new/base':>9}   (tokens/s, range)")
    with worktree(args.base) as tree:
        for dtype in args.dtype:
            make_checkpoint(root / dtype, getattr(torch, dtype), args.family)
            for name in args.workload:
                workload, workers = workload_of(name, args.workers)
                row = {"dtype": dtype, **measure_base(name, root / dtype, tree, workload, workers, args.rounds)}
                rows.append(row)
                print(
                    f"{dtype:<9} {name:<9} {workers:>7} {row['base']:>9.1f} {row['new']:>9.1f} {row['ratio']:>9.3f}"
                    f"   {min(row['ratios']):.3f}..{max(row['ratios']):.3f} over {args.rounds}",
                    flush=True,
                )
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--family", choices=tuple(FAMILIES), default="qwen3_moe")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="ranks for the batch workload")
    workloads = ("batch", "short", "single")
    parser.add_argument("--workload", nargs="+", choices=workloads, default=["batch", "single"])
    parser.add_argument("--base", metavar="REV", help="compare with this revision, not with transformers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as root:
        rows = (compare_with_base if args.base else compare_with_transformers)(args, Path(root))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
