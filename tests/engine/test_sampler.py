"""The sampler against naive references written from the definitions: one Python loop per token, float64."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_worker.engine.sampling.sampling import SampledRow, accepted, choose, feed, sampled_rows
from moeyard_worker.engine.steps.runner import Launched
from moeyard_worker.protocol import SamplingParams, TokenLogprob
from moeyard_worker.scheduling.request import Accepted, Mask, Request
from moeyard_worker.scheduling.sampling_check import MAX_CHANGED, sampling_error
from moeyard_worker.scheduling.step import Chunk, Step

BACKEND = CpuBackend(page_size=16)

V = 40


def row(prompt: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = (), **sampling: Any) -> SampledRow:
    """Return a row that is about to sample its request's next token."""
    params = SamplingParams(**{"max_tokens": 1000, **sampling})
    return SampledRow(params=params, prompt=prompt, output=list(output))


def logits_for(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def one(logits: torch.Tensor, eos: tuple[int, ...] = (), **options: Any) -> int:
    return choose(BACKEND, logits[None], [row(**options)], eos)[0][0]


def logprob_of(logits: torch.Tensor, **options: Any) -> TokenLogprob | None:
    return choose(BACKEND, logits[None], [row(**options)], ())[0][1]


def naive_probabilities(logits: list[float], p: SamplingParams) -> list[float]:
    """Apply temperature, min-p, top-k, top-p by their definitions. At a cut the lower of equal ids stays."""
    top = max(logits)
    weights = [math.exp((x - top) / p.temperature) for x in logits]
    total = sum(weights)
    probabilities = [w / total for w in weights]
    order = sorted(range(len(logits)), key=lambda i: (-probabilities[i], i))
    order = [i for i in order if probabilities[i] >= p.min_p * max(probabilities)]
    if p.top_k > 0:
        order = order[: p.top_k]
    mass = sum(probabilities[i] for i in order)
    kept, reached = [], 0.0
    for i in order:
        kept.append(i)
        reached += probabilities[i] / mass
        if p.top_p < 1 and reached >= p.top_p:
            break
    mass = sum(probabilities[i] for i in kept)
    return [probabilities[i] / mass if i in kept else 0.0 for i in range(len(logits))]


def naive_edit(logits: list[float], s: SampledRow) -> list[float]:
    """Apply the bias, then the three penalties, token by token."""
    p, edited = s.params, []
    for token_id, x in enumerate(logits):
        x += p.logit_bias.get(token_id, 0.0)
        if token_id in s.prompt or token_id in s.output:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        count = s.output.count(token_id)
        x -= p.frequency_penalty * count
        x -= p.presence_penalty * (count > 0)
        edited.append(x)
    return edited


CUTS = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.7},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.8},
    {"top_k": 12, "top_p": 0.95, "min_p": 0.02, "temperature": 1.7},
]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_frequencies_match_the_probabilities(cuts: dict[str, Any], seed: int) -> None:
    """Chi-square over 2000 fixed seeds. d + 4 sqrt(2 d) + 4 is about the 1 - 10^-4 quantile for d in 1..40."""
    logits = logits_for(seed, V)
    params = SamplingParams(**{"max_tokens": 1, **cuts})
    expected = naive_probabilities(logits.double().tolist(), params)
    n = 2000
    tokens = [t for t, _ in choose(BACKEND, logits.expand(n, V), [row(seed=i, **cuts) for i in range(n)], ())]
    counts = np.bincount(tokens, minlength=V)
    support = [i for i in range(V) if expected[i] > 0]
    assert all(expected[i] > 0 for i in np.flatnonzero(counts)), "a token outside the support was drawn"
    # Cells with few expected draws are pooled.
    cells = [(counts[i], n * expected[i]) for i in support if n * expected[i] >= 8]
    rest = [(counts[i], n * expected[i]) for i in support if n * expected[i] < 8]
    if sum(e for _, e in rest) >= 8:
        cells.append((sum(c for c, _ in rest), sum(e for _, e in rest)))
    chi2 = sum((c - e) ** 2 / e for c, e in cells)
    freedom = len(cells) - 1
    bound = freedom + 4 * math.sqrt(2 * freedom) + 4
    assert chi2 <= bound
    if set(cuts) <= {"temperature"}:
        # The bound detects a temperature that is higher by half.
        wrong = naive_probabilities(logits.double().tolist(), SamplingParams(max_tokens=1, **_hotter(cuts)))
        off = sum((counts[i] - n * wrong[i]) ** 2 / (n * wrong[i]) for i in support if n * wrong[i] >= 8)
        assert off > bound


def _hotter(cuts: dict[str, Any]) -> dict[str, Any]:
    return {**cuts, "temperature": 1.5 * cuts.get("temperature", 1.0)}


@pytest.mark.parametrize("cuts", CUTS[1:], ids=str)
def test_support_matches_the_reference(cuts: dict[str, Any], seed: int) -> None:
    """A flat distribution makes each remaining token frequent enough to appear."""
    logits = torch.linspace(1, 0, V)[torch.randperm(V, generator=torch.Generator().manual_seed(seed))]
    expected = naive_probabilities(logits.double().tolist(), SamplingParams(max_tokens=1, **cuts))
    n = 800
    drawn = {t for t, _ in choose(BACKEND, logits.expand(n, V), [row(seed=i, **cuts) for i in range(n)], ())}
    assert drawn <= {i for i in range(V) if expected[i] > 0}
    assert drawn >= {i for i in range(V) if n * expected[i] > 15}


def test_lowest_ids_survive_ties_at_a_cut() -> None:
    logits = torch.zeros(V)
    for cuts, kept in (({"top_k": 3}, 3), ({"top_p": 0.1}, 4), ({"top_k": 8, "top_p": 0.5}, 4)):
        drawn = {one(logits, seed=i, **cuts) for i in range(200)}
        assert drawn == set(range(kept)), cuts


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(V)
    logits[[30, 7, 21]] = 5.0
    for options in ({}, {"logit_bias": {39: -1.0}}, {"min_tokens": 1}, {"presence_penalty": 0.5}):
        assert one(logits, temperature=0.0, **options) == 7
    # Edits use float64. In float32 this bias would round away.
    assert one(logits, temperature=0.0, logit_bias={21: 1e-9}) == 21


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_tiny_temperature_is_greedy(temperature: float, seed: int) -> None:
    logits = logits_for(seed, V)
    assert one(logits, temperature=temperature) == int(logits.argmax())
    assert one(logits, temperature=temperature, top_p=0.5, min_p=0.1) == int(logits.argmax())


PENALTIES = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.7},
    {"logit_bias": {4: 3.0, 9: -100.0, 0: 100.0}},
    {"logit_bias": {3: -50.0}, "repetition_penalty": 1.3, "presence_penalty": -0.4, "frequency_penalty": 0.9},
]


@pytest.mark.parametrize("edits", PENALTIES, ids=str)
def test_penalties_match_the_reference(edits: dict[str, Any], seed: int) -> None:
    """Greedy choices over many rows, and samples equal those of the edited logits without edits."""
    rng = np.random.default_rng(seed)
    changed = 0
    for values in logits_for(seed, 200, V):
        prompt, output = (tuple(rng.integers(0, V, size=n).tolist()) for n in (6, 25))
        asked = row(prompt, output, temperature=0.0, **edits)
        edited = naive_edit(values.double().tolist(), asked)
        ((chosen, _),) = choose(BACKEND, values[None], [asked], ())
        assert edited[chosen] >= max(edited) - 1e-12
        changed += chosen != int(values.argmax())
    assert changed > 5, "the rows are too easy to notice the edits"


def test_only_repetition_penalty_counts_the_prompt() -> None:
    logits = torch.full((V,), -10.0)
    logits[5], logits[6] = 2.0, 1.5
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        assert one(logits, prompt=(5,), temperature=0.0, **penalty) == 5
        assert one(logits, prompt=(1,), output=(5,), temperature=0.0, **penalty) == 6
    assert one(logits, prompt=(5,), temperature=0.0, repetition_penalty=2.0) == 6
    assert one(logits, prompt=(1,), output=(5,), temperature=0.0, repetition_penalty=2.0) == 6


def test_penalties_apply_to_sampling(seed: int) -> None:
    logits = logits_for(seed, V)
    edits = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {8: 1.0}}
    prompt, output = (1, 2, 3), (4, 4, 5)
    edited = torch.tensor(naive_edit(logits.double().tolist(), row(prompt, output, **edits)))
    tokens = [one(logits, prompt=prompt, output=output, seed=i, **edits) for i in range(300)]
    assert tokens == [one(edited, prompt=prompt, output=output, seed=i) for i in range(300)]
    assert tokens != [one(logits, prompt=prompt, output=output, seed=i) for i in range(300)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_excludes_every_stop(temperature: float) -> None:
    logits = torch.zeros(V)
    logits[[2, 3]] = 50.0
    options: dict[str, Any] = {"temperature": temperature, "min_tokens": 2, "stop_token_ids": (3, 1000)}
    for output in ((), (5,)):
        for seed in range(20):
            assert one(logits, eos=(2,), output=output, seed=seed, **options) not in (2, 3)
    assert one(logits, eos=(2,), output=(5, 5), **options) in (2, 3)
    # With ignore_eos the end-of-sequence token is an ordinary token.
    assert one(logits, eos=(2,), output=(5,), ignore_eos=True, **options) == 2


def test_logprobs_ignore_edits_and_cuts(seed: int) -> None:
    logits = logits_for(seed, 30, V)
    logits[3, [4, 9, 17]] = 12.0
    expected = torch.log_softmax(logits.double(), dim=-1)
    edits = {"temperature": 0.7, "top_k": 9, "presence_penalty": 1.0, "logit_bias": {5: 4.0}}
    out = choose(BACKEND, logits, [row(seed=i, logprobs=5, **edits) for i in range(30)], ())
    for values, exact, (token_id, got) in zip(logits, expected, out, strict=True):
        assert got is not None
        assert got.logprob == pytest.approx(float(exact[token_id]), abs=1e-6)
        assert got.rank == 1 + int((values > values[token_id]).sum())
        order = sorted(range(V), key=lambda i: (-float(values[i]), i))[:5]
        assert [i for i, _ in got.top] == order
        assert [x for _, x in got.top] == pytest.approx([float(exact[i]) for i in order], abs=1e-6)
    assert out[3][1] is not None
    assert [i for i, _ in out[3][1].top][:3] == [4, 9, 17]


def test_number_of_logprobs(seed: int) -> None:
    logits = logits_for(seed, V)
    assert logprob_of(logits) is None
    for asked in (0, 1, 20):
        logprob = logprob_of(logits, logprobs=asked)
        assert logprob is not None
        assert len(logprob.top) == asked
    # Each row gets the number that it asked for.
    (_, few), (_, none), (_, many) = choose(BACKEND, logits.expand(3, V), [row(logprobs=n) for n in (2, None, 7)], ())
    assert none is None
    assert few is not None
    assert many is not None
    assert (len(few.top), len(many.top)) == (2, 7)
    assert many.top[:2] == few.top


def test_row_is_the_same_alone_and_in_any_batch(seed: int) -> None:
    """Token ids and log-probability bits of all kinds of rows, in two orders and with padding rows."""
    kinds: list[dict[str, Any]] = [*CUTS, *PENALTIES, {"temperature": 0.0}, {"temperature": 0.0, "min_tokens": 9}]
    logits = logits_for(seed, len(kinds) + 5, 257)
    rows = [row((1, 2), (3, 4, 4), seed=i, logprobs=3, **kind) for i, kind in enumerate(kinds)]
    alone = [choose(BACKEND, logits[i][None].clone(), [each], (7,))[0] for i, each in enumerate(rows)]
    assert choose(BACKEND, logits, rows, (7,)) == alone
    flipped = logits[: len(rows)].flip(0).contiguous()
    assert choose(BACKEND, flipped, rows[::-1], (7,))[::-1] == alone
    assert len({token_id for token_id, _ in alone}) > 3


def test_sample_depends_only_on_seed_and_position(seed: int) -> None:
    logits = logits_for(seed, V)
    # A failover sends the output as part of the prompt, so the same position occurs in both.
    for i in range(50):
        draws = {
            one(logits, prompt=(1, 2, 3, 4, 5), seed=i),
            one(logits, prompt=(1, 2), output=(3, 4, 5), seed=i),
            one(logits, prompt=(9, 9, 9), output=(9, 9), seed=i),
        }
        assert len(draws) == 1
    by_seed = [one(logits, seed=i) for i in range(50)]
    by_position = [one(logits, prompt=(1,) * (i + 1)) for i in range(50)]
    assert len(set(by_seed)) > 3
    assert len(set(by_position)) > 3


def test_sampling_does_not_change_the_logits(seed: int) -> None:
    logits = logits_for(seed, 1, V)
    before = logits.clone()
    choose(BACKEND, logits, [row(output=(1,), min_tokens=5, stop_token_ids=(4,), **PENALTIES[-1], logprobs=2)], (3,))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("scale", [1.0, 3e38])
def test_extreme_edits_leave_a_token_to_choose(scale: float, temperature: float, seed: int) -> None:
    """All ranges at their limits, on logits up to the largest fp32: some token is always chosen."""
    logits = logits_for(seed, 50).clamp(-1, 1) * scale
    edits = {"logit_bias": {1: 100.0, 2: -100.0}, "presence_penalty": 2.0, "frequency_penalty": -2.0, "min_p": 1.0}
    for penalty in (0.01, 100.0):
        chosen = one(logits, output=(1, 1, 2), temperature=temperature, repetition_penalty=penalty, **edits)
        assert 0 <= chosen < 50


def test_largest_allowed_request_can_be_sampled() -> None:
    """A request that is too large for the sampler would end one rank after the other."""
    vocab = 8192
    params = SamplingParams(
        max_tokens=9,
        min_tokens=9,
        top_k=2**63 - 1,
        temperature=0.5,
        logit_bias=dict.fromkeys(range(2000), 1.0),
        stop_token_ids=tuple(range(1500, MAX_CHANGED)),
        seed=2**64,
    )
    assert sampling_error(params, vocab) is None
    mask = Mask(words=b"\xff" * (vocab // 8))
    rows = [SampledRow(params=params, prompt=(1,), output=[], mask=m) for m in (None, mask)]
    chosen = choose(BACKEND, torch.zeros(2, vocab), rows, (4096, 4097))
    assert all(token_id not in range(1500, MAX_CHANGED) for token_id, _ in chosen[:1])
    assert sampling_error(replace(params, top_k=2**63), vocab) is not None
    assert sampling_error(replace(params, stop_token_ids=tuple(range(1500, MAX_CHANGED + 1))), vocab) is not None


def test_no_rows() -> None:
    assert choose(BACKEND, torch.empty(16, V), [], ()) == []


def request(prompt: tuple[int, ...], output: tuple[int, ...]) -> Request:
    params = SamplingParams(max_tokens=9, temperature=0.0)
    return Request(
        client=b"", request_id="", prompt=prompt, sampling=params, arrived=0.0, hashes=[], output=list(output)
    )


def test_fed_rows_take_the_results_of_the_step_before() -> None:
    """Two tokens were accepted with one draft after them: the start moves, rows are known, and the sampler counts."""
    known = Chunk(key=(b"", "a"), start=3, token_ids=(7,), pages=(0,), prompt=False, num_sampled=1)
    fed = Chunk(key=(b"", "b"), start=5, token_ids=(0, 0, 0), pages=(1,), prompt=False, num_sampled=3, fed=1, slack=2)
    results = [Accepted((1,)), Accepted((11, 12), drafts=(13,))]
    before = Launched(step=Step.empty(), results=results)
    step = feed(Step(decode=(known, fed)), before)
    assert step.decode[0] is known
    assert (step.decode[1].start, step.decode[1].token_ids) == (6, (12, 13, 0))
    requests = [request((1, 2, 3), (7,)), request((4, 5, 6), (8, 9))]
    rows = sampled_rows(step, requests, before)
    assert [list(r.output) for r in rows] == [[7], [8, 9, 11, 12], [8, 9, 11, 12, 13], [8, 9, 11, 12, 13, 0]]
    assert [r.position for r in rows] == [4, 7, 8, 9]
    nothing = feed(Step(decode=(known,)), None)
    assert nothing.decode == (known,)


def test_drafts_are_accepted_up_to_the_first_wrong_one() -> None:
    chunk = Chunk(key=(b"", ""), start=3, token_ids=(7, 20, 21), pages=(0,), prompt=False, num_sampled=3)
    plain = Chunk(key=(b"", ""), start=3, token_ids=(7, 8, 9), pages=(0,), prompt=False, num_sampled=1)
    step = Step(decode=(chunk, plain))
    for tokens, taken in (((20, 21, 22), 3), ((20, 5, 22), 2), ((6, 21, 22), 1)):
        chosen = [(t, TokenLogprob(logprob=-1.0, rank=1)) for t in tokens]
        first, second = accepted(step, [*chosen, (9, None)])
        assert first.token_ids == tokens[:taken]
        assert len(first.logprobs) == taken
        assert second == Accepted((9,))
