"""One answer of models with state in slots: the bits of a position's logits do not depend on how it runs.

Prompt chunks must end at multiples of a block, which the scheduler ensures. Everything else is free.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import VOCAB_SIZE, make_checkpoint

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.engine.assembly.local import greedy_tokens, local_runner, prompt_logits
from moeyard_worker.engine.assembly.verify import reference_model
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.models.families import load_model_config
from moeyard_worker.models.shapes import served_model
from moeyard_worker.scheduling.step import Chunk, Step

ODD = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 18,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the multiple at which its chunks end, and the lengths of three prompts."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    block: int = 64
    lengths: tuple[int, int, int] = (200, 33, 97)


def deepseek_v4(**options: Any) -> Case:
    # Past the border of a block of 128, just before one, and within the first block of 4.
    return Case("deepseek_v4", options, block=128, lengths=(300, 126, 2))


ODD_KIMI = {"linear_num_heads": 3, "linear_head_dim": 18, "linear_conv_kernel_dim": 3}
CASES = {
    "qwen3_next": Case("qwen3_next"),
    "qwen3_next-odd": Case("qwen3_next", ODD),
    "qwen3_next-bf16": Case("qwen3_next", {"dtype": torch.bfloat16}),
    "qwen3_5_moe": Case("qwen3_5_moe"),
    "kimi_linear-odd": Case("kimi_linear", ODD_KIMI),
    "kimi_linear-bf16": Case("kimi_linear", {"dtype": torch.bfloat16}),
    "deepseek_v4": deepseek_v4(),
    "deepseek_v4-bf16": deepseek_v4(dtype=torch.bfloat16),
}
NUM_TOKENS = 12
PAGES = 20  # of 16 positions


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def runner(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    directory = make_checkpoint(tmp_path_factory.mktemp(case.family), case.family, **case.options)
    return local_runner(directory, dtype=case.options.get("dtype", torch.float32), num_pages=4 * PAGES)


@pytest.fixture(scope="module")
def prompts(case: Case) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in case.lengths]


@pytest.fixture(scope="module")
def alone(runner: Runner, prompts: list[list[int]]) -> list[tuple[list[int], torch.Tensor]]:
    """Run every prompt alone, in one chunk."""
    return [greedy_tokens(runner, prompt, NUM_TOKENS) for prompt in prompts]


def chunk(ids: list[int], start: int, size: int, *, which: int, prompt: bool) -> Chunk:
    """Return rows of sequence `which`, which has its own pages and slot."""
    pages = tuple(range(which * PAGES, (which + 1) * PAGES))
    return Chunk(
        key=(b"", ""),
        start=start,
        token_ids=tuple(ids[start : start + size]),
        pages=pages,
        state_slot=2 * which + 1,
        prompt=prompt,
        num_sampled=1,
    )


@pytest.mark.parametrize("blocks", [1, 2])
def test_prompt_chunks(case: Case, runner: Runner, prompts: list[list[int]], alone: list, blocks: int) -> None:
    """The slot holds the state of an earlier sequence, which must not show."""
    size = blocks * case.block
    tokens, logits = greedy_tokens(runner, prompts[0], NUM_TOKENS, first_page=PAGES, chunk_size=size, slot=3)
    assert tokens == alone[0][0]
    assert torch.equal(logits, alone[0][1])


def test_mixed_batch(case: Case, runner: Runner, prompts: list[list[int]], alone: list) -> None:
    """Each prompt begins some steps after the one before, so its chunks run with decode rows of the others."""
    known = [list(prompt) for prompt in prompts]
    done, begins = [0] * len(prompts), (3, 0, 1)
    for turn in range(NUM_TOKENS + 8):
        prefill, decode = [], []
        for which, ids in enumerate(known):
            left = len(prompts[which]) - done[which]
            if turn < begins[which] or len(ids) == len(prompts[which]) + NUM_TOKENS:
                continue
            if left > 0:
                prefill.append((which, chunk(ids, done[which], min(case.block, left), which=which, prompt=True)))
            else:
                decode.append((which, chunk(ids, done[which], 1, which=which, prompt=False)))
        if turn % 2:
            decode.reverse()
        step = Step(prefill=tuple(c for _, c in prefill), decode=tuple(c for _, c in decode))
        logits = runner.forward(step)
        for row, (which, each) in enumerate(prefill + decode):
            done[which] += each.num_tokens
            if done[which] == len(known[which]):
                number = len(known[which]) - len(prompts[which])
                assert torch.equal(logits[row], alone[which][1][number]), (which, number)
                known[which].append(int(logits[row].argmax()))
    assert [ids[len(prompt) :] for ids, prompt in zip(known, prompts, strict=True)] == [tokens for tokens, _ in alone]


def test_continuation_from_a_snapshot(case: Case, runner: Runner, prompts: list[list[int]], alone: list) -> None:
    """One sequence leaves a snapshot within or at the end of a chunk, and another continues from it."""
    length = case.lengths[0]
    whole = length // case.block * case.block
    beside = max((1, 2), key=case.lengths.__getitem__)
    ids, other = prompts[0], chunk(prompts[beside], 0, case.lengths[beside], which=2, prompt=True)
    for at in range(case.block, whole + 1, case.block):
        snapshots = ((at, 6), (whole, 7)) if at < whole else ((whole, 6),)
        left = replace(chunk(ids, 0, whole, which=0, prompt=True), snapshots=snapshots)
        runner.forward(Step(prefill=(other, left)))
        # Both sequences share pages, but not state: the first one has moved on.
        runner.forward(Step(prefill=(chunk(ids, whole, 8, which=0, prompt=True),)))
        begun = replace(chunk(ids, at, length - at, which=0, prompt=True), state_slot=3, restored=6, snapshots=())
        logits = runner.forward(Step(prefill=(begun, other)))
        assert torch.equal(logits[0], alone[0][1][0]), at
        assert torch.equal(logits[1], alone[beside][1][0]), at
        first = replace(chunk([*ids, alone[0][0][0]], length, 1, which=0, prompt=False), state_slot=3)
        assert torch.equal(runner.forward(Step(decode=(first,)))[0], alone[0][1][1]), at


@pytest.mark.parametrize("chunk_size", [2, 5, NUM_TOKENS - 1])
def test_recomputed_outputs(case: Case, runner: Runner, prompts: list[list[int]], alone: list, chunk_size: int) -> None:
    """As after a preemption, a step has several rows of each of two sequences beside another prompt."""
    lengths = case.lengths
    ids = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, alone, strict=True)]
    runner.forward(Step(prefill=tuple(chunk(ids[i], 0, lengths[i], which=i, prompt=True) for i in (0, 1))))
    for start in range(0, NUM_TOKENS - 1, chunk_size):
        size = min(chunk_size, NUM_TOKENS - 1 - start)
        # The second sequence has a row less, so waves of rows differ in width. With DeepSeek-V4 it crosses the border
        # of a block.
        shorter = max(1, size - 1)
        again = [chunk(ids[0], lengths[0] + start, size, which=0, prompt=False)]
        if start == 0:
            again.append(chunk(ids[1], lengths[1], shorter, which=1, prompt=False))
        other = chunk(prompts[2], 0, lengths[2], which=2, prompt=True)
        logits = runner.forward(Step(prefill=(other,), decode=tuple(again)))
        assert torch.equal(logits[0], alone[2][1][0])
        assert torch.equal(logits[1], alone[0][1][start + size])
        if start == 0:
            assert torch.equal(logits[2], alone[1][1][shorter])


def test_against_transformers_in_chunks(tmp_path: Path, seed: int) -> None:
    """Compare every position where a chunk of the formula begins or ends, in a prompt of several chunks."""
    directory = make_checkpoint(tmp_path, "qwen3_next", seed=seed)
    prompt = torch.randint(VOCAB_SIZE, (260,), generator=torch.Generator().manual_seed(seed)).tolist()
    runner = local_runner(directory, dtype=torch.float32, num_pages=17)
    with torch.inference_mode():
        expected = reference_model(directory, "qwen3_next", dtype=torch.float32)(torch.tensor([prompt])).logits[0]
    for end in (1, 63, 64, 65, 128, 129, 200, 260):
        logits = prompt_logits(runner, prompt[:end], range(17), chunk_size=64)[-1]
        assert float((logits - expected[end - 1]).abs().max() / expected.abs().max()) < 1e-4, end


def test_too_small_chunks_are_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3_next")
    assert load_model_config(directory).has_slots
    for options, message in (
        ({"prefill_chunk": 63}, "--prefill-chunk 63: qwen3_next computes 64 positions of a prompt together"),
        ({"max_batch_tokens": 32, "max_num_seqs": 8}, "--max-batch-tokens 32: qwen3_next computes 64"),
    ):
        with pytest.raises(ValueError, match=message):
            served_model(EngineConfig(model_path=str(directory), **options))
