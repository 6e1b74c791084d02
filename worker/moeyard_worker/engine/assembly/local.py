"""A fleet of one rank, driven step by step, for comparisons with other implementations."""

from collections.abc import Sequence
from pathlib import Path

import torch

from moeyard_kernels.backend import Backend
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_checkpoint
from moeyard_worker.engine.assembly.device import cpu_backend
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.exchange.transports.local import LocalExchange
from moeyard_worker.experts.cache import ExpertCache
from moeyard_worker.layers.routing import StepRouting
from moeyard_worker.models.families import load_model_config
from moeyard_worker.models.spec import ModelSpec
from moeyard_worker.scheduling.step import Chunk, Step

PAGE_SIZE = 16


def local_runner(
    directory: Path | str,
    *,
    dtype: torch.dtype,
    num_pages: int,
    page_size: int = PAGE_SIZE,
    backend: Backend | None = None,
    num_slots: int | None = None,
    policy: str = "slru",
    num_state_slots: int = 8,
    gguf: str | None = None,
    drafts: bool = False,
) -> Runner:
    """Return the runner of a fleet of one rank. `num_slots`: the number of expert slots (None: one for each expert).

    `gguf`: a GGUF file with the weights of the model that `directory` describes. `drafts`: with its layer of
    multi-token prediction.

    The longest sequence fills `num_pages`. `num_state_slots`: slots of state per sequence, if the model keeps such
    state. Raises CheckpointError.
    """
    config = load_model_config(directory, num_pages * page_size, gguf=gguf is not None)
    config = config.with_drafts() if drafts else config
    checkpoint = open_checkpoint(directory, config, gguf)
    backend = cpu_backend(page_size) if backend is None else backend
    return runner_of(
        CheckpointWeights(checkpoint, backend=backend, dtype=dtype),
        checkpoint.spec,
        backend=backend,
        dtype=dtype,
        num_pages=num_pages,
        num_slots=num_slots,
        policy=policy,
        num_state_slots=num_state_slots if config.has_slots else 0,
    )


def runner_of(
    weights: CheckpointWeights,
    spec: ModelSpec,
    *,
    backend: Backend,
    dtype: torch.dtype,
    num_pages: int,
    num_state_slots: int,
    num_slots: int | None = None,
    policy: str = "slru",
    routing: StepRouting | None = None,
) -> Runner:
    """Return the runner of a rank without peers that computes with `weights`. Arguments are those of `local_runner` and
    `Runner`."""
    config = spec.config
    experts = ExpertCache(
        backend=backend,
        source=weights,
        layers=config.moe_layers,
        experts=range(config.num_experts),
        form=config.expert_form(str(dtype).removeprefix("torch.")),
        num_slots=config.num_experts * len(config.moe_layers) if num_slots is None else num_slots,
        policy=policy,
    )
    experts.preload()
    return Runner(
        spec,
        load=weights.load,
        backend=backend,
        exchange=LocalExchange(),
        experts=experts,
        dtype=dtype,
        num_pages=num_pages,
        num_state_slots=num_state_slots,
        routing=routing,
    )


def prompt_logits(
    runner: Runner, token_ids: Sequence[int], pages: Sequence[int], *, chunk_size: int | None = None, slot: int = 0
) -> torch.Tensor:
    """Return logits [chunks, V] at the end of each prompt chunk. `slot`: of the sequence's state, if there is any."""
    slot = slot if runner.config.has_slots else -1
    rows = []
    size = chunk_size or len(token_ids)
    for begin in range(0, len(token_ids), size):
        ids = tuple(token_ids[begin : begin + size])
        chunk = Chunk(
            key=(b"", ""), start=begin, token_ids=ids, pages=tuple(pages), state_slot=slot, prompt=True, num_sampled=1
        )
        rows.append(runner.forward(Step(prefill=(chunk,)))[0])
    return torch.stack(rows)


def greedy_tokens(
    runner: Runner,
    token_ids: Sequence[int],
    num_tokens: int,
    *,
    first_page: int = 0,
    chunk_size: int | None = None,
    slot: int = 0,
) -> tuple[list[int], torch.Tensor]:
    """Return `num_tokens` greedy tokens after a prompt, and their logits [num_tokens, V].

    Uses the pages from `first_page` on, and `slot` if the model keeps state per sequence. The lowest id wins a tie.
    """
    count = -(-(len(token_ids) + num_tokens) // runner.page_size)
    pages = tuple(range(first_page, first_page + count))
    rows = [prompt_logits(runner, token_ids, pages, chunk_size=chunk_size, slot=slot)[-1]]
    tokens = [int(rows[0].argmax())]
    while len(tokens) < num_tokens:
        position = len(token_ids) + len(tokens) - 1
        chunk = Chunk(
            key=(b"", ""),
            start=position,
            token_ids=(tokens[-1],),
            pages=pages,
            prompt=False,
            num_sampled=1,
            state_slot=slot if runner.config.has_slots else -1,
        )
        rows.append(runner.forward(Step(decode=(chunk,)))[0])
        tokens.append(int(rows[-1].argmax()))
    return tokens, torch.stack(rows)
