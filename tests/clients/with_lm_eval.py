"""lm-eval against the tasks in lm_eval/: `python with_lm_eval.py URL`.

The documents come from `deploy/demo/heldout.jsonl`: the first 24 texts that are long enough.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from asks import MODEL, run

HERE = Path(__file__).resolve().parent
DEMO = HERE.parents[1] / "deploy" / "demo"
TASKS = ("demo_choice", "demo_rolling", "demo_generate")
DOCS, CHARACTERS, CONTEXT, NEXT = 24, 3000, 600, 70
MAX_LENGTH = 512  # lm-eval splits 3,000 characters into windows of this many tokens


def documents() -> list[dict[str, Any]]:
    """Return beginnings, each with its continuation among three others, and the text."""
    with (DEMO / "heldout.jsonl").open() as lines:
        texts = [text for line in lines if len(text := json.loads(line)["text"]) >= CHARACTERS][:DOCS]
    assert len(texts) == DOCS, f"{len(texts)} texts are long enough"
    following = [text[CONTEXT : CONTEXT + NEXT] for text in texts]
    out = []
    for i, text in enumerate(texts):
        choices = [following[(i + step) % DOCS] for step in (5, 11, 17)]
        choices.insert(i % 4, following[i])
        out.append({"context": text[:CONTEXT], "choices": choices, "answer": i % 4, "text": text[:CHARACTERS]})
    return out


def evaluate(directory: Path) -> tuple[dict[str, Any], str]:
    """Return lm-eval's results by task, and its log."""
    (directory / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in documents()))
    model = {
        "model": MODEL,
        "base_url": f"{sys.argv[1]}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": DEMO,
        "num_concurrent": 4,
        "max_length": MAX_LENGTH,
    }
    command = [
        *(Path(sys.executable).parent / "lm_eval", "--model", "local-completions", "--batch_size", "4"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
        *("--tasks", ",".join(TASKS), "--include_path", HERE / "lm_eval", "--log_samples", "--output_path", "out"),
    ]
    # Nothing comes from a hub; the cache of datasets is deleted with the documents.
    settings = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "hf")}
    finished = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **settings},
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert finished.returncode == 0, finished.stdout[-4000:]
    (results,) = directory.glob("out/**/results_*.json")
    found = json.loads(results.read_text())
    assert {name: n["effective"] for name, n in found["n-samples"].items()} == dict.fromkeys(TASKS, DOCS)
    samples = {name: next(directory.glob(f"out/**/samples_{name}_*.jsonl")).read_text() for name in TASKS}
    answers = [json.loads(line)["resps"][0][0] for line in samples["demo_generate"].splitlines()]
    assert len([answer for answer in answers if answer.strip()]) > DOCS // 2, answers
    return found["results"], finished.stdout


def likelihoods_and_generations() -> None:
    """Run all three tasks without a retry; the right continuation is likelier than others."""
    with tempfile.TemporaryDirectory() as directory:
        results, log = evaluate(Path(directory))
    accuracy, bits = results["demo_choice"]["acc,none"], results["demo_rolling"]["bits_per_byte,none"]
    print(f"       accuracy {accuracy:.2f}, {bits:.4f} bits per byte", flush=True)
    assert "retry" not in log.lower(), log[-4000:]
    assert accuracy > 0.6, "random choice reaches a quarter"
    assert 0.8 < bits < 2.5, "random bytes have 8"


run(f"lm-eval {importlib.metadata.version('lm_eval')}", [likelihoods_and_generations])
