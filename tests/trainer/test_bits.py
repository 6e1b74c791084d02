"""`moeyard.torch`: log-probabilities have a server's bits, for present parameters, saved checkpoints and any batch."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints import DEMO, MLA, make_checkpoint
from tests.quantised import quantise
from tests.trainer.replayed import with_experts, with_own_experts

from moeyard.torch import Sample, TrainableModel
from moeyard.torch.model import _Formula
from moeyard_kernels.backend import Backend
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.ops import token_logprobs
from moeyard_worker.engine.assembly.local import greedy_tokens, local_runner
from moeyard_worker.engine.steps.runner import Runner

FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "deepseek_v2": {"q_lora_rank": None},
    "deepseek_v4": {},
    "kimi_k25": {},
    "qwen3_moe": {"mlp_only_layers": [1], "attention_bias": True, "tie_word_embeddings": True},
    "qwen3_next": {},
    "qwen3_5_moe": {},
    "kimi_linear": {},
    "mixtral": {"sliding_window": 40},
    "olmoe": {},
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = ((70, 20), (5, 9), (1, 1))


def decoded(runner: Runner, lengths: tuple[tuple[int, int], ...] = LENGTHS) -> list[tuple[Sample, torch.Tensor]]:
    """Return samples that a server decodes token by token, and their log-probabilities."""
    generator, found = torch.Generator().manual_seed(3), []
    for prompt, output in lengths:
        ids = torch.randint(250, (prompt,), generator=generator).tolist()
        tokens, logits = greedy_tokens(runner, ids, output)
        logprobs = token_logprobs(logits, torch.tensor(tokens, device=logits.device), 0).logprobs
        assert logprobs is not None
        found.append((Sample(prompt=ids, output=tokens), logprobs))
    return found


@pytest.mark.sampled(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_those_of_decoding(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    make_checkpoint(tmp_path, family, dtype=dtype, **FAMILIES[family])
    model = TrainableModel(tmp_path)
    found = decoded(local_runner(tmp_path, dtype=dtype, num_pages=8))
    for (_, expected), logprobs in zip(found, model([sample for sample, _ in found]), strict=True):
        assert torch.equal(logprobs, expected)
    sample, expected = found[1]
    assert torch.equal(model([sample])[0], expected)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_bits_of_the_backend_of_a_gpu(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU its references stand for its kernels. A step holds samples of different lengths."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    make_checkpoint(tmp_path, family, dtype=dtype, **(MLA if family == "deepseek_v3" else {"head_dim": 32}))

    def backend() -> Backend:
        return CudaBackend(page_size=64, device=DEVICE)

    found = decoded(local_runner(tmp_path, dtype=dtype, num_pages=4, page_size=64, backend=backend()))
    model = TrainableModel(tmp_path, device=DEVICE.type)
    monkeypatch.setattr(model, "_backend", backend)
    logprobs = model([sample for sample, _ in found])
    for (_, expected), each in zip(found, logprobs, strict=True):
        # The references' products depend on the number of rows in the last bits of fp32.
        atol = 0.0 if DEVICE.type == "cuda" else 1e-5
        torch.testing.assert_close(each, expected, rtol=0.0, atol=atol)
    torch.cat(logprobs).sum().backward()
    assert all(p.grad is None or (p.grad.device == p.device and p.grad.isfinite().all()) for p in model.parameters())


def test_steps_of_any_size_have_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "kimi_linear")
    samples = [sample for sample, _ in decoded(local_runner(tmp_path, dtype=torch.float32, num_pages=8))] * 3
    model = TrainableModel(tmp_path)
    together = model(samples)
    object.__setattr__(model._engine, "max_batch_tokens", 100)
    assert all(map(torch.equal, model(samples), together))


def test_updates_are_seen_and_saved(tmp_path: Path) -> None:
    """The demo's layer of multi-token prediction is no parameter. The saved checkpoint keeps it."""
    runner = local_runner(DEMO, dtype=torch.bfloat16, num_pages=4)
    sample, before = decoded(runner, ((20, 12),))[0]
    model = TrainableModel(DEMO)
    (logprobs,) = model([sample])
    assert torch.equal(logprobs, before)
    (-logprobs.sum()).backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    (after,) = model([sample])
    assert after.sum() > before.sum()
    model.save(tmp_path / "new")
    (loaded,) = TrainableModel(tmp_path / "new")([sample])
    assert torch.equal(loaded, after)
    old, new = (load_file(next(path.glob("*.safetensors"))) for path in (DEMO, tmp_path / "new"))
    assert {key: (value.dtype, value.shape) for key, value in old.items()} == {
        key: (value.dtype, value.shape) for key, value in new.items()
    }
    names = dict(model.named_parameters())
    assert all(key in names or torch.equal(new[key], value) for key, value in old.items())
    assert sum(key.startswith("model.layers.6.") for key in old.keys() - names.keys()) > 100
    tokens, logits = greedy_tokens(local_runner(tmp_path / "new", dtype=torch.bfloat16, num_pages=4), sample.prompt, 12)
    expected = token_logprobs(logits, torch.tensor(tokens), 0).logprobs
    assert expected is not None
    assert torch.equal(model([Sample(prompt=sample.prompt, output=tokens)])[0], expected)
    with pytest.raises(ValueError, match="exists already"):
        model.save(tmp_path / "new")


def test_an_interrupted_save_is_not_continued_with_other_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TrainableModel(make_checkpoint(tmp_path / "model", "olmoe"))

    def fail(*args: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("moeyard_worker.checkpoint.writing._write_json", fail)
        with pytest.raises(OSError, match="no space"):
            model.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="begun with another model"):
        model.save(tmp_path / "new")


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4", "olmoe"])
def test_replayed_routing(tmp_path: Path, family: str) -> None:
    """A given choice equal to the model's own keeps the bits. Another choice gives the formula's value."""
    make_checkpoint(tmp_path, family)
    model = TrainableModel(tmp_path)
    samples = [sample for sample, _ in decoded(local_runner(tmp_path, dtype=torch.float32, num_pages=8))]
    own, routed = model._served(samples)
    assert all(map(torch.equal, model(with_own_experts(model, samples)), own))
    other = (routed[0] + 1) % model.config.num_experts
    mixed = [with_experts(model, samples[0], other), *samples[1:]]
    found, used = model._served(mixed)
    assert torch.equal(used[0], other)
    assert all(map(torch.equal, found[1:], own[1:]))
    assert (found[0] - own[0]).abs().max() > 0.01
    # The formula differs from the served one in the order of fp32 sums.
    from_formula = formula_logprobs(model, mixed[0], other)
    torch.testing.assert_close(found[0], from_formula, rtol=1e-5, atol=1e-5)


def formula_logprobs(model: TrainableModel, sample: Sample, routed: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of a sample by the formula that the backward differentiates."""
    with torch.no_grad():
        return _Formula(model, model._stored(), torch.float32).logprobs(sample, routed)


def test_choice_of_a_server() -> None:
    array = np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2)
    np.save(file := io.BytesIO(), array)
    choice = {"token_ids": [7, 8], "routed_experts": base64.b64encode(file.getvalue()).decode()}
    sample = Sample.of_choice([1, 2, 3], choice)
    assert (sample.prompt, sample.output, sample.num_rows) == ([1, 2, 3], [7, 8], 4)
    assert sample.routed_experts is not None
    assert sample.routed_experts.tolist() == array.tolist()
    assert Sample.of_choice([1], {"token_ids": [7]}).routed_experts is None


@pytest.mark.parametrize("choice", [{"text": "ab"}, {"text": "ab", "token_ids": None}])
def test_choice_without_token_ids(choice: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r'^the choice has no token_ids: the request needs "return_token_ids": true$'):
        Sample.of_choice([1], choice)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"dtype": dtype}, "dtype .* is not one of auto, ") for dtype in ("float16", "int8", "", torch.float32)),
        ({"max_model_len": 513}, "max_model_len 513 exceeds the model's 512$"),
        *(({"max_model_len": length}, "max_model_len") for length in (0, -1)),
        ({"device": "gpu"}, "device 'gpu' is not cpu, cuda or cuda:N$"),
    ],
)
def test_settings_that_no_server_has(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        TrainableModel(make_checkpoint(tmp_path, "qwen3_moe"), **settings)


def test_samples_have_the_length_that_a_server_answers(tmp_path: Path) -> None:
    model = TrainableModel(make_checkpoint(tmp_path, "qwen3_moe"), max_model_len=20)
    assert model([Sample(prompt=[1] * 15, output=[2] * 5)])[0].isfinite().all()
    with pytest.raises(ValueError, match="21 tokens, the model serves at most 20"):
        model([Sample(prompt=[1] * 15, output=[2] * 6)])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (None, "there are no samples"),
        (Sample(prompt=[], output=[1]), "0 prompt and 1 output"),
        (Sample(prompt=[1], output=[]), "1 prompt and 0 output"),
        (Sample(prompt=[1] * 500, output=[1] * 13), "513 tokens, the model serves at most 512"),
        (Sample(prompt=[1, 272], output=[1]), "token 272, outside the vocabulary of 272"),
        (Sample(prompt=[1], output=[2, 3], routed_experts=torch.zeros(3, 3, 2)), r"\[3, 3, 2\].*needs \[2, 3, 2\]"),
        (Sample(prompt=[1], output=[2], routed_experts=torch.full((1, 3, 2), 8)), "outside 0 to 7"),
    ],
)
def test_samples_that_no_server_answers(small: TrainableModel, sample: Sample | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small([] if sample is None else [sample])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TrainableModel:
    return TrainableModel(make_checkpoint(tmp_path_factory.mktemp("small"), "qwen3_moe"))


def test_models_that_cannot_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    with pytest.raises(ValueError, match="MKL_CBWR=AVX512,STRICT"):
        TrainableModel(tmp_path)
    quantise(tmp_path, "fp8")
    with pytest.raises(ValueError, match="moeyard dequantize"):
        TrainableModel(tmp_path)
