"""A shared expert as one more of each row's: the bits are those of one beside the routed ones, prompts and output."""

from typing import Any

import pytest
import torch
from tests.checkpoints import VOCAB_SIZE, make_checkpoint

from moeyard_kernels import ops
from moeyard_kernels.cuda import experts as cuda_experts
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_worker.engine.local import PAGE_SIZE, local_runner
from moeyard_worker.engine.runner import Runner
from moeyard_worker.scheduling.step import Chunk, Step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MLA = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
# The gate of a shared expert is a logit of the router's product; fp32 logits; a share of one expert's width.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gated": ("qwen3_next", {"head_dim": 32, "shared_expert_intermediate_size": 32, "moe_intermediate_size": 32}),
    "whole": ("kimi_linear", {**MLA, "moe_intermediate_size": 32}),
    "groups": ("deepseek_v3", {**MLA, "moe_intermediate_size": 32}),
}
PAGES = 4


def make_runner(directory: Any, dtype: torch.dtype, num_slots: int | None = None) -> Runner:
    backend = CudaBackend(page_size=PAGE_SIZE, device=DEVICE)
    return local_runner(
        directory, dtype=dtype, num_pages=4 * PAGES, num_state_slots=4, backend=backend, num_slots=num_slots
    )  # fmt: skip


def chunk(runner: Runner, which: int, start: int, end: int, *, prompt: bool) -> Chunk:
    generator = torch.Generator().manual_seed(which)
    ids = torch.randint(VOCAB_SIZE, (40,), generator=generator).tolist()
    return Chunk(
        key=(b"", str(which)), start=start, token_ids=tuple(ids[start:end]), prompt=prompt, num_sampled=1,
        pages=tuple(range(PAGES * which, PAGES * which + PAGES)), state_slot=which if runner.config.has_slots else -1,
    )  # fmt: skip


def logits(runner: Runner) -> torch.Tensor:
    """Of a prompt, of one row, and of two rows beside a prompt."""
    alone = runner.forward(Step(prefill=(chunk(runner, 0, 0, 5, prompt=True),)))[:1]
    row = runner.forward(Step(decode=(chunk(runner, 0, 5, 6, prompt=False),)))[:1]
    runner.forward(Step(prefill=(chunk(runner, 1, 0, 3, prompt=True),)))
    decode = tuple(chunk(runner, which, at, at + 1, prompt=False) for which, at in ((0, 6), (1, 3)))
    both = runner.forward(Step(prefill=(chunk(runner, 2, 0, 2, prompt=True),), decode=decode))[:3]
    return torch.cat((alone, row, both))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_joined_is_beside(
    case: str, dtype: torch.dtype, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    family, options = CASES[case]
    directory = make_checkpoint(tmp_path / case, family, dtype=dtype, **options)
    runner = make_runner(directory, dtype)
    assert runner.config.shared_is_as_wide
    wanted = logits(runner)
    pairs: list[int] = []
    seen: list[int] = []
    choose = ops.topk_gate

    def joins(num_pairs: int, down: torch.Tensor) -> bool:
        pairs.append(num_pairs)
        return True

    def watched(*args: Any, **options: Any) -> Any:
        found = choose(*args, **options)
        seen.append(found[1].shape[1])
        return found

    monkeypatch.setattr(cuda_experts, "joins", joins)
    monkeypatch.setattr(ops, "topk_gate", watched)
    got = logits(make_runner(directory, dtype))
    top_k = runner.config.top_k
    # A prompt of five rows has more pairs than that.
    assert {count // (top_k + 1) for count in pairs} == {1, 3, 4, 5}
    assert set(seen) == {top_k + 1}
    assert torch.equal(got, wanted)
    # A cache that does not hold all has no room for it.
    seen.clear()
    part = make_runner(directory, dtype, num_slots=runner.config.num_experts)
    assert torch.equal(logits(part), wanted)
    assert set(seen) == {top_k}
