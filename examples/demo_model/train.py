"""Train the demo checkpoint: a small DeepSeek-V3 (MLA, sigmoid-gated MoE, one MTP layer) on public-domain English.

    python -m examples.demo_model.prepare_data                     # fetch the texts into examples/demo_model/data
    python -m examples.demo_model.train --run /tmp/demo-run        # 10 minutes on an H200; resumes where it stopped
    python -m examples.demo_model.train --tiny --data F --out DIR  # seconds on a CPU, for the test of this file

The model is plain PyTorch with the names and formulas of DeepSeek-V3's checkpoints (Liu et al. 2024, arXiv 2412.19437).
Balancing is free of auxiliary losses (section 2.1.2). After every step an expert's correction bias moves by a fixed
amount against its excess load. The multi-token-prediction loss is that of section 2.2. The MTP layer gets the main
model's final hidden states after the last norm, as in `transformers` and vLLM. During training every expert computes
every token, and the gate's weights are zero except for the top k. This is the sparse function in a few large products.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "deploy" / "demo"
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|turn|>")
BEGIN, END, PAD, SYSTEM, USER, ASSISTANT, TURN = range(len(SPECIAL_TOKENS))
# A turn ends with <|turn|>. The model closes its own turn with it too, so it is a stop id in generation_config.json.
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
BIAS_UPDATE_SPEED = 1e-3  # gamma of DeepSeek-V3
MTP_LOSS_WEIGHT = 0.3  # lambda of DeepSeek-V3's first phase
SAVE_SECONDS = 60.0


def model_config(tiny: bool) -> transformers.DeepseekV3Config:
    """Return the shipped model's config, or the same architecture in miniature."""
    sizes = {
        "vocab_size": 4096,
        "hidden_size": 192,
        "intermediate_size": 384,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 1024,
    }
    if tiny:
        tiny_sizes = (320, 32, 64, 16, 2, 2, 2, 16, 16, 8, 8, 8, 8, 2, 64)
        sizes = dict(zip(sizes, tiny_sizes, strict=True))
    return transformers.DeepseekV3Config(
        **sizes,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        num_nextn_predict_layers=1,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PAD,
        dtype="bfloat16",
        architectures=["DeepseekV3ForCausalLM"],
    )


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, 1e-6)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """[T, H] -> weights [T, E], zero but for the top k: sigmoid scores. Bias and groups affect only the choice."""

    e_score_correction_bias: Tensor

    def __init__(self, config: transformers.DeepseekV3Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight).sigmoid()
        with torch.no_grad():
            choice = (scores + self.e_score_correction_bias).unflatten(-1, (c.n_group, -1))
            groups = choice.topk(2, dim=-1).values.sum(-1).topk(c.topk_group, dim=-1).indices
            allowed = torch.zeros_like(choice[..., 0]).scatter(-1, groups, 1.0).bool()
            choice = choice.masked_fill(~allowed[..., None], -math.inf).flatten(-2)
            chosen = torch.zeros_like(scores).scatter(-1, choice.topk(c.num_experts_per_tok, dim=-1).indices, 1.0)
        weights = scores * chosen
        return c.routed_scaling_factor * weights / (weights.sum(-1, keepdim=True) + 1e-20)


class MoE(nn.Module):
    """Routed experts [E, I, H], stacked for training, and a shared one. Also returns the tokens of each expert [E]."""

    def __init__(self, config: transformers.DeepseekV3Config) -> None:
        super().__init__()
        shape = (config.n_routed_experts, config.moe_intermediate_size, config.hidden_size)
        self.gate = Gate(config)
        self.gate_proj, self.up_proj = (nn.Parameter(torch.empty(shape)) for _ in range(2))
        self.down_proj = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))
        self.shared_experts = MLP(shape[2], shape[1] * config.n_shared_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.gate(x)
        hidden = F.silu(F.linear(x, self.gate_proj.flatten(0, 1))) * F.linear(x, self.up_proj.flatten(0, 1))
        hidden = hidden.unflatten(-1, (weights.shape[-1], -1)) * weights[..., None].to(hidden.dtype)
        routed = F.linear(hidden.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))
        return routed + self.shared_experts(x), (weights.detach() > 0).sum(0)


class Attention(nn.Module):
    """Multi-head latent attention over whole sequences [B, S, H], causal, rotary pairs interleaved."""

    def __init__(self, config: transformers.DeepseekV3Config) -> None:
        super().__init__()
        self.config = c = config
        heads, hidden = c.num_attention_heads, c.hidden_size
        self.q_a_proj = nn.Linear(hidden, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank)
        self.q_b_proj = nn.Linear(c.q_lora_rank, heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * c.v_head_dim, hidden, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        c = self.config
        heads = (c.num_attention_heads, -1)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, heads).transpose(1, 2)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, heads).transpose(1, 2)
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        k_rope = rotate(k_rope[:, None], rotary).expand(-1, c.num_attention_heads, -1, -1)
        q, k = torch.cat((q_nope, rotate(q_rope, rotary)), -1), torch.cat((k_nope, k_rope), -1)
        # Flash attention needs one head size. The padding is zero in the output too.
        v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : c.v_head_dim]
        return self.o_proj(out.transpose(1, 2).flatten(-2))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the pairs (x0, x1), (x2, x3), ... of [B, heads, S, D] by `rotary` [2, S, D / 2], cosines and sines."""
    cos, sin = rotary.to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


class Layer(nn.Module):
    """A decoder layer. Returns its output and the tokens per expert, None for a dense one."""

    def __init__(self, config: transformers.DeepseekV3Config, dropout: float, *, dense: bool) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if dense else MoE(config)
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), rotary))
        rows = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MLP):
            return x + self.dropout(self.mlp(rows)), None
        out, load = self.mlp(rows.flatten(0, 1))
        return x + self.dropout(out.view_as(x)), load


class MTPLayer(Layer):
    """Predicts token t+2 from the main model's state at t and token t+1 (embedding first in `eh_proj`)."""

    def __init__(self, config: transformers.DeepseekV3Config, dropout: float) -> None:
        super().__init__(config, dropout, dense=False)
        self.enorm, self.hnorm = RMSNorm(config.hidden_size), RMSNorm(config.hidden_size)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(config.hidden_size)})


class Trunk(nn.Module):
    """Embedding, decoder layers, the MTP layer after them, last norm: the `model` of the checkpoint."""

    def __init__(self, config: transformers.DeepseekV3Config, dropout: float) -> None:
        super().__init__()
        dense = [i < config.first_k_dense_replace for i in range(config.num_hidden_layers)]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([*(Layer(config, dropout, dense=d) for d in dense), MTPLayer(config, dropout)])
        self.norm = RMSNorm(config.hidden_size)


class DemoModel(nn.Module):
    """[B, S + 2] token ids -> (main logits for t+1, MTP logits for t+2, each [B, S, V]; load [MoE layers + 1, E])."""

    rotary: Tensor

    def __init__(self, config: transformers.DeepseekV3Config, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config, dropout)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.dropout = nn.Dropout(dropout)
        size = config.qk_rope_head_dim
        angles = torch.arange(config.max_position_embeddings)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("rotary", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def init_weights(self) -> None:
        """Initialise normally with deviation 1 / sqrt(fan in), and smaller by the depth for residual outputs."""
        depth = (2 * self.config.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                scale = depth if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")) else 1.0
                nn.init.normal_(weight, std=0.5 if "embed" in name else scale * weight.shape[-1] ** -0.5)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embed, rotary = self.model.embed_tokens, self.rotary[:, : ids.shape[1] - 2]
        *layers, mtp = self.model.layers
        assert isinstance(mtp, MTPLayer)
        x, loads = self.dropout(embed(ids[:, :-2])), []
        for layer in layers:
            x, load = layer(x, rotary)
            loads += [] if load is None else [load]
        hidden = self.model.norm(x)
        pair = torch.cat((mtp.enorm(embed(ids[:, 1:-1])), mtp.hnorm(hidden)), -1)
        ahead, load = mtp(mtp.eh_proj(self.dropout(pair)), rotary)
        draft = mtp.shared_head["norm"](ahead)
        return self.lm_head(hidden), self.lm_head(draft), torch.stack([*loads, load])

    def balance(self, load: Tensor, speed: float) -> None:
        """Move each gate's correction bias against its experts' load [MoE layers, E]."""
        gates = [layer.mlp.gate for layer in self.model.layers if isinstance(layer.mlp, MoE)]
        load = load.float()
        for gate, change in zip(gates, speed * (load.mean(-1, keepdim=True) - load).sign(), strict=True):
            gate.e_score_correction_bias += change

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the tensors of a DeepSeek-V3 checkpoint: bfloat16, one per expert; gates' biases float32."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            part = name.rpartition(".mlp.")[2]
            if part in ("gate_proj", "up_proj", "down_proj"):
                stem = name.removesuffix(part)
                tensors |= {f"{stem}experts.{i}.{part}.weight": expert for i, expert in enumerate(tensor)}
            else:
                tensors[name] = tensor
        # DeepSeek-V3 stores the MTP layer's embedding and head, although they are the main model's.
        last = f"model.layers.{self.config.num_hidden_layers}"
        tensors[f"{last}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"{last}.shared_head.head.weight"] = tensors["lm_head.weight"]
        keep = "e_score_correction_bias"
        return {
            k: t.to(torch.float32 if k.endswith(keep) else torch.bfloat16).cpu().clone() for k, t in tensors.items()
        }


def write_tokenizer(out: Path, texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer and write it with its chat template. A prompt starts with <|begin|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = SPECIAL_TOKENS[BEGIN]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, BEGIN)]
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts fill {tokenizer.get_vocab_size()} of {vocab_size} tokens: give more text")
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return tokenizer


def read_documents(path: Path) -> list[dict[str, str]]:
    """Read the output of prepare_data.py, one JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def chat_examples(documents: list[dict[str, str]]) -> list[tuple[str, str]]:
    """Return (user's text, answer) pairs: a document's `ask` with its opening, a sentence with the text after it."""
    examples = []
    for document in documents:
        paragraphs = [p for p in document["text"].split("\n\n") if p.strip()]
        examples.append((document["ask"], passage(paragraphs, limit=700)))
        for i in range(1, len(paragraphs) - 1, 8):
            opening = paragraphs[i].split(". ")[0].split("\n")[0].strip()
            rest = paragraphs[i].removeprefix(opening).lstrip(". \n")
            if 20 <= len(opening) <= 200 and rest:
                examples.append((f"Continue: {opening}.", passage([rest, *paragraphs[i + 1 : i + 3]], limit=500)))
    return examples


def passage(paragraphs: list[str], *, limit: int) -> str:
    """Return whole paragraphs of up to `limit` characters. Cut a longer first one after a sentence, else a word."""
    text = paragraphs[0]
    for paragraph in paragraphs[1:]:
        if len(text) + len(paragraph) > limit:
            break
        text += "\n\n" + paragraph
    if len(text) <= limit:
        return text
    cut = max(text.rfind(mark, 0, limit) for mark in (". ", "! ", "? ", ".\n"))
    return text[: cut + 1] if cut > 0 else text[:limit].rpartition(" ")[0]


class Corpus:
    """Token windows [B, S + 2] in a seeded order. Every epoch shuffles all sequences and cuts new windows."""

    def __init__(self, sequences: list[np.ndarray], *, length: int, batch: int, seed: int) -> None:
        self.sequences, self.length, self.batch, self.seed = sequences, length, batch, seed
        self.num_tokens = sum(map(len, sequences))
        # A window predicts two tokens beyond its end, and they must exist in the epoch's stream too.
        self.steps_per_epoch = (self.num_tokens - 2) // (length * batch)
        if self.steps_per_epoch < 1:
            raise ValueError(f"{self.num_tokens} tokens are too few for one batch of {batch} x {length}")

    def batches(self, first_step: int) -> Iterator[Tensor]:
        epoch, first = divmod(first_step, self.steps_per_epoch)
        while True:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.sequences))
            stream = torch.from_numpy(np.concatenate([self.sequences[i] for i in order])).long()
            windows = stream.unfold(0, self.length + 2, self.length)
            # The windows of a batch are far apart in the stream.
            rows = windows[: self.steps_per_epoch * self.batch].unflatten(0, (self.batch, self.steps_per_epoch))
            for i in range(first, self.steps_per_epoch):
                yield rows[:, i].contiguous()
            epoch, first = epoch + 1, 0


def encode_all(tokenizer: Tokenizer, documents: list[dict[str, str]]) -> list[np.ndarray]:
    """Encode <|begin|> text <|end|> of every document, and every chat example in its template."""
    texts = [document["text"] for document in documents]
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    sequences = [np.array([BEGIN, *e.ids, END], dtype=np.int32) for e in encoded]
    users, answers = zip(*chat_examples(documents), strict=True)
    asked, answered = (tokenizer.encode_batch_fast(list(side), add_special_tokens=False) for side in (users, answers))
    chats = ([BEGIN, USER, *u.ids, TURN, ASSISTANT, *a.ids, TURN] for u, a in zip(asked, answered, strict=True))
    return sequences + [np.array(chat, dtype=np.int32) for chat in chats]


def losses(model: Callable, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean cross-entropy (nats) of the main model and the MTP layer, and the load [MoE layers + 1, E]."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits, draft, load = model(ids)
    main = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:-1].flatten())
    return main, F.cross_entropy(draft.float().flatten(0, 1), ids[:, 2:].flatten()), load


@torch.no_grad()
def held_out(model: nn.Module, corpus: Corpus, num_bytes: int) -> dict[str, float]:
    """Return held-out bits per byte over windows (an estimate; evaluate.py measures) and the worst load / mean."""
    device = next(model.parameters()).device
    model.eval()
    batches = zip(range(corpus.steps_per_epoch), corpus.batches(0), strict=False)
    found = [losses(model, ids.to(device)) for _, ids in batches]
    model.train()
    nats = float(torch.stack([main for main, _, _ in found]).mean())
    load = torch.stack([load for _, _, load in found]).sum(0).float()
    bits = nats / math.log(2) * corpus.num_tokens / num_bytes
    return {"heldout_bpb": bits, "max_load": float((load.amax(-1) / load.mean(-1)).max())}


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return a linear warm-up over 2 % of the steps, then a cosine down to 2 % of the peak."""
    warmup = max(1, args.steps // 50)
    if step < warmup:
        return args.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, args.steps - warmup)
    return args.lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def save(path: Path, model: DemoModel, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Write the state of a resumed run. If the run is killed meanwhile, the previous state remains."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for i, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{name}": tensor for name, tensor in moments.items()}
    save_file(tensors, path.with_suffix(".new"), metadata={"state": json.dumps(state)})
    path.with_suffix(".new").replace(path)


def restore(path: Path, model: DemoModel, optimizer: torch.optim.Optimizer) -> dict:
    """Read the output of `save` into model and optimizer. Return its `state`."""
    moments: dict[int, dict[str, Tensor]] = {}
    with safe_open(path, framework="pt", device=str(next(model.parameters()).device)) as file:
        model.load_state_dict({name: file.get_tensor(f"model.{name}") for name in model.state_dict()})
        for name in file.keys():  # noqa: SIM118 (an open file is no mapping)
            owner, _, rest = name.partition(".")
            if owner == "optimizer":
                i, _, moment = rest.partition(".")
                moments.setdefault(int(i), {})[moment] = file.get_tensor(name)
        state = json.loads(file.metadata()["state"])
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    return state


def train(model: DemoModel, args: argparse.Namespace, corpus: Corpus, heldout: tuple[Corpus, int]) -> dict | None:
    """Train to `args.steps`, saving into args.run. Return None if --minutes ended it (call again to continue)."""
    device = next(model.parameters()).device
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    state: dict[str, Any] = {"step": 0, "seconds": 0.0, "curve": []}
    saved = args.run / "state.safetensors"
    if saved.exists():
        state = restore(saved, model, optimizer)
    fast: Callable = torch.compile(model, dynamic=False) if device.type == "cuda" else model
    begun = last_save = time.monotonic()
    before = state["seconds"]

    recent: list[Tensor] = []
    with tqdm(total=args.steps, initial=state["step"], unit="step", mininterval=2.0) as bar:
        for step, ids in zip(range(state["step"], args.steps), corpus.batches(state["step"]), strict=False):
            torch.manual_seed(args.seed * 1_000_003 + step)  # dropout's noise, the same after a resume
            rate = learning_rate(step, args)
            for group in optimizer.param_groups:
                group["lr"] = rate
            main, ahead, load = losses(fast, ids.to(device, non_blocking=True))
            (main + MTP_LOSS_WEIGHT * ahead).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            model.balance(load, BIAS_UPDATE_SPEED)
            recent.append(torch.stack((main.detach(), ahead.detach())))
            bar.update()
            state["step"], state["seconds"] = step + 1, before + time.monotonic() - begun
            if state["step"] % args.log_every and state["step"] != args.steps:
                continue
            loss, mtp_loss = torch.stack(recent).mean(0).tolist()
            recent.clear()
            row = {
                "step": state["step"],
                "tokens": state["step"] * ids[:, 2:].numel(),
                "loss": loss,
                "mtp_loss": mtp_loss,
            }
            if state["step"] % (4 * args.log_every) == 0 or state["step"] == args.steps:
                row |= held_out(model, *heldout)
            state["curve"].append(row | {"lr": rate})
            speed = row["tokens"] / state["seconds"]
            bar.set_postfix_str(f"loss {loss:.3f}, MTP {mtp_loss:.3f}, {speed / 1e3:.0f}k tokens/s")
            if time.monotonic() - last_save > SAVE_SECONDS:
                save(saved, model, optimizer, state)
                last_save = time.monotonic()
            if args.minutes and time.monotonic() - begun > 60 * args.minutes:
                break
    save(saved, model, optimizer, state)
    return state if state["step"] == args.steps else None


def export(model: DemoModel, state: dict, args: argparse.Namespace, sizes: dict[str, int]) -> None:
    """Write the Hugging Face directory (the tokenizer is there already) and training.json, for the model card."""
    model.config.save_pretrained(args.out)
    stops = transformers.GenerationConfig(bos_token_id=BEGIN, eos_token_id=[END, TURN], pad_token_id=PAD)
    stops.save_pretrained(args.out)
    path = args.out / "model.safetensors"
    save_file(model.checkpoint(), path, metadata={"format": "pt"})
    # The library writes 0600, but a container that runs as another user must read it.
    path.chmod(0o644)
    device = next(model.parameters()).device
    options = {k: v for k, v in vars(args).items() if k not in ("data", "heldout", "run", "out", "minutes", "tiny")}
    record = {
        "command": "python -m examples.demo_model.train "
        + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in options.items()),
        "seed": args.seed,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "seconds": round(state["seconds"], 1),
        "tokens": state["curve"][-1]["tokens"],
        "options": options | sizes,
        "curve": state["curve"],
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line. The defaults made the shipped checkpoint."""
    parser = argparse.ArgumentParser(description="train the demo checkpoint")
    parser.add_argument("--data", type=Path, default=HERE / "data" / "train.jsonl", help="output of prepare_data.py")
    parser.add_argument(
        "--heldout", type=Path, default=MODEL / "heldout.jsonl", help="text for the curve, never trained on"
    )
    parser.add_argument("--run", type=Path, default=Path("/tmp/moeyard-demo"), help="state to resume from")
    parser.add_argument("--out", type=Path, default=MODEL, help="folder of the checkpoint")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="stop after this many minutes; the same call continues (0: never)"
    )
    parser.add_argument("--tiny", action="store_true", help="the architecture in miniature, for a CPU")
    parser.add_argument("--seed", type=int, default=20261120)
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--batch", type=int, default=32, help="windows of a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--log-every", type=int, default=50)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if the checkpoint is written, 3 if --minutes is over (call again)."""
    args = arguments(argv)
    for folder in (args.run, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    config = model_config(args.tiny)
    documents, unseen = read_documents(args.data), read_documents(args.heldout)
    tokenizer = write_tokenizer(args.out, [document["text"] for document in documents], config.vocab_size)
    sequences = encode_all(tokenizer, documents)
    corpus = Corpus(sequences, length=args.length, batch=args.batch, seed=args.seed)
    texts = [document["text"] for document in unseen]
    tokens = [
        np.array([BEGIN, *e.ids, END], dtype=np.int32)
        for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]
    heldout = Corpus(tokens, length=args.length, batch=8, seed=0), sum(len(text.encode()) for text in texts)
    model = DemoModel(config, args.dropout)
    model.init_weights()
    model.to(device)
    sizes = {"corpus_tokens": corpus.num_tokens, "steps_per_epoch": corpus.steps_per_epoch}
    print(f"{len(documents)} documents, {sizes}, on {device}")
    state = train(model, args, corpus, heldout)
    if state is None:
        print("stopped by --minutes: the same call continues")
        return 3
    export(model, state, args, sizes)
    print(f"wrote {args.out}: {state['curve'][-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
