"""Write demo.json: transformers' answers to 20 held-out prompts with the demo model, in float32.

    python tests/golden/capture.py [--output FILE]

The prompts are those of examples/demo_model/evaluate.py: <|begin|> and the first 64 tokens of documents spread over the
sources. Transformers decodes each alone, greedily, for 64 tokens, and ignores end tokens. A log-probability is that of
the chosen token over the whole vocabulary. Run this again only when the demo model or the prompts change, because the
comparison exists to find new answers of moeyard or of another transformers version.
"""

import argparse
import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).resolve().parent
DEMO = HERE.parents[1] / "deploy" / "demo"
NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 20, 64, 64


def choose_prompts(model: Any) -> list[list[int]]:
    """Return the token ids of each prompt, <|begin|> included."""
    from examples.demo_model.measure import read_documents, spread

    documents = [d for d in read_documents(DEMO / "heldout.jsonl", model) if len(d.ids) > PROMPT_TOKENS + 1]
    return [d.ids[: PROMPT_TOKENS + 1] for d in spread(documents, NUM_PROMPTS)]


@torch.inference_mode()
def answer(main: Any, prompt: list[int]) -> dict[str, list[Any]]:
    """Return the greedy tokens after a prompt and the float32 log-probability of each."""
    out = main.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ids = out.sequences[0, len(prompt) :]
    logprobs = torch.log_softmax(torch.cat(out.logits), -1)
    assert logprobs.dtype == torch.float32, logprobs.dtype
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    # The shortest decimal that reads back as the same float32.
    return {"prompt": prompt, "ids": ids.tolist(), "logprobs": [float(str(value)) for value in chosen.numpy()]}


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "demo.json")
    args = parser.parse_args()
    sys.path.insert(0, str(DEMO.parents[1]))
    from examples.demo_model.measure import DemoModel

    torch.set_num_threads(1)
    model = DemoModel(DEMO)
    provenance = {
        "command": "python tests/golden/capture.py",
        "dtype": "float32",
        "model": {name: sha256(DEMO / name) for name in ("model.safetensors", "config.json", "heldout.jsonl")},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": platform.machine(),
    }
    answers = [answer(model.main, prompt) for prompt in choose_prompts(model)]
    # One line per list is readable, and a changed answer is a diff of two lines.
    rows = [[f'"{name}": {json.dumps(row[name], separators=(",", ":"))}' for name in row] for row in answers]
    lines = ",\n".join("{" + ",\n ".join(row) + "}" for row in rows)
    args.output.write_text(f'{{"provenance": {json.dumps(provenance, indent=1)},\n"answers": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
