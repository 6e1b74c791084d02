"""The CUDA backend computes what the CPU backend does, through kernels on a GPU and through their references otherwise.

Cases are all families, and configurations that take another path through a layer. Steps have prompts in chunks, decode
rows, and several rows of one sequence. In fp32 both backends agree up to the order of sums.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.checkpoints import MLA, VOCAB_SIZE, make_checkpoint
from tests.models.test_families import relative

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.cuda.step_inputs import StepInputs
from moeyard_kernels.types.gate import GateRule
from moeyard_kernels.types.layers import GateLayer, GqaLayer
from moeyard_kernels.types.matrix import Matrix
from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.engine.assembly.local import PAGE_SIZE, greedy_tokens, local_runner
from moeyard_worker.engine.sampling.scoring import read_scores, score
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.models.families import load_model_config
from moeyard_worker.scheduling.step import Chunk, Scoring, Step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-bias_no_q_rank": ("deepseek_v3", {"attention_bias": True, "q_lora_rank": None}),
    "deepseek_v2": ("deepseek_v2", {}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3_moe-bias_tied": ("qwen3_moe", {"attention_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 40}),
    "olmoe": ("olmoe", {}),
    "olmoe-bias_six_heads": (
        "olmoe",
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True},
    ),
}
# Kernels need widths that are powers of two from 16 on.
WIDTHS = {
    "deepseek_v3": MLA,
    "deepseek_v2": MLA,
}
NUM_PAGES = 40
LENGTHS = (70, 33, 50, 41)


@pytest.fixture(params=CASES, scope="module")
def runners(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Runner]:
    family, overrides = CASES[request.param]
    directory = make_checkpoint(tmp_path_factory.mktemp(family), family, **{**WIDTHS.get(family, {}), **overrides})
    return make_runner(directory, torch.float32), local_runner(directory, dtype=torch.float32, num_pages=NUM_PAGES)


def make_runner(directory: Path, dtype: torch.dtype, **residency: Any) -> Runner:
    backend = CudaBackend(page_size=PAGE_SIZE, device=DEVICE)
    return local_runner(directory, dtype=dtype, num_pages=NUM_PAGES, backend=backend, **residency)


def prompt(length: int, seed: int = 5) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def chunk(which: int, start: int, end: int, *, is_prompt: bool, num_sampled: int = 1) -> Chunk:
    """Return a chunk of one of four sequences, each with its own pages."""
    tokens, pages = tuple(prompt(LENGTHS[which], which)[start:end]), tuple(range(10 * which, 10 * which + 5))
    return Chunk(key=(b"", ""), start=start, token_ids=tokens, pages=pages, prompt=is_prompt, num_sampled=num_sampled)


def test_logits_and_greedy_tokens(runners: tuple[Runner, Runner]) -> None:
    ours, theirs = (greedy_tokens(runner, prompt(97), 16, chunk_size=40) for runner in runners)
    assert relative(ours[1], theirs[1]) < 1e-4
    assert ours[0] == theirs[0]


def test_prompts_beside_decode_rows(runners: tuple[Runner, Runner]) -> None:
    """Two prompts, one of them continued, a single decode row, and three rows of one sequence."""
    results = []
    for runner in runners:
        first = Step(prefill=(chunk(0, 0, 30, is_prompt=True), chunk(2, 0, 49, is_prompt=True)))
        runner.forward(first)
        runner.forward(Step(prefill=(chunk(3, 0, 38, is_prompt=True),)))
        mixed = Step(
            prefill=(chunk(0, 30, 70, is_prompt=True), chunk(1, 0, 33, is_prompt=True)),
            decode=(chunk(2, 49, 50, is_prompt=False), chunk(3, 38, 41, is_prompt=False)),
        )
        results.append(runner.forward(mixed)[:4])
    assert relative(*results) < 1e-4


def test_prompt_scores(runners: tuple[Runner, Runner]) -> None:
    """Scores come in blocks of one size, as in a GPU's steps, beside a prompt without scores."""
    ids, other = prompt(90), prompt(20, 6)
    scoring = Scoring(first=3, targets=tuple(ids[4:]), num_top=2)
    pages = (tuple(range(6)), tuple(range(10, 12)))
    options = {"start": 0, "prompt": True, "num_sampled": 0}
    step = Step(
        prefill=(
            Chunk(key=(b"", "a"), token_ids=tuple(other), pages=pages[1], **options),
            Chunk(key=(b"", "b"), token_ids=tuple(ids), pages=pages[0], scoring=scoring, **options),
        )
    )
    found = []
    with torch.inference_mode():
        for runner, whole in zip(runners, (True, False), strict=True):
            hidden = runner.model.hidden(runner.backend.plan(step))
            found.append(read_scores(step, score(runner.backend, runner.model.head, hidden, step, whole=whole))[0])
    ours, theirs = (torch.tensor([entry.logprob for entry in scores]) for scores in found)
    assert len(ours) == 86
    assert relative(ours, theirs) < 1e-4
    assert all(len(entry.top) == 2 for scores in found for entry in scores)


def test_empty_step(runners: tuple[Runner, Runner]) -> None:
    assert runners[0].forward(Step.empty()).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["fp32 logits", "bf16 logits"])
@pytest.mark.parametrize("num_experts", [12, 7])
def test_gate_of_a_shared_expert(num_experts: int, weight_dtype: torch.dtype) -> None:
    """On a GPU the router's product includes the shared expert's logit, and the chosen experts stay the same."""
    weight = torch.randn(num_experts, 64).bfloat16().to(weight_dtype)
    shared, x = torch.randn(1, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    rule = GateRule(top_k=3, scoring="softmax", renormalize=True)
    found = {}
    for backend in (CudaBackend(page_size=PAGE_SIZE, device=DEVICE), CpuBackend(page_size=PAGE_SIZE)):
        on = [t.to(backend.device) for t in (weight, shared, x)]
        entries = torch.tensor([3, -1, 0, 7, 8], device=backend.device)
        plan: Any = SimpleNamespace(num_rows=5, num_tokens=5, entries=entries)
        gates = [
            backend.gate(
                GateLayer(rule=rule, weight=Matrix.plain(on[0]), bias=None, dtype=torch.bfloat16, shared_gate=gate)
            )
            for gate in (Matrix.plain(on[1]), None)
        ]
        found_beside, alone = (gate.choose(on[2], plan, defer=True) for gate in gates)
        weights, ids, logits = found_beside.weights, found_beside.ids, found_beside.shared_gate
        assert torch.equal(ids, alone.ids)
        # A CPU may sum a row of 16 logits in another order than one of 7. A GPU's reference computes 16.
        padded = isinstance(backend, CudaBackend) and DEVICE.type == "cpu"
        exact = {"rtol": 1e-6, "atol": 1e-7} if padded else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(weights, alone.weights, **exact)
        assert alone.shared_gate is None
        assert found_beside.deferred is alone.deferred is None, "several rows defer no choice"
        assert logits is not None
        assert logits.shape == (5,)
        found[backend] = weights.cpu(), ids.cpu(), logits.float().cpu()
        if backend.choices is not None:
            # The logits after the experts' own belong to no expert, and row 1 is padding.
            rows = torch.bincount(ids[[0, 2, 3, 4]].flatten().cpu(), minlength=num_experts).tolist()
            while (counted := backend.choices.read()) is None:
                torch.cuda.synchronize()
            assert counted == [rows, rows]
        empty: Any = SimpleNamespace(num_rows=0, num_tokens=0)
        assert gates[0].choose(on[2][:0], empty, defer=False).shared_gate is None
    ours, theirs = found.values()
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(ours[2], x.float() @ shared[0].float(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(theirs[2], ours[2], rtol=1e-2, atol=1e-2)


def test_attention_without_a_rotation() -> None:
    """Layers without positions give the same values as any rotation at position 0."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 0.25, "window": None, "eps": 1e-6}
    step = Step(prefill=(Chunk(key=(b"", ""), start=0, token_ids=(0,) * 9, pages=(0,), prompt=True, num_sampled=1),))
    qkv = torch.randn(9, 8 * 16, generator=torch.Generator().manual_seed(1))
    results = []
    for backend in (CudaBackend(page_size=16, device=DEVICE), CpuBackend(page_size=16)):
        k, v = (torch.zeros(2, 1, 16, 16, device=backend.device) for _ in range(2))
        attention = backend.gqa(GqaLayer(**sizes, q_norm=None, k_norm=None, rope=None, interleaved=False, k=k, v=v))
        plan = backend.plan(step)
        rows = torch.zeros(plan.num_rows, 8 * 16, device=backend.device)
        rows[:9] = qkv.to(backend.device)
        results.append(attention.attend(rows, plan)[:9])
        assert torch.equal(k[:, 0, :9].cpu(), qkv.view(9, 8, 16)[:, 4:6].transpose(0, 1))
    assert relative(*results) < 1e-5


def test_captured_decode_step_equals_a_plan(runners: tuple[Runner, Runner]) -> None:
    """Three decode rows in a step of five: the host knows one token, and the step before chose two."""
    runner = runners[0]
    backend = runner.backend
    assert isinstance(backend, CudaBackend)
    lengths = (69, 32, 49)
    runner.forward(Step(prefill=tuple(chunk(i, 0, n, is_prompt=True) for i, n in enumerate(lengths))))
    step = Step(decode=tuple(chunk(i, n, n + 1, is_prompt=False) for i, n in enumerate(lengths)))
    wanted = runner.forward(step)
    last = torch.tensor([0, prompt(LENGTHS[2], 2)[49], 0, prompt(LENGTHS[1], 1)[32]], device=DEVICE)
    bucket = StepSize(sequences=5, width=7)
    inputs = StepInputs(bucket, page_size=PAGE_SIZE, windows=backend.windows, last_ids=last)
    unknown = [replace(step.decode[1], token_ids=(0,), fed=3), replace(step.decode[2], token_ids=(0,), fed=1)]
    unknown_step = Step(decode=(step.decode[0], *unknown))
    size = StepSize.of(unknown_step)
    assert size == StepSize(sequences=3, width=5)
    assert bucket.holds(size)
    inputs.fill(unknown_step)
    with torch.inference_mode():
        inputs.begin()
        got = runner.model.forward(inputs)
    rows = torch.cat((wanted[:3], wanted[:1], wanted[:1])).cpu()
    assert relative(got, rows) < 1e-5
    # A reference's sums may depend on the number of rows. A kernel's do not, and padding repeats the first row.
    assert DEVICE.type == "cpu" or torch.equal(got.cpu(), rows)


def test_padded_prompt_step_equals_a_plan(runners: tuple[Runner, Runner]) -> None:
    """A continued prompt, a whole one, two without samples, with or without decode rows, in a larger step."""
    runner = runners[0]
    backend = runner.backend
    assert isinstance(backend, CudaBackend)
    last = torch.tensor([0, prompt(LENGTHS[3], 3)[38]], device=DEVICE)
    middle = chunk(0, 30, 61, is_prompt=True, num_sampled=0)
    steps = [
        Step(prefill=(middle, chunk(1, 0, 33, is_prompt=True))),
        Step(
            prefill=(chunk(1, 0, 33, is_prompt=True), middle),
            decode=(chunk(2, 49, 50, is_prompt=False), chunk(3, 38, 39, is_prompt=False)),
        ),
        Step(prefill=(chunk(0, 30, 70, is_prompt=True),)),
    ]
    buckets = [
        StepSize(prompt=128, sequences=rows, keys=256 if backend.flat else 0, width=7, chunks=3) for rows in (0, 4)
    ]
    padded = [StepInputs(bucket, page_size=PAGE_SIZE, windows=backend.windows, last_ids=last) for bucket in buckets]
    for step in steps:
        runner.forward(Step(prefill=(chunk(0, 0, 30, is_prompt=True), chunk(2, 0, 49, is_prompt=True))))
        runner.forward(Step(prefill=(chunk(3, 0, 38, is_prompt=True),)))
        wanted = runner.forward(step)
        size = StepSize.of(step)
        assert size is not None
        inputs = padded[0 if buckets[0].holds(size) else 1]
        assert inputs.size.holds(size)
        fed = step.decode
        if len(fed) > 1:
            fed = (fed[0], replace(fed[1], token_ids=(0,), fed=1))
        inputs.fill(replace(step, decode=fed))
        with torch.inference_mode():
            inputs.begin()
            got = runner.model.forward(inputs)
        count = len(step.sample_rows)
        assert got.shape[0] == inputs.num_sampled >= count
        assert relative(got[:count], wanted[:count].cpu()) < 1e-5
        assert DEVICE.type == "cpu" or torch.equal(got[:count], wanted[:count])


def test_steps_that_do_not_fit_a_size() -> None:
    decode = Chunk(key=(b"", ""), start=3, token_ids=(1,), pages=(0,), prompt=False, num_sampled=1)
    several = replace(decode, token_ids=(1, 2))
    longer = replace(decode, prompt=True, start=100, token_ids=(1,) * 29)
    assert StepSize.of(Step.empty()) is None
    assert StepSize.of(Step(decode=(several,))) == StepSize(sequences=1, queries=2, width=1)
    assert not StepSize(sequences=8, width=8).holds(StepSize(sequences=1, queries=2, width=1))
    size = StepSize.of(Step(prefill=(longer,), decode=(decode,)))
    assert size == StepSize(prompt=29, sequences=1, keys=129, width=1, chunks=1)
    fits = StepSize(prompt=32, sequences=1, keys=129, width=1, chunks=1)
    assert fits.holds(size)
    assert replace(fits, keys=0).holds(size)
    for less in ({"prompt": 28}, {"sequences": 0}, {"keys": 128}, {"width": 0}, {"chunks": 0}, {"prompt": 0}):
        assert not replace(fits, **less).holds(size), less
    only = StepSize.of(Step(decode=(decode,)))
    assert only is not None
    assert not fits.holds(only), "decode rows do not use a prompt's step"


def test_captured_step_has_room_for_the_tiles_of_any_chunks() -> None:
    """The last tile of each chunk may have one row."""
    lengths = (129, 1, 257)
    chunks = tuple(
        Chunk(
            key=(b"", ""),
            start=0,
            token_ids=(1,) * length,
            pages=tuple(range(-(-length // PAGE_SIZE))),
            prompt=True,
            num_sampled=0,
        )
        for length in lengths
    )
    bucket = StepSize(prompt=sum(lengths), width=257, chunks=3)
    last = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    inputs = StepInputs(bucket, page_size=PAGE_SIZE, windows=(None,), last_ids=last)
    plan = inputs.paged[None]
    assert plan.num_full_tiles == 4
    for some, tiles in (
        (chunks, [[2, 256], [0, 128], [2, 128], [0, 0], [1, 0], [2, 0]]),
        # There is no fourth chunk.
        (chunks[:2], [[0, 128], [0, 0], [1, 0], [3, 0], [3, 0], [3, 0]]),
    ):
        inputs.fill(Step(prefill=some))
        assert plan.tiles.tolist() == tiles
        assert plan.cu_q[3] == plan.cu_q[4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_residency_changes_no_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Prompts in chunks, and decode rows alone and with prompts, with all experts in slots, a quarter, and one."""
    directory = make_checkpoint(tmp_path, family, dtype=dtype, **WIDTHS.get(family, {}))
    config = load_model_config(directory)
    total = config.num_experts * len(config.moe_layers)
    answers = []
    for num_slots, policy in ((total, "slru"), *itertools.product((1, total // 4, total - 1), ("slru", "lru"))):
        runner = make_runner(directory, dtype, num_slots=num_slots, policy=policy)
        tokens, logits = greedy_tokens(runner, prompt(50), 6, chunk_size=20)
        first = Chunk(
            key=(b"", ""), start=0, token_ids=tuple(prompt(33, 9)), pages=(20, 21, 22), prompt=True, num_sampled=1
        )
        row = Chunk(key=(b"", ""), start=55, token_ids=(tokens[-1],), pages=(0, 1, 2, 3), prompt=False, num_sampled=1)
        mixed = runner.forward(Step(prefill=(first,), decode=(row,)))[:2]
        answers.append((num_slots, policy, tokens, torch.cat((logits, mixed)).cpu()))
    _, _, tokens, logits = answers[0]
    for num_slots, policy, other, others in answers[1:]:
        assert other == tokens, (num_slots, policy)
        assert torch.equal(others, logits), (num_slots, policy)
