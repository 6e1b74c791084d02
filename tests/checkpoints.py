"""Small random checkpoints made with transformers' own classes, for every test that needs a model on disk.

`make_checkpoint(directory, family, **overrides)` writes the files of a hub directory: config.json,
generation_config.json, safetensors. Weights are scaled so that activations keep their size through the layers, routing
is diverse and logits have spread; the same (family, overrides, seed) gives the same bytes. `write_tokenizer` adds a
byte-level tokenizer and a chat template, so that the directory can be served over HTTP. Importing this file loads torch
and transformers.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FAMILIES = (
    "deepseek_v3",
    "kimi_k2",
    "kimi_k25",
    "deepseek_v2",
    "deepseek_v4",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "kimi_linear",
    "mixtral",
    "olmoe",
)

# Ids 0..255 are the bytes in the order of the ByteLevel alphabet; the special tokens follow.
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
BOS_ID, EOS_ID = 256, 257
VOCAB_SIZE = 272

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_FAMILY: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_MLA, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_mtp_layers": 0},
    "deepseek_v2": {**_MLA, "topk_method": "greedy"},
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        # With few heads most scores are 0, and ties decide.
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 8,
        "layer_types": [
            *("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
            **{"beta_fast": 32, "beta_slow": 1},
        },
        # Some values reach it.
        "swiglu_limit": 1.0,
    },
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "qwen3_next": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "kimi_linear": {
        **{key: value for key, value in _MLA.items() if key not in ("n_routed_experts", "first_k_dense_replace")},
        "q_lora_rank": None,
        "num_local_experts": 8,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2},
}
_FAMILY["qwen3_5_moe_text"] = {**_FAMILY["qwen3_next"], "linear_num_value_heads": 8, "pad_token_id": None}
DEMO = Path(__file__).resolve().parents[1] / "deploy" / "demo"
# MLA head sizes that GPU kernels accept: powers of two from 16 on.
MLA = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
# Heads of DeepSeek-V4 as its releases have them, for which Hopper GPUs have kernels of their own.
V4_HEADS = {"num_attention_heads": 32, "head_dim": 512, "partial_rotary_factor": 0.125, "index_head_dim": 128}
# For `qwen3_moe`: rows long enough that GPU kernels choose one row's experts.
WIDE: dict[str, Any] = {
    "hidden_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
}
# Families whose text model is one of the others.
_WITH_IMAGES = {"kimi_k25": "deepseek_v3", "qwen3_5_moe": "qwen3_5_moe_text"}
_CLASSES: dict[str, tuple[str, str]] = {
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v4": ("DeepseekV4Config", "DeepseekV4ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
}


def make_checkpoint(
    directory: Path | str,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "1GB",
    old_rope_keys: bool = False,
    fused_experts: bool = False,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of `family` and return its directory.

    `overrides` are keys of the family's transformers config. `max_shard_size` as in save_pretrained (small: several
    shards and an index). `old_rope_keys` rewrites config.json to rope_theta + rope_scaling. `fused_experts` stores each
    layer's experts as the two 3-D tensors of transformers 5 instead of one tensor per expert. `tokenizer` also writes
    tokenizer.json and a chat template.
    """
    directory = Path(directory)
    base = {"kimi_k2": "deepseek_v3", **_WITH_IMAGES}.get(family, family)
    config_class, model_class = (getattr(transformers, name) for name in _CLASSES[base])
    model = model_class(config_class(**{**_COMMON, **_FAMILY[base], **overrides}))
    randomize(model, seed)
    model.to(dtype)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if fused_experts:
        # save_pretrained always writes the hub's per-expert layout; this is the in-memory one.
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del state["lm_head.weight"]
        for file in directory.glob("*.safetensors*"):
            file.unlink()
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    if family == "kimi_k2":
        edit_config(directory, model_type="kimi_k2")
    if family in _WITH_IMAGES:
        _with_images(directory, family)
    if old_rope_keys:
        _old_rope(directory)
    if tokenizer:
        write_tokenizer(directory)
    return directory


def randomize(model: transformers.PreTrainedModel, seed: int) -> None:
    """Fill every saved parameter and buffer with seeded noise at a scale that keeps activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    for name in sorted(state):
        tensor = state[name]
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("tid2eid"):
            # Distinct experts per token.
            order = torch.rand(tensor.shape[0], model.config.n_routed_experts, generator=generator).argsort(1)
            tensor.copy_(order[:, : tensor.shape[1]])
            continue
        if "e_score_correction_bias" in name:
            noise *= 0.2
        elif name.endswith("A_log"):
            pass  # the share of a state left after a position: from nearly nothing to nearly all
        elif name.endswith("norm.weight") and _stores_less_one(model, name):
            noise *= 0.1
        elif tensor.ndim == 1:
            noise = (0.0 if name.endswith("bias") else 1.0) + 0.1 * noise
        elif "embed_tokens" not in name or model.config.tie_word_embeddings:
            # An embedding that is also the head stays small; otherwise every token would predict itself. A gate's
            # logits get a wide spread, so that rounding noise does not change the top-k choice.
            gain = 2.0 if ".gate.weight" in name else 1.0
            noise *= gain * max(tensor.shape[-1], 1) ** -0.5
        tensor.copy_(noise)


def _stores_less_one(model: transformers.PreTrainedModel, name: str) -> bool:
    return model.config.model_type.startswith(("qwen3_next", "qwen3_5")) and ".linear_attn." not in name


def edit_config(directory: Path | str, *, remove: Sequence[str] = (), **changes: Any) -> None:
    """Change or remove top-level keys of a checkpoint's config.json."""
    path = Path(directory) / "config.json"
    config = json.loads(path.read_text())
    for key in remove:
        del config[key]
    path.write_text(json.dumps({**config, **changes}, indent=2))


def edit_tensors(
    directory: Path | str, *, remove: Sequence[str] = (), add: dict[str, torch.Tensor] | None = None
) -> None:
    """Rewrite a single-file checkpoint without the keys `remove` and with the tensors `add`."""
    path = Path(directory) / "model.safetensors"
    tensors = load_file(path)
    for key in remove:
        del tensors[key]
    save_file({**tensors, **(add or {})}, path, metadata={"format": "pt"})


def publish_v4(directory: Path) -> Path:
    """Rewrite a single-file DeepSeek-V4 checkpoint with the names of tensors and settings that the hub has."""
    path = directory / "model.safetensors"
    names = {"embed_tokens.": "embed.", "hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm."}

    def published(key: str) -> str:
        key = key.removeprefix("model.")
        for saved, name in names.items():
            key = key.replace(saved, name)
        return key

    save_file({published(key): x for key, x in load_file(path).items()}, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    rope = {k: v for k, v in config["rope_parameters"]["compress"].items() if k in ("factor", "beta_fast", "beta_slow")}
    rope |= {"original_max_position_embeddings": 64, "type": "yarn"}
    edit_config(
        directory,
        remove=("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor"),
        compress_ratios=[*(ratios[kind] for kind in config["layer_types"]), 0],
        num_hash_layers=config["mlp_layer_types"].count("hash_moe"),
        rope_scaling=rope,
        rope_theta=config["rope_parameters"]["main"]["rope_theta"],
        topk_method="noaux_tc",
    )
    return directory


def add_v4_drafts(directory: Path | str, *, dspark: bool = False, scale: float = 0.1) -> None:
    """Give a published DeepSeek-V4 checkpoint a drafter with good drafts: a multi-token prediction layer, or `dspark`.

    All layers add little to the embedding, so that the next token mostly depends on the last one. `scale` is applied to
    what they add. New layers resemble the first layer with a window only. The layer of multi-token prediction mostly
    sees the embedding. The bias of DSpark mostly is the logits of that embedding.
    """
    path = Path(directory) / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("wo_b.weight", "w2.weight")):
            tensors[name] *= scale
    generator = torch.Generator().manual_seed(7)
    config = json.loads((Path(directory) / "config.json").read_text())
    like = f"layers.{config['compress_ratios'].index(0)}."
    # This layer chooses experts by the token, and the new one by its scores.
    other = f"layers.{config['num_hash_layers']}."
    width = config["hidden_size"]

    def noisy(x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x + scale * torch.randn(x.shape, generator=generator)).to(tensors["norm.weight"].dtype)

    new = {name.removeprefix(like): x for name, x in tensors.items() if name.startswith(like) and "tid2eid" not in name}
    new["ffn.gate.bias"] = tensors[f"{other}ffn.gate.bias"]
    read = [1, 3] if dspark else [0]
    last = f"mtp.{len(read) - 1}."
    for i in range(len(read)):
        # Noise must not add what `scale` takes away.
        added = {name: min(scale, 0.01) if name.endswith(("wo_b.weight", "w2.weight")) else 0.01 for name in new}
        tensors |= {f"mtp.{i}.{name}": noisy(x, added[name]) for name, x in new.items()}
    for name in ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"):
        tensors[last + name] = noisy(tensors[name], 0.01)
    if dspark:
        embedding, vocab = tensors["embed.weight"].float(), config["vocab_size"]
        normed = embedding * (embedding.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        tensors |= {
            "mtp.0.main_proj.weight": noisy(torch.zeros(width, len(read) * width), width**-0.5),
            "mtp.0.main_norm.weight": noisy(torch.ones(width), 0.1),
            f"{last}markov_head.markov_w1.weight": noisy(normed * tensors["norm.weight"], 0.01),
            f"{last}markov_head.markov_w2.weight": noisy(10 * tensors["head.weight"], 0.01),
            f"{last}confidence_head.proj.weight": noisy(torch.zeros(1, 2 * width), 1.0),
        }
        settings = {"block_size": 5, "markov_rank": width, "noise_token_id": vocab - 1, "target_layer_ids": read}
        edit_config(directory, **{f"dspark_{key}": value for key, value in settings.items()})
        save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata={"format": "pt"})
        return
    tensors["mtp.0.e_proj.weight"] = noisy(torch.eye(width), 0.01)
    tensors["mtp.0.h_proj.weight"] = noisy(torch.zeros(width, width), 0.3 * width**-0.5)
    for name in ("enorm.weight", "hnorm.weight"):
        tensors[f"mtp.0.{name}"] = noisy(torch.ones(width), 0.1)
    save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata={"format": "pt"})


def add_drafts(directory: Path | str) -> None:
    """Give a single-file Qwen3-Next or Qwen3.5 checkpoint a multi-token prediction layer with good drafts.

    All layers add little to the embedding, so that the next token mostly depends on the last one; the new layer
    resembles the full attention layer, and sees that embedding.
    """
    path = Path(directory) / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            tensors[name] *= 0.2
    (full,) = [name.removesuffix("self_attn.q_proj.weight") for name in tensors if "self_attn.q_proj" in name]
    last = next(tensors[name] for name in tensors if name.endswith(("model.norm.weight", "language_model.norm.weight")))
    generator, width = torch.Generator().manual_seed(7), last.shape[0]

    def noisy(x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x + scale * torch.randn(x.shape, generator=generator)).to(last.dtype)

    draft = {name.removeprefix(full): tensor for name, tensor in tensors.items() if name.startswith(full)}
    tensors |= {f"mtp.layers.0.{name}": noisy(tensor, 0.01) for name, tensor in draft.items()}
    tensors["mtp.fc.weight"] = noisy(torch.eye(width, 2 * width), 0.1 * width**-0.5)
    tensors["mtp.norm.weight"] = noisy(last, 0.01)
    for name in ("embedding", "hidden"):
        tensors[f"mtp.pre_fc_norm_{name}.weight"] = noisy(torch.zeros(width), 0.1)
    save_file(tensors, path, metadata={"format": "pt"})


def write_tokenizer(directory: Path | str) -> None:
    """Write a byte-level tokenizer (one token per UTF-8 byte) and a chat template for the roles of `SPECIAL_TOKENS`."""
    directory = Path(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    assert tokenizer.token_to_id("<|eos|>") == EOS_ID
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _with_images(directory: Path, family: str) -> None:
    """Write a text model's checkpoint as part of one that reads images, in the hub's layout."""
    path, config = directory / "config.json", json.loads((directory / "config.json").read_text())
    tied = config.pop("tie_word_embeddings")
    whole = {"model_type": family, "text_config": config, "vision_config": {"depth": 27}}
    path.write_text(json.dumps({**whole, "tie_word_embeddings": tied, "image_token_id": 7}))
    tensors = load_file(directory / "model.safetensors")
    if family == "kimi_k25":
        renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        names = ("vision_tower.patch_embed.proj.weight", "mm_projector.linear_1.weight")
    else:
        renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
        names = ("model.visual.pos_embed.weight", "mtp.fc.weight")
    others = {name: torch.ones(3) for name in names}
    save_file({**renamed, **others}, directory / "model.safetensors", metadata={"format": "pt"})


def _old_rope(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
