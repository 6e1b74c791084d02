"""Every family and its unusual configurations against transformers: logits of all positions, 64 greedy tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints import VOCAB_SIZE, edit_config, edit_tensors, make_checkpoint

from moeyard_worker.engine.assembly.local import greedy_tokens, local_runner, prompt_logits
from moeyard_worker.engine.assembly.verify import reference_model
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.models.families import load_model_config
from moeyard_worker.scheduling.step import Chunk, Step

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
# Heads have 16 values.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 160,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-no_q_rank": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek_v3-yarn": ("deepseek_v3", {"rope_parameters": YARN, "first_k_dense_replace": 0}),
    "deepseek_v3-yarn_old_keys": ("deepseek_v3", {"rope_parameters": YARN, "old_rope_keys": True}),
    "deepseek_v3-yarn_attention_factor": (
        "deepseek_v3",
        {"rope_parameters": {**YARN, "attention_factor": 1.3, "truncate": False}},
    ),
    "deepseek_v3-one_group_top4": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 2},
    ),
    "deepseek_v3-raw_weights_two_shared": (
        "deepseek_v3",
        {"norm_topk_prob": False, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
    ),
    "deepseek_v3-no_shared": ("deepseek_v3", {"n_shared_experts": 0}),
    "deepseek_v3-bias": ("deepseek_v3", {"attention_bias": True}),
    "deepseek_v3-bias_no_q_rank_half_rope": (
        "deepseek_v3",
        {"attention_bias": True, "q_lora_rank": None, "rope_interleave": False},
    ),
    "deepseek_v3-odd": (
        "deepseek_v3",
        {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "q_lora_rank": 21,
            "kv_lora_rank": 18,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6,
            "v_head_dim": 14,
            "moe_intermediate_size": 20,
            "n_routed_experts": 6,
            "n_group": 3,
        },
    ),
    "deepseek_v3-sharded_tied": ("deepseek_v3", {"max_shard_size": "100KB", "tie_word_embeddings": True}),
    "kimi_k2": ("kimi_k2", {"n_group": 1, "topk_group": 1, "rope_parameters": YARN}),
    "kimi_k2-fused": ("kimi_k2", {"fused_experts": True}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "num_experts_per_tok": 3,
        },
    ),
    "deepseek_v2-no_q_rank_yarn": (
        "deepseek_v2",
        {"q_lora_rank": None, "rope_parameters": YARN, "old_rope_keys": True, "n_shared_experts": 2},
    ),
    "deepseek_v2-bias_all_moe": ("deepseek_v2", {"attention_bias": True, "first_k_dense_replace": 0}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-dense_layers": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen3_moe-sparse_step": ("qwen3_moe", {"decoder_sparse_step": 2, "rope_parameters": LINEAR}),
    "qwen3_moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 24}),
    "qwen3_moe-tied_bias": (
        "qwen3_moe",
        {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": DYNAMIC, "old_rope_keys": True},
    ),
    "qwen3_moe-odd_heads": (
        "qwen3_moe",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 10, "rope_parameters": LLAMA3},
    ),
    "qwen3_moe-one_kv_head_yarn_fused": (
        "qwen3_moe",
        {"num_key_value_heads": 1, "rope_parameters": {**YARN, "mscale": None}, "fused_experts": True},
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next-interval_half_rope": (
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "layer_types": None,
            "full_attention_interval": 2,
            "partial_rotary_factor": 0.5,
            "old_rope_keys": True,
        },
    ),
    "qwen3_next-odd_heads_bias_tied": (
        "qwen3_next",
        {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 18,
            "linear_value_head_dim": 10,
            "linear_conv_kernel_dim": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 24,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_next-no_shared_dense_layer_yarn_fused": (
        "qwen3_next",
        {
            "shared_expert_intermediate_size": 0,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "rope_parameters": {**YARN, "mscale": None, "partial_rotary_factor": 0.5},
            "fused_experts": True,
        },
    ),
    "qwen3_next-last_full_sharded": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "decoder_sparse_step": 2,
            "max_shard_size": "100KB",
        },
    ),
    "deepseek_v4": ("deepseek_v4", {}),
    "deepseek_v4-all_hashed_heavy_first_sharded": (
        "deepseek_v4",
        {
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "mlp_layer_types": ["hash_moe", "hash_moe"],
            "num_hidden_layers": 2,
            "rope_scaling": None,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "index_topk": 3,
            "swiglu_limit": 0.3,
            "max_shard_size": "100KB",
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe", {"fused_experts": True}),
    "qwen3_5_moe-tied_yarn_four_layers": (
        "qwen3_5_moe",
        {
            "tie_word_embeddings": True,
            "num_hidden_layers": 4,
            "layer_types": None,
            "linear_num_key_heads": 1,
            "rope_parameters": {**YARN, "mscale": None, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5_moe-first_full_odd_heads": (
        "qwen3_5_moe",
        {
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 9,
            "linear_value_head_dim": 10,
        },
    ),
    "qwen3_5_moe_text-no_shared_sharded": (
        "qwen3_5_moe_text",
        {"shared_expert_intermediate_size": 0, "max_shard_size": "100KB", "linear_value_head_dim": 24},
    ),
    "kimi_linear": ("kimi_linear", {}),
    "kimi_linear-groups_q_rank_all_moe": (
        "kimi_linear",
        {
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 24,
            "mlp_layer_types": ["sparse"] * 3,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    "kimi_linear-odd_heads_no_shared_bias": (
        "kimi_linear",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "linear_num_heads": 3,
            "linear_head_dim": 18,
            "linear_conv_kernel_dim": 3,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "n_shared_experts": 0,
            "attention_bias": True,
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 20, "num_key_value_heads": 4}),
    "mixtral-odd": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 24, "num_key_value_heads": 1},
    ),
    "mixtral-fused_tied_old_keys": (
        "mixtral",
        {"fused_experts": True, "tie_word_embeddings": True, "old_rope_keys": True, "rope_parameters": LINEAR},
    ),
    "olmoe": ("olmoe", {}),
    "olmoe-normalised_weights_bias": ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    "olmoe-one_key_per_head_linear": ("olmoe", {"num_key_value_heads": None, "rope_parameters": LINEAR}),
    "olmoe-odd": (
        "olmoe",
        {
            "hidden_size": 84,
            "intermediate_size": 20,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "rope_parameters": LLAMA3,
        },
    ),
    "olmoe-one_kv_head_yarn_fused_eps": (
        "olmoe",
        {
            "num_key_value_heads": 1,
            "rope_parameters": {**YARN, "mscale": None},
            "fused_experts": True,
            "rms_norm_eps": 1e-2,
        },
    ),
    # Sequences exceed max_position_embeddings.
    "qwen3_moe-stretched_linear": ("qwen3_moe", {"rope_parameters": LINEAR, "max_position_embeddings": 40}),
    "deepseek_v3-stretched_yarn_old_keys": (
        "deepseek_v3",
        {"rope_parameters": YARN, "max_position_embeddings": 64, "old_rope_keys": True},
    ),
    "mixtral-short_longrope_old_keys": (
        "mixtral",
        {"rope_parameters": LONGROPE, "head_dim": 16, "old_rope_keys": True},
    ),
    "qwen3_moe-long_longrope": (
        "qwen3_moe",
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64}},
    ),
    "olmoe-tied_sharded_old_keys": (
        "olmoe",
        {
            "tie_word_embeddings": True,
            "max_shard_size": "100KB",
            "rope_parameters": DYNAMIC,
            "old_rope_keys": True,
            "num_experts_per_tok": 8,
        },
    ),
}


@pytest.mark.sampled(0)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # transformers with no shared expert
@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(tmp_path: Path, case: str, seed: int) -> None:
    family, options = CASES[case]
    directory = make_checkpoint(tmp_path, family, seed=seed, **options)
    prompt = torch.randint(VOCAB_SIZE, (75,), generator=torch.Generator().manual_seed(seed)).tolist()
    runner = local_runner(directory, dtype=torch.float32, num_pages=9)
    tokens, decoded = greedy_tokens(runner, prompt, 64)
    by_position = (
        every_position(runner, prompt)
        if runner.config.has_slots
        else prompt_logits(runner, prompt, range(9), chunk_size=1)
    )

    model = reference_model(directory, family, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    # Comparing the argmax after our own tokens is greedy decoding, token by token.
    assert tokens == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert relative(by_position, expected[: len(prompt)]) < 1e-4
    # Decode rows use another formula than prompts.
    assert relative(decoded, expected[len(prompt) - 1 : -1]) < 1e-4


def test_dynamic_rope_of_a_full_context(tmp_path: Path, seed: int) -> None:
    """Beyond max_position_embeddings all sequences are rotated like one that fills the context in transformers."""
    changes = {"rope_parameters": DYNAMIC, "max_position_embeddings": 24, "num_hidden_layers": 2}
    directory = make_checkpoint(tmp_path, "qwen3_moe", seed=seed, **changes)
    prompt = torch.randint(VOCAB_SIZE, (96,), generator=torch.Generator().manual_seed(seed)).tolist()
    runner = local_runner(directory, dtype=torch.float32, num_pages=9)
    assert runner.config.max_position == len(prompt)
    with torch.inference_mode():
        expected = reference_model(directory, "qwen3_moe", dtype=torch.float32)(torch.tensor([prompt])).logits[0]
    assert relative(every_position(runner, prompt), expected) < 1e-4


def every_position(runner: Runner, prompt: list[int]) -> torch.Tensor:
    """Return the logits [positions, V] of a prompt in one chunk."""
    chunk = Chunk(
        key=(b"", ""), start=0, token_ids=tuple(prompt), pages=tuple(range(9)), state_slot=5, prompt=True, num_sampled=1
    )
    with torch.inference_mode():
        hidden = runner.model.hidden(runner.backend.plan(Step(prefill=(chunk,))))
        return runner.model.head(hidden)[: len(prompt)]


def test_kimi_linear_as_published(tmp_path: Path, seed: int) -> None:
    """transformers names keys and dense layers differently from the hub. The numbers are the same."""
    directory = make_checkpoint(tmp_path, "kimi_linear", seed=seed)
    prompt = torch.randint(VOCAB_SIZE, (75,), generator=torch.Generator().manual_seed(seed)).tolist()
    expected = every_position(local_runner(directory, dtype=torch.float32, num_pages=9), prompt)
    tensors = load_file(directory / "model.safetensors")
    dense = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.block_sparse_moe.")}
    assert len(dense) == 3
    moved = {name.replace("block_sparse_moe", "mlp"): tensor.clone() for name, tensor in dense.items()}
    edit_tensors(directory, remove=tuple(dense), add=moved)
    published = {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4, "full_attn_layers": [2]}
    edit_config(
        directory,
        remove=("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim"),
        linear_attn_config={**published, "kda_layers": [1, 3]},
        first_k_dense_replace=1,
        moe_layer_freq=1,
    )
    config = load_model_config(directory)
    assert [bool(kind.state().slots) for kind in config.attention] == [True, False, True]
    assert torch.equal(every_position(local_runner(directory, dtype=torch.float32, num_pages=9), prompt), expected)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference divided by the largest value."""
    return float((ours.cpu() - theirs.cpu()).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "kimi_linear", "olmoe"])
def test_bfloat16(tmp_path: Path, family: str, seed: int) -> None:
    """A bfloat16 checkpoint gives its own float32 logits when served in float32, and similar ones in bfloat16."""
    # Rounding changes a nearly tied choice of experts, in transformers too, so this family needs another seed.
    seed += family == "qwen3_5_moe"
    directory = make_checkpoint(tmp_path, family, seed=seed, dtype=torch.bfloat16)
    prompt = torch.randint(VOCAB_SIZE, (50,), generator=torch.Generator().manual_seed(seed)).tolist()
    with torch.inference_mode():
        expected = reference_model(directory, family, dtype=torch.float32)(torch.tensor([prompt])).logits[0, -1]
    exact = prompt_logits(local_runner(directory, dtype=torch.float32, num_pages=4), prompt, range(4))[0]
    rounded = prompt_logits(local_runner(directory, dtype=torch.bfloat16, num_pages=4), prompt, range(4))[0]
    assert relative(exact, expected) < 1e-4
    assert relative(rounded, expected) < 0.1
    assert not torch.equal(rounded, exact)


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "deepseek_v2", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "kimi_linear", "mixtral", "olmoe"],
)
def test_routing_of_random_checkpoints_is_diverse(tmp_path: Path, family: str, seed: int) -> None:
    """Without this the comparisons above would not test the gate."""
    seed += family == "kimi_linear"  # with the test's own seed two experts of a layer get no row
    directory = make_checkpoint(tmp_path, family, seed=seed)
    runner = local_runner(directory, dtype=torch.float32, num_pages=4)
    experts = runner.model._layers[-1].block._experts  # type: ignore[union-attr]
    seen: list[tuple[int, ...]] = []
    run = experts.run

    def spy(layer: int, dispatched: Any) -> torch.Tensor:
        seen.append(dispatched.experts.flatten().bincount().tolist())
        return run(layer, dispatched)

    experts.run = spy  # type: ignore[method-assign]
    prompt_logits(
        runner, torch.randint(VOCAB_SIZE, (64,), generator=torch.Generator().manual_seed(seed)).tolist(), range(4)
    )
    assert len(seen) == len(runner.config.moe_layers)
    for counts in seen:
        assert sum(counts) == 64 * runner.config.top_k
        assert sum(count > 0 for count in counts) >= 7
        assert max(counts) < 0.5 * sum(counts)
