"""A tiny deepseek_v3 checkpoint with an MTP layer and some held-out texts, for tests of the demo's scripts."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.checkpoints import edit_config, edit_tensors, make_checkpoint

LAYERS, HIDDEN, WINDOW = 2, 32, 32
MTP = f"model.layers.{LAYERS}."
TEXTS = {
    "sea": ["The ship went out at dawn, and no one saw her sails again until the winter came.", "A whale! A whale!"],
    "verse": ["O moon\nthat shines on naïve men", "Let there be light: and there was light, and it was good enough."],
}


def make_demo(directory: Path, **tensors: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Write a tiny deepseek_v3 directory with an MTP layer. `tensors` change those whose name has the key, __ for
    '.'."""
    make_checkpoint(
        directory,
        "deepseek_v3",
        tokenizer=True,
        num_hidden_layers=LAYERS + 1,
        hidden_size=HIDDEN,
        intermediate_size=48,
        moe_intermediate_size=16,
        max_position_embeddings=WINDOW,
    )
    edit_config(directory, num_hidden_layers=LAYERS, num_nextn_predict_layers=1)
    stored = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    stored |= {
        MTP + "enorm.weight": torch.ones(HIDDEN),
        MTP + "hnorm.weight": torch.ones(HIDDEN),
        MTP + "eh_proj.weight": torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) / 8,
        MTP + "shared_head.norm.weight": torch.ones(HIDDEN),
        MTP + "shared_head.head.weight": stored["lm_head.weight"].clone(),
        MTP + "embed_tokens.weight": stored["model.embed_tokens.weight"].clone(),
    }
    for part, change in tensors.items():
        names = [name for name in stored if part.replace("__", ".") in name]
        assert names, f"no tensor is named {part}"
        stored |= {name: change(stored[name]) for name in names}
    edit_tensors(directory, add=stored)
    return directory


def write_heldout(path: Path) -> Path:
    """Write TEXTS in the format of heldout.jsonl."""
    rows = [
        {"source": source, "title": f"{source} {i}", "ask": f"Say {source} {i}.", "text": text}
        for source, texts in TEXTS.items()
        for i, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
