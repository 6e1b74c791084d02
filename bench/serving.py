"""moeyard's serving path (HTTP) against `transformers.generate` on the same checkpoint and the same cores.

    python bench/serving.py [--dtype float32 bfloat16] [--rounds 3] [--json FILE]

The checkpoint is random (Qwen3-MoE architecture, hidden 512, 8 layers, 32 experts top-4). Two workloads: 16 concurrent
requests of mixed prompt and output length, for which transformers runs one left-padded static batch until its longest
member ends; and one stream alone. Tokens per second count the tokens that were asked for. Rounds of both alternate in
one run; medians and their ratio are printed. transformers gets all cores (torch's default threads), moeyard the same
cores: --workers ranks of one thread each for the batch, one worker for the single stream.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 4096
HIDDEN, LAYERS, EXPERTS, TOP_K, INTERMEDIATE = 512, 8, 32, 4, 512
READY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload: its prompt and how many tokens it wants."""

    prompt: list[int]
    num_tokens: int


def make_checkpoint(directory: Path, dtype: torch.dtype) -> None:
    """Write the random checkpoint; the tokenizer knows bytes only, because prompts are token ids."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=4 * INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=INTERMEDIATE,
        max_position_embeddings=2048,
        eos_token_id=0,
        bos_token_id=None,
    )
    transformers.Qwen3MoeForCausalLM(config).to(dtype).save_pretrained(directory)
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def batch_workload() -> list[Request]:
    """16 requests: prompts of 16 to 256 tokens, answers of 32 to 128."""
    rng = random.Random(1)
    return [
        Request([rng.randrange(1, VOCAB) for _ in range(rng.randint(16, 256))], rng.randint(32, 128)) for _ in range(16)
    ]


def single_workload() -> list[Request]:
    """One stream: 64 tokens in, 96 out."""
    rng = random.Random(2)
    return [Request([rng.randrange(1, VOCAB) for _ in range(64)], 96)]


def run_transformers(model: Any, workload: list[Request]) -> float:
    """Seconds of one static batch."""
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
    """Seconds until the last of the concurrent requests has ended."""

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
    """`moeyard serve` as a process of its own, ready to answer."""

    def __init__(self, model: Path, workers: int) -> None:
        command = [sys.executable, "-m", "moeyard", "serve", str(model), "--workers", str(workers), "--port", "0"]
        # Every round must compute its prompts: no prefix cache.
        command += ["--served-model-name", "bench", "--no-prefix-caching"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready: "), line
        self.url = line.split()[1].removesuffix("/v1")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def measure(name: str, model: Any, path: Path, workload: list[Request], workers: int, rounds: int) -> dict[str, Any]:
    """Alternate rounds of both on one workload; the first round of each is a warm-up."""
    tokens = sum(r.num_tokens for r in workload)
    theirs, ours = [], []
    server = Server(path, workers)

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
            for i in range(rounds + 1):
                seconds = run_transformers(model, workload), await run_moeyard(client, workload)
                if i:
                    theirs.append(tokens / seconds[0])
                    ours.append(tokens / seconds[1])

    try:
        asyncio.run(run())
    finally:
        server.stop()
    a, b = statistics.median(theirs), statistics.median(ours)
    return {"workload": name, "workers": workers, "transformers": a, "moeyard": b, "ratio": b / a}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="ranks for the batch workload")
    parser.add_argument("--workload", nargs="+", choices=("batch", "single"), default=["batch", "single"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    rows = []
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {os.cpu_count()} cores")
    print(f"{'dtype':<9} {'workload':<9} {'workers':>7} {'transformers':>13} {'moeyard':>9} {'ratio':>6}   (tokens/s)")
    with tempfile.TemporaryDirectory() as root:
        for dtype in args.dtype:
            path = Path(root) / dtype
            make_checkpoint(path, getattr(torch, dtype))
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
            for name in args.workload:
                workload, workers = (batch_workload(), args.workers) if name == "batch" else (single_workload(), 1)
                row = {"dtype": dtype, **measure(name, model, path, workload, workers, args.rounds)}
                rows.append(row)
                print(
                    f"{dtype:<9} {name:<9} {workers:>7} {row['transformers']:>13.1f} {row['moeyard']:>9.1f} "
                    f"{row['ratio']:>6.2f}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
