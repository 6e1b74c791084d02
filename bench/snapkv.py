"""The cost of prompt compression in quality: loss of the text after a prompt, by what is kept. On a CPU.

The first tokens of every text are the prompt, and the next ones its continuation. The continuation is fed row by row
behind the kept part of the prompt. With --pieces N a long text gives up to N such pieces in sequence. The kept parts
are: all, SnapKV's choice, the last positions, and random positions with the same window. Texts that are too short are
left out.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from moeyard_kernels.common.snapkv import latest
from moeyard_kernels.cpu import attention
from moeyard_kernels.cpu.attn_prefill import snapkv
from moeyard_worker.engine.assembly.local import local_runner
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.scheduling.step import Chunk, Compaction, Step

Choice = Callable[..., torch.Tensor]


def last(q: torch.Tensor, k: torch.Tensor, *, length: int, budget: int, shared: bool = False, **_: Any) -> torch.Tensor:
    return latest(length, budget).expand(1 if shared else k.shape[0], -1)


def random_positions(seed: int) -> Choice:
    chance = torch.Generator().manual_seed(seed)

    def choose(
        q: torch.Tensor, k: torch.Tensor, *, length: int, budget: int, shared: bool = False, **_: Any
    ) -> torch.Tensor:
        window = q.shape[0]
        rows = [
            torch.randperm(length - window, generator=chance)[: budget - window].sort().values
            for _ in range(1 if shared else k.shape[0])
        ]
        return torch.cat((torch.stack(rows), latest(length, window).expand(len(rows), -1)), 1)

    return choose


def loss(runner: Runner, prompt: tuple[int, ...], behind: tuple[int, ...], *, budget: int, window: int) -> torch.Tensor:
    """Return the nats of each token of `behind` but the first."""
    count, size = len(prompt), runner.page_size
    pages = -(-(count + len(behind)) // size)
    own, copied = tuple(range(pages)), tuple(range(pages, 2 * pages))
    dropped = max(count - budget, 0)
    kept = Compaction(kept=budget, dropped=dropped, window=window, pages=copied) if dropped else None
    first = Chunk(key=(b"", ""), start=0, token_ids=prompt, pages=own, prompt=True, num_sampled=1, compaction=kept)
    runner.forward(Step(prefill=(first,)))
    rows = Chunk(
        key=(b"", ""),
        start=count,
        token_ids=behind[:-1],
        pages=copied if dropped else own,
        prompt=False,
        num_sampled=len(behind) - 1,
        dropped=dropped,
    )
    logits = runner.forward(Step(decode=(rows,)))[: len(behind) - 1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(behind[1:]), reduction="none")


def more(found: torch.Tensor, than: torch.Tensor) -> str:
    """Format the mean difference over texts, with its standard error."""
    difference = found - than
    return f"{difference.mean():+.4f} ({difference.std() / len(found) ** 0.5:.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("deploy/demo"))
    parser.add_argument("--texts", type=Path, default=Path("deploy/demo/heldout.jsonl"))
    parser.add_argument("--prompt", type=int, default=768, help="tokens of each prompt")
    parser.add_argument("--continuation", type=int, default=128, help="tokens after it")
    parser.add_argument("--count", type=int, default=32, help="maximum number of pieces")
    parser.add_argument("--pieces", type=int, default=1, help="maximum pieces of one text")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25, 0.12], help="budgets, of the prompt")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    length = args.prompt + args.continuation
    lines = args.texts.read_text().splitlines()
    encoded = (tokenizer.encode(json.loads(line)["text"]).ids for line in lines)
    pieces = (
        tuple(ids[start : start + length])
        for ids in encoded
        for start in range(0, min(len(ids), args.pieces * length) - length + 1, length)
    )
    texts = list(itertools.islice(pieces, args.count))
    runner = local_runner(args.model, dtype=torch.float32, num_pages=2 * -(-length // 16) + 2)
    print(f"{len(texts)} pieces, prompts of {args.prompt}, continuations of {args.continuation}, window {args.window}")

    def mean(choice: Choice, budget: int) -> torch.Tensor:
        attention.snapkv = choice
        found = [
            loss(runner, t[: args.prompt], t[args.prompt :], budget=budget, window=args.window).mean() for t in texts
        ]
        return torch.stack(found)

    whole = mean(snapkv, args.prompt)
    print("| budget | kept | loss (nats per token) | above all kept | above SnapKV |\n|---|---|---|---|---|")
    print(f"| {args.prompt} | all | {whole.mean():.4f} | | |")
    for share in args.shares:
        budget = round(args.prompt * share)
        chosen = None
        for name, choice in (("SnapKV", snapkv), ("the latest", last), ("random", random_positions(1))):
            found = mean(choice, budget)
            chosen = found if chosen is None else chosen
            beside = "" if found is chosen else more(found, chosen)
            print(f"| {budget} | {name} | {found.mean():.4f} | {more(found, whole)} | {beside} |", flush=True)


if __name__ == "__main__":
    main()
