"""The share of prompt tokens that a rank computes, by the share of KV memory for state snapshots.

    python bench/snapshots.py [--kv-memory 8GiB] [--model qwen3_next | kimi_linear] [--rule served lru]

The scheduler is the real one, with the sizes of a published model in bfloat16 and as many pages and snapshots as fit.
Steps are not computed. 16 requests run at once, with answers of 8 tokens (the next prompt of a conversation contains
its own answer of that length). For each trace of shared prefixes, share and eviction rule the output has computed and
total prompt tokens, and evictions. Share 0 is no reuse. The rules are the served one (`state/snapshots.py`) and LRU.
"""

import argparse
import random
from collections import deque
from collections.abc import Callable, Iterator
from unittest.mock import patch

from moeyard_worker.config.engine_config import SchedulerConfig, format_size, parse_size
from moeyard_worker.protocol import SamplingParams, Submit
from moeyard_worker.scheduling import holdings
from moeyard_worker.scheduling.request import Accepted
from moeyard_worker.scheduling.scheduler import Scheduler
from moeyard_worker.state.snapshots import SnapshotPool

# Bytes of a sequence's state, and of a token in layers of full attention (docs/linear_attention.md).
SIZES = {"qwen3_next": (int(73.7 * 2**20), 24 << 10), "kimi_linear": (int(41.4 * 2**20), int(7.9 * 1024))}
PAGE, CHUNK, SEQS, VOCAB = 16, 64, 16, 50_000
SHARES = (0.0, 0.25, 0.5, 0.75)

Trace = Iterator[tuple[int, ...]]


def text(rng: random.Random, least: int, most: int) -> tuple[int, ...]:
    """Return `least` to `most` random tokens."""
    return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(least, most)))


def chats(rng: random.Random) -> Trace:
    """Return 40 concurrent conversations of 6 turns each, with one system prompt. A new one replaces each that ends."""
    system, open_chats = text(rng, 400, 400), []
    for _ in range(1200):
        while len(open_chats) < 40:
            open_chats.append((system, 0))
        which = rng.randrange(len(open_chats))
        history, turn = open_chats.pop(which)
        prompt = (*history, *text(rng, 30, 400))
        yield prompt
        if turn < 5:
            open_chats.append(((*prompt, *text(rng, 50, 500)), turn + 1))


def system_prompts(rng: random.Random) -> Trace:
    """Return requests with 60 system prompts of 500 to 4000 tokens, some of them popular, and own questions."""
    heads = [text(rng, 500, 4000) for _ in range(60)]
    for _ in range(800):
        yield (*heads[min(int(rng.expovariate(0.08)), 59)], *text(rng, 20, 300))


def few_shots(rng: random.Random) -> Trace:
    """Return 8 sets of examples of 3000 tokens in sequence, with 60 questions each."""
    for _ in range(8):
        head = text(rng, 3000, 3000)
        for _ in range(60):
            yield (*head, *text(rng, 50, 200))


def distinct(rng: random.Random) -> Trace:
    """Return prompts that share nothing, for the cost of useless snapshots in pages and copies."""
    for _ in range(300):
        yield text(rng, 100, 3000)


TRACES: dict[str, Callable[[random.Random], Trace]] = {
    "chats": chats,
    "system_prompts": system_prompts,
    "few_shots": few_shots,
    "distinct": distinct,
}


class Lru(SnapshotPool):
    """Evicts the least recently used snapshot."""

    def _least(self) -> bytes:
        return next(iter(self._held))


RULES: dict[str, type[SnapshotPool]] = {"served": SnapshotPool, "lru": Lru}


def run(trace: Trace, *, pages: int, snapshots: int, rule: str = "served") -> Scheduler:
    """Run a trace and return the scheduler at its end."""
    config = SchedulerConfig(
        num_pages=pages,
        page_size=PAGE,
        max_model_len=16384,
        vocab_size=VOCAB,
        max_num_seqs=SEQS,
        prefix_caching=snapshots > 0,
        num_state_slots=SEQS,
        num_snapshots=snapshots,
        chunk_alignment=CHUNK,
    )
    with patch.object(holdings, "SnapshotPool", RULES[rule]):
        scheduler = Scheduler(config)
    prompts = deque(enumerate(trace))
    while prompts or scheduler.has_work():
        while prompts and scheduler.num_running + scheduler.num_waiting < SEQS:
            number, prompt = prompts.popleft()
            sampling = SamplingParams(max_tokens=8, ignore_eos=True)
            refused = scheduler.add(
                Submit(request_id=str(number), prompt_token_ids=prompt, sampling=sampling), b"bench", 0.0
            )
            assert refused is None, refused
        step = scheduler.schedule(0.0)
        scheduler.complete(step, [Accepted((1,))] * len(step.sampled), 0.0)
    return scheduler


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-memory", type=parse_size, default=8 << 30)
    parser.add_argument("--model", choices=tuple(SIZES), default="qwen3_next")
    parser.add_argument("--rule", nargs="+", choices=tuple(RULES), default=["served"])
    args = parser.parse_args()
    state, token = SIZES[args.model]
    print(f"{args.model}, {format_size(args.kv_memory)} of KV memory, {SEQS} at once")
    for name, make in TRACES.items():
        for share in SHARES:
            snapshots = int(args.kv_memory * share) // state
            pages = (args.kv_memory - snapshots * state) // (token * PAGE)
            for rule in args.rule if snapshots else args.rule[:1]:
                done = run(make(random.Random(1)), pages=pages, snapshots=snapshots, rule=rule)
                stats, held = done.stats, done.snapshots
                total = stats.prefill_tokens + stats.prefix_hit_tokens
                print(
                    f"{name:<15} share {share:<5} {rule:<6} {snapshots:>4} snapshots {pages * PAGE:>7} tokens of pages:"
                    f" computed {stats.prefill_tokens / total:>6.1%} of {total}, used {held.num_used}, "
                    f"taken {held.num_taken}, evicted {held.num_evicted}, preempted {stats.num_preemptions}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
