"""Count the product files that one decode step enters on the host: `python -m tests.step_files [--device cpu|cuda]`.

On "cpu" two ranks of one host decode with the demo model, and the steps of rank 0 are counted. On "cuda" one rank
decodes on one GPU with captured steps. Without a GPU its runner uses stand-ins (tests/engine/captured_on_cpu.py), and
launches inside a graph are not counted. Tokens are sampled with top-p and two alternatives.

The script prints the files of the most frequent turn (`Engine._turn`) that decodes one token, in the order of entry,
then further files of other such turns. `--most N`: exit with 1 if the first list is longer.
"""

import argparse
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tests.engine.captured_on_cpu import Graph, gpu_steps
from tests.fleet import Client

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.assembly.worker import Worker
from moeyard_worker.engine.loop.loop import Engine

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "deploy" / "demo"
PACKAGES = tuple(str(ROOT / folder) for folder in ("worker", "router", "kernels", "deploy"))
TOKENS = 24


class Trace:
    """The files of one rank's decode steps, in the order of entry."""

    def __init__(self) -> None:
        self._turns: list[dict[str, None]] = []
        self._turn: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Record a call; `sys.setprofile` calls this."""
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGES):
            self._turn.setdefault(str(Path(name).relative_to(ROOT)))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Trace the turns of rank 0."""
        turn, replay = Engine._turn, Graph.replay

        def traced(engine: Engine) -> None:
            if engine.rank != 0:
                turn(engine)
                return
            stats, self._turn = engine._scheduler.stats, {}
            before = stats.generation_tokens, stats.prefill_tokens, engine._scheduler.num_running
            sys.setprofile(self)
            try:
                turn(engine)
            finally:
                sys.setprofile(None)
            behind = stats.generation_tokens - 1, stats.prefill_tokens, engine._scheduler.num_running
            if before == behind:
                self._turns.append(self._turn)

        def untraced(graph: Graph) -> None:
            watching = sys.getprofile()
            sys.setprofile(None)
            replay(graph)
            sys.setprofile(watching)

        Engine._turn, Graph.replay = traced, untraced  # type: ignore[method-assign]
        try:
            yield
        finally:
            Engine._turn, Graph.replay = turn, replay  # type: ignore[method-assign]

    def counted(self) -> tuple[list[str], list[str]]:
        """Return the files of the most frequent turn, and the others; a request's first and last turns do not count."""
        kinds = Counter(frozenset(turn) for turn in self._turns[1:-1])
        [(most, _)] = kinds.most_common(1)
        files = [*next(turn for turn in self._turns if most == turn.keys())]
        return files, sorted({name for kind in kinds for name in kind - most})


def together(calls: list[Callable[[], object]]) -> None:
    """Run all calls at once."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def decode(device: str) -> Trace:
    """Decode one request."""
    ranks, epoch, trace = 2 if device == "cpu" else 1, secrets.randbits(31), Trace()
    dtype = "bfloat16" if device == "cuda" and torch.cuda.is_available() else "float32"
    config = EngineConfig(
        model_path=str(DEMO), device=device, num_workers=ranks, dtype=dtype, kv_memory=4 << 20, max_num_seqs=4
    )
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(gpu_steps())
        stack.enter_context(trace.watch())
        workers = [
            Worker(WorkerSpec(config=config, rank=rank, epoch=epoch, host="127.0.0.1", version=""))
            for rank in range(ranks)
        ]
        for worker in workers:
            stack.callback(worker.stop)
        mesh = [worker.endpoints()["mesh"] for worker in workers]
        together([lambda worker=worker: worker.connect(mesh) for worker in workers])  # type: ignore[misc]
        together([lambda worker=worker: worker.load(ranks) for worker in workers])  # type: ignore[misc]
        for worker in workers:
            worker.start()
        client = Client([worker.endpoints()["frontend"] for worker in workers])
        stack.callback(client.close)
        client.hello()
        drawn = {"temperature": 1.0, "top_p": 0.9, "seed": 1, "logprobs": 2}
        client.submit(0, "counted", list(range(9, 60)), max_tokens=TOKENS, ignore_eos=True, **drawn)
        client.wait("counted")
    return trace


def main() -> int:
    """Print the files of a decode step."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--most", type=int)
    args = parser.parse_args()
    files, others = decode(args.device).counted()
    for number, name in enumerate(files, 1):
        print(f"{number:3} {name}")
    print(f"{len(files)} files; in other steps also:", *others, sep="\n    ")
    return int(args.most is not None and len(files) > args.most)


if __name__ == "__main__":
    sys.exit(main())
