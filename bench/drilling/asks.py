"""Requests of a drill: seeded, of every kind, with answers that are known beforehand."""

import random
from dataclasses import dataclass
from typing import Any

# Words that are frequent in the demo model's training text. Prompts consist of them.
TEXT = (
    "the of and to a in that was he his it with as had for not but at on her which by she from they all were be this "
    "captain harbour winter letter morning government soldier garden silence river kingdom window sister evening"
)
# Ids of ordinary tokens in the demo's vocabulary of 4096, without special tokens and single bytes.
FIRST_ID, LAST_ID = 300, 4000
SHORT, LONG = (4, 48), (320, 640)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: name, endpoint and body. `prefill`: its prompt takes several steps."""

    name: str
    endpoint: str
    body: dict[str, Any]
    prefill: bool = False


def make_asks(seed: int, count: int, *, max_tokens: int) -> list[Ask]:
    """Return `count` requests whose longest answer has `max_tokens` tokens.

    They mix greedy and seeded sampling, chats and completions, text and ids, n of 2, log-probabilities, streams and
    whole answers, shared prefixes, short and long prompts.
    """
    rng = random.Random(seed)
    beginning = [rng.randint(FIRST_ID, LAST_ID) for _ in range(96)]
    return [_ask(rng, number, beginning, max_tokens) for number in range(count)]


def fresh_ask(rng: random.Random, number: int, *, max_tokens: int) -> Ask:
    """Return a long random prompt, which no cache holds, so that it is computed. Its reference is taken afterwards."""
    body = {"prompt": _ids(rng, LONG), "max_tokens": rng.randint(4, max(4, max_tokens // 4)), "logprobs": 1}
    return Ask(f"fresh-{number}", "/v1/completions", {**body, **_sampling(rng), **_streamed()}, prefill=True)


def _ask(rng: random.Random, number: int, beginning: list[int], max_tokens: int) -> Ask:
    kind = ("ids", "chat", "text", "long", "shared", "pair", "scored", "chat-scored")[number % 8]
    body: dict[str, Any] = {"max_tokens": rng.randint(max(1, max_tokens // 4), max_tokens), **_sampling(rng)}
    if kind in ("chat", "chat-scored"):
        body["messages"] = [{"role": "user", "content": _words(rng, SHORT)}]
        body |= {"logprobs": True, "top_logprobs": 3} if kind == "chat-scored" else {}
    elif kind == "text":
        body["prompt"] = _words(rng, SHORT)
    else:
        body["prompt"] = _ids(rng, LONG if kind == "long" else SHORT)
    if kind == "shared":
        body["prompt"] = beginning + body["prompt"]
    elif kind == "pair":
        body["n"] = 2
        body["logprobs"] = 2
    if kind == "scored":
        # Log-probabilities of the prompt, which ranks send during prefill. Only whole answers have them, as in vLLM.
        body |= {"prompt": _ids(rng, (200, 400)), "prompt_logprobs": 2, "logprobs": 1, "return_token_ids": True}
    else:
        body |= _streamed()
    endpoint = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return Ask(f"{kind}-{number}", endpoint, body, prefill=kind in ("long", "scored"))


def _sampling(rng: random.Random) -> dict[str, Any]:
    """Return greedy or seeded sampling, mostly with `ignore_eos`, so that streams are long enough to be hit."""
    fields: dict[str, Any] = {"ignore_eos": rng.random() < 0.8}
    if rng.random() < 0.4:
        return {**fields, "temperature": 0}
    fields |= {"temperature": rng.choice((0.7, 1.0)), "seed": rng.randrange(2**31), "top_p": rng.choice((0.9, 1.0))}
    return fields | ({"presence_penalty": 0.5, "repetition_penalty": 1.1} if rng.random() < 0.3 else {})


def _streamed() -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


def _ids(rng: random.Random, bounds: tuple[int, int]) -> list[int]:
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(rng.randint(*bounds))]


def _words(rng: random.Random, bounds: tuple[int, int]) -> str:
    return " ".join(rng.choices(TEXT.split(), k=rng.randint(*bounds)))
