"""`moeyard replay`: run logged requests again, and compare token ids and log-probabilities bit by bit."""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moeyard.clients.api_client import SILENCE_SECONDS, ask, first_model, refusal
from moeyard.clients.target_config import Target, parse_target

# A difference ends the command after this many requests per connection at most.
_AHEAD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A line of `--log-requests` with a prompt. `place`: its file and line.

    mixed: whether the weights changed while it ran.
    """

    place: str
    fingerprint: str | None
    prompt: list[int]
    params: dict[str, Any]
    token_ids: list[int]
    logprobs: list[float] | None
    mixed: bool

    def body(self, model: str) -> dict[str, Any]:
        """Return the request whose answer has these tokens, and no more."""
        length = len(self.token_ids)
        limits = {"max_tokens": length, "min_tokens": min(self.params.get("min_tokens") or 0, length)}
        return {"model": model, "token_ids": self.prompt, "sampling_params": {**self.params, **limits}}


def replay(args: argparse.Namespace) -> int:
    """Return 0 if all answers are equal, 1 at the first difference. Raises ValueError for an unusable log or server."""
    target = parse_target(args.url, args.api_key)
    known = list(read_log(Path(args.log)))
    answered = [one for one in known if one.token_ids]
    if not answered:
        raise ValueError(f"{args.log}: no request has output")
    # One server has one set of weights.
    logged = [one for one in answered if not one.mixed]
    if not logged:
        raise ValueError(f"{args.log}: every output has tokens of several weights")
    model = args.model or first_model(target)
    equal, step = 0, _AHEAD * args.concurrency
    with ThreadPoolExecutor(args.concurrency) as pool:
        for begin in range(0, len(logged), step):
            batch = logged[begin : begin + step]
            for one, answer in zip(batch, pool.map(partial(answer_to, target, model), batch), strict=True):
                found = difference(one, answer["choices"][0])
                if found is not None:
                    print(f"{one.place}: {found}{unlike(one, answer)}; {before(equal)}")
                    return 1
                equal += 1
    left_out = {
        "without output": len(known) - len(answered),
        "with tokens of several weights": len(answered) - len(logged),
    }
    more = ", ".join(f"{count} {kind}" for kind, count in left_out.items() if count)
    print(f"{f'all {equal} answers are' if equal > 1 else 'the only answer is'} equal{more and f'; left out: {more}'}")
    return 0


def before(equal: int) -> str:
    """Return what is known of the answers before a difference."""
    if equal > 1:
        return f"{equal} answers before it are equal"
    return "1 answer before it is equal" if equal else "it is the first answer"


def read_log(path: Path) -> Iterator[Logged]:
    """Yield the lines. Raises ValueError with the place of a line that cannot be replayed."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}:{number}"
            try:
                values = json.loads(line)
                one = Logged(
                    place=place,
                    fingerprint=values.get("system_fingerprint"),
                    prompt=values.get("prompt_token_ids", []),
                    params=dict(values["sampling_params"]),
                    token_ids=values.get("token_ids", []),
                    logprobs=values.get("token_logprobs"),
                    mixed=len(values.get("weight_versions", ())) > 1,
                )
            except (ValueError, LookupError, TypeError, AttributeError):
                raise ValueError(f"{place}: no line of `moeyard serve --log-requests`") from None
            if not one.prompt:
                raise ValueError(f"{place}: has no prompt; serve with --log-prompts to log requests for a replay")
            yield one


def answer_to(target: Target, model: str, one: Logged) -> dict[str, Any]:
    """Return the answer of /inference/v1/generate to a logged request. Raises ValueError if there is none."""
    path = f"{target.prefix}/inference/v1/generate"
    status, body = ask(target, "POST", path, one.body(model), timeout=SILENCE_SECONDS)
    if status != 200:
        raise ValueError(f"{one.place}: HTTP {status}: {refusal(body)}")
    return dict(json.loads(body))


def difference(one: Logged, choice: dict[str, Any]) -> str | None:
    """Return the first difference of an answer from the logged one, None if there is none."""
    for i, (was, now) in enumerate(zip(one.token_ids, choice["token_ids"], strict=False)):
        if was != now:
            return f"token {i} was {was} and is {now}"
    if len(choice["token_ids"]) != len(one.token_ids):
        return f"the answer had {len(one.token_ids)} tokens and has {len(choice['token_ids'])}"
    if one.logprobs is not None:
        scores = (each["logprob"] for each in choice["logprobs"]["content"])
        for i, (logprob, again) in enumerate(zip(one.logprobs, scores, strict=True)):
            if logprob != again:
                return f"the log-probability of token {i} was {logprob!r} and is {again!r}"
    return None


def unlike(one: Logged, answer: dict[str, Any]) -> str:
    """Return a note if the server's fingerprint is not the logged one."""
    now = answer.get("system_fingerprint")
    return "" if now == one.fingerprint else f" (system_fingerprint was {one.fingerprint} and is {now})"
