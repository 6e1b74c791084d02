"""Write demo.json and a file per form: transformers' answers to held-out prompts with the demo model, in float32.

    python tests/golden/capture.py [--output FOLDER] [--forms fp8 int4-g32 q8_0]

The prompts are those of examples/demo_model/evaluate.py: <|begin|> and the first 64 tokens of documents spread over the
sources. Transformers decodes each alone, greedily, for 64 tokens, and ignores end tokens. A log-probability is that of
the chosen token over the whole vocabulary. Run this again only when the demo model or the prompts change, because the
comparison exists to find new answers of moeyard or of another transformers version.

demo.json has 20 prompts. A file per form of `moeyard quantize` has four of them, and the answers of what `moeyard
dequantize` makes of that form.
"""

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).resolve().parent
DEMO = HERE.parents[1] / "deploy" / "demo"
NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 20, 64, 64
FORMS = ("fp8", "int4-g32", "q8_0")
NUM_FORM_PROMPTS = 4


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


def quantised(form: str, folder: Path) -> Path:
    """Write the demo model in a form of `moeyard quantize`. Return the directory, or the GGUF file."""
    out = folder / form
    command = [sys.executable, "-m", "moeyard", "quantize", str(DEMO), "--to", form, "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.gguf"), out)


def plain_model(form: str) -> Any:
    """Return transformers' model of the bfloat16 weights that a form stands for."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plain"
        model = quantised(form, Path(folder))
        subprocess.run([sys.executable, "-m", "moeyard", "dequantize", str(model), "--out", str(out)], check=True)
        settings: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        return transformers.DeepseekV3ForCausalLM.from_pretrained(out, **settings).eval()


def write(path: Path, answers: list[dict[str, list[Any]]]) -> None:
    """Write one line per list, so that a changed answer is a diff of two lines."""
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
    rows = [[f'"{name}": {json.dumps(row[name], separators=(",", ":"))}' for name in row] for row in answers]
    lines = ",\n".join("{" + ",\n ".join(row) + "}" for row in rows)
    path.write_text(f'{{"provenance": {json.dumps(provenance, indent=1)},\n"answers": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE)
    parser.add_argument("--forms", nargs="*", choices=FORMS, help="capture only these")
    args = parser.parse_args()
    sys.path.insert(0, str(DEMO.parents[1]))
    from examples.demo_model.measure import DemoModel

    torch.set_num_threads(1)
    demo = DemoModel(DEMO)
    prompts = choose_prompts(demo)
    if args.forms is None:
        write(args.output / "demo.json", [answer(demo.main, prompt) for prompt in prompts])
    for form in FORMS if args.forms is None else args.forms:
        model = plain_model(form)
        some = prompts[:: NUM_PROMPTS // NUM_FORM_PROMPTS]
        write(args.output / f"{form}.json", [answer(model, prompt) for prompt in some])


if __name__ == "__main__":
    main()
