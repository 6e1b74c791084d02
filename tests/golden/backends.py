"""What serves the golden prompts, by name. A new backend is one entry: the comparison knows nothing of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moeyard_worker.engine.verify import local_runner
from moeyard_worker.scheduling.step import Chunk, Step

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's tokens in order, and the log-probability of each over the whole vocabulary."""

    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """serve: (checkpoint, prompts, how many greedy tokens) -> an answer to each, end tokens ignored, in float32.

    tolerance: the largest difference of a log-probability from transformers' that rounding explains. available: whether
    this machine can run it, asked when the test runs.
    """

    serve: Callable[[Path, list[list[int]], int], list[Answer]]
    tolerance: float
    available: Callable[[], bool]


@torch.inference_mode()
def serve_on_cpu(checkpoint: Path, prompts: list[list[int]], num_tokens: int) -> list[Answer]:
    """All prompts in one step, then one step per token with a row of each."""
    size = -(-(max(map(len, prompts)) + num_tokens) // PAGE_SIZE)
    runner = local_runner(checkpoint, dtype=torch.float32, num_pages=size * len(prompts), page_size=PAGE_SIZE)
    pages = [tuple(range(i * size, (i + 1) * size)) for i in range(len(prompts))]
    answers = [Answer([], []) for _ in prompts]

    def chunk(number: int, *, prompt: bool) -> Chunk:
        ids = prompts[number] if prompt else answers[number].ids[-1:]
        start = 0 if prompt else len(prompts[number]) + len(answers[number].ids) - 1
        return Chunk(
            request_id=str(number), start=start, token_ids=tuple(ids), pages=pages[number], prompt=prompt, sample=True
        )

    for position in range(num_tokens):
        chunks = tuple(chunk(number, prompt=position == 0) for number in range(len(prompts)))
        step = Step(prefill=chunks) if position == 0 else Step(decode=chunks)
        logits = runner.forward(step)[: len(prompts)]  # without padding
        best = logits.argmax(-1)
        logprobs = torch.log_softmax(logits.float(), -1).gather(1, best[:, None])[:, 0]
        for answer, token, logprob in zip(answers, best.tolist(), logprobs.tolist(), strict=True):
            answer.ids.append(token)
            answer.logprobs.append(logprob)
    return answers


BACKENDS = {
    # Measured on 2026-11-22 over all 1280 tokens (torch 2.13 and 2.15, AMD EPYC): at most 1.1e-5, 99 of 100 below
    # 4.2e-6, half below 8e-7; only the order of sums differs. One bfloat16 rounding of a logit of 8 is up to 3e-2.
    "cpu": Backend(serve=serve_on_cpu, tolerance=5e-5, available=lambda: True),
}
