"""One answer: the bits of a position's logits do not depend on the composition of its step."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.checkpoints import VOCAB_SIZE, make_checkpoint

from moeyard_kernels.ops import token_logprobs
from moeyard_worker.engine.assembly.local import greedy_tokens, local_runner, prompt_logits
from moeyard_worker.engine.sampling.sampling import read_tokens
from moeyard_worker.engine.sampling.scoring import Scores, read_scores, score
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.protocol import TokenLogprob
from moeyard_worker.scheduling.step import Chunk, Scoring, Step

OPTIONS = {
    "deepseek_v3": {"num_hidden_layers": 2},
    # Widths that are not multiples of a vector register.
    "deepseek_v2": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        "kv_lora_rank": 18,
        "q_lora_rank": None,
    },
    "qwen3_moe": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 10},
    "mixtral": {"sliding_window": 40},
    # Norms over 90 and 30 values.
    "olmoe": {"hidden_size": 90, "num_attention_heads": 9, "num_key_value_heads": 3},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPT_LENGTH, NUM_TOKENS = 150, 20
PAGES = 11  # of 16 positions


@pytest.fixture(params=[f"{family}-{dtype}" for family in OPTIONS for dtype in DTYPES], scope="module")
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    family, dtype = request.param.split("-")
    directory = make_checkpoint(tmp_path_factory.mktemp(family), family, dtype=DTYPES[dtype], **OPTIONS[family])
    return local_runner(directory, dtype=DTYPES[dtype], num_pages=4 * PAGES)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in (PROMPT_LENGTH, 33, 97)]


@pytest.fixture(scope="module")
def alone(runner: Runner, prompts: list[list[int]]) -> tuple[list[int], torch.Tensor]:
    """Run the first prompt alone, in one chunk."""
    return greedy_tokens(runner, prompts[0], NUM_TOKENS)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64])
def test_prompt_chunks(runner: Runner, prompts: list[list[int]], alone: tuple, chunk_size: int) -> None:
    tokens, logits = greedy_tokens(runner, prompts[0], NUM_TOKENS, first_page=PAGES, chunk_size=chunk_size)
    assert tokens == alone[0]
    assert torch.equal(logits, alone[1])


def make_chunk(ids: list[int], start: int, size: int, *, prompt: bool, first_page: int, reverse: bool = False) -> Chunk:
    pages = range(first_page, first_page + PAGES)
    return Chunk(
        key=(b"", ""),
        start=start,
        token_ids=tuple(ids[start : start + size]),
        pages=tuple(reversed(pages)) if reverse else tuple(pages),
        prompt=prompt,
        num_sampled=1,
    )


@pytest.mark.sampled(0)
@pytest.mark.parametrize("chunk_size", [9, 48])
def test_mixed_batch(runner: Runner, prompts: list[list[int]], alone: tuple, chunk_size: int) -> None:
    """The first request decodes while two others prefill in chunks and then decode too, on scattered pages."""
    tokens, expected = alone
    ids = [*prompts[0], *tokens]
    others = [list(prompt) for prompt in prompts[1:]]
    done = [0, 0]
    runner.forward(Step(prefill=(make_chunk(ids, 0, PROMPT_LENGTH, prompt=True, first_page=0, reverse=True),)))
    for i in range(1, NUM_TOKENS):
        prefill, decode = [], []
        for which, other in enumerate(others):
            page, left = (which + 1) * PAGES, len(prompts[which + 1]) - done[which]
            if left > 0:
                prefill.append(make_chunk(other, done[which], min(chunk_size, left), prompt=True, first_page=page))
            else:
                decode.append(make_chunk(other, done[which], 1, prompt=False, first_page=page))
        decode.insert(1, make_chunk(ids, PROMPT_LENGTH + i - 1, 1, prompt=False, first_page=0, reverse=True))
        step = Step(prefill=tuple(prefill), decode=tuple(decode))
        logits = runner.forward(step)
        mine = next(n for n, chunk in enumerate(step.sampled) if chunk.pages[0] == PAGES - 1)
        assert torch.equal(logits[mine], expected[i]), i
        for which, other in enumerate(others):
            chunk = next(c for c in step.chunks if c.pages[0] == (which + 1) * PAGES)
            done[which] += chunk.num_tokens
            if done[which] == len(other):
                other.append(int(logits[step.sampled.index(chunk)].argmax()))
    for which, other in enumerate(others):
        length = len(prompts[which + 1])
        expected_tokens, _ = greedy_tokens(runner, prompts[which + 1], len(other) - length, first_page=3 * PAGES)
        assert other[length:] == expected_tokens


@pytest.mark.parametrize("chunk_size", [2, 6, NUM_TOKENS - 1])
def test_recomputed_outputs(runner: Runner, prompts: list[list[int]], alone: tuple, chunk_size: int) -> None:
    """Output positions run again, several rows of one sequence in one decode chunk, beside another prompt."""
    tokens, expected = alone
    ids = [*prompts[0], *tokens]
    runner.forward(Step(prefill=(make_chunk(ids, 0, PROMPT_LENGTH, prompt=True, first_page=2 * PAGES),)))
    # KV of these positions must come from the recomputation, not from an earlier run.
    for start in range(0, NUM_TOKENS - 1, chunk_size):
        size = min(chunk_size, NUM_TOKENS - 1 - start)
        again = make_chunk(ids, PROMPT_LENGTH + start, size, prompt=False, first_page=2 * PAGES)
        other = make_chunk(prompts[1], 0, 33, prompt=True, first_page=PAGES)
        logits = runner.forward(Step(prefill=(other,), decode=(again,)))
        assert torch.equal(logits[1], expected[start + size])


def test_only_sampled_rows_are_returned(runner: Runner, prompts: list[list[int]], alone: tuple) -> None:
    ids = [*prompts[0], *alone[0]]
    silent = Chunk(key=(b"", ""), start=0, token_ids=(1, 2, 3), pages=(PAGES,), prompt=True, num_sampled=0)
    assert runner.forward(Step(prefill=(silent,))).shape == (0, VOCAB_SIZE)
    runner.forward(Step(prefill=(make_chunk(ids, 0, PROMPT_LENGTH, prompt=True, first_page=0),)))
    decode = make_chunk(ids, PROMPT_LENGTH, 1, prompt=False, first_page=0)
    logits = runner.forward(Step(prefill=(silent,), decode=(decode,)))
    assert logits.shape[1] == VOCAB_SIZE
    assert logits.dtype == torch.float32
    assert torch.equal(logits[0], alone[1][1])


def scores_of(runner: Runner, *prefill: Chunk, whole: bool = False) -> Scores:
    step = Step(prefill=prefill)
    with torch.inference_mode():
        return read_scores(
            step,
            score(runner.backend, runner.model.head, runner.model.hidden(runner.backend.plan(step)), step, whole=whole),
        )


def scored_chunk(ids: list[int], start: int, size: int, *, first_page: int = 0, first: int = 0) -> Chunk:
    targets = tuple(ids[start + first + 1 : start + size + 1])
    scoring = Scoring(first=first, targets=targets, num_top=3) if targets else None
    chunk = make_chunk(ids, start, size, prompt=True, first_page=first_page)
    return replace(chunk, num_sampled=0, scoring=scoring)


@pytest.mark.sampled(0)
def test_prompt_scores(runner: Runner, prompts: list[list[int]]) -> None:
    """Log-probability bits do not depend on chunks, blocks of the head, or other prompts."""
    ids, other = prompts[0], prompts[2]
    (alone,) = scores_of(runner, scored_chunk(ids, 0, PROMPT_LENGTH))
    assert len(alone) == PROMPT_LENGTH - 1
    assert scores_of(runner, scored_chunk(ids, 0, PROMPT_LENGTH), whole=True) == [alone]
    for size in (7, 64):
        found: list[TokenLogprob] = []
        for start in range(0, PROMPT_LENGTH, size):
            beside = scored_chunk(other, 0, 5 + start % 60, first_page=PAGES)
            mine = scored_chunk(ids, start, min(size, PROMPT_LENGTH - start), first_page=2 * PAGES)
            found += [entry for scores in scores_of(runner, beside, mine)[1:] for entry in scores]
        assert tuple(found) == alone, size
    (late,) = scores_of(runner, scored_chunk(ids, 0, PROMPT_LENGTH, first=100))
    assert late == alone[100:]
    # The logits are those from which a token would be sampled, row by row.
    sampled = prompt_logits(runner, ids, range(PAGES), chunk_size=1)[:-1]
    expected = read_tokens(token_logprobs(sampled, torch.tensor(ids[1:]), 3), [3] * len(sampled))
    assert alone == tuple(entry for _, entry in expected)


def test_idle_step_takes_part_in_every_exchange(tmp_path: Path) -> None:
    runner = local_runner(make_checkpoint(tmp_path, "deepseek_v3"), dtype=torch.float32, num_pages=1)
    exchange = runner.model._layers[1].block._exchange  # type: ignore[union-attr]
    calls: list[tuple[str, int]] = []
    dispatch, combine = exchange.dispatch, exchange.combine

    def spy_dispatch(x: torch.Tensor, ids: torch.Tensor, *, layer: int, num_prompt: int) -> object:
        assert x.shape == (0, 64)
        assert ids.shape == (0, 2)
        assert ids.dtype == torch.int64
        calls.append(("dispatch", layer))
        return dispatch(x, ids, layer=layer, num_prompt=num_prompt)

    def spy_combine(out: torch.Tensor, handle: object) -> torch.Tensor:
        calls.append(("combine", out.shape[0]))
        return combine(out, handle)

    exchange.dispatch, exchange.combine = spy_dispatch, spy_combine
    assert runner.forward(Step.empty()).shape == (0, VOCAB_SIZE)
    assert calls == [("dispatch", 1), ("combine", 0), ("dispatch", 2), ("combine", 0)]
