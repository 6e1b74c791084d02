"""Backends that serve the golden prompts, by name. A new backend is one entry."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from moeyard_kernels.backend import Backend
from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_worker.engine.assembly.local import local_runner
from moeyard_worker.scheduling.step import Chunk, Step


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of one answer and their log-probabilities over the whole vocabulary."""

    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """make: return the backend (float32) for a page size. marks: marks of its test, such as `gpu`.

    tolerance: largest difference of a log-probability from transformers' that rounding explains.
    """

    make: Callable[[int], Backend]
    tolerance: float
    marks: tuple[pytest.MarkDecorator, ...] = ()


def serve(
    backend: Backend, checkpoint: Path, prompts: list[list[int]], num_tokens: int, gguf: Path | None = None
) -> list[Answer]:
    """Greedy answers without end tokens: one step prefills all prompts, then each step decodes a row of each.

    gguf: a file with the weights of the model that `checkpoint` describes.
    """
    page_size = backend.page_size
    size = -(-(max(map(len, prompts)) + num_tokens) // page_size)
    runner = local_runner(
        checkpoint,
        dtype=torch.float32,
        num_pages=size * len(prompts),
        page_size=page_size,
        backend=backend,
        gguf=None if gguf is None else str(gguf),
    )
    pages = [tuple(range(i * size, (i + 1) * size)) for i in range(len(prompts))]
    answers = [Answer([], []) for _ in prompts]

    def chunk(number: int, *, prompt: bool) -> Chunk:
        return Chunk(
            key=(b"", str(number)),
            start=0 if prompt else len(prompts[number]) + len(answers[number].ids) - 1,
            token_ids=tuple(prompts[number] if prompt else answers[number].ids[-1:]),
            pages=pages[number],
            prompt=prompt,
            num_sampled=1,
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


CANDIDATES = {
    # Measured on 2026-11-22 over all 1280 tokens (torch 2.13 and 2.15, AMD EPYC): at most 1.1e-5, 99 of 100 below
    # 4.2e-6, half below 8e-7. Only the order of sums differs. One bfloat16 rounding of a logit of 8 is up to 3e-2.
    "cpu": Candidate(make=lambda page_size: CpuBackend(page_size=page_size), tolerance=5e-5),
    "cuda": Candidate(
        make=lambda page_size: CudaBackend(page_size=page_size, device=torch.device("cuda")),
        tolerance=5e-5,
        marks=(pytest.mark.gpu,),
    ),
}
