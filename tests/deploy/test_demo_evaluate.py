"""evaluate.py and measure.py of the demo model on small checkpoints with figures known or computed in another way."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.demo_model import evaluate, measure
from tests.deploy.tiny_demo import HIDDEN, LAYERS, TEXTS, WINDOW, make_demo, write_heldout

from moeyard_worker.protocol import SamplingParams


def load(directory: Path, **tensors: Callable[[torch.Tensor], torch.Tensor]) -> measure.DemoModel:
    return measure.DemoModel(make_demo(directory, **tensors))


@pytest.fixture(scope="module")
def heldout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heldout(tmp_path_factory.mktemp("text") / "heldout.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> measure.DemoModel:
    return load(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def documents(model: measure.DemoModel, heldout: Path) -> list[measure.Document]:
    return measure.read_documents(heldout, model)


@torch.inference_mode()
def one_by_one(model: measure.DemoModel, ids: list[int]) -> dict[str, list[Any]]:
    """Return for each token but the first: bits, the main model's choice, and (from the third) the MTP layer's draft.

    Each comes from a separate forward over the context that measure.py promises; drafts use MtpModel's own decoding.
    """
    out: dict[str, list[Any]] = {"bits": [], "greedy": [], "drafts": []}
    stride = WINDOW // 2
    for at in range(1, len(ids)):
        begin = max(0, -(-(at - WINDOW) // stride)) * stride
        context = torch.tensor([ids[begin:at]])
        result = model.main(context, output_hidden_states=True)
        logprobs = result.logits[0, -1].double().log_softmax(-1)
        out["bits"].append(-float(logprobs[ids[at]]) / math.log(2))
        out["greedy"].append(int(logprobs.argmax()))
        if at >= 2:
            draft, _, _ = model.mtp(
                input_ids=context[:, 1:],
                last_hidden_states=result.hidden_states[-1][:, :-1],
                attention_mask=torch.ones_like(context[:, 1:]),
                position_ids=torch.arange(1, context.shape[1])[None],
                mtp_cache=None,
            )
            out["drafts"].append(int(draft))
    return out


def test_heldout_figures_equal_those_of_one_token_at_a_time(model, documents) -> None:
    result = measure.measure_heldout(model, documents)
    expected = [one_by_one(model, document.ids) for document in documents]
    assert max(len(document.ids) for document in documents) > WINDOW + WINDOW // 2
    for source, texts in TEXTS.items():
        bits = sum(sum(e["bits"]) for e, d in zip(expected, documents, strict=True) if d.source == source)
        figure = result["heldout"]["sources"][source]
        assert figure["bytes"] == sum(len(text.encode()) for text in texts)
        assert figure["bits_per_byte"] == pytest.approx(bits / figure["bytes"], rel=1e-5)
    total = sum(sum(e["bits"]) for e in expected) / sum(
        len(text.encode()) for texts in TEXTS.values() for text in texts
    )
    assert result["heldout"]["bits_per_byte"] == pytest.approx(total, rel=1e-5)
    pairs = [
        (draft, greedy, true)
        for e, d in zip(expected, documents, strict=True)
        for draft, greedy, true in zip(e["drafts"], e["greedy"][1:], d.ids[2:], strict=True)
    ]
    mtp = result["mtp"]
    assert mtp["positions"] == len(pairs)
    assert mtp["agrees_with_main"] * len(pairs) == pytest.approx(sum(d == g for d, g, _ in pairs))
    assert mtp["right"] * len(pairs) == pytest.approx(sum(d == t for d, _, t in pairs))
    right = [
        g == t for e, d in zip(expected, documents, strict=True) for g, t in zip(e["greedy"], d.ids[1:], strict=True)
    ]
    assert mtp["main_right"] == pytest.approx(sum(right) / len(right))


def test_one_forward_equals_a_forward_for_each_token(model, documents) -> None:
    ids = documents[1].ids
    assert len(ids) <= WINDOW + 1
    expected = one_by_one(model, ids)
    result = model.forward(torch.tensor([ids[:-1]]))
    assert result.logits[0].argmax(-1).tolist() == expected["greedy"]
    assert result.drafts[0].argmax(-1).tolist() == expected["drafts"]
    assert len(set(expected["drafts"])) > 5


def test_load_counts_every_predicting_position_once(model, documents) -> None:
    result = measure.measure_heldout(model, documents)
    num_tokens = sum(len(document.ids) - 1 for document in documents)
    assert [(row["layer"], row["mtp"]) for row in result["experts"]] == [(1, False), (2, True)]
    for row in result["experts"]:
        positions = num_tokens - len(documents) if row["mtp"] else num_tokens
        assert sum(row["counts"]) == positions * model.config.num_experts_per_tok
        mean = sum(row["counts"]) / len(row["counts"])
        assert (row["busiest"], row["least"]) == (max(row["counts"]) / mean, min(row["counts"]) / mean)


def test_an_expert_that_is_never_chosen_is_dead(tmp_path: Path, heldout: Path) -> None:
    def shun(bias: torch.Tensor) -> torch.Tensor:
        return bias.index_fill(0, torch.tensor([3]), -100.0)

    model = load(tmp_path, **{f"layers__{LAYERS}__mlp__gate__e_score_correction_bias": shun})
    main, mtp = measure.measure_heldout(model, measure.read_documents(heldout, model))["experts"]
    assert main["counts"][3] > 0
    assert mtp["counts"][3] == mtp["least"] == 0
    assert mtp["dead"] == mtp["counts"].count(0)


def test_documents_are_spread_over_sources(documents) -> None:
    titles = [[document.title for document in measure.spread(documents, n)] for n in (1, 2, 3, 9)]
    assert titles == [["sea 1"], ["sea 1", "verse 1"], ["sea 0", "sea 1", "verse 1"], [d.title for d in documents]]


def zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)


def drafter(embedding: float, hidden: float) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """An MTP layer that computes only eh_proj = [embedding * I, hidden * I]."""
    eye = torch.eye(HIDDEN)
    return {
        f"layers__{LAYERS}__self_attn__o_proj": zero,
        f"layers__{LAYERS}__mlp__experts": zero,
        f"layers__{LAYERS}__mlp__shared_experts": zero,
        "eh_proj": lambda _: torch.cat((embedding * eye, hidden * eye), dim=1),
        "norm": torch.ones_like,
    }


def accepted(model: measure.DemoModel, documents: list[measure.Document]) -> dict[str, Any]:
    prompts = [document.ids[:8] for document in documents]
    continuations = [evaluate.transformers_greedy(model.main, prompt, 20) for prompt in prompts]
    return evaluate.acceptance(model, prompts, continuations, num_checked=len(prompts))


@pytest.mark.parametrize(("sign", "share"), [(1.0, 1.0), (-1.0, 0.0)])
def test_acceptance_of_a_drafter_that_is_always_right_or_wrong(
    tmp_path: Path, documents, sign: float, share: float
) -> None:
    # Without its branches the main model is head(norm(embedding)), which the MTP layer computes too, or negated.
    branches = {"o_proj": zero, "down_proj": zero}
    model = load(tmp_path, **branches, **drafter(sign, 0.0))
    result = accepted(model, documents)
    assert (result["share"], result["drafts"], result["unstable"]) == (share, 19 * len(documents), 0)
    for row in result["checked"]:
        assert row["tokens_equal"]
        assert row["passes"] == row["passes_expected"] == (11 if share else 20)


def test_acceptance_agrees_with_the_passes_that_transformers_needs(tmp_path: Path, documents) -> None:
    weak = {"o_proj": lambda t: 0.5 * t, "down_proj": lambda t: 0.5 * t}
    result = accepted(load(tmp_path, **weak, **drafter(1.0, 0.3)), documents)
    assert 0.1 < result["share"] < 0.9
    assert all(row["tokens_equal"] and row["passes"] == row["passes_expected"] for row in result["checked"])


def test_speculative_passes() -> None:
    assert evaluate.speculative_passes([True, True, True]) == 3
    assert evaluate.speculative_passes([False, False, False]) == 4
    # The draft of token 2 is never made, because the earlier pass gave token 2 itself.
    assert evaluate.speculative_passes([True, True, False, False]) == 4


def test_greedy_comparison_names_the_first_difference(tmp_path: Path, model, documents) -> None:
    prompts = [document.ids[:8] for document in documents[:2]]
    same, continuations = evaluate.compare_with_moeyard(
        model.main, evaluate.make_runner(model.directory, WINDOW), prompts, 12
    )
    assert (same["equal"], same["differences"]) == (2, [])
    assert [len(tokens) for tokens in continuations] == [12, 12]
    other = evaluate.make_runner(make_demo(tmp_path, lm_head=lambda t: t.roll(1, 0)), WINDOW)
    result, _ = evaluate.compare_with_moeyard(model.main, other, prompts, 12)
    assert result["equal"] == 0
    first = result["differences"][0]
    assert (first["prompt"], first["position"], first["transformers"]) == (0, 0, continuations[0][0])
    assert first["moeyard"] == continuations[0][0] + 1
    assert first["logit_gap"] > 0


def test_samples_follow_their_seed_and_stop_at_an_end(model, documents) -> None:
    runner = evaluate.make_runner(model.directory, WINDOW)
    prompt = documents[0].ids[:8]
    params = SamplingParams(max_tokens=20, temperature=5.0, seed=1)
    texts = [
        evaluate.continue_with_moeyard(runner, prompt, SamplingParams(max_tokens=20, temperature=5.0, seed=seed))
        for seed in range(12)
    ]
    assert texts[1] == evaluate.continue_with_moeyard(runner, prompt, params)
    assert len({tuple(text) for text in texts}) == 12
    [end] = runner.config.eos_token_ids
    ended = [text for text in texts if end in text]
    assert ended
    assert all(text.index(end) == len(text) - 1 for text in ended)
    assert all(len(text) == 20 for text in texts if end not in text)
    greedy = evaluate.continue_with_moeyard(runner, prompt, SamplingParams(max_tokens=12, temperature=0.0))
    expected = evaluate.transformers_greedy(model.main, prompt, 12)
    assert greedy == expected[: len(greedy)]


def test_bounds_follow_the_figures() -> None:
    good = {
        "heldout": {"bits_per_byte": 1.9},
        "experts": [{"busiest": 2.0, "dead": 0}],
        "acceptance": {"share": 0.5},
        "greedy": {"equal": 20, "prompts": 20},
    }
    assert all(row["met"] for row in evaluate.check_bounds(good))
    bad = {
        "heldout": {"bits_per_byte": 1.91},
        "experts": [{"busiest": 1.5, "dead": 0}, {"busiest": 2.01, "dead": 1}],
        "acceptance": {"share": 0.49},
        "greedy": {"equal": 19, "prompts": 20},
    }
    assert not any(row["met"] for row in evaluate.check_bounds(bad))
