"""`moeyard.torch`: gradients are those of the formula, and the formula is the function that the forward computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import make_checkpoint
from tests.trainer.replayed import with_own_experts

from moeyard.torch import Sample, TrainableModel
from moeyard_worker.engine.assembly.verify import reference_model

# Small enough for finite differences. Every layer kind occurs; one expert in four has no row.
TINY: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
TINY |= {"bos_token_id": 0, "eos_token_id": 1, "num_hidden_layers": 2}
NARROW_MLA = {
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "num_key_value_heads": 2,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "head_dim": 8,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 4,
}
NARROW_V4 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 4,
    "o_lora_rank": 4,
    "index_head_dim": 16,
    "moe_intermediate_size": 4,
    "n_routed_experts": 4,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {**NARROW_MLA, "q_lora_rank": 6, "moe_intermediate_size": 4}),
    "deepseek_v2": ("deepseek_v2", {**NARROW_MLA, "q_lora_rank": None, "moe_intermediate_size": 4}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 4, "num_key_value_heads": 1, "moe_intermediate_size": 4, "tie_word_embeddings": True},
    ),
    "qwen3_next": ("qwen3_next", LINEAR),
    "kimi_linear": (
        "kimi_linear",
        {
            **NARROW_MLA,
            "q_lora_rank": None,
            "moe_intermediate_size": 4,
            "linear_num_heads": 2,
            "linear_head_dim": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "mixtral": ("mixtral", {"num_key_value_heads": 1, "sliding_window": 3, "intermediate_size": 4}),
    "olmoe": ("olmoe", {"num_key_value_heads": 1, "intermediate_size": 4}),
    "deepseek_v4": ("deepseek_v4", {**NARROW_V4, "index_topk": 64}),
    "deepseek_v4_choice": ("deepseek_v4", {**NARROW_V4, "index_topk": 3}),
}
SHORT = (Sample(prompt=[3, 9, 4], output=[5, 2, 11]), Sample(prompt=[7], output=[12]))
# Long enough for an entry over 128 positions, and for a choice among those over 4.
LONG = (Sample(prompt=[(5 * i + i // 7) % 16 for i in range(140)], output=[5, 2, 11]), SHORT[1])


def samples_of(name: str) -> tuple[Sample, ...]:
    return LONG if name.startswith("deepseek_v4") else SHORT


def tiny(directory: Path, name: str, dtype: str = "float64") -> TrainableModel:
    family, overrides = CASES[name]
    make_checkpoint(directory, family, **{**TINY, **overrides})
    return TrainableModel(directory, dtype=dtype)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", CASES)
def test_gradcheck(tmp_path: Path, name: str) -> None:
    """Random projections of both Jacobians agree, for all parameters."""
    model, samples = tiny(tmp_path, name), samples_of(name)

    def logprobs(*parameters: torch.Tensor) -> torch.Tensor:
        return torch.cat(model(samples))

    assert torch.autograd.gradcheck(logprobs, tuple(model.parameters()), fast_mode=True)


def test_gradcheck_of_every_entry(tmp_path: Path) -> None:
    model = tiny(tmp_path, "deepseek_v3")
    some = [value for key, value in model.named_parameters() if "norm" in key]
    for value in set(model.parameters()) - set(some):
        value.requires_grad_(False)

    def logprobs(*parameters: torch.Tensor) -> torch.Tensor:
        return torch.cat(model(SHORT))

    assert torch.autograd.gradcheck(logprobs, tuple(some))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", [name for name in CASES if name != "deepseek_v4_choice"])
def test_gradient_is_that_of_the_served_forward(tmp_path: Path, name: str) -> None:
    """Central differences of the served fp32 values along one random direction. They may change an indexer's choice."""
    model, samples = tiny(tmp_path, name, "float32"), samples_of(name)
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(2)
    directions = [torch.randn(p.shape, generator=generator) * p.std(correction=0) for p in parameters]
    torch.cat(model(samples)).sum().backward()
    slope = sum((p.grad * d).sum().item() for p, d in zip(parameters, directions, strict=True) if p.grad is not None)
    values, step = [], 2e-3
    fixed = with_own_experts(model, samples)
    with torch.no_grad():
        for sign in (1, -2):
            for p, d in zip(parameters, directions, strict=True):
                p += sign * step * d
            values.append(torch.cat(model(fixed)).double().sum().item())
    # The error of the difference is O(step^2), and that of fp32 values about 1e-6 / step.
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=0.02, abs=0.02)


@pytest.mark.parametrize(("family", "num_shared"), [("qwen3_moe", 30), ("deepseek_v4", 5)])
def test_gradients_are_those_of_transformers(tmp_path: Path, family: str, num_shared: int) -> None:
    """Parameters that transformers stores under the same names: it fuses experts, and renames layers of DeepSeek-V4.

    The embedding's gradient depends on all layers.
    """
    make_checkpoint(tmp_path, family)
    model, reference = TrainableModel(tmp_path), reference_model(tmp_path, family, dtype=torch.float32)
    sample = Sample(prompt=[5, 200, 31, 7, *range(140)], output=[90, 12, 250])
    model([sample])[0].sum().backward()
    ids = torch.tensor([[*sample.prompt, *sample.output]])
    logprobs = reference(ids[:, :-1]).logits[0, len(sample.prompt) - 1 :].log_softmax(-1)
    logprobs.gather(1, ids[0, len(sample.prompt) :, None]).sum().backward()
    ours, theirs = (dict(each.named_parameters()) for each in (model, reference))
    shared = [key for key in theirs if key in ours]
    assert len(shared) == num_shared
    for key in shared:
        torch.testing.assert_close(ours[key].grad, theirs[key].grad, rtol=1e-3, atol=1e-5, msg=key)


def test_frozen_parameters_and_late_updates(tmp_path: Path) -> None:
    model = tiny(tmp_path, "qwen3_next", "float32")
    parameters = dict(model.named_parameters())
    for key, value in parameters.items():
        value.requires_grad_("experts" in key)
    torch.cat(model(SHORT)).sum().backward()
    trained = {key for key, value in parameters.items() if value.grad is not None}
    assert trained
    assert all("experts" in key for key in trained)
    logprobs = torch.cat(model(SHORT)).sum()
    with torch.no_grad():
        parameters["lm_head.weight"] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.backward()


def test_rounding_of_the_served_dtype_is_not_differentiated(tmp_path: Path) -> None:
    """A bf16 model's gradient is that of the fp32 formula at the stored weights, for the same experts."""
    make_checkpoint(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    models = [TrainableModel(tmp_path, dtype=dtype) for dtype in ("bfloat16", "float32")]
    given = with_own_experts(models[0], SHORT)
    for model in models:
        torch.cat(model(given)).sum().backward()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    assert all(a.grad is b.grad is None or torch.equal(a.grad, b.grad) for a, b in pairs)
