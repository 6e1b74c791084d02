"""Grammars in a GPU's steps: rows in a batch equal those alone, replayed or eager, one or two steps in flight.

The demo model runs without drafts here. tests/engine/test_speculation.py has drafts. Without a GPU the steps run over
the kernels' references (captured_on_cpu.py).
"""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.checkpoints import DEMO
from tests.engine.captured_on_cpu import PLACE, gpu_steps
from tests.engine.test_grammars import KINDS
from tests.engine.test_speculation_cuda import same
from tests.rank import Rank, Reply, Requests
from tokenizers import Tokenizer

from moeyard_worker.protocol import SamplingParams

PROMPT = [5, 40, 300, 21, 8, 77]


def requests() -> Requests:
    """Greedy and sampled requests of every grammar kind, and free ones between them."""
    asked: dict[str, Any] = {}
    for drawn in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2}):
        for number, (name, grammar) in enumerate([("free", None), *KINDS.items()]):
            params = SamplingParams(max_tokens=16, grammar=grammar, logprobs=number % 3 or None, **drawn)
            asked[f"{name} {drawn['temperature']}"] = (PROMPT[: 1 + number % 5], params)
    return asked


def load(**options: Any) -> Rank:
    return Rank(DEMO, **PLACE, max_num_seqs=8, max_batch_tokens=128, max_model_len=160, **options)


@pytest.fixture(scope="module")
def rank() -> Iterator[Rank]:
    with gpu_steps(), load() as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected() -> dict[str, Reply]:
    """Answer each request alone, eager, one step in flight."""
    with gpu_steps(), load(enforce_eager=True) as loaded:
        return {name: loaded.run({name: asked}, max_in_flight=1)[0][name] for name, asked in requests().items()}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("deep", [1, 2])
def test_rows_equal_those_alone(rank: Rank, expected: dict[str, Reply], eager: bool, deep: int) -> None:
    launches: Any = rank.worker.runner
    before, launches.eager = (launches.num_replayed, launches.num_eager), eager
    answers, _ = rank.run(requests(), max_in_flight=deep)
    launches.eager = False
    same(answers, expected)
    replayed, launched = launches.num_replayed - before[0], launches.num_eager - before[1]
    assert (replayed == 0 < launched) if eager else (replayed > launched)


def test_answers_match_their_grammar(expected: dict[str, Reply]) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for drawn in ("0.0", "0.8"):
        texts = {name: tokenizer.decode(expected[f"{name} {drawn}"].token_ids) for name in ("choice", "regex")}
        assert texts["choice"] in ("yes", "no", 'a "third"')
        assert len(texts["regex"]) == 8
        assert texts["regex"][:3].isdigit()
        assert texts["regex"][3] == "-"
