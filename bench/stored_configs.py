"""The gain of a stored config in a decode step: graphs with and without it, in one process.

    python bench/stored_configs.py --model Qwen3-30B-A3B:12 --streams 1 8 --line \\
        'rope_gqa_decode / M8 D128 few / {"kernel": "one", "BM": 16, "TAIL": 4, "num_warps": 8, "num_stages": 3}'

Each --line is one variant, or several lines joined by ';'. All variants decode the same rows greedily, --steps tokens
behind --context positions of zeros. Any difference in a bit of their logits ends the run. Then replays are timed in
turns.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from moeyard_kernels import ops
from moeyard_kernels.common import tuning
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.assembly.worker import Worker
from moeyard_worker.engine.sampling.step_sampler import StepSampler
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.engine.steps.sizes import DECODING, decode_sizes
from moeyard_worker.exchange.base import PeerRows
from moeyard_worker.scheduling.step import Chunk, Step

PAGE = 64
TURNS, REPLAYS = 7, 60

Lines = Mapping[str, Mapping[str, Mapping[str, Any]]]
_AS_STORED = tuning.stored


def lines_of(text: str) -> Lines:
    """Parse {op: {shape class: fields}} from 'op / class / {fields}; ..'."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.split(";"):
        op, shape, fields = (part.strip() for part in line.split("/", 2))
        found.setdefault(op, {})[shape] = json.loads(fields)
    return found


def with_lines(lines: Lines) -> Callable[[str], Lines]:
    """Return a `tuning.stored` with these lines in place of the stored ones."""

    def stored(name: str) -> Lines:
        table = dict(_AS_STORED(name))
        for op, classes in lines.items():
            table[op] = {**table.get(op, {}), **classes}
        return MappingProxyType(table)

    return stored


def load(shape: str, layers: int, streams: int, pages: int, device: str, **fields: Any) -> tuple[Worker, Runner]:
    """Return a worker that captures nothing by itself, and its model. `fields` are those of its config."""
    config = EngineConfig(
        model_path=None,
        load_format="dummy",
        shape=shape,
        num_layers=layers,
        device=device,
        page_size=PAGE,
        max_num_seqs=streams,
        max_batch_tokens=2048,
        prefill_chunk=2048,
        max_model_len=pages * PAGE,
        kv_memory=(1 if pages <= 8 else 8) << 30,
        enforce_eager=True,
        **fields,
    )
    worker = Worker(WorkerSpec(config=config, rank=0, epoch=0, host="127.0.0.1", version="bench"))
    worker.connect([worker.endpoints()["mesh"]])
    worker.load(1)
    found = worker.runner
    return worker, found if isinstance(found, Runner) else found._runner


def sampler_of(runner: Runner, rows: int) -> StepSampler:
    """Return a sampler of up to `rows` rows, without edits."""
    assert isinstance(runner.backend, CudaBackend)
    return StepSampler(
        runner.backend, max_rows=rows, max_requests=0, vocab=runner.config.vocab_size, eos_token_ids=(), verifies=True
    )


class Variant:
    """A decode step of some rows, captured under its own lines. `pages` are those of a row."""

    def __init__(
        self, runner: Runner, sampler: StepSampler, lines: Lines, pool: Any, *, rows: int, context: int, pages: int
    ) -> None:
        backend = runner.backend
        assert isinstance(backend, CudaBackend)
        tuning.stored = with_lines(lines)  # type: ignore[assignment]
        tuning._found.cache_clear()
        self._runner, self._sampler, self._rows, self._slots = runner, sampler, rows, backend.slots
        self._context, self._pages = context, [tuple(range(pages * row, pages * (row + 1))) for row in range(rows)]
        sizes = decode_sizes(DECODING, max_sequences=1, max_pages=1 << 20)
        width = min(size.width for size in sizes if size.width >= pages)
        self._inputs = backend.step_inputs(StepSize(sequences=rows, width=width), sampler.last_ids)
        self.replay = backend.capture(self._forward, pool)[0].replay

    def _forward(self) -> None:
        self._inputs.begin()
        logits = self._sampler.logits[: self._rows]
        self._runner.model.forward(self._inputs, out=logits)
        self._sampler.last_ids[: self._rows] = ops.sample(logits).ids

    def chain(self, steps: int) -> torch.Tensor:
        """Return the logits [rows, V] of the last of `steps` greedy steps. The first step reads random tokens."""
        chance = random.Random(5)
        first = [chance.randrange(self._runner.config.vocab_size) for _ in range(self._rows)]
        if self._slots:
            self._begin()
        for i in range(steps):
            chunks = [
                Chunk(
                    key=(b"", str(row)),
                    start=self._context + i,
                    token_ids=(first[row] if i == 0 else 0,),
                    pages=self._pages[row],
                    prompt=False,
                    num_sampled=1,
                    fed=None if i == 0 else row,
                    state_slot=row if self._slots else -1,
                )
                for row in range(self._rows)
            ]
            self._inputs.fill(Step(decode=tuple(chunks)))
            self.replay()
        return self._sampler.logits[: self._rows].clone()

    def _begin(self) -> None:
        """Set slots to their state after one token, whatever chain ran before."""
        chunks = [
            Chunk(
                key=(b"", str(row)),
                start=0,
                token_ids=(0,),
                pages=self._pages[row],
                prompt=True,
                num_sampled=1,
                state_slot=row,
            )
            for row in range(self._rows)
        ]
        self._runner.exchange.steps.set_rows(PeerRows(self._rows, (self._rows,)))
        self._runner.forward(Step(prefill=tuple(chunks)))

    def milliseconds(self) -> float:
        """Return the milliseconds of one replay of the last filled step, over REPLAYS back to back."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            self.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / REPLAYS


@torch.inference_mode()
def measure(args: argparse.Namespace) -> int:
    """Print a line for each number of streams and variant. Return 1 if any bit differed."""
    shape, layers = args.model.split(":")
    pages = -(-(args.context + args.steps) // PAGE)
    worker, runner = load(shape, int(layers), max(args.streams), pages, args.device)
    pool = torch.cuda.graph_pool_handle()
    sampler = sampler_of(runner, max(args.streams))
    differ = 0
    for rows in args.streams:
        named = [("as stored", {}) if text is None else (text, lines_of(text)) for text in (None, *args.line)]
        variants = [
            Variant(runner, sampler, lines, pool, rows=rows, context=args.context, pages=pages) for _, lines in named
        ]
        wanted = variants[0].chain(args.steps)
        equal = [torch.equal(variant.chain(args.steps), wanted) for variant in variants]
        differ += equal.count(False)
        turns = [[variant.milliseconds() for variant in variants] for _ in range(TURNS)]
        for i, (name, _) in enumerate(named):
            found = [turn[i] for turn in turns]
            print(
                f"{args.model} {rows:3} rows behind {args.context} {statistics.median(found):.4f} ms "
                f"({min(found):.4f} to {max(found):.4f}), "
                f"{'the same' if equal[i] else 'OTHER'} logits: {name}",
                flush=True,
            )
    worker.stop()
    return 1 if differ else 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="Qwen3-30B-A3B:12", help="shape:layers")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--line", action="append", default=[], help="op / class / {fields}; several joined by ';'")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100, help="tokens of the chain")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name(args.device)}, torch {torch.__version__}", flush=True)
    return measure(args)


if __name__ == "__main__":
    sys.exit(main())
