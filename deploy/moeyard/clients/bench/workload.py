"""Requests to a server, drawn from a seed: lengths, words or token ids, turns and arrivals. Pure."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

# Common and short, so that most tokenizers have one token for each.
_TEXT = """
    able above across add after again air all almost along also always animal answer any apple area arm around art ask
    away baby back bad bag ball bank base bear beat bed before begin behind bell best better big bird black blood blue
    board boat body bone book both bottom bowl box boy branch bread break bridge bright bring brother brown build burn
    busy buy cake call camp capital car card care carry case cat catch cause cell center chain chair chance change
    check child choose church circle city class clean clear climb clock close cloud coast coat cold color come common
    cook cool copy corn corner cost cotton count country course cover cow create crop cross crowd cry current cut
    dance dark day dead deal dear deep desert dinner divide doctor dog dollar door double down draw dream dress drink
    drive drop dry during each early earth east easy eat edge egg eight end energy engine enough enter equal even
    evening every exact eye face fact fair fall family famous far farm fast father fear feed feel feet field fight
    figure fill final find fine finger fire first fish fit five flat floor flow flower fly follow food foot force
    forest form forward four free fresh friend front fruit full game garden gas gather general gentle girl give glad
    glass go gold good grand grass gray great green ground group grow guess guide gun hair half hand happen happy hard
    hat head hear heart heat heavy help here high hill history hit hold hole home hope horse hot hour house hundred
    hunt hurry ice idea inch island job join jump just keep key kind king knew know lady lake land language large last
    late laugh law lead learn leave left leg less letter level lie life lift light line liquid list listen little live
    locate log lone long look lost loud love low machine made main major make many map mark market mass master match
    matter mean meat meet melody men metal method middle mile milk million mind mine minute miss mix modern money month
    moon more morning most mother motion mountain mouth move much music name nation near neck need new next night nine
    noise noon north nose note nothing notice noun now number object ocean offer office oil old once one only open
    order other over own oxygen page paint pair paper parent part party pass past path pattern pay people period
"""
WORDS = tuple(_TEXT.split())
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

    Token ids stay as they are, so their `per_word` is 1.
    """

    base: float = 0.0
    per_word: float = 1.0

    def words(self, tokens: int, *, around: bool = True) -> int:
        """Words that make `tokens` tokens, at least 1. `around`: the template's tokens count."""
        return max(1, round((tokens - (self.base if around else 0.0)) / self.per_word))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTurn:
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

    def conversation(self, index: int) -> list[PromptTurn]:
        """Its turns. Each begins with other words than those of any other conversation, but for the shared prefix."""
        rng = random.Random(f"{self.seed}/{index}")
        return [
            PromptTurn(prompt=self._prompt(rng, first=number == 0), max_tokens=self.output.draw(rng))
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
