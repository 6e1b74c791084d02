"""Models with state on the CUDA backend give the logits of the CPU backend, through references without a GPU.

Steps have prompts in chunks, decode rows, and several rows of one sequence in order. Prompts leave snapshots and
continue from them. Captured inputs have padding, which touches no slot. In fp32 both agree up to the order of sums.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import MLA, VOCAB_SIZE, make_checkpoint
from tests.models.test_families import relative

from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.cuda.step_inputs import StepInputs
from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.engine.assembly.local import PAGE_SIZE, greedy_tokens, local_runner
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.scheduling.step import Chunk, Step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Kernels need widths that are powers of two from 16 on, except those of linear attention.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {"head_dim": 32}),
    "qwen3_next-odd": (
        "qwen3_next",
        {
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 18,
            "head_dim": 64,
            "linear_value_head_dim": 10,
            "linear_conv_kernel_dim": 3,
            "mlp_only_layers": [0],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {"head_dim": 256, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "kimi_linear": ("kimi_linear", MLA),
    "kimi_linear-odd": ("kimi_linear", {**MLA, "linear_num_heads": 3, "linear_head_dim": 18}),
}
LENGTHS = (150, 33, 130, 70)
PAGES = 11
SLOTS = 7


@pytest.fixture(params=CASES, scope="module")
def runners(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Runner]:
    family, options = CASES[request.param]
    directory = make_checkpoint(tmp_path_factory.mktemp(family), family, **options)
    return make_runner(directory), make_runner(directory, CudaBackend(page_size=PAGE_SIZE, device=DEVICE))


def make_runner(directory: Path, backend: CudaBackend | None = None) -> Runner:
    more = {} if backend is None else {"backend": backend}
    return local_runner(directory, dtype=torch.float32, num_pages=4 * PAGES, num_state_slots=SLOTS, **more)


def ids(which: int) -> list[int]:
    generator = torch.Generator().manual_seed(which)
    return torch.randint(VOCAB_SIZE, (LENGTHS[which] + 60,), generator=generator).tolist()


def chunk(which: int, start: int, end: int, *, is_prompt: bool, sampled: int = 1) -> Chunk:
    return Chunk(
        key=(b"", str(which)),
        start=start,
        token_ids=tuple(ids(which)[start:end]),
        state_slot=which,
        pages=tuple(range(PAGES * which, PAGES * which + PAGES)),
        prompt=is_prompt,
        num_sampled=sampled,
    )


def begin(runner: Runner) -> None:
    """Put sequence 0 in the middle of its prompt and 2 and 3 after theirs, whatever their slots held."""
    firsts = tuple(chunk(which, 0, end, is_prompt=True) for which, end in ((0, 64), (2, 128), (3, 70)))
    runner.forward(Step(prefill=firsts))
    runner.forward(Step(prefill=(chunk(2, 128, 130, is_prompt=True),)))


def slots_of(runner: Runner) -> list[torch.Tensor]:
    """Return the state and windows of all layers."""
    rules = [layer.attention._mix for layer in runner.model._layers if hasattr(layer.attention, "_mix")]
    layers = [getattr(mix, "_rule", mix)._layer for mix in rules]
    return [x for layer in layers for x in (layer.state, layer.window)]


def test_logits_and_greedy_tokens(runners: tuple[Runner, Runner]) -> None:
    theirs, ours = (greedy_tokens(runner, ids(0)[:150], 16, chunk_size=64, slot=1) for runner in runners)
    assert relative(ours[1], theirs[1]) < 1e-4
    assert ours[0] == theirs[0]


def test_prompts_with_decode_rows_and_recomputed_rows(runners: tuple[Runner, Runner]) -> None:
    """One sequence has a single row, another 40 rows, more than the rule takes at once. Then each has one more."""
    found, kept = [], []
    for runner in runners:
        begin(runner)
        prefill = (chunk(0, 64, 150, is_prompt=True), chunk(1, 0, 33, is_prompt=True))
        decode = (chunk(2, 130, 131, is_prompt=False), chunk(3, 70, 110, is_prompt=False))
        logits = [runner.forward(Step(prefill=prefill, decode=decode))[:4]]
        rows = ((0, 150), (1, 33), (2, 131), (3, 110))
        step = Step(decode=tuple(chunk(which, at, at + 1, is_prompt=False) for which, at in rows))
        logits.append(runner.forward(step)[:4])
        found.append(torch.cat(logits))
        kept.append([x[:4] for x in slots_of(runner)])
    assert relative(found[1], found[0]) < 1e-4
    for ours, theirs in zip(kept[1], kept[0], strict=True):
        assert relative(ours, theirs) < 1e-4


def test_recomputed_rows_equal_decoding(runners: tuple[Runner, Runner]) -> None:
    """Rows run in pieces of any size, and on a GPU all bits are equal."""
    runner, results = runners[1], []
    for size in (1, 16, 19, 38):
        begin(runner)
        logits = [
            runner.forward(Step(decode=(chunk(3, at, min(at + size, 108), is_prompt=False),)))[:1]
            for at in range(70, 108, size)
        ]
        results.append((logits[-1], [x[3].clone() for x in slots_of(runner)]))
    for logits, state in results[1:]:
        assert relative(logits, results[0][0]) < 1e-5
        if DEVICE.type == "cuda":
            assert torch.equal(logits, results[0][0])
            assert all(torch.equal(a, b) for a, b in zip(state, results[0][1], strict=True))


def make_inputs(runner: Runner, bucket: StepSize) -> StepInputs:
    backend = runner.backend
    assert isinstance(backend, CudaBackend)
    last = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    return backend.step_inputs(bucket, last)


def replayed(runner: Runner, inputs: StepInputs, step: Step) -> torch.Tensor:
    with torch.inference_mode():
        inputs.fill(step)
        inputs.begin()
        return runner.model.forward(inputs)[: inputs.num_sampled]


def captured(runner: Runner, bucket: StepSize, step: Step) -> torch.Tensor:
    inputs, size = make_inputs(runner, bucket), StepSize.of(step)
    assert size is not None
    assert bucket.holds(size)
    with torch.inference_mode():
        inputs.begin()
        before = [x.clone() for x in slots_of(runner)]
        runner.model.forward(inputs)
        # An empty step, as at the capture, leaves all slots unchanged.
        assert all(torch.equal(a, b) for a, b in zip(before, slots_of(runner), strict=True))
    return replayed(runner, inputs, step)


def test_captured_decode_rows_equal_a_plan(runners: tuple[Runner, Runner]) -> None:
    """Two decode rows in a step of five: padding repeats the first row's result and touches no slot."""
    runner = runners[1]
    step = Step(decode=(chunk(2, 130, 131, is_prompt=False), chunk(3, 70, 71, is_prompt=False)))
    begin(runner)
    wanted = runner.forward(step)[:2]
    kept = [x.clone() for x in slots_of(runner)]
    begin(runner)
    got = captured(runner, StepSize(sequences=5, width=PAGES + 2), step)
    assert relative(got[:2], wanted) < 1e-5
    assert relative(got[2:], wanted[:1].expand(3, -1)) < 1e-5
    for ours, theirs in zip(slots_of(runner), kept, strict=True):
        assert relative(ours, theirs) < 1e-5
        assert DEVICE.type == "cpu" or torch.equal(ours, theirs)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("rows", [0, 4])
def test_captured_prompts_equal_a_plan(runners: tuple[Runner, Runner], rows: int) -> None:
    """A continued prompt and a new one in a used slot, with or without decode rows."""
    runner = runners[1]
    backend = runner.backend
    assert isinstance(backend, CudaBackend)
    prefill = (chunk(0, 64, 150, is_prompt=True), chunk(1, 0, 33, is_prompt=True))
    decode = (chunk(2, 130, 131, is_prompt=False), chunk(3, 70, 71, is_prompt=False)) if rows else ()
    step = Step(prefill=prefill, decode=decode)
    begin(runner)
    wanted = runner.forward(step)[: 2 + len(decode)]
    kept = [x.clone() for x in slots_of(runner)]
    begin(runner)
    bucket = StepSize(prompt=192, sequences=rows, keys=384 if backend.flat else 0, width=PAGES + 2, chunks=3)
    got = captured(runner, bucket, step)[: 2 + len(decode)]
    assert relative(got, wanted) < 1e-5
    for ours, theirs in zip(slots_of(runner), kept, strict=True):
        assert relative(ours, theirs) < 1e-5
        assert DEVICE.type == "cpu" or torch.equal(ours, theirs)
    # A smaller step in the same inputs sees nothing of the step before.
    one = replace(step, prefill=prefill[1:], decode=decode[1:])
    assert relative(captured(runner, bucket, one)[:1], runner.forward(one)[:1]) < 1e-4


def from_snapshots(*, taking: int) -> Step:
    """Return a step that continues sequence 0 from position 64 twice, in slots 4 and 1, beside a new prompt. The last
    one leaves a snapshot in slot `taking`, which may be the slot that both are restored from."""
    again = replace(chunk(0, 64, 150, is_prompt=True), restored=5)
    last = replace(again, state_slot=1, snapshots=((128, taking),))
    return Step(prefill=(replace(again, state_slot=4), chunk(3, 0, 70, is_prompt=True), last))


def leave_snapshots(runner: Runner) -> torch.Tensor:
    """Snapshot sequence 0 at 64 positions in slot 5 and at 128 in slot 6. Return the logits after its prompt."""
    leaving = replace(chunk(0, 0, 128, is_prompt=True), snapshots=((64, 5), (128, 6)))
    runner.forward(Step(prefill=(chunk(3, 0, 70, is_prompt=True), leaving)))
    return runner.forward(Step(prefill=(chunk(0, 128, 150, is_prompt=True),)))[:1]


def check_snapshots(runner: Runner, logits: torch.Tensor, wanted: torch.Tensor, *, taken: int) -> None:
    """Check that both continuations and the snapshot equal sequence 0."""
    assert relative(logits[[0, 2]], wanted.expand(2, -1)) < 1e-5
    for x in slots_of(runner):
        for got, right in ((taken, 6), (1, 0), (4, 0)):
            assert relative(x[got], x[right]) < 1e-5
            assert DEVICE.type == "cpu" or torch.equal(x[got], x[right])


@pytest.mark.parametrize("taking", [5, 2], ids=["its_own", "another"])
def test_prompts_continue_from_snapshots(runners: tuple[Runner, Runner], taking: int) -> None:
    for runner in runners:
        wanted = leave_snapshots(runner)
        logits = runner.forward(from_snapshots(taking=taking))
        check_snapshots(runner, logits, wanted, taken=taking)


@pytest.mark.parametrize("taking", [5, 2], ids=["its_own", "another"])
def test_captured_prompts_continue_from_snapshots(runners: tuple[Runner, Runner], taking: int) -> None:
    runner = runners[1]
    backend = runner.backend
    assert isinstance(backend, CudaBackend)
    wanted = leave_snapshots(runner)
    bucket = StepSize(prompt=320, keys=640 if backend.flat else 0, width=PAGES + 2, chunks=5)
    inputs = make_inputs(runner, bucket)
    check_snapshots(runner, replayed(runner, inputs, from_snapshots(taking=taking)), wanted, taken=taking)
    # Steps without snapshots see nothing of those inputs, in both of the host's blocks.
    kept = [x.clone() for x in slots_of(runner)]
    for _ in range(2):
        replayed(runner, inputs, Step(prefill=(chunk(3, 0, 70, is_prompt=True),)))
    for x, before in zip(slots_of(runner), kept, strict=True):
        others = [slot for slot in range(SLOTS) if slot != 3]
        assert torch.equal(x[others], before[others])
