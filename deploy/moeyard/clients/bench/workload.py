"""What is asked of a server, drawn from a seed: lengths, words or token ids, turns and arrivals. Pure."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moeyard.clients.bench.server.words import WORDS

KINDS = ("words", "ids")
_SHAPES = "expected a number, LOW:HIGH or lognormal:MEDIAN:SIGMA[:MOST]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of whole numbers from 1 up: fixed, uniform (both ends included) or lognormal.

    `spread` is sigma, the standard deviation of the logarithm; `low` and `high` bound what is drawn (`high` None: not).
    """

    text: str
    middle: float
    spread: float = 0.0
    low: int = 1
    high: int | None = None

    def draw(self, rng: random.Random) -> int:
        """One of them."""
        if self.spread:
            value = round(self.middle * rng.lognormvariate(0.0, self.spread))
            return max(self.low, value if self.high is None else min(value, self.high))
        return self.low if self.high is None else rng.randint(self.low, self.high)


def parse_lengths(text: str) -> Lengths:
    """ "512", "128:1024" or "lognormal:512:0.8[:4096]" as a distribution. Raises ValueError for anything else."""
    name, *rest = text.split(":")
    try:
        if name == "lognormal":
            median, sigma, *most = rest
            high = int(most[0]) if most else None
            found = Lengths(text=text, middle=float(median), spread=float(sigma), high=high)
            sound = len(most) < 2 and found.middle >= 1 and 0 < found.spread < 10 and (high is None or high >= 1)
        else:
            low, high = int(name), int(rest[0]) if rest else None
            found = Lengths(text=text, middle=(low + (low if high is None else high)) / 2, low=low, high=high)
            sound = len(rest) < 2 and low >= 1 and (high is None or high >= low)
    except ValueError:
        sound = False
    if not sound:
        raise ValueError(f"{text!r} is no distribution of lengths; {_SHAPES}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """How many tokens a server makes of words: `base` for a prompt without any (template, start), `per_word` for each.

    Of token ids nothing is made, so there `per_word` is 1.
    """

    base: float = 0.0
    per_word: float = 1.0

    def words(self, tokens: int, *, around: bool = True) -> int:
        """Words that make so many tokens, with what stands `around` them counted or not; at least 1."""
        return max(1, round((tokens - (self.base if around else 0.0)) / self.per_word))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request of a conversation: what the user adds to it, and how many tokens are wanted back."""

    prompt: str | list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Conversations without end; number i of a seed is always the same. `vocab_size` bounds token ids (exclusive)."""

    kind: str
    prompt: Lengths
    output: Lengths
    shared_prefix: int
    turns: int
    seed: int
    vocab_size: int
    yardstick: Yardstick

    def conversation(self, index: int) -> list[Turn]:
        """Its turns. Each begins with other words than those of any other conversation, but for the shared prefix."""
        rng = random.Random(f"{self.seed}/{index}")
        return [
            Turn(prompt=self._prompt(rng, first=number == 0), max_tokens=self.output.draw(rng))
            for number in range(self.turns)
        ]

    def _prompt(self, rng: random.Random, *, first: bool) -> str | list[int]:
        # A later turn is longer by its words alone: what the template puts around them is small and counted once.
        count = self.yardstick.words(self.prompt.draw(rng), around=first)
        shared = self.yardstick.words(self.shared_prefix, around=False) if first and self.shared_prefix else 0
        common = random.Random(f"{self.seed}/shared")
        if self.kind == "ids":
            ids = range(self.vocab_size)
            return common.choices(ids, k=shared) + rng.choices(ids, k=count)
        return " ".join(common.choices(WORDS, k=shared) + rng.choices(WORDS, k=count))


def arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests are due, `rate` a second on average; `rate` inf: all at once.

    Gaps are gamma-distributed with shape `burstiness` and mean 1 / rate, as in vLLM's `bench serve`: 1 is a Poisson
    process, less comes in bursts, more comes evenly.
    """
    rng = random.Random(f"{seed}/arrivals")
    at = 0.0
    while True:
        if rate != float("inf"):
            at += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        yield at


def body(
    prompt: Any, *, chat: bool, model: str, max_tokens: int, temperature: float, extra: dict[str, Any]
) -> dict[str, Any]:
    """A streaming request; `prompt`: messages of a chat, or a completion's text or ids. `extra` is put over it."""
    return {
        "model": model,
        ("messages" if chat else "prompt"): prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
