"""Measure how fast a server scores its own output: one token per step, many per step, and as a prompt.

    moeyard serve --port 8000        # the bundled model
    python bench/scoring.py --url http://127.0.0.1:8000 --output 512

Each way runs once to warm up, then --rounds times. Its line has the median of tokens per second. The log-probabilities
of the first two ways must be those of sampling, bit for bit. A prompt has another formula, so its line counts how many
differ.
"""

import argparse
import json
import statistics
import time
from typing import Any

from moeyard.clients.api_client import ask, first_model, refusal
from moeyard.clients.target_config import Target, parse_target

_SECONDS = 600.0


def generate(target: Target, model: str, ids: list[int], **params: Any) -> tuple[float, dict[str, Any]]:
    """Return the seconds and the answer of a request. Raises ValueError if there is none."""
    body = {"model": model, "token_ids": ids, "sampling_params": params}
    begun = time.perf_counter()
    status, answer = ask(target, "POST", "/inference/v1/generate", body, timeout=_SECONDS)
    if status != 200:
        raise ValueError(f"HTTP {status}: {refusal(answer)}")
    return time.perf_counter() - begun, json.loads(answer)


def scores_of(answer: dict[str, Any]) -> list[float]:
    """Return the log-probabilities of the output."""
    return [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--output", type=int, default=512, help="tokens of the output")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    target = parse_target(args.url, None)
    model = first_model(target)
    prompt = [7 * i % 250 + 3 for i in range(args.prompt)]
    sampling = {"max_tokens": args.output, "seed": 7, "ignore_eos": True, "logprobs": 0}
    seconds, sampled = generate(target, model, prompt, **sampling)
    output, expected = sampled["choices"][0]["token_ids"], scores_of(sampled)
    print(f"sampled {len(output)} tokens after {len(prompt)}: {len(output) / seconds:.0f} tokens/s")
    forced: dict[str, Any] = {"trace_decode_token_ids": output, "logprobs": 0}
    ways: dict[str, tuple[list[int], dict[str, Any]]] = {
        "one token per step": (prompt, forced),
        "many tokens per step": (prompt, {**forced, "score": "as_decoded"}),
        "as a prompt": (prompt + output, {"max_tokens": 1, "prompt_logprobs": 0}),
    }
    for name, (ids, params) in ways.items():
        runs = [generate(target, model, ids, **params) for _ in range(args.rounds + 1)]
        answer = runs[0][1]
        if "prompt_logprobs" in params:
            entries = zip(answer["prompt_logprobs"][len(prompt) :], output, strict=True)
            found = [entry[str(token)]["logprob"] for entry, token in entries]
        else:
            found = scores_of(answer)
            assert found == expected, f"{name}: the scores are not those of sampling"
        speed = len(output) / statistics.median(seconds for seconds, _ in runs[1:])
        differ = sum(one != other for one, other in zip(found, expected, strict=True))
        print(f"{name}: {speed:.0f} tokens/s, {differ} of {len(output)} log-probabilities differ from sampling")


if __name__ == "__main__":
    main()
