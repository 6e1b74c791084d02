"""Sampling: kernels and reference against the numpy sampler, token by token, and against the definitions."""

import math
from collections.abc import Sequence as Seq
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases.case import assert_bits
from tests.kernels import numpy_sampler

from moeyard_kernels import ops
from moeyard_kernels.common.launch import checked
from moeyard_kernels.ops import sampling as reference
from moeyard_kernels.sampling import sample as triton_kernel
from moeyard_kernels.sampling import token_logprobs as triton_kernel_of_given
from moeyard_kernels.types.sampling import LogitEdits, SampledTokens
from moeyard_worker.protocol import SamplingParams
from moeyard_worker.scheduling.request import Request

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
LARGE = [129280, 151936, 163840] if ON_GPU else []
# The interpreter needs 60 ms per row.
MANY = 64 if ON_GPU else 4
# Parts and lists are so small that a short row has many of both and its top-k does not fit.
SMALL = triton_kernel.SampleConfig(BLOCK=256, ROUNDS=2, RACE=256, MASS=256, PART=512, LIST=16)
# The interpreter needs 2 ms per function call.
USUAL = None if ON_GPU else triton_kernel.SampleConfig(BLOCK=1024, ROUNDS=1, RACE=1024, MASS=1024, PART=1024)
F64 = torch.float64


def sequence(prompt: Seq[int] = (1, 2, 3), output: Seq[int] = (), **options: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 1000, **options})
    return Request(
        client=b"a",
        request_id="r",
        prompt=tuple(prompt),
        sampling=params,
        arrived=0.0,
        hashes=[],
        output=list(output),
    )


def edits_of(sequences: Seq[Request], vocab: int) -> LogitEdits:
    """Return edits like a worker's, where the slots are not those of the rows."""
    num_rows, width = len(sequences), 1 + max(len(s.sampling.logit_bias) for s in sequences)
    words = torch.zeros(num_rows + 1, vocab, dtype=torch.int32)
    bias = torch.full((num_rows + 1, width), math.nan, dtype=F64)
    slots, penalties = torch.full((num_rows,), -1), torch.full((num_rows, 3), math.nan, dtype=F64)
    for i, s in enumerate(sequences):
        p, slot = s.sampling, num_rows - i
        excluded = set(p.stop_token_ids) if len(s.output) < p.min_tokens else set()
        added = {**p.logit_bias, **dict.fromkeys(excluded, -math.inf)}
        if not numpy_sampler.edits_logits(p) and not excluded:
            continue
        bias = torch.nn.functional.pad(bias, (0, max(0, len(added) - bias.shape[1])), value=math.nan)
        slots[i], penalties[i] = slot, torch.tensor([p.repetition_penalty, p.frequency_penalty, p.presence_penalty])
        penalties[i] = torch.tensor([p.repetition_penalty, p.frequency_penalty, p.presence_penalty], dtype=F64)
        for j, (token, value) in enumerate(added.items()):
            words[slot, token] += j + 1
            bias[slot, j] = value
        words[slot, list(set(s.prompt))] += LogitEdits.IN_PROMPT
        for token in s.output:
            words[slot, token] += LogitEdits.ONCE
    return LogitEdits(words=words, bias=bias, slots=slots, penalties=penalties)


def arguments(sequences: Seq[Request], vocab: int, *, edits: bool = True) -> dict[str, Any]:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(s.sampling, name) for s in sequences], dtype=dtype)

    return {
        "temperature": column("temperature", F64),
        "top_k": column("top_k", torch.int64),
        "top_p": column("top_p", F64),
        "min_p": column("min_p", F64),
        "seeds": column("seed", torch.int64),
        "positions": torch.tensor([s.length for s in sequences]),
        "edits": edits_of(sequences, vocab) if edits else None,
    }


def to_device(x: Any) -> Any:
    if isinstance(x, LogitEdits):
        return LogitEdits(**{name.removeprefix("edits."): tensor.to(DEVICE) for name, tensor in x.named().items()})
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


def run_kernel(
    logits: torch.Tensor, *, config: triton_kernel.SampleConfig | None = None, **options: Any
) -> SampledTokens:
    """Run the Triton kernels on DEVICE and return the results on the CPU."""
    with np.errstate(all="ignore"):
        tokens = triton_kernel.sample(
            logits.to(DEVICE), config=config or USUAL, **{name: to_device(x) for name, x in options.items()}
        )
    return SampledTokens(**{name: x if x is None else x.cpu() for name, x in named(tokens).items()})


def named(tokens: SampledTokens) -> dict[str, torch.Tensor | None]:
    return {field.name: getattr(tokens, field.name) for field in fields(tokens)}


def assert_same(got: SampledTokens, wanted: SampledTokens, what: str) -> None:
    """Check that all bytes are equal."""
    for name, x in named(got).items():
        assert_bits(f"{what}: {name}", x, getattr(wanted, name))


def of_rows(tokens: SampledTokens, rows: slice | list[int]) -> SampledTokens:
    return SampledTokens(**{name: x if x is None else x[rows] for name, x in named(tokens).items()})


def from_numpy(logits: torch.Tensor, sequences: Seq[Request]) -> list[int]:
    return [s.token_ids[0] for s in numpy_sampler.sample(logits.float(), sequences, ())]


def mixed_rows(vocab: int, count: int, *, edits: bool) -> tuple[torch.Tensor, list[Request]]:
    """Return rows of all kinds, peaked and flat, greedy and sampled, and their requests."""
    rng = np.random.default_rng(int(torch.randint(2**31, ())))
    logits = torch.randn(count, vocab) * torch.from_numpy(rng.choice([0.05, 1.0, 3.0], count)).float()[:, None]
    logits[:, ::17] = logits[:, :1]
    logits[0, 1::2] = -math.inf
    sequences = []
    for _ in range(count):
        some = {
            "temperature": float(rng.choice([0.0, 0.3, 1.0, 1.0, 1.7])),
            "top_k": int(rng.choice([0, 1, 5, 50, vocab - 1, vocab + 3])),
            "top_p": float(rng.choice([0.02, 0.5, 0.9, 1.0, 1.0])),
            "min_p": float(rng.choice([0.0, 0.0, 0.05, 1.0], p=[0.4, 0.3, 0.25, 0.05])),
            "seed": int(rng.integers(-(2**63), 2**63)),
        }
        prompt, output = rng.integers(vocab, size=20), rng.integers(vocab, size=int(rng.integers(1, 60)))
        if edits and rng.random() < 0.8:
            some["repetition_penalty"] = float(rng.choice([1.0, 1.1, 0.7]))
            some["presence_penalty"] = float(rng.choice([0.0, 0.3, -1.0]))
            some["frequency_penalty"] = float(rng.choice([0.0, 0.1]))
            bias = rng.integers(vocab, size=int(rng.integers(0, 4)))
            some["logit_bias"] = {int(t): float(rng.normal() * 5) for t in bias}
            some["min_tokens"], some["stop_token_ids"] = int(rng.choice([0, 500])), (int(output[0]),)
        sequences.append(sequence(prompt.tolist(), output.tolist(), **some))
    return logits, sequences


def test_noise_equals_numpys() -> None:
    ids = torch.tensor([0, 1, 2, 3, 4, 7, 163839, 2**31 - 1])
    for seed, position in ((0, 0), (-1, 5), (2**63 - 1, 2**32 + 7), (-(2**63), 131071)):
        words = reference.philox4x32(ids, position, seed).numpy()
        wanted = numpy_sampler.philox4x32(
            (ids.numpy().astype(np.uint64), position, 0, 0), (seed & 2**32 - 1, seed >> 32 & 2**32 - 1)
        )
        assert np.array_equal(words, wanted)
    # Many rows at once.
    rows = torch.tensor([(0, 0), (5, -1), (2**32 + 7, 2**63 - 1), (131071, -(2**63))])
    together = reference.philox4x32(ids[:4], rows[:, 0], rows[:, 1])
    for i, (position, seed) in enumerate(rows.tolist()):
        assert torch.equal(together[i : i + 1], reference.philox4x32(ids[i : i + 1], position, seed))


@pytest.mark.parametrize("vocab", [7, 1000])
def test_reference_chooses_like_numpy(vocab: int) -> None:
    logits, sequences = mixed_rows(vocab, 150, edits=True)
    ids = ops.sample(logits, **arguments(sequences, vocab)).ids
    assert ids.tolist() == from_numpy(logits, sequences)


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 0.7, 30.0])
def test_reference_chooses_like_numpy_in_long_rows(temperature: float) -> None:
    """The rows are long enough that cuts look only at their likeliest tokens."""
    logits = torch.randn(12, 20000) * torch.tensor([0.02, 1.0, 4.0]).repeat(4)[:, None]
    logits[:6] = logits[:6].mul(8).round().div(8)
    cuts: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 400}, {"top_p": 0.3, "min_p": 1e-4}, {"min_p": 1e-3}]
    cuts = [{**cut, "temperature": temperature, "seed": i} for i in range(3) for cut in cuts]
    sequences = [sequence(output=(5, 5, 7), repetition_penalty=(1.0, 1.3)[i % 2], **cuts[i]) for i in range(12)]
    ids = ops.sample(logits, **arguments(sequences, 20000)).ids
    assert ids.tolist() == from_numpy(logits, sequences)


def kept_by_definition(x: np.ndarray, temperature: float, *, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Return the ids after min-p, a sort of the whole row by falling weight, top-k and top-p."""
    with np.errstate(over="ignore"):
        weights = np.exp((x - x.max()) / temperature)
    ids = np.flatnonzero(weights >= min_p)
    ids = ids[np.argsort(-weights[ids], kind="stable")][: top_k or None]
    mass = np.cumsum(weights[ids])
    return ids[: int((mass < top_p * mass[-1]).sum()) + 1] if top_p < 1 else np.sort(ids)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("temperature", [1e-6, 0.5, 1.0, 50.0])
@pytest.mark.parametrize("kind", ["flat", "usual", "peaked", "equal", "steps", "halves", "infinite"])
def test_cuts_equal_those_of_a_whole_sort(kind: str, temperature: float) -> None:
    vocab = 5000
    x = torch.randn(vocab).double().numpy() * {"flat": 0.01, "peaked": 6.0}.get(kind, 2.0)
    if kind == "equal":
        x[:] = 0.0
    elif kind == "steps":
        x = x.round()
    elif kind == "halves":
        # Sums of powers of two are exact: a nucleus ends right at a token's.
        x = -math.log(2) * np.minimum(np.arange(vocab), 1000.0)[torch.randperm(vocab).numpy()] * temperature
    elif kind == "infinite":
        x[torch.rand(vocab).numpy() < 0.9] = -math.inf
    for top_k in (0, 1, 40, 900, vocab - 1, vocab, vocab + 7):
        for top_p in (1e-9, 0.25, 0.5, 0.75, 0.999, 1 - 2.0**-40, 1.0):
            for min_p in (0.0, 2.0**-20, 0.01, 0.5, 1.0):
                cuts: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
                ids, _ = reference.candidates(x, temperature, **cuts)
                # Without a nucleus the order does not matter.
                ids = ids if top_p < 1 else np.sort(ids)
                assert np.array_equal(ids, kept_by_definition(x, temperature, **cuts)), cuts


@pytest.mark.sampled(1)
@pytest.mark.parametrize("edits", [False, True], ids=["plain", "edits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("vocab", [7, 1000, 4096, *LARGE], ids=lambda v: f"V{v}")
def test_kernels_choose_like_numpy(vocab: int, dtype: torch.dtype, edits: bool) -> None:
    logits, sequences = mixed_rows(vocab, MANY, edits=edits)
    logits = logits.to(dtype)
    ids = run_kernel(logits, **arguments(sequences, vocab, edits=edits)).ids
    assert ids.tolist() == from_numpy(logits, sequences)


@pytest.mark.parametrize(
    "given",
    [(), ("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p"), ("top_p", "min_p")],
    ids=lambda g: "+".join(g) or "plain",
)
@pytest.mark.parametrize("vocab", [999, *LARGE[:1]], ids=lambda v: f"V{v}")
def test_skipped_launches_change_no_choice(vocab: int, given: tuple[str, ...]) -> None:
    logits, sequences = mixed_rows(vocab, MANY, edits=False)
    all_of_them = arguments(sequences, vocab, edits=False)
    always = ("temperature", "seeds", "positions")
    some = {name: all_of_them[name] for name in (*always, *given)}
    assert torch.equal(run_kernel(logits, **some).ids, ops.sample.reference(logits, **some).ids)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.randn(6, 4096 if not ON_GPU else 163840).to(torch.bfloat16)
    wanted = torch.stack([(row == row.max()).nonzero()[0, 0] for row in logits])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(run_kernel(logits.to(dtype)).ids, wanted)
    zeros = torch.zeros(2, 600)
    zeros[0, :5] = -0.0
    assert run_kernel(zeros).ids.tolist() == [0, 0]


@pytest.mark.parametrize("vocab", [600, *LARGE[-1:]], ids=lambda v: f"V{v}")
def test_row_alone_equals_the_row_in_a_batch(vocab: int) -> None:
    logits, sequences = mixed_rows(vocab, MANY, edits=True)
    whole = run_kernel(logits, logprobs=3, **arguments(sequences, vocab))
    order = torch.randperm(len(sequences))[: 24 if ON_GPU else 2].tolist()
    for i in order:
        alone = run_kernel(logits[i : i + 1], logprobs=3, **arguments([sequences[i]], vocab))
        assert_same(alone, of_rows(whole, [i]), f"row {i}")
    turned = order[::-1]
    again = run_kernel(logits[turned], logprobs=3, **arguments([sequences[i] for i in turned], vocab))
    assert_same(again, of_rows(whole, turned), "turned around")


@pytest.mark.parametrize("vocab", [33, 600, 20001])
def test_row_alone_equals_the_row_in_a_batch_of_the_reference(vocab: int) -> None:
    """This holds bit for bit on a CPU in production, for any number of rows that draw noise together."""
    logits, sequences = mixed_rows(vocab, 40, edits=True)
    whole = ops.sample(logits, logprobs=3, **arguments(sequences, vocab))
    for rows in ([0], [7], [39], [5, 30, 2], list(range(39, -1, -1))):
        some = ops.sample(logits[rows], logprobs=3, **arguments([sequences[i] for i in rows], vocab))
        assert_same(some, of_rows(whole, rows), str(rows))


@pytest.mark.parametrize("vocab", LARGE[1:2] or [700], ids=lambda v: f"V{v}")
def test_every_config_gives_the_same(vocab: int) -> None:
    logits, sequences = mixed_rows(vocab, 64 if ON_GPU else 2, edits=ON_GPU)
    options = arguments(sequences, vocab, edits=ON_GPU)
    wanted = run_kernel(logits, logprobs=5, config=SMALL, **options)
    # The interpreter is too slow for all configs.
    for config in triton_kernel.CONFIGS if ON_GPU else triton_kernel.CONFIGS[1:3]:
        assert_same(run_kernel(logits, logprobs=5, config=config, **options), wanted, str(config))


@pytest.mark.parametrize("top_k", [1, 17, 300, 899])
def test_top_k_larger_than_the_list(top_k: int) -> None:
    """The rows are flat, half of them with equal logits. Bisection over the row finds the cut."""
    logits = torch.randn(4, 900).mul(0.1)
    logits[2:] = 0.25
    logits[3, ::3] = 0.5
    sequences = [sequence(top_k=top_k, temperature=0.9, seed=i, top_p=(1.0, 0.7)[i % 2]) for i in range(4)]
    ids = run_kernel(logits, config=SMALL, **arguments(sequences, 900, edits=False)).ids
    assert ids.tolist() == from_numpy(logits, sequences)


@pytest.mark.parametrize("top_p", [1e-9, 0.004, 0.03])
def test_nuclei_that_the_first_candidates_miss(top_p: float) -> None:
    logits = torch.randn(MANY // 2, 900).mul(0.2)
    sequences = [sequence(top_p=top_p, seed=i) for i in range(MANY // 2)]
    ids = run_kernel(logits, config=SMALL, **arguments(sequences, 900, edits=False)).ids
    assert ids.tolist() == from_numpy(logits, sequences)


def test_rows_beyond_fp32_precision_are_searched() -> None:
    """All but two tokens are slightly below min-p, within the error of the race's scores."""
    logits = torch.full((2, 900), math.log(0.5) - 1e-4)
    logits[:, 400], logits[:, 500] = 0.0, -0.1
    sequences = [sequence(min_p=0.5, seed=i, top_p=(1.0, 0.9)[i % 2]) for i in range(2)]
    ids = run_kernel(logits, **arguments(sequences, 900, edits=False)).ids
    assert set(ids.tolist()) <= {400, 500}
    assert ids.tolist() == from_numpy(logits, sequences)


@pytest.mark.parametrize("vocab", [40, 300])
def test_ties_at_a_cut_go_to_the_lowest_ids(vocab: int) -> None:
    """A list holds 40 equal tokens. Bisection over the row finds the cut among 300."""
    logits = torch.zeros(9, vocab)
    cuts: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.01}, {"top_k": 6, "top_p": 0.5}]
    sequences = [sequence(seed=i, **cuts[i % 3]) for i in range(9)]
    options = arguments(sequences, vocab, edits=False)
    ids = run_kernel(logits, **options).ids
    assert set(ids.tolist()) <= {0, 1, 2}
    assert len(set(ids.tolist())) > 1
    assert torch.equal(ids, ops.sample.reference(logits, **options).ids)


def test_non_finite_logits() -> None:
    """A NaN has priority, then an infinite largest logit, sampled or greedy, cut or not."""
    inf, nan = math.inf, math.nan
    logits = torch.randn(6, 50)
    logits[0] = -inf
    logits[0, 31] = -5.0
    logits[1] = -inf
    logits[2, 7] = logits[2, 9] = nan
    logits[3, 11] = logits[3, 12] = inf
    logits[4, 20], logits[4, 30] = inf, -nan
    logits[5, 1:] = -inf
    wanted = [31, 0, 7, 11, 30, 0]
    assert run_kernel(logits).ids.tolist() == wanted
    for options in ({}, {"top_k": 4}, {"top_p": 0.5}, {"top_k": 4, "top_p": 0.5, "min_p": 0.1}):
        sequences = [sequence(seed=i, **options) for i in range(6)]
        given = arguments(sequences, 50, edits=False)
        got, of_reference = run_kernel(logits, logprobs=3, **given), ops.sample.reference(logits, logprobs=3, **given)
        assert got.ids.tolist() == wanted
        for tokens in (got, of_reference):
            assert tokens.logprobs is not None
            assert tokens.logprobs.isnan().tolist() == [False, True, True, True, True, False]
            assert tokens.logprobs[[0, 5]].tolist() == [0.0, 0.0]
        for name in ("ids", "ranks", "top_ids"):
            assert_bits(name, getattr(got, name), getattr(of_reference, name))


@pytest.mark.parametrize("temperature", [1e-310, 1e-30, 1e4, 1e60])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.randn(3, 400).mul(4)
    logits[:, ::3] = -math.inf
    # At 1e60 all weights are equal, and rounding decides the cuts.
    cuts: list[dict[str, Any]] = [{}, {"top_k": 9}, {"top_p": 0.9}] if temperature < 1e60 else [{}] * 3
    sequences = [sequence(temperature=temperature, seed=i, **cuts[i]) for i in range(3)]
    ids = run_kernel(logits, **arguments(sequences, 400, edits=False)).ids
    assert ids.tolist() == from_numpy(logits, sequences)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_top", [0, 1, 7, 20])
@pytest.mark.parametrize("vocab", [11, 1000, *LARGE[:1]], ids=lambda v: f"V{v}")
def test_logprobs_and_ranks_equal_numpys(vocab: int, num_top: int, dtype: torch.dtype) -> None:
    """Kernels and reference use the unmodified logits, with ties among the likeliest."""
    logits, sequences = mixed_rows(vocab, 3, edits=True)
    logits = logits.mul(4).round().div(4).to(dtype)
    options = arguments(sequences, vocab)
    for tokens in (run_kernel(logits, logprobs=num_top, **options), ops.sample(logits, logprobs=num_top, **options)):
        assert tokens.logprobs is not None
        assert tokens.ranks is not None
        for i in range(3):
            wanted = numpy_sampler.token_logprob(logits[i].float().numpy(), int(tokens.ids[i]), num_top)
            assert int(tokens.ranks[i]) == wanted.rank
            assert float(tokens.logprobs[i]) == pytest.approx(wanted.logprob, rel=2e-7, abs=1e-7)
            if num_top == 0:
                assert tokens.top_ids is tokens.top_logprobs is None
                continue
            assert tokens.top_ids is not None
            assert tokens.top_logprobs is not None
            assert tokens.top_ids[i].tolist() == [token for token, _ in wanted.top]
            of_numpy = [logprob for _, logprob in wanted.top]
            assert tokens.top_logprobs[i].tolist() == pytest.approx(of_numpy, rel=2e-7, abs=1e-7)


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_of_given_tokens_equal_those_of_chosen_tokens(num_top: int) -> None:
    """`token_logprobs` of the tokens that `sample` chose, and of tokens that sampling would not choose."""
    logits, sequences = mixed_rows(1000, 3, edits=True)
    options = arguments(sequences, 1000)
    chosen = run_kernel(logits, logprobs=num_top, **options)
    again = triton_kernel_of_given.token_logprobs(logits.to(DEVICE), chosen.ids.to(DEVICE), num_top, config=USUAL)
    assert_same(again.each(lambda x: x.cpu()), chosen, "kernel")
    whole = ops.sample(logits, logprobs=num_top, **options)
    assert_same(ops.token_logprobs(logits, whole.ids, num_top), whole, "reference")
    least = logits[:2].argmin(1)
    got = triton_kernel_of_given.token_logprobs(logits[:2].to(DEVICE), least.to(DEVICE), num_top, config=USUAL)
    assert got.logprobs is not None
    assert got.ranks is not None
    for i in range(2):
        wanted = numpy_sampler.token_logprob(logits[i].numpy(), int(least[i]), num_top)
        assert int(got.ranks[i]) == wanted.rank
        assert float(got.logprobs[i]) == pytest.approx(wanted.logprob, rel=2e-7, abs=1e-7)
    logits[0, 5] = math.nan
    bad = triton_kernel_of_given.token_logprobs(logits[:2].to(DEVICE), least.to(DEVICE), num_top, config=USUAL)
    for tokens in (bad, ops.token_logprobs(logits[:2], least, num_top)):
        assert tokens.logprobs is not None
        assert tokens.logprobs.isnan().tolist() == [True, False]


def test_invalid_given_tokens_are_refused() -> None:
    logits, ids = torch.randn(2, 50), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"token_logprobs: logits float16 \[2, 50\], expected float32 or bfloat16 \[B, V\]"
    ):
        ops.token_logprobs(logits.half(), ids, 0)
    with pytest.raises(ValueError, match=r"token_logprobs: ids .* expected int64 \[2\]"):
        ops.token_logprobs(logits, ids[:1], 0)
    with pytest.raises(ValueError, match=r"token_logprobs: num_top 21, expected 0 <= num_top <= 20"):
        ops.token_logprobs(logits, ids, 21)


def test_only_requested_results_are_computed() -> None:
    logits, sequences = mixed_rows(50, 2, edits=False)
    options = arguments(sequences, 50, edits=False)
    for tokens in (run_kernel(logits, **options), ops.sample(logits, **options)):
        assert named(tokens) == {"ids": tokens.ids} | dict.fromkeys(("logprobs", "ranks", "top_ids", "top_logprobs"))


@pytest.mark.gpu
def test_graph_replay() -> None:
    logits, sequences = mixed_rows(4096, 16, edits=True)
    options = {name: to_device(x) for name, x in arguments(sequences, 4096).items()}
    fixed = logits.to(DEVICE)
    triton_kernel.sample(fixed, logprobs=4, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = triton_kernel.sample(fixed, logprobs=4, **options)
    for shift in (0, 1, 5):
        fixed.copy_(logits.roll(shift, 1))
        options["positions"].add_(shift)
        graph.replay()
        assert_same(tokens, triton_kernel.sample(fixed.clone(), logprobs=4, **options), f"rolled by {shift}")


def test_no_rows() -> None:
    for run in (run_kernel, ops.sample):
        tokens = run(torch.zeros(0, 5), logprobs=20)
        assert tokens.ids.shape == tokens.logprobs.shape == tokens.ranks.shape == (0,)
        assert tokens.top_ids.shape == tokens.top_logprobs.shape == (0, 5)
        assert tokens.ids.dtype == tokens.ranks.dtype == tokens.top_ids.dtype == torch.int64
        assert tokens.logprobs.dtype == tokens.top_logprobs.dtype == torch.float32


def test_bad_arguments_are_named() -> None:
    logits, sequences = mixed_rows(7, 2, edits=True)
    good = arguments(sequences, 7)
    with pytest.raises(ValueError, match=r"logits float16 \[2, 7\], expected float32 or bfloat16 \[B, V\]"):
        ops.sample(logits.half())
    with pytest.raises(ValueError, match=r"top_p float32 \[2\], expected float64 \[2\]"):
        ops.sample(logits, **{**good, "top_p": torch.ones(2)})
    with pytest.raises(ValueError, match=r"top_k int64 \[3\], expected int64 \[2\] for logits float32 \[2, 7\]"):
        ops.sample(logits, **{**good, "top_k": torch.ones(3, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"temperature float64 \[2\], seeds None, positions int64 \[2\]"):
        ops.sample(logits, **{**good, "seeds": None})
    for wrong in (-1, 21):
        with pytest.raises(ValueError, match=f"logprobs {wrong}, expected logprobs is None or 0 <= logprobs <= 20"):
            ops.sample(logits, logprobs=wrong)
    with pytest.raises(ValueError, match=r"temperature None, top_k None, top_p float64 \[2\], min_p None"):
        ops.sample(logits, top_p=good["top_p"])
    bad = {"words": torch.zeros(3, 8, dtype=torch.int32), "slots": torch.zeros(2), "penalties": torch.zeros(2, 2)}
    parts = {name: getattr(good["edits"], name) for name in ("words", "bias", "slots", "penalties")}
    for name, x in bad.items():
        with pytest.raises(ValueError, match=rf"edits.{name} \w+ \[.*\], expected \w+ \["):
            ops.sample(logits, **{**good, "edits": LogitEdits(**{**parts, name: x})})
    outside = {**good, "edits": LogitEdits(**{**parts, "slots": torch.tensor([0, 3])})}
    with pytest.raises(ValueError, match="holds 0 to 3, outside -1 to 2"):
        ops.sample(logits, **outside)
    with checked(), pytest.raises(ValueError, match=r"slots int64 .* holds 0 to 3, outside -1 to 2"):
        run_kernel(logits, **outside)
    beyond = {**parts, "words": parts["words"] | 4095}
    with pytest.raises(ValueError, match=r"words name bias 4095 of \d+ per slot"):
        ops.sample(logits, **{**good, "edits": LogitEdits(**beyond)})
    with pytest.raises(ValueError, match="is not contiguous"):
        run_kernel(torch.zeros(7, 2).t())


def test_tensors_on_another_device_are_named() -> None:
    logits, sequences = mixed_rows(7, 2, edits=True)
    good = arguments(sequences, 7)
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    wrong = {name: {**good, name: good[name].to("meta")} for name in names}
    for name in ("words", "bias", "slots", "penalties"):
        parts = {field: getattr(good["edits"], field) for field in ("words", "bias", "slots", "penalties")}
        wrong[f"edits.{name}"] = {**good, "edits": LogitEdits(**{**parts, name: parts[name].to("meta")})}
    for name, options in wrong.items():
        for run in (ops.sample, triton_kernel.sample):
            with pytest.raises(ValueError, match=rf"sample: {name} is on meta, logits on cpu"):
                run(logits, **options)


def with_allowed(edits: LogitEdits, allowed: torch.Tensor) -> LogitEdits:
    """Return `edits` with bits for bool [S, V]. Bits past V are ones."""
    num_slots, vocab = allowed.shape
    padded = np.ones((num_slots, -(-vocab // 32) * 32), dtype=bool)
    padded[:, :vocab] = allowed.numpy()
    words = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32).copy())
    return LogitEdits(words=edits.words, bias=edits.bias, slots=edits.slots, penalties=edits.penalties, allowed=words)


@pytest.mark.parametrize("run", [ops.sample, run_kernel], ids=["reference", "kernel"])
@pytest.mark.parametrize("vocab", [7, 999, *LARGE[:1]], ids=lambda v: f"V{v}")
def test_disallowed_tokens_are_never_chosen(vocab: int, run: Any) -> None:
    """The effect is that of logits of minus infinity, except that log-probabilities use the original logits."""
    logits, sequences = mixed_rows(vocab, MANY, edits=True)
    given = arguments(sequences, vocab)
    given["edits"] = edits_of(sequences, vocab)
    # Every row has its own slot.
    given["edits"].slots[:] = torch.arange(MANY).flip(0)
    given["edits"].penalties[:] = given["edits"].penalties.nan_to_num(1.0)
    given["edits"].bias[:] = given["edits"].bias.nan_to_num(0.0)
    allowed = torch.rand(given["edits"].words.shape) < 0.3
    # Odd tokens of the first row have no finite logit.
    allowed[:, vocab // 2 & ~1] = True
    edits = with_allowed(given["edits"], allowed)
    got = run(logits, logprobs=2, **{**given, "edits": edits})
    rows = allowed[edits.slots]
    assert rows.gather(1, got.ids.cpu()[:, None]).all()
    masked = logits.masked_fill(~rows, -math.inf)
    assert torch.equal(got.ids.cpu(), ops.sample(masked, **given).ids)
    free = run(logits, logprobs=2, **given)
    assert_same(SampledTokens(ids=got.top_ids[:, 0]), SampledTokens(ids=free.top_ids[:, 0]), "the likeliest")


def test_bits_of_the_wrong_shape_are_named() -> None:
    logits, sequences = mixed_rows(40, 2, edits=True)
    edits = edits_of(sequences, 40)
    wrong = LogitEdits(
        words=edits.words,
        bias=edits.bias,
        slots=edits.slots,
        penalties=edits.penalties,
        allowed=torch.zeros(3, 1, dtype=torch.int32),
    )
    with pytest.raises(ValueError, match=r"edits.allowed .*expected int32 \[3, 2\]"):
        ops.sample(logits, edits=wrong)
