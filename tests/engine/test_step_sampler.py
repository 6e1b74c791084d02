"""The sampler of a GPU's steps against `choose`, which knows every token: equal tokens and log-probabilities.

Without a GPU it runs over the references, eager. With one its chains are captured too.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_worker.engine.sampling.edit_counts import MAX_BIASES
from moeyard_worker.engine.sampling.sampling import SampledRow, choose, read_tokens
from moeyard_worker.engine.sampling.step_sampler import StepSampler
from moeyard_worker.protocol import SamplingParams, TokenLogprob
from moeyard_worker.scheduling.request import Accepted, Request
from moeyard_worker.scheduling.step import Chunk, Step

V = 96
EOS = (7, 8)
BACKEND = CpuBackend(page_size=16)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "seeded": {"seed": 2**63 + 11, "logprobs": 0},
    "cut": {"seed": 3, "top_k": 9, "top_p": 0.8, "min_p": 0.01},
    "counted": {"seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    "biased": {"temperature": 0.0, "logit_bias": {5: 3.0, 7: 50.0, 11: -4.0}, "logprobs": 2},
    "min_tokens": {"seed": 5, "min_tokens": 4, "logit_bias": {8: 2.0}, "stop_token_ids": (9, 10)},
    "min_tokens_only": {"temperature": 0.0, "min_tokens": 3},
}


def request(name: str, prompt: tuple[int, ...], **sampling: Any) -> Request:
    params = SamplingParams(max_tokens=1000, **sampling)
    return Request(client=b"c", request_id=name, prompt=prompt, sampling=params, arrived=0.0, hashes=[])


class Before:
    """A launched step that counts reads of its results."""

    def __init__(self, results: Sequence[Accepted]) -> None:
        self._results = list(results)
        self.asked = 0

    @property
    def results(self) -> list[Accepted]:
        self.asked += 1
        return self._results


class Session:
    """Requests that decode. With `deep` the scheduler does not know the tokens of the newest step."""

    def __init__(self, sampler: StepSampler, *, deep: bool) -> None:
        self.sampler, self.deep = sampler, deep
        self.tokens: dict[str, list[int]] = {}
        self.before: Before | None = None
        self._order: list[str] = []

    def step(self, requests: Sequence[Request], logits: torch.Tensor) -> list[tuple[int, TokenLogprob | None]]:
        chunks, rows = [], []
        for r in requests:
            done = self.tokens.setdefault(r.request_id, [])
            fed = None
            if self.deep and r.request_id in self._order:
                fed = self._order.index(r.request_id)
            r.output[:] = done[: len(done) - (fed is not None)]
            end = len(r.prompt) + len(done)
            first = not done
            chunks.append(
                Chunk(
                    key=r.key,
                    start=0 if first else end - 1,
                    token_ids=r.prompt if first else (0,),
                    pages=(0,),
                    prompt=first,
                    num_sampled=1,
                    fed=fed,
                )
            )
            rows.append(SampledRow(params=r.sampling, prompt=r.prompt, output=list(done)))
        firsts = tuple(c for c in chunks if c.prompt)
        ordered = [*firsts, *(c for c in chunks if not c.prompt)]
        places = [chunks.index(c) for c in ordered]
        step = Step(prefill=firsts, decode=tuple(ordered[len(firsts) :]))
        mine, theirs = [requests[i] for i in places], [rows[i] for i in places]
        logits = logits[places].to(DEVICE)
        self.sampler.logits[: len(rows)] = logits
        wanted = choose(BACKEND, logits.clone(), theirs, EOS)
        with torch.inference_mode():
            tokens, errors = self.sampler.choose(step, mine, before=self.before, greedy=False)
            got = read_tokens(tokens, [r.sampling.logprobs for r in mine])
        assert errors == {}
        assert got == [
            (token, logprob if r.sampling.logprobs is not None else None)
            for (token, logprob), r in zip(wanted, mine, strict=True)
        ]
        assert self.sampler.last_ids[: len(rows)].tolist() == [token for token, _ in wanted]
        for r, (token, _) in zip(mine, wanted, strict=True):
            self.tokens[r.request_id].append(token)
        self._order = [r.request_id for r in mine]
        self.before = Before([Accepted((token,)) for token, _ in wanted])
        return got


@pytest.fixture(params=["launched", pytest.param("captured", marks=pytest.mark.gpu)])
def sampler(request: pytest.FixtureRequest) -> StepSampler:
    backend = CudaBackend(page_size=16, device=DEVICE)
    made = StepSampler(backend, max_rows=8, max_requests=8, vocab=V, eos_token_ids=EOS)
    if request.param == "captured":
        made.capture([1, 4, 8], torch.cuda.graph_pool_handle())
    return made


def logits_of(step: int, count: int) -> torch.Tensor:
    return torch.randn(count, V, generator=torch.Generator().manual_seed(step)) * 2


@pytest.mark.parametrize("deep", [False, True], ids=["1deep", "2deep"])
def test_sampler_equals_choose(sampler: StepSampler, deep: bool) -> None:
    """All kinds, then some, then others: counts survive steps without the request."""
    requests = {
        name: request(name, (1, 2, 3, 5)[: 2 + i % 3], **params) for i, (name, params) in enumerate(REQUESTS.items())
    }
    session = Session(sampler, deep=deep)
    for i in range(6):
        session.step(list(requests.values()), logits_of(i, len(requests)))
    for i, names in enumerate((["greedy", "seeded"], ["counted"], ["cut", "logprobs"], list(REQUESTS))):
        session.step([requests[name] for name in names], logits_of(10 + i, len(names)))


def test_counts_do_not_wait_for_the_step_before(sampler: StepSampler) -> None:
    counted = request("a", (1, 2), **REQUESTS["counted"])
    session = Session(sampler, deep=True)
    for i in range(5):
        session.step([counted], logits_of(i, 1))
        asked = session.before
        session.step([counted], logits_of(20 + i, 1))
        assert asked is not None
        assert asked.asked == 0


def test_names_and_places_are_reused(sampler: StepSampler) -> None:
    """There are more requests than places, and a name returns with another prompt."""
    session = Session(sampler, deep=False)
    for i in range(20):
        name = f"r{i % 11}"
        session.tokens.pop(name, None)
        one = request(name, (i, i + 1), **REQUESTS["counted"])
        for j in range(3):
            session.step([one], logits_of(100 * i + j, 1))


def near_tie(penalty: str) -> torch.Tensor:
    """Logits [1, V]: a penalty of exactly 1.1 or 0.1 ranks token 5 above token 4, and one rounded to fp32 ties them."""
    logits = torch.full((1, V), -9.0)
    logits[0, 4:6] = torch.tensor([1.0, 1.1]) if penalty == "repetition_penalty" else torch.tensor([0.0, 0.1])
    return logits


@pytest.mark.parametrize(("penalty", "value"), [("repetition_penalty", 1.1), ("presence_penalty", 0.1)])
def test_penalties_are_exact_to_the_last_bit(sampler: StepSampler, penalty: str, value: float) -> None:
    """This holds on the device and, next to a row that does not fit there, in `choose`."""
    session = Session(sampler, deep=False)
    one = request("a", (5,), temperature=0.0, **{penalty: value})
    session.tokens["a"] = [5]
    session.step([one], near_tie(penalty))
    assert session.tokens["a"] == [5, 5]


def test_host_edits_rows_with_too_many_biases(sampler: StepSampler) -> None:
    """The other rows are one whose biases just fit on the device, and one without biases."""
    many = request("m", (1,), logit_bias={5: 4.0}, stop_token_ids=(9,) * MAX_BIASES, seed=3)
    few = request("f", (1,), logit_bias={6: 3.0}, stop_token_ids=(9,) * (MAX_BIASES - 1 - len(EOS)), seed=4)
    assert [sampler._counts.takes(each.sampling) for each in (many, few)] == [False, True]
    session = Session(sampler, deep=True)
    for i in range(3):
        session.step([many, few, request("g", (2,), temperature=0.0)], logits_of(i, 3))
