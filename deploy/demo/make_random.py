"""Write the demo checkpoint into this folder: a small DeepSeek-V3 shaped model with seeded random weights.

The weights come from `torch.rand`, whose bits depend on the seed alone (no transcendental functions), so the same seed
gives the same file on every machine. Everything else is what `save_pretrained` and the tokenizers library write.

    python deploy/demo/make_random.py [--out DIR] [--seed N]
"""

import argparse
import json
import math
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 1024
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|turn|>")
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
TURN_ID = 6
MAX_LENGTH = 4096

# A turn ends with <|turn|>; the model closes its own turn with it too, so it is a stop id in generation_config.json.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('unknown role ' ~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|turn|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def model_config() -> transformers.DeepseekV3Config:
    """All parts of the architecture: MLA with both low-rank halves, expert groups, a shared expert, a dense layer."""
    return transformers.DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        num_mtp_layers=0,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="bfloat16",
    )


def deviation(name: str, shape: torch.Size) -> float:
    """Standard deviation of a weight: activations stay near 1, a gate's scores spread, so that routing is diverse."""
    if name.endswith("e_score_correction_bias"):
        return 0.02
    if "embed_tokens" in name:
        return 1.0
    scale = 1.0 / math.sqrt(shape[-1])
    # A residual branch adds to the stream without drowning the token; the head needs no more than logits around 2.
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return 0.7 * scale
    return 2.0 * scale if name.endswith(("gate.weight", "lm_head.weight")) else scale


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Fill the saved tensors in order of their names; norms stay 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict().items()):
        if "norm" in name:
            tensor.fill_(1.0)
            continue
        # Uniform on [-a, a) has the deviation a / sqrt(3).
        half_width = deviation(name, tensor.shape) * math.sqrt(3.0)
        tensor.copy_((torch.rand(tensor.shape, generator=generator) * 2.0 - 1.0) * half_width)


def write_tokenizer(out: Path) -> None:
    """Train a byte-level BPE tokenizer on corpus.txt and write it with its template. A prompt starts with <|begin|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((HERE / "corpus.txt").read_text().splitlines(keepends=True), trainer)
    begin = SPECIAL_TOKENS[BOS_ID]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, BOS_ID)]
    )
    assert tokenizer.token_to_id(SPECIAL_TOKENS[TURN_ID]) == TURN_ID
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "corpus.txt is too short to fill the vocabulary"
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description="write the demo checkpoint")
    parser.add_argument("--out", type=Path, default=HERE, help="where to (default: this folder)")
    parser.add_argument("--seed", type=int, default=20261120)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.DeepseekV3ForCausalLM(model_config())
    randomize(model, args.seed)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=[EOS_ID, TURN_ID], pad_token_id=PAD_ID
    )
    # The gate's correction bias stays float32, as in the checkpoints that this one stands for.
    biases = {name: tensor.clone() for name, tensor in model.state_dict().items() if "e_score_correction_bias" in name}
    model.to(torch.bfloat16)
    model.load_state_dict(biases, strict=False, assign=True)
    model.save_pretrained(args.out)
    # Written 0600 by the library; a container that runs as another user must read it.
    (args.out / "model.safetensors").chmod(0o644)
    write_tokenizer(args.out)


if __name__ == "__main__":
    main()
