"""Measure the demo model on text that training never saw, for its model card.

    python -m examples.demo_model.evaluate [--model DIR] [--heldout FILE] [--json FILE] [--documents N] [--seed S]

Everything is measured in float32 on the stored weights. measure.py has the figures that need only transformers, this
file those of generated text. Greedy continuations ignore end tokens on both sides, so that all have the same length;
samples stop at them. The script prints tables, writes everything with --json, and returns 1 if a figure misses its
bound.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from examples.demo_model.measure import DemoModel, Document, measure_heldout, read_documents, spread
from examples.demo_model.model_card import figures, samples

from moeyard_worker.engine.assembly.local import greedy_tokens, local_runner, prompt_logits
from moeyard_worker.engine.sampling.sampling import SampledRow, choose
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.protocol import SamplingParams
from moeyard_worker.scheduling.step import Chunk, Step

MODEL = Path(__file__).resolve().parents[2] / "deploy" / "demo"
# Bounds that the shipped model must reach.
MAX_BITS_PER_BYTE = 1.9
MAX_BUSIEST_EXPERT = 2.0
MIN_ACCEPTANCE = 0.5
NUM_SAMPLES = 10


def make_runner(directory: Path | str, length: int) -> Runner:
    """Return moeyard in float32 on one rank, with pages for one sequence of `length` tokens. Raises CheckpointError."""
    page_size = 16
    return local_runner(directory, dtype=torch.float32, num_pages=-(-length // page_size), page_size=page_size)


@torch.inference_mode()
def transformers_greedy(main: Any, prompt: Sequence[int], num_tokens: int, **settings: Any) -> list[int]:
    """Return `num_tokens` greedy tokens of transformers. `settings` go to generate: use_mtp=True to speculate."""
    generated = main.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **settings,
    )
    return generated[0, len(prompt) :].tolist()


def compare_with_moeyard(
    main: Any, runner: Runner, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Compare greedy tokens of moeyard and transformers after each prompt. Return (differences, transformers' tokens).

    `differences` has the index of the prompt, the position of its first different token and both tokens. It also has
    the distance of their logits in moeyard, which is tiny if rounding broke a tie.
    """
    continuations, differences = [], []
    for number, prompt in enumerate(prompts):
        theirs = transformers_greedy(main, prompt, num_tokens)
        ours, logits = greedy_tokens(runner, prompt, num_tokens)
        continuations.append(theirs)
        if ours != theirs:
            at = next(i for i in range(num_tokens) if ours[i] != theirs[i])
            gap = float(logits[at, ours[at]] - logits[at, theirs[at]])
            differences.append(
                {"prompt": number, "position": at, "moeyard": ours[at], "transformers": theirs[at], "logit_gap": gap}
            )
    equal = len(prompts) - len(differences)
    return {"prompts": len(prompts), "tokens": num_tokens, "equal": equal, "differences": differences}, continuations


def acceptance(
    model: Any, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], *, num_checked: int = 2
) -> dict[str, Any]:
    """Measure how often the MTP layer's greedy draft is the main model's next greedy token.

    `prompts` have one length. `continuations` are the main model's own greedy tokens c[0..n). c[0] comes with the
    prompt. When c[i-1] is known, the MTP layer drafts c[i]. That gives n - 1 drafts per prompt, and all of them count.
    One teacher-forced pass over prompt and continuation computes them. `unstable` counts tokens that this pass would
    choose differently from the decoding (rounding: 0 or very few).

    For the first `num_checked` prompts generate(use_mtp=True) decodes too. `checked` says whether its tokens are the
    same and it needed as many passes of the main model as these drafts imply, and how many tokens a pass gave.
    """
    ids = torch.tensor([[*p, *c] for p, c in zip(prompts, continuations, strict=True)])
    start, num_tokens = len(prompts[0]), len(continuations[0])
    result = model.forward(ids)
    unstable = result.logits[:, start - 1 : -1].argmax(-1) != ids[:, start:]
    # Index i drafts token i+2, so token start+1 is the first with a draft from a generated token.
    right = result.drafts[:, start - 1 : -1].argmax(-1) == ids[:, start + 1 :]
    checked = []
    for row, prompt in enumerate(prompts[:num_checked]):
        passes = 0

        def count(_module: Any, _args: Any, _output: Any) -> None:
            nonlocal passes
            passes += 1

        hook = model.main.model.register_forward_hook(count)
        speculated = transformers_greedy(model.main, prompt, num_tokens, use_mtp=True)
        hook.remove()
        checked.append(
            {
                "prompt": row,
                "tokens_equal": speculated == list(continuations[row]),
                "passes": passes,
                "passes_expected": speculative_passes(right[row].tolist()),
                "tokens_per_pass": num_tokens / passes,
            }
        )
    return {
        "prompts": len(prompts),
        "prompt_tokens": start,
        "drafts": right.numel(),
        "accepted": int(right.sum()),
        "share": float(right.double().mean()),
        "unstable": int(unstable.sum()),
        "by_prompt": right.double().mean(1).tolist(),
        "checked": checked,
    }


def speculative_passes(right: Sequence[bool]) -> int:
    """Return the passes of the main model that decode len(right) + 1 tokens with one draft each.

    right[i] is whether the draft of token i+1 is right. The first pass reads the prompt and gives token 0. Every other
    pass gives a token, and the next one if its draft was right.
    """
    passes, have, total = 1, 1, len(right) + 1
    while have < total:
        passes += 1
        have += 2 if right[have - 1] else 1
    return passes


def continue_with_moeyard(runner: Runner, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Return the tokens of moeyard's own sampler after a prompt, up to an end token (kept) or `params.max_tokens`."""
    output: list[int] = []
    pages = tuple(range(-(-(len(prompt) + params.max_tokens) // runner.page_size)))
    ends = runner.config.eos_token_ids
    logits = prompt_logits(runner, prompt, pages)[-1:]
    while True:
        row = SampledRow(params=params, prompt=prompt, output=output)
        [(token_id, _)] = choose(runner.backend, logits, [row], ends)
        output.append(token_id)
        if token_id in ends or len(output) == params.max_tokens:
            return output
        chunk = Chunk(
            key=(b"", ""),
            start=len(prompt) + len(output) - 1,
            token_ids=(token_id,),
            pages=pages,
            prompt=False,
            num_sampled=1,
        )
        logits = runner.forward(Step(decode=(chunk,)))[:1]


def sample_texts(
    tokenizer: Any,
    runner: Runner,
    documents: Sequence[Any],
    *,
    seed: int,
    temperature: float = 0.7,
    max_tokens: int = 72,
) -> list[dict[str, Any]]:
    """Return one sample per document: in turn a continuation of its first 24 tokens, and a chat answer to its `ask`.

    A sample has `max_tokens` tokens, or fewer if it ends or the model's context does. Sampling is counter-based, so
    (seed, temperature) fixes each text. Sample i has seed `seed` + i.
    """
    rows = []
    for number, document in enumerate(documents):
        chat = number % 2 == 1
        if chat:
            prompt_text = document.ask
            templated = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt_text}], add_generation_prompt=True, tokenize=False
            )
            prompt = tokenizer(templated, add_special_tokens=False).input_ids
        else:
            prompt = document.ids[:25]
            prompt_text = tokenizer.decode(prompt, skip_special_tokens=True)
        room = min(max_tokens, runner.config.max_position - len(prompt))
        params = SamplingParams(max_tokens=room, temperature=temperature, seed=seed + number)
        output = continue_with_moeyard(runner, prompt, params)
        rows.append(
            {
                "kind": "chat" if chat else "text",
                "source": document.source,
                "title": document.title,
                "prompt": prompt_text,
                "output": tokenizer.decode(output, skip_special_tokens=True),
                "tokens": len(output),
                "ended": output[-1] in runner.config.eos_token_ids,
                "seed": params.seed,
                "temperature": temperature,
            }
        )
    return rows


def check_bounds(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bounded figures, each with its bound."""
    busiest = max(row["busiest"] for row in result["experts"])
    dead = sum(row["dead"] for row in result["experts"])
    bpb, accepted = result["heldout"]["bits_per_byte"], result["acceptance"]["share"]
    equal, prompts = result["greedy"]["equal"], result["greedy"]["prompts"]
    rows = [
        ("held-out bits per byte", bpb, "at most", MAX_BITS_PER_BYTE),
        ("busiest expert of a layer / mean", busiest, "at most", MAX_BUSIEST_EXPERT),
        ("dead experts", dead, "at most", 0),
        ("MTP acceptance at greedy", accepted, "at least", MIN_ACCEPTANCE),
        ("prompts with equal greedy tokens", equal, "at least", prompts),
    ]
    return [
        {
            "figure": figure,
            "value": value,
            "bound": f"{word} {limit}",
            "limit": limit,
            "met": value <= limit if word == "at most" else value >= limit,
        }
        for figure, value, word, limit in rows
    ]


def evaluate(
    model: DemoModel,
    documents: Sequence[Document],
    *,
    seed: int,
    num_prompts: int = 20,
    prompt_tokens: int = 64,
    num_tokens: int = 64,
) -> dict[str, Any]:
    """Return all figures. Prompts are <|begin|> and the first `prompt_tokens` tokens of documents of all sources.

    Raises ValueError if no document is that long.
    """
    started = time.monotonic()
    result = measure_heldout(model, documents)
    runner = make_runner(model.directory, model.config.max_position_embeddings)
    chosen = spread([d for d in documents if len(d.ids) > prompt_tokens + 1], num_prompts)
    if not chosen:
        raise ValueError(f"no held-out document has {prompt_tokens} tokens to prompt with")
    prompts = [document.ids[: prompt_tokens + 1] for document in chosen]
    result["greedy"], continuations = compare_with_moeyard(model.main, runner, prompts, num_tokens)
    result["acceptance"] = acceptance(model, prompts, continuations)
    result["samples"] = sample_texts(model.tokenizer, runner, spread(documents, NUM_SAMPLES), seed=seed)
    result["bounds"] = check_bounds(result)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"seed": seed, **versions, "seconds": time.monotonic() - started, **result}


def main() -> int:
    """Run the command line. Return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description="measure the demo model on held-out text")
    parser.add_argument("--model", type=Path, default=MODEL, help="a deepseek_v3 directory (default: deploy/demo)")
    parser.add_argument("--heldout", type=Path, default=MODEL / "heldout.jsonl")
    parser.add_argument("--json", type=Path, help="write every figure here, for model_card.py")
    parser.add_argument("--documents", type=int, help="measure this many documents only, spread over the sources")
    parser.add_argument("--seed", type=int, default=1, help="seed of the samples")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = DemoModel(args.model)
    documents = read_documents(args.heldout, model)
    if args.documents:
        documents = spread(documents, args.documents)
    result = evaluate(model, documents, seed=args.seed)
    print(figures(result), samples(result), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return 0 if all(row["met"] for row in result["bounds"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
