"""Write the demo model's card, README.md with curves.svg, from the records of other scripts.

    python -m examples.demo_model.evaluate --json deploy/demo/evaluation.json
    python -m examples.demo_model.model_card [--folder deploy/demo]

It reads config.json, model.safetensors, data.json (prepare_data.py), training.json (train.py) and evaluation.json
(evaluate.py) of the folder. The text is in card_template.md, and all numbers come from those files.
"""

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.demo_model.curves import draw
from safetensors import safe_open

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "deploy" / "demo"
USAGE_PROMPT = "In the beginning"


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, text: bool = False) -> str:
    """Return a Markdown table, padded to be readable in a terminal. Columns after the first are numbers, or `text`."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in [head, *rows]]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    lines = [
        "| "
        + " | ".join(
            c.ljust(w) if text or not i else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + ("-" if text or not i else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def number(value: float | int) -> str:
    """Format integers in groups of three digits, and fractions to three places."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def figures(result: dict[str, Any]) -> str:
    """Return evaluation.json as Markdown tables: bounds, bits per byte by source, expert load by layer, MTP, greedy."""
    held, mtp, accepted, greedy = (result[key] for key in ("heldout", "mtp", "acceptance", "greedy"))
    bounds = [(r["figure"], number(r["value"]), r["bound"], "met" if r["met"] else "MISSED") for r in result["bounds"]]
    sources = [
        (name, *(number(row[key]) for key in ("documents", "tokens", "bytes", "bits_per_byte", "nats_per_token")))
        for name, row in [*held["sources"].items(), ("all", held)]
    ]
    layers = [
        (f"{r['layer']}{' (MTP)' if r['mtp'] else ''}", number(r["busiest"]), number(r["least"]), r["dead"])
        for r in result["experts"]
    ]
    drafts = [
        ("main model's first choice is the true token", number(mtp["main_right"])),
        ("MTP draft is the true token", number(mtp["right"])),
        ("MTP draft is the main model's first choice", number(mtp["agrees_with_main"])),
        ("**acceptance at greedy**: draft is the next greedy token", number(accepted["share"])),
    ]
    speculated = [
        f"generate(use_mtp=True) on prompt {row['prompt']}: {'the same' if row['tokens_equal'] else 'OTHER'} tokens in"
        f" {row['passes']} passes ({row['passes_expected']} expected), {row['tokens_per_pass']:.2f} tokens a pass."
        for row in accepted["checked"]
    ]
    differing = [
        f"Prompt {row['prompt']} differs at token {row['position']}: moeyard {row['moeyard']}, transformers"
        f" {row['transformers']}, logits {row['logit_gap']:.2e} apart."
        for row in greedy["differences"]
    ]
    parts = [
        table(("figure", "measured", "required", ""), bounds),
        "Bits per byte: sum of -log2 p over a document's tokens and its <|end|>, by the bytes of its text; windows of"
        f" {held['window']} tokens advancing by half.".replace("<|end|>", "`<|end|>`"),
        table(("held-out text", "documents", "tokens", "bytes", "bits/byte", "nats/token"), sources),
        "Load of a layer's experts over all held-out tokens, relative to the layer's mean:",
        table(("layer", "busiest", "least", "dead"), layers),
        f"Multi-token prediction: the first three over {mtp['positions']:,} held-out tokens (with true text as input),"
        f" the last over {accepted['drafts']:,} drafts while generating {greedy['tokens']} greedy tokens after"
        f" {accepted['prompts']} held-out prompts.",
        table(("share of tokens where the", ""), drafts),
        *speculated,
        f"moeyard and transformers generate the same {greedy['tokens']} greedy tokens in float32 after"
        f" {greedy['equal']} of {greedy['prompts']} held-out prompts.",
        *differing,
    ]
    return "\n\n".join(parts)


def forms(result: dict[str, Any]) -> str:
    """Return forms.json as a Markdown table."""
    rows = [
        (name, f"{row['bits_per_byte']:.4f}", f"{row['bytes'] / 1e6:.1f}", f"{row['tpot_ms']:.2f}")
        for name, row in result["forms"].items()
    ]
    return table(("form", "bits/byte", "MB", "TPOT, ms"), rows)


def quote(row: dict[str, Any]) -> str:
    """Return one sample as a Markdown quotation that keeps its line breaks."""

    def escape(text: str) -> str:
        return re.sub(r"([\\`*_<>#\[\]|~])", r"\\\1", text)

    prompt, output = row["prompt"].rstrip(), row["output"]
    gap = row["prompt"][len(prompt) :] if row["kind"] == "text" else "\n"
    text = f"**{escape(prompt)}**{gap}{escape(output.rstrip())}"
    lines = "  \n".join(f"> {line}".rstrip() for line in text.split("\n"))
    tail = "" if row["ended"] else " ..."
    kind = "chat" if row["kind"] == "chat" else row["title"]
    return f"{kind}, temperature {row['temperature']:g}, seed {row['seed']}:\n\n{lines}{tail}"


def samples(result: dict[str, Any]) -> str:
    """Return all samples as Markdown."""
    return "\n\n".join(quote(row) for row in result["samples"])


def count_parameters(folder: Path) -> dict[str, int]:
    """Count the parameters in model.safetensors by part of the model, in order of use, and in total.

    `used per token` excludes routed experts beyond the top k, the embedding except one row, and the MTP layer.
    """
    config = json.loads((folder / "config.json").read_text())
    parts = dict.fromkeys(
        (
            "embedding",
            "attention",
            "dense MLP",
            "routed experts",
            "shared experts",
            "gates",
            "norms",
            "head",
            "MTP layer",
        ),
        0,
    )
    patterns = (
        ("MTP layer", rf"^model\.layers\.{config['num_hidden_layers']}\."),
        ("embedding", r"embed_tokens"),
        ("head", r"^lm_head"),
        ("norms", r"norm"),
        ("attention", r"self_attn"),
        ("routed experts", r"mlp\.experts"),
        ("shared experts", r"shared_experts"),
        ("gates", r"mlp\.gate\."),
        ("dense MLP", r"mlp\."),
    )
    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - no mapping
            part = next(part for part, pattern in patterns if re.search(pattern, name))
            parts[part] += math.prod(tensors.get_slice(name).get_shape())
    idle = 1 - config["num_experts_per_tok"] / config["n_routed_experts"]
    total = sum(parts.values())
    used = total - parts["embedding"] - parts["MTP layer"] - round(idle * parts["routed experts"])
    return parts | {"total": total, "used per token": used}


def architecture(folder: Path) -> str:
    """Return config.json as a table of the architecture."""
    c = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        dtypes = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 - no mapping
    dense = c["first_k_dense_replace"]
    rows = [
        ("family", f"`{c['model_type']}`, stored as {' and '.join(sorted(dtypes))}"),
        ("layers", f"{dense} dense, {c['num_hidden_layers'] - dense} mixtures, {c['num_nextn_predict_layers']} MTP"),
        ("hidden", f"{c['hidden_size']}; dense MLP {c['intermediate_size']}, expert {c['moe_intermediate_size']}"),
        (
            "attention",
            f"latent (MLA), {c['num_attention_heads']} heads, q_lora_rank {c['q_lora_rank']}, kv_lora_rank"
            f" {c['kv_lora_rank']}, head {c['qk_nope_head_dim']} + {c['qk_rope_head_dim']} (rotary),"
            f" value {c['v_head_dim']}",
        ),
        (
            "experts",
            f"{c['n_routed_experts']} routed in {c['n_group']} groups, top {c['topk_group']} groups, top"
            f" {c['num_experts_per_tok']} experts, sigmoid gate with correction bias; {c['n_shared_experts']} shared",
        ),
        ("vocabulary", f"{c['vocab_size']:,}, byte-level BPE"),
        ("context", f"{c['max_position_embeddings']:,} tokens"),
        ("chat", "roles system, user, assistant; a turn ends with `<|turn|>`, a document with `<|end|>`"),
        ("file", f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f} MB"),
    ]
    return table(("", "value"), rows, text=True)


def training_text(training: dict[str, Any]) -> str:
    """Return command, seed, hardware and options of training.json."""
    last = training["curve"][-1]
    rows = [
        ("command", f"`{training['command']}`"),
        ("seed", str(training["seed"])),
        ("hardware", f"{training['device']}, torch {training['torch']}"),
        ("time", f"{training['seconds'] / 60:.1f} minutes"),
        ("tokens", f"{training['tokens']:,} in {last['step']:,} steps"),
        ("last loss", f"{last['loss']:.3f} nats per token, MTP layer {last['mtp_loss']:.3f}"),
    ]
    return table(("", "value"), rows, text=True)


def data_text(data: dict[str, Any]) -> str:
    """Return sources, licences and sizes of data.json, and the rule for held-out documents."""
    rows = [
        (
            row["source"],
            f"`{row['package']}` {row['version']} ({row['registry']})",
            row["package_licence"],
            row["why_public_domain"],
            *(f"{row[part]['documents']:,} / {row[part]['bytes'] / 1e3:,.1f}" for part in ("train", "heldout")),
        )
        for row in data["sources"]
    ]
    head = ("source", "package", "its licence", "why the text is in the public domain", "train", "held out")
    split = data["split"]
    left_out = "; ".join(split["left_out_for_shared_passages"]) or "none"
    return f"""\
Public-domain English from package registries, fetched and checked by `prepare_data.py`; the last two columns are
documents / thousand bytes.

{table(head, rows, text=True)}

A hash of source and title decides which documents are held out, about {split["share"]:.1%} of the text. Training
never sees them. A held-out document that shares more than {split["max_shared_shingles"]:.0%} of its 50-character
passages with the training text is left out of both: {left_out}."""


def write_card(folder: Path) -> None:
    """Write README.md and curves.svg. Raises OSError or KeyError if a record is missing or incomplete."""
    result, training, data, formed = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("evaluation", "training", "data", "forms")
    )
    config = json.loads((folder / "config.json").read_text())
    counts = count_parameters(folder)
    limits = {row["figure"]: row["limit"] for row in result["bounds"]}
    text = (
        (HERE / "card_template.md")
        .read_text()
        .format(
            millions=counts["total"] / 1e6,
            mtp_layer=config["num_hidden_layers"],
            usage_prompt=USAGE_PROMPT,
            architecture=architecture(folder),
            parameters=table(("parameters", ""), [(name, f"{count:,}") for name, count in counts.items()]),
            data=data_text(data),
            training=training_text(training),
            transformers=result["transformers"],
            torch=result["torch"],
            figures=figures(result),
            forms=forms(formed),
            samples=samples(result),
        )
    )
    (folder / "README.md").write_text(text)
    picture = draw(training["curve"], limits["held-out bits per byte"], limits["busiest expert of a layer / mean"])
    (folder / "curves.svg").write_text(picture)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="write the demo model's card")
    parser.add_argument("--folder", type=Path, default=MODEL, help="the model's directory (default: deploy/demo)")
    write_card(parser.parse_args().folder)


if __name__ == "__main__":
    main()
