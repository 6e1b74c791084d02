"""Structured output on the demo model: validity of answers to random JSON schemas, and the cost of a grammar.

    python bench/structured.py [--schemas 200] [--streams 1 16] [--tokens 128] [--ambiguous 8] [--vocabulary 151936]

One worker runs in process, as in `moeyard bench engine`. First every schema gets an answer of at most 600 tokens,
greedy and sampled in turn, sixteen at once. Each answer that ends by itself must parse, and validate by the library
jsonschema. Answers that ran out of tokens are counted, and as many more schemas are drawn.

Then it measures tokens/s with and without a grammar, and the pace of a stream beside requests with an ambiguous
grammar. Last it times masks and compilations, with this vocabulary and with a made-up one of the size of Qwen3's.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from moeyard_worker.config.cpu_config import set_cpu_environment
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.worker_spec import WorkerSpec

set_cpu_environment()

from moeyard_worker.engine.assembly.worker import Worker  # noqa: E402
from moeyard_worker.engine.sampling.grammars import Grammars  # noqa: E402 - reads the settings above
from moeyard_worker.protocol import Done, Grammar, SamplingParams, Submit, Tokens  # noqa: E402
from moeyard_worker.scheduling.scheduler import Scheduler  # noqa: E402

DEMO = Path(__file__).resolve().parents[1] / "deploy" / "demo"
PROMPT = "Here is what the captain wrote down of it: "
MAX_TOKENS = 600
# An answer to this never ends, so that every run uses all its tokens.
ENDLESS = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer"},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age", "ok"],
        "additionalProperties": False,
    },
}
# Its masks take longer with each token.
AMBIGUOUS = Grammar(kind="lark", text='start: e\ne: e e | "a" | e e e')
WORDS = ("age", "captain", "date of birth", "harbour", "id", "items", "kind", "name", "note", "price", "ship", "x-1")
PATTERNS = ("^[A-Z][a-z]{1,8}$", "^[0-9]{3}-[0-9]{4}$", "^(red|green|blue)$", "^[a-f0-9]{8}$", r"^\d{1,3}(\.\d{2})?$")
FORMATS = ("date", "time", "uuid", "ipv4", "email")


def random_schema(seed: int) -> Any:
    """Return a random schema of usual parts: objects, arrays, enums, anyOf, patterns, ranges, references."""
    rng = random.Random(seed)
    schema = _object(rng, 3)
    if rng.random() < 0.2:
        schema["$defs"] = {"part": _schema(rng, 1)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"] = [*schema["required"], "part"]
    return schema


def _schema(rng: random.Random, depth: int) -> Any:
    kinds = [_string, _string, _integer, _number, _boolean, _enum, _const, _nullable]
    if depth:
        kinds += [_object, _object, _array, _any_of]
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> Any:
    names = rng.sample(WORDS, rng.randint(1, 4))
    schema = {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
        "additionalProperties": False,
    }
    if rng.random() < 0.1:
        schema["title"] = schema["description"] = "what the captain knew"
    return schema


def _array(rng: random.Random, depth: int) -> Any:
    if rng.random() < 0.2:
        items = [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    least = rng.randint(0, 2)
    return {"type": "array", "items": _schema(rng, depth - 1), "minItems": least, "maxItems": least + rng.randint(0, 3)}


def _any_of(rng: random.Random, depth: int) -> Any:
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, _: int) -> Any:
    kind = rng.random()
    if kind < 0.25:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind < 0.45:
        return {"type": "string", "format": rng.choice(FORMATS)} if kind < 0.4 else {"type": "string", "maxLength": 0}
    least = rng.randint(0, 8)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 24)}


def _integer(rng: random.Random, _: int) -> Any:
    least = rng.randint(-1000, 1000)
    bounds = {"minimum": least, "maximum": least + rng.randint(0, 5000)}
    if rng.random() < 0.2:
        bounds = {"exclusiveMinimum": least, "multipleOf": rng.choice((2, 5, 10)), "exclusiveMaximum": least + 50}
    return {"type": "integer", **bounds}


def _number(rng: random.Random, _: int) -> Any:
    least = round(rng.uniform(-100, 100), 2)
    return {"type": "number", "minimum": least, "maximum": round(least + rng.uniform(0.5, 300), 1)}


def _boolean(rng: random.Random, _: int) -> Any:
    return {"type": "boolean"}


def _enum(rng: random.Random, _: int) -> Any:
    return {"enum": rng.sample(["north", "south", 'a "quoted" one', 3, -1.5, None, True, "naïve", "line\nbreak"], 4)}


def _const(rng: random.Random, _: int) -> Any:
    return {"const": rng.choice(["fixed", 42, None, {"a": [1, 2]}, False])}


def _nullable(rng: random.Random, _: int) -> Any:
    return {"type": ["string", "null"], "maxLength": 12}


@dataclass(slots=True)
class Answer:
    """The answer to one request, and the arrival times of its messages in seconds."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    end: Done | None = None


class Bench:
    """One worker without sockets and peers, and its tokenizer."""

    def __init__(self, directory: Path = DEMO, *, streams: int = 16, max_model_len: int = 1024) -> None:
        config = EngineConfig(
            model_path=str(directory),
            kv_memory=64 << 20,
            max_model_len=max_model_len,
            max_num_seqs=streams,
            prefix_caching=False,
        )
        self.worker = Worker(WorkerSpec(config=config, rank=0, epoch=0, host="127.0.0.1", version="bench"))
        self.worker.connect([self.worker.endpoints()["mesh"]])
        self.worker.load(1)
        assert self.worker.grammars is not None, "a loaded worker compiles grammars"
        self.grammars: Grammars = self.worker.grammars
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._steps = 0

    def run(self, wanted: Sequence[SamplingParams], *, deep: int = 1) -> tuple[list[Answer], float]:
        """Return all answers, and the seconds of the steps."""
        scheduler = Scheduler(replace(self.worker.scheduler.config, max_in_flight=deep, max_waiting=len(wanted)))
        prompt = tuple(self.tokenizer.encode(PROMPT).ids)
        answers = {str(i): Answer() for i in range(len(wanted))}
        for name, params in zip(answers, wanted, strict=True):
            held = None
            if params.grammar is not None:
                held = self.grammars.constraint(self.grammars.compile(params.grammar).result(), params)
            submit = Submit(request_id=name, prompt_token_ids=prompt, sampling=params)
            rejected = scheduler.add(submit, b"bench", 0.0, held)
            assert rejected is None, rejected
        begun, flights = time.perf_counter(), deque()
        while scheduler.has_work() or flights:
            step = scheduler.schedule(0.0)
            if step.chunks:
                self._steps += 1
                self.worker.experts.begin_step(self._steps)
                before = flights[-1] if flights else None
                flights.append(self.worker.runner.launch(step, scheduler.requests(step), before=before, num_drafts=0))
                if len(flights) < deep:
                    continue
            done = flights.popleft()
            for reply in scheduler.complete(done.step, done.results, 0.0):
                message = reply.message
                if isinstance(message, Tokens):
                    answers[message.request_id].token_ids += message.token_ids
                    answers[message.request_id].times.append(time.perf_counter() - begun)
                elif isinstance(message, Done):
                    answers[message.request_id].end = message
        scheduler.validate()
        return list(answers.values()), time.perf_counter() - begun

    def text(self, answer: Answer) -> str:
        """Return an answer as a client reads it."""
        return self.tokenizer.decode(answer.token_ids, skip_special_tokens=True)

    def close(self) -> None:
        """Free sockets and threads."""
        self.worker.stop()


def sampling_for(seed: int, schema: Any) -> SamplingParams:
    """Return parameters that are greedy and sampled in turn."""
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=float(seed % 2), seed=seed, grammar=grammar)


def fault(schema: Any, text: str) -> str | None:
    """Return the error of an answer that ended by itself, or None."""
    try:
        draft = jsonschema.Draft202012Validator
        draft(schema, format_checker=draft.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{error}"
    return None


def check_schemas(bench: Bench, count: int) -> int:
    """Draw schemas until `count` answers have ended by themselves. Return the number of invalid ones.

    Answers that the length limit cut are valid beginnings, and count separately.
    """
    lengths: list[int] = []
    ended = cut = wrong = 0
    while ended < count:
        seeds = range(ended + cut, cut + count)
        if seeds.start > 2 * count:
            raise SystemExit(f"{cut} of {seeds.start} answers were cut, too many to continue")
        schemas = [random_schema(seed) for seed in seeds]
        answers, _ = bench.run([sampling_for(seed, schema) for seed, schema in zip(seeds, schemas, strict=True)])
        for seed, schema, answer in zip(seeds, schemas, answers, strict=True):
            assert answer.end is not None, "every request ends"
            lengths.append(len(answer.token_ids))
            if answer.end.finish_reason == "length":
                cut += 1
                continue
            ended += 1
            if answer.end.finish_reason == "error":
                wrong += 1
                print(f"schema {seed}: {answer.end.error}\n  {json.dumps(schema)}")
            elif (said := fault(schema, bench.text(answer))) is not None:
                wrong += 1
                print(f"schema {seed}: {said[:300]}\n  {bench.text(answer)[:300]}")
    print(
        f"{ended - wrong} of {ended} answers that ended are valid; {cut} more were cut at {MAX_TOKENS} tokens; tokens "
        f"per answer: median {statistics.median(lengths):.0f}, most {max(lengths)}"
    )
    return wrong


def rates(bench: Bench, streams: int, tokens: int) -> None:
    """Print tokens/s without and with a grammar, in alternation: the best of each, because of other load."""
    grammar = Grammar(kind="json_schema", text=json.dumps(ENDLESS))
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(8):
        for held in found:
            params = SamplingParams(
                max_tokens=tokens, temperature=1.0, ignore_eos=True, grammar=grammar if held else None
            )
            answers, seconds = bench.run([replace(params, seed=i) for i in range(streams)])
            assert all(len(answer.token_ids) == tokens for answer in answers), "an answer ended"
            found[held].append(streams * tokens / seconds)
    free, held = (max(each) for each in found.values())
    print(f"{streams} streams: {free:.0f} tokens/s, with a grammar {held:.0f} ({held / free - 1:+.1%})")


def pace_beside(bench: Bench, count: int, tokens: int) -> None:
    """Print the pace of one stream alone, beside ordinary requests and beside ambiguous ones, the best of four runs."""
    free = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True)
    others = {
        "alone": (),
        "beside ordinary ones": (free,),
        "beside ambiguous ones": (replace(free, grammar=AMBIGUOUS),),
    }
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in others}
    for _ in range(4):
        for name, beside in others.items():
            wanted = [free, *(replace(each, seed=i + 1) for each in beside for i in range(count))]
            (stream, *rest), _ = bench.run(wanted)
            gaps = [after - before for before, after in pairwise(stream.times)]
            longest = max((len(answer.token_ids) for answer in rest), default=0)
            found[name].append((len(gaps) / sum(gaps), max(gaps), longest))
    for name, runs in found.items():
        rate, gap, longest = max(runs)
        print(
            f"a stream of {tokens} tokens, {name}: {rate:.1f} tokens/s, longest gap {gap * 1e3:.0f} ms"
            + (f" ({count} others, of {longest} tokens at most)" if longest else "")
        )


def costs(grammars: Grammars, tokenizer: Tokenizer, name: str, count: int) -> None:
    """Measure seconds of compiling, and of each mask along a typical answer."""
    compiled, masks = [], []
    for seed in range(count):
        begun = time.perf_counter()
        grammars.compile(Grammar(kind="json_schema", text=json.dumps(random_schema(seed)))).result()
        compiled.append(time.perf_counter() - begun)
    matcher = grammars.compile(Grammar(kind="json_schema", text=json.dumps(ENDLESS))).result()
    text = '[{"name": "Arthur Gordon Pym", "age": 17, "ok": true}, {"name": "Richard Parker", "age": 30, "ok": false},'
    output = tokenizer.encode(text + text[1:] * 3, add_special_tokens=False).ids
    held = grammars.constraint(matcher, SamplingParams(max_tokens=1))
    for length in range(len(output) + 1):
        begun = time.perf_counter()
        mask = held.mask(output[:length])
        masks.append(time.perf_counter() - begun)
        assert mask.words is not None, "the text follows the grammar"
    print(
        f"{name}: compiled in {statistics.median(compiled) * 1e3:.2f} ms (median of {count}; most "
        f"{max(compiled) * 1e3:.1f}), {len(masks)} masks: median {statistics.median(masks) * 1e6:.0f} us, "
        f"most {max(masks) * 1e3:.2f} ms"
    )


def large_tokenizer(vocabulary: int) -> str:
    """Return a byte-level tokenizer.json of `vocabulary` tokens, composed of pieces of ASCII words and JSON's signs."""
    rng, alphabet = random.Random(0), sorted(ByteLevel.alphabet())
    vocab, merges = {sign: i for i, sign in enumerate(alphabet)}, []
    letters = [c for c in alphabet if c.isascii() and (c.isalnum() or c in '{}[]":,.-_')] + ["Ġ"]
    pieces = list(letters)
    while len(vocab) < vocabulary - 1:
        pair = [rng.choice(pieces), rng.choice(letters if rng.random() < 0.5 else pieces)]
        piece = "".join(pair)
        if len(piece) <= 14 and piece not in vocab:
            vocab[piece] = len(vocab)
            merges.append(pair)
            if len(piece) < 8:
                pieces.append(piece)
    made = json.loads(Tokenizer(BPE()).to_str())
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    made["model"] |= {"vocab": vocab, "merges": merges}
    made["pre_tokenizer"] = made["decoder"] = level
    end = {"content": "<|end|>", "special": True, "normalized": False}
    made["added_tokens"] = [{"id": len(vocab), "single_word": False, "lstrip": False, "rstrip": False, **end}]
    return json.dumps(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=200, help="answers that must end by themselves; 0 for none")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ambiguous", type=int, default=8, help="requests beside a stream of 600 tokens; 0 for none")
    parser.add_argument("--vocabulary", type=int, default=151936, help="size of the made-up tokenizer; 0 for none")
    args = parser.parse_args()
    bench = Bench()
    try:
        wrong = check_schemas(bench, args.schemas) if args.schemas else 0
        for streams in args.streams:
            rates(bench, streams, args.tokens)
        if args.ambiguous:
            pace_beside(bench, args.ambiguous, MAX_TOKENS)
        costs(bench.grammars, bench.tokenizer, f"{bench.grammars.vocab_size} tokens", 50)
    finally:
        bench.close()
    if args.vocabulary:
        text = large_tokenizer(args.vocabulary)
        begun = time.perf_counter()
        large = Grammars(text, vocab_size=args.vocabulary, eos_token_ids=(args.vocabulary - 1,))
        print(f"a tokenizer of {args.vocabulary} tokens: {time.perf_counter() - begun:.2f} s")
        costs(large, Tokenizer.from_str(text), f"{args.vocabulary} tokens", 50)
        large.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
