"""Logits of a GPU against a CPU in fp32 and against transformers in bf16, for every family and the demo model.

Two bf16 computations of one model differ by rounding, and by experts that rounding makes a row choose. The size of the
difference depends on the checkpoint, so no constant bounds it. The distance of two results is the median of
|a - b| / |b| over the positions of a prompt. The fp32 logits are the truth.
"""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import DEMO, MLA, make_checkpoint

from moeyard_kernels.backend import Backend
from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_worker.engine.assembly.local import PAGE_SIZE, greedy_tokens, local_runner
from moeyard_worker.engine.assembly.verify import reference_model
from moeyard_worker.models.families import load_model_config
from moeyard_worker.scheduling.step import Chunk, Step

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": MLA,
    "kimi_k2": {**MLA, "n_group": 1, "topk_group": 1},
    "deepseek_v2": MLA,
    "qwen3_moe": {},
    "mixtral": {"sliding_window": 40},
    "olmoe": {},
    "qwen3_next": {"head_dim": 32},
    "qwen3_5_moe": {"head_dim": 32},
    "kimi_linear": MLA,
    "deepseek_v4": {},
}
NUM_PROMPTS, LENGTH = 24, 200
NUM_PAGES = -(-LENGTH // PAGE_SIZE)


@pytest.fixture(scope="module", params=["demo", *FAMILIES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint stored in bf16, so that fp32 and bf16 serve the same values."""
    if request.param == "demo":
        return DEMO
    directory = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(directory, request.param, dtype=torch.bfloat16, **FAMILIES[request.param])


def prompts(model: Path, count: int) -> list[list[int]]:
    vocab, generator = load_model_config(model).vocab_size, torch.Generator().manual_seed(3)
    return [torch.randint(vocab, (LENGTH,), generator=generator).tolist() for _ in range(count)]


def ours(model: Path, dtype: torch.dtype, backend: Backend, count: int) -> torch.Tensor:
    """Return our logits [prompts, positions, V] of whole prompts, on the CPU."""
    runner = local_runner(model, dtype=dtype, num_pages=NUM_PAGES, backend=backend)
    found = []
    with torch.inference_mode():
        for prompt in prompts(model, count):
            pages = tuple(range(NUM_PAGES))
            chunk = Chunk(
                key=(b"", ""),
                start=0,
                token_ids=tuple(prompt),
                pages=pages,
                prompt=True,
                num_sampled=1,
                state_slot=0 if runner.config.has_slots else -1,
            )
            hidden = runner.model.hidden(runner.backend.plan(Step(prefill=(chunk,))))
            found.append(runner.model.head(hidden[:LENGTH]).float().cpu())
    return torch.stack(found)


def theirs(model: Path, dtype: torch.dtype, attention: str, count: int) -> torch.Tensor:
    """Return the same from transformers on the GPU."""
    reference = reference_model(model, load_model_config(model).family, dtype=dtype).to(DEVICE)
    reference.set_attn_implementation(attention)
    with torch.inference_mode():
        found = [reference(torch.tensor([prompt], device=DEVICE)).logits[0] for prompt in prompts(model, count)]
    return torch.stack(found).float().cpu()


def test_fp32_matches_the_cpu(model: Path) -> None:
    """Prompts of 200 rows, chunks of 40 (whole blocks with state) and decode rows: within 1e-4 of the largest logit."""
    on_gpu, on_cpu = CudaBackend(page_size=PAGE_SIZE, device=DEVICE), CpuBackend(page_size=PAGE_SIZE)
    got, wanted = (ours(model, torch.float32, backend, 3) for backend in (on_gpu, on_cpu))
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-4
    alignment = load_model_config(model).state_spec(4).chunk_alignment
    chunk_size = alignment if alignment > 1 else 40
    answers = [
        greedy_tokens(
            local_runner(model, dtype=torch.float32, num_pages=NUM_PAGES, backend=backend),
            prompts(model, 1)[0][:97],
            24,
            chunk_size=chunk_size,
        )
        for backend in (on_gpu, on_cpu)
    ]
    (ids, logits), (other_ids, others) = answers
    assert ids == other_ids
    assert float((logits.cpu() - others.cpu()).abs().max() / others.abs().max()) < 1e-4


def distances(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """Return the median over positions of |a - b| / |b|, per prompt."""
    return ((a - b).norm(dim=2) / b.norm(dim=2)).median(1).values.tolist()


def farther(a: list[float], b: list[float]) -> bool:
    """Return whether the mean of `a` exceeds that of `b` by more than two standard errors of their differences."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    return statistics.mean(differences) > 2 * statistics.stdev(differences) / len(differences) ** 0.5


def test_bf16_is_as_accurate_as_transformers(model: Path, record_property: Any) -> None:
    """Our distance from fp32 is at most that of transformers (eager, sdpa), and from each of these two at most what
    both roundings explain. The two share all rounding but that of attention, so they may be closer to each other.
    """
    if model.name.startswith("deepseek_v4"):
        pytest.skip("transformers 5.17 multiplies rows of other dtypes there")
    truth = theirs(model, torch.float32, "eager", NUM_PROMPTS)
    eager, sdpa = (theirs(model, torch.bfloat16, name, NUM_PROMPTS) for name in ("eager", "sdpa"))
    own = ours(model, torch.bfloat16, CudaBackend(page_size=PAGE_SIZE, device=DEVICE), NUM_PROMPTS)
    pairs = {
        "ours to fp32": (own, truth),
        "eager to fp32": (eager, truth),
        "sdpa to fp32": (sdpa, truth),
        "ours to eager": (own, eager),
        "ours to sdpa": (own, sdpa),
        "eager to sdpa": (eager, sdpa),
    }
    found = {name: distances(*pair) for name, pair in pairs.items()}
    line = ", ".join(f"{name} {statistics.mean(values):.5f}" for name, values in found.items())
    print(f"\n{model.name}: {line}")
    record_property("distances", line)
    far = [max(a, b) for a, b in zip(found["eager to fp32"], found["sdpa to fp32"], strict=True)]
    assert not farther(found["ours to fp32"], far), line
    for name in ("eager", "sdpa"):
        apart = [(a * a + b * b) ** 0.5 for a, b in zip(found["ours to fp32"], found[f"{name} to fp32"], strict=True)]
        assert not farther(found[f"ours to {name}"], apart), line
