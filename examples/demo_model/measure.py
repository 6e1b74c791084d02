"""Measure the demo model on held-out text with transformers alone: bits per byte, expert load, teacher-forced MTP.

The model is transformers' own DeepseekV3ForCausalLM with its MtpModel, in float32 on the stored weights.

Bits per byte: a document is <|begin|> (given), its tokens and <|end|>. The sum of -log2 p over its tokens, <|end|>
included, is divided by the UTF-8 bytes of its text. The text runs in windows of max_position_embeddings inputs that
advance by half of that. Every token counts once, in the first window that predicts it. So tokens of the first window
have everything before them as context, and later ones at least half a window.

Expert load: how often each expert is among the top k, over every position that predicts a counted token (in the MTP
layer: over every position that drafts one).

Teacher-forced MTP: the MTP layer gets the inputs of generate(use_mtp=True). These are the main model's hidden state at
t after the final norm, and the embedding of the true token t+1. Its argmax is a draft of token t+2.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

# Inputs of one pass: one long window, or several short ones. Four long windows at once took half as long again on a
# CPU.
TOKENS_PER_PASS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One held-out text. `ids` is <|begin|>, its tokens, <|end|>; `num_bytes` is its length in UTF-8."""

    source: str
    title: str
    ask: str
    text: str
    ids: list[int]

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True, slots=True)
class Window:
    """`ids` of one pass. The last one is only a target. Targets from index `first` on count here."""

    document: int
    ids: list[int]
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward of ids [B, T]: `logits` [B, T, V] for token t+1, `drafts` [B, T-1, V] for token t+2.

    `experts` maps a layer to its gate's choice: [B, T, top_k], and [B, T-1, top_k] for the MTP layer.
    """

    logits: torch.Tensor
    drafts: torch.Tensor
    experts: dict[int, torch.Tensor]


class DemoModel:
    """transformers' model and MTP layer of a checkpoint, in float32, and its tokenizer.

    Raises ValueError unless the checkpoint has exactly one MTP layer.
    """

    def __init__(self, directory: Path | str) -> None:
        transformers.utils.logging.disable_progress_bar()
        # It would report the MTP layer's tensors as unexpected, and texts longer than the model's context.
        transformers.utils.logging.set_verbosity_error()
        self.directory = Path(directory)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        # On a CPU torch has no fused attention for keys wider than values. The eager form is a sixth faster there.
        settings = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.main = transformers.DeepseekV3ForCausalLM.from_pretrained(directory, **settings).eval()
        self.config = self.main.config
        if self.config.num_mtp_layers != 1:
            raise ValueError(f"{directory}: {self.config.num_mtp_layers} MTP layers, 1 is needed")
        # transformers finds MTP layers by this pattern, which names only layer 61 of the real model.
        self.main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{self.config.num_hidden_layers}\..*"]
        self.mtp = MtpModel.from_pretrained(self.main).eval()
        self._draft_hidden: list[torch.Tensor] = []
        self._chosen: dict[int, torch.Tensor] = {}
        self.mtp.layers[0].register_forward_hook(lambda _m, _args, output: self._draft_hidden.append(output))
        blocks = [*self.main.model.layers, self.mtp.layers[0].mtp_block]
        self.moe_layers = [i for i, block in enumerate(blocks) if hasattr(block.mlp, "gate")]
        for i in self.moe_layers:
            blocks[i].mlp.gate.register_forward_hook(lambda _m, _args, output, i=i: self._chosen.update({i: output[2]}))

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor) -> Pass:
        """Return logits, drafts and routing of ids [B, T], T >= 2. A row padded on its right keeps its own values."""
        batch, length = ids.shape
        hidden = self.main.model(ids, use_cache=False).last_hidden_state
        self._draft_hidden.clear()
        self.mtp(
            input_ids=ids[:, 1:],
            last_hidden_states=hidden[:, :-1],
            attention_mask=torch.ones_like(ids[:, 1:]),
            position_ids=torch.arange(1, length).expand(batch, -1),
            mtp_cache=MtpCache(config=self.config.get_mtp_config()),
        )
        return Pass(
            logits=self.main.lm_head(hidden),
            drafts=self.mtp.shared_head(self._draft_hidden[0]),
            experts={i: chosen.view(batch, -1, chosen.shape[-1]) for i, chosen in self._chosen.items()},
        )


def read_documents(path: Path, model: DemoModel) -> list[Document]:
    """Read and tokenize the lines of heldout.jsonl."""
    begin, end = model.config.bos_token_id, model.config.eos_token_id
    documents = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        ids = [begin, *model.tokenizer(row["text"], add_special_tokens=False).input_ids, end]
        documents.append(Document(source=row["source"], title=row["title"], ask=row["ask"], text=row["text"], ids=ids))
    return documents


def spread(documents: Sequence[Document], count: int) -> list[Document]:
    """Return `count` documents (all if there are fewer), as equally from each source as possible, evenly spaced."""
    sources: dict[str, list[Document]] = {}
    for document in documents:
        sources.setdefault(document.source, []).append(document)
    quota = dict.fromkeys(sources, 0)
    while sum(quota.values()) < min(count, len(documents)):
        open_sources = [source for source in sources if quota[source] < len(sources[source])]
        for source in open_sources[: count - sum(quota.values())]:
            quota[source] += 1
    return [
        rows[(2 * i + 1) * len(rows) // (2 * quota[source])]
        for source, rows in sources.items()
        for i in range(quota[source])
    ]


def cut_windows(documents: Sequence[Document], size: int) -> list[Window]:
    """Cut windows of up to `size` inputs (`size` + 1 ids). Together they count all tokens but the first."""
    stride = size // 2
    windows = []
    for number, document in enumerate(documents):
        ids = document.ids
        begins = range(0, max(1, len(ids) - 1 - (size - stride)), stride)
        for begin in begins:
            first = 1 if begin == 0 else size - stride + 1
            windows.append(Window(number, ids[begin : begin + size + 1], first))
    return windows


def batches(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """Yield groups of windows of similar length, TOKENS_PER_PASS inputs at most (or one window)."""
    batch: list[Window] = []
    for window in sorted(windows, key=lambda w: -len(w.ids)):
        if batch and (len(batch) + 1) * len(batch[0].ids) > TOKENS_PER_PASS:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


class HeldOut:
    """Running sums over held-out windows: bits per document, expert counts, and how often tokens are predicted."""

    def __init__(self, model: DemoModel, num_documents: int) -> None:
        self._model = model
        self.bits = [0.0] * num_documents
        self.counts = {
            layer: torch.zeros(model.config.n_routed_experts, dtype=torch.int64) for layer in model.moe_layers
        }
        self.num_tokens = self.num_right = 0
        self.num_drafts = self.num_drafts_right = self.num_drafts_agree = 0

    def add(self, batch: Sequence[Window]) -> None:
        """Run one batch of windows. Shapes below: L inputs of a window, its targets are ids[1 : L+1]."""
        longest = max(len(window.ids) for window in batch) - 1
        ids = torch.tensor([window.ids[:-1] + [0] * (longest + 1 - len(window.ids)) for window in batch])
        result = self._model.forward(ids)
        for row, window in enumerate(batch):
            inputs, first = len(window.ids) - 1, window.first
            targets = torch.tensor(window.ids)[first:]
            logits = result.logits[row, first - 1 : inputs]
            nats = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum")
            self.bits[window.document] += float(nats) / math.log(2)
            greedy = logits.argmax(-1)
            self.num_tokens += len(targets)
            self.num_right += int((greedy == targets).sum())
            # Index i drafts token i+2. A document's first token has no earlier hidden state to be drafted from.
            skip = max(0, 2 - first)
            drafts = result.drafts[row, first + skip - 2 : inputs - 1].argmax(-1)
            self.num_drafts += len(drafts)
            self.num_drafts_right += int((drafts == targets[skip:]).sum())
            self.num_drafts_agree += int((drafts == greedy[skip:]).sum())
            for layer, chosen in result.experts.items():
                is_mtp = layer == self._model.config.num_hidden_layers
                counted = chosen[row, first + skip - 2 : inputs - 1] if is_mtp else chosen[row, first - 1 : inputs]
                self.counts[layer] += torch.bincount(counted.flatten(), minlength=len(self.counts[layer]))


def measure_heldout(model: DemoModel, documents: Sequence[Document], *, window: int | None = None) -> dict[str, Any]:
    """Return figures 1 to 3: bits per byte in total and by source, expert load by layer, teacher-forced MTP.

    `window` is the number of inputs of a pass, by default the model's max_position_embeddings.
    """
    size = window or model.config.max_position_embeddings
    sums = HeldOut(model, len(documents))
    for batch in batches(cut_windows(documents, size)):
        sums.add(batch)
    rows = {name: [i for i, d in enumerate(documents) if d.source == name] for name in {d.source: 0 for d in documents}}

    def figures(indices: Sequence[int]) -> dict[str, Any]:
        num_bytes = sum(documents[i].num_bytes for i in indices)
        bits = sum(sums.bits[i] for i in indices)
        num_tokens = sum(len(documents[i].ids) - 1 for i in indices)
        return {
            "documents": len(indices),
            "tokens": num_tokens,
            "bytes": num_bytes,
            "bits_per_byte": bits / num_bytes,
            "nats_per_token": bits * math.log(2) / num_tokens,
        }

    return {
        "heldout": {
            "window": size,
            **figures(range(len(documents))),
            "sources": {name: figures(indices) for name, indices in rows.items()},
        },
        "experts": [load_figures(layer, counts, model.config) for layer, counts in sums.counts.items()],
        "mtp": {
            "positions": sums.num_drafts,
            "agrees_with_main": sums.num_drafts_agree / sums.num_drafts,
            "right": sums.num_drafts_right / sums.num_drafts,
            "main_right": sums.num_right / sums.num_tokens,
        },
    }


def load_figures(layer: int, counts: torch.Tensor, config: Any) -> dict[str, Any]:
    """Return the load of one layer's experts [E] relative to the mean. `dead` counts experts that no position chose."""
    mean = float(counts.sum()) / len(counts)
    return {
        "layer": layer,
        "mtp": layer == config.num_hidden_layers,
        "busiest": float(counts.max()) / mean,
        "least": float(counts.min()) / mean,
        "dead": int((counts == 0).sum()),
        "counts": counts.tolist(),
    }
