"""`moeyard verify MODEL`: a checkpoint's logits and greedy tokens against transformers.

Both sides load the same directory; ours runs on one rank over the local exchange. transformers is an extra dependency.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers

from moeyard_worker.checkpoint.converting import dequantized, is_quantized
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.fields import read_json
from moeyard_worker.engine.assembly.local import PAGE_SIZE, greedy_tokens, local_runner
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.models.families import FAMILIES, load_model_config
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.tokenizer import read_tokenizer

NUM_NEW_TOKENS = 32
PROMPT_LENGTHS = (1, 7, 40, 100)
PROMPT_TEXTS = (
    "Hello",
    "The capital of France is",
    "def fibonacci(n: int) -> int:\n    ",
    "Once upon a time, there was",
)
# Differences of logits relative to the largest logit. float32 differs only in the order of sums. bfloat16 rounds after
# every operation, in different places on both sides.
TOLERANCE = MappingProxyType({"float32": 1e-4, "bfloat16": 5e-2})


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One prompt on both sides. `tokens_agree` counts the equal greedy tokens before the first difference."""

    prompt_length: int
    max_abs: float
    max_rel: float
    tokens_agree: int
    num_tokens: int


def compare(runner: Runner, model: Any, prompt: Sequence[int]) -> Comparison:
    """Run one prompt through our runner and a transformers model, and compare last logits and greedy tokens."""
    ours, logits = greedy_tokens(runner, prompt, NUM_NEW_TOKENS)
    with torch.inference_mode():
        theirs_logits = model(torch.tensor([list(prompt)])).logits[0, -1].float()
        generated = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_NEW_TOKENS,
            min_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    theirs = generated[0, len(prompt) :].tolist()
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    max_abs = float((logits[0] - theirs_logits).abs().max())
    return Comparison(
        prompt_length=len(prompt),
        max_abs=max_abs,
        max_rel=max_abs / float(theirs_logits.abs().max()),
        tokens_agree=same.index(False) if False in same else len(same),
        num_tokens=len(same),
    )


def sample_prompts(directory: Path | str, config: ModelConfig) -> list[list[int]]:
    """Return a few encoded texts, or seeded random ids without a tokenizer. All leave room for the new tokens."""
    files = read_tokenizer(Path(directory))
    if files is not None:
        prompts = [files.tokenizer.encode(text).ids for text in PROMPT_TEXTS]
    else:
        generator = torch.Generator().manual_seed(config.vocab_size)
        prompts = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    return [prompt for prompt in prompts if len(prompt) + NUM_NEW_TOKENS <= config.max_position]


def reference_model(directory: Path | str, family: str, *, dtype: torch.dtype, gguf: str | None = None) -> Any:
    """Load the checkpoint as a transformers model for inference.

    transformers gets the values of quantised weights, because its own decoder of fp8 is wrong for partial blocks, and
    it reads few families from a GGUF file. Raises CheckpointError naming the tensors that transformers does not find.
    """
    transformers.utils.logging.disable_progress_bar()
    model_class = getattr(transformers, FAMILIES[family].reference)
    # The model type selects the conversion of stored tensors. For an unknown type, transformers would skip it and leave
    # the experts at random values.
    coded = gguf is not None or is_quantized(load_model_config(directory))
    new = dequantized(directory, gguf) if coded else None
    settings = read_json(Path(directory) / "config.json") if new is None else dict(new.config)
    if FAMILIES[family].text_config:
        tied = settings.get("tie_word_embeddings", False)
        settings = {"tie_word_embeddings": tied, **settings.get("text_config", settings)}
    settings.pop("model_type", None)
    config = model_class.config_class.from_dict(settings)
    # transformers ignores multi-token prediction at DeepSeek-V3's layer number, 61, and warns of it at any other.
    first, count = config.num_hidden_layers, getattr(config, "num_mtp_layers", None) or 0
    ignored = [rf"model\.layers\.{i}\..*" for i in range(first, first + count)]
    ignored += [f"^{re.escape(prefix)}" for prefix, _ in FAMILIES[family].names.skipped]
    known = model_class._keys_to_ignore_on_load_unexpected or []
    quiet: Any = type(model_class.__name__, (model_class,), {"_keys_to_ignore_on_load_unexpected": known + ignored})
    # The tensors of a text model that is part of another model are found only by this mapping.
    parts = {r"^model\.language_model\.": "model.", r"^language_model\.": ""}
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
    options["key_mapping"] = parts if FAMILIES[family].text_config else None
    if new is not None:
        options["state_dict"] = {key: value for piece in new.pieces for key, value in piece.make().items()}
    model, report = quiet.from_pretrained(directory if new is None else None, config=config, **options)
    if missing := sorted(report["missing_keys"]):
        # transformers gives them random values.
        raise CheckpointError(f"{gguf or directory}: transformers does not find {', '.join(missing):.200}")
    return model.eval()


def verify(directory: Path | str, *, dtype: str = "float32", gguf: str | None = None) -> int:
    """Print a table of differences. Return 0 if logits and tokens agree, 1 if not or if no prompt fits.

    `dtype` is "float32" or "bfloat16". Greedy tokens count in float32 only, because bfloat16 decides near ties either
    way. With `gguf` the weights are those of a GGUF file, and `directory` describes its model. Raises CheckpointError
    for a checkpoint that cannot be read.
    """
    if dtype not in TOLERANCE:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(TOLERANCE)}")
    config = load_model_config(directory, gguf=gguf is not None)
    prompts = sample_prompts(directory, config)
    if not prompts:
        print(f"{directory}: no test prompt and {NUM_NEW_TOKENS} tokens fit {config.max_position} positions")
        return 1
    num_pages = -(-(max(map(len, prompts)) + NUM_NEW_TOKENS) // PAGE_SIZE)
    runner = local_runner(directory, dtype=getattr(torch, dtype), num_pages=num_pages, gguf=gguf)
    model = reference_model(directory, config.family, dtype=getattr(torch, dtype), gguf=gguf)
    print(f"{gguf or directory}: {config.family}, {config.num_layers} layers, {config.num_experts} experts, {dtype}")
    print(f"{'prompt tokens':>14} {'max abs':>10} {'max rel':>10} {'greedy tokens equal':>20}")
    agree = True
    for prompt in prompts:
        result = compare(runner, model, prompt)
        print(
            f"{result.prompt_length:>14} {result.max_abs:>10.2e} {result.max_rel:>10.2e}"
            f" {result.tokens_agree:>13} of {result.num_tokens}"
        )
        exact = dtype != "float32" or result.tokens_agree == result.num_tokens
        agree = agree and exact and result.max_rel <= TOLERANCE[dtype]
    print("agrees with transformers" if agree else "DIFFERS from transformers")
    return 0 if agree else 1
