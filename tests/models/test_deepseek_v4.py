"""DeepSeek-V4 against transformers at every border of a block; its settings, drafts and codes.

test_linear_attention.py tests that it has one answer for every cut and neighbour.
"""

import copy
import os
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import VOCAB_SIZE, add_v4_drafts, edit_config, edit_tensors, make_checkpoint, publish_v4
from tests.quantised import publish_codes
from tests.rank import Rank

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.types.matrix import blob_views, dequantize
from moeyard_worker.checkpoint.converting import dequantized
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_checkpoint
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.engine.assembly.local import greedy_tokens, local_runner, prompt_logits
from moeyard_worker.engine.assembly.verify import reference_model
from moeyard_worker.layers import compressed
from moeyard_worker.models.families import load_model_config
from moeyard_worker.models.shapes import served_model
from moeyard_worker.models.spec import model_spec
from moeyard_worker.protocol import KvCompression, Rejected, SamplingParams, Submit
from moeyard_worker.scheduling.step import Chunk, Step


def chunk(ids: list[int], start: int, size: int, *, num_pages: int, prompt: bool) -> Chunk:
    """Return rows of the only sequence, in the first pages."""
    return Chunk(
        key=(b"", ""),
        start=start,
        token_ids=tuple(ids[start : start + size]),
        pages=tuple(range(num_pages)),
        state_slot=0,
        prompt=prompt,
        num_sampled=1,
    )


def test_every_length_against_transformers(tmp_path: Path, seed: int) -> None:
    """Prompts that end around every kind of border, and outputs that cross it: mod 4, mod 64 and mod 128."""
    directory = make_checkpoint(tmp_path, "deepseek_v4", seed=seed)
    ids = torch.randint(VOCAB_SIZE, (400,), generator=torch.Generator().manual_seed(seed)).tolist()
    runner = local_runner(directory, dtype=torch.float32, num_pages=26)
    with torch.inference_mode():
        expected = reference_model(directory, "deepseek_v4", dtype=torch.float32)(torch.tensor([ids])).logits[0]
    scale = float(expected.abs().max())
    for length in (1, 2, 3, 4, 5, 7, 8, 9, 31, 63, 64, 65, 120, 127, 128, 129, 131, 132, 192, 255, 256, 257, 383, 384):
        found = prompt_logits(runner, ids[:length], range(26), chunk_size=128)[-1]
        assert float((found - expected[length - 1]).abs().max()) < 1e-4 * scale, length
        for position in range(length, length + 9):
            row = chunk(ids, position, 1, num_pages=26, prompt=False)
            found = runner.forward(Step(decode=(row,)))[0]
            assert float((found - expected[position]).abs().max()) < 1e-4 * scale, (length, position)


def test_published_names_and_settings(tmp_path: Path, seed: int) -> None:
    """The hub has other keys than transformers writes. The numbers are the same."""
    directory = make_checkpoint(tmp_path, "deepseek_v4", seed=seed)
    prompt = torch.randint(VOCAB_SIZE, (140,), generator=torch.Generator().manual_seed(seed)).tolist()
    saved = load_model_config(directory)
    expected = greedy_tokens(local_runner(directory, dtype=torch.float32, num_pages=10), prompt, 6)
    publish_v4(directory)
    assert "layers.0.attn.kv_norm.weight" in open_checkpoint(directory, saved).index.entries
    assert load_model_config(directory) == saved
    found = greedy_tokens(local_runner(directory, dtype=torch.float32, num_pages=10), prompt, 6)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


def test_released_codes(tmp_path: Path) -> None:
    """The answer of fp8 and fp4 weights is that of the bfloat16 weights that they stand for, bit for bit."""
    pair = tmp_path / "codes", tmp_path / "plain"
    for directory in pair:
        publish_v4(make_checkpoint(directory, "deepseek_v4", dtype=torch.bfloat16))
    save_file(publish_codes(pair[0]), pair[1] / "model.safetensors", metadata={"format": "pt"})
    prompt = list(range(1, 140))
    found, wanted = (greedy_tokens(local_runner(d, dtype=torch.bfloat16, num_pages=10), prompt, 5) for d in pair)
    assert found[0] == wanted[0]
    assert torch.equal(found[1], wanted[1])
    out = tmp_path / "out"
    dequantized(pair[0]).write(out, lambda _: None)
    done, plain = dict[str, torch.Tensor](), load_file(pair[1] / "model.safetensors")
    for file in out.glob("*.safetensors"):
        done |= load_file(file)
    assert done.keys() == plain.keys()
    assert all(torch.equal(done[key].float(), plain[key].float()) for key in plain)
    edit_config(pair[0], expert_dtype="fp6")
    with pytest.raises(CheckpointError, match=r"expert_dtype 'fp6' is not supported \(supported: fp8, fp4\)"):
        load_model_config(pair[0])


def test_experts_keep_released_codes_on_a_gpu(tmp_path: Path) -> None:
    """A slot holds 4.25 bits per value, with the values of the bfloat16 checkpoint. Damaged scales are refused."""
    make = partial(make_checkpoint, family="deepseek_v4", dtype=torch.bfloat16)
    directory = publish_v4(make(tmp_path, hidden_size=256, moe_intermediate_size=128, intermediate_size=128))
    plain = publish_codes(directory)
    model = served_model(EngineConfig(model_path=str(directory), device="cuda"))
    form = model.expert_form("bfloat16")
    assert form.blob_bytes * 8 == 3 * 256 * 128 * 4.25
    checkpoint = open_checkpoint(directory, model)
    weights = CheckpointWeights(checkpoint, backend=CpuBackend(page_size=16), dtype=torch.bfloat16)
    views = blob_views(form, torch.empty(form.blob_bytes, dtype=torch.uint8))
    weights.fill(1, 3, views)
    for name, matrix in (("w1", views.gate), ("w3", views.up), ("w2", views.down)):
        assert torch.equal(dequantize(matrix), plain[f"layers.1.ffn.experts.3.{name}.weight"])
    path = directory / "model.safetensors"
    tensors = load_file(path)
    scales = tensors["layers.1.ffn.experts.3.w3.scale"].view(torch.uint8)
    for byte, text in (
        (0, "0 or not finite"),
        (255, "0 or not finite"),
        (129, r"from 2\^-126 to 2\^1,.* --weights bfloat16"),
    ):
        scales[5, 1] = byte
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=f"w3.scale .* a scale .*{text}"):
            CheckpointWeights(
                open_checkpoint(directory, model), backend=CpuBackend(page_size=16), dtype=torch.bfloat16
            ).fill(1, 3, views)


def test_random_weights_of_the_release_have_its_codes() -> None:
    """fp8 in attention and shared experts, fp4 in experts, as the release has them."""
    options: dict[str, Any] = {"quantization": "fp4", "load_format": "dummy", "device": "cuda", "weights": "codes"}
    model = served_model(EngineConfig(model_path=None, shape="DeepSeek-V4-Flash", **options))
    assert model.expert_form("bfloat16").blob_bytes == 3 * 4096 * 2048 * 17 // 32
    spec = model_spec(model, ())
    kept = [each for each in spec.dense() if spec.form(each, "bfloat16").tiled]
    coded = {part.key.split(".", 2)[2] for each in kept for part in each.parts}
    assert coded == {
        *(f"attn.{name}.weight" for name in ("wq_a", "wkv", "wq_b", "wo_b", "indexer.wq_b")),
        *(f"ffn.shared_experts.w{i}.weight" for i in (1, 2, 3)),
    }


@pytest.fixture(scope="module")
def with_drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = publish_v4(make_checkpoint(tmp_path_factory.mktemp("drafts"), "deepseek_v4", seed=2))
    add_v4_drafts(directory)
    return directory


def test_mtp_layer_matches_its_definition(with_drafts: Path) -> None:
    """transformers has the layer's parts: embedding, a decoder layer with a window only, and the mix before the head.

    The streams of a row are a projection of the model's streams at that row plus one of the next token's embedding.
    """
    runner = local_runner(with_drafts, dtype=torch.float32, num_pages=10, drafts=True)
    assert runner.speculation is not None
    ids = torch.randint(VOCAB_SIZE, (140,), generator=torch.Generator().manual_seed(8)).tolist()
    drafter, rows = runner.speculation.drafter, len(ids) - 1
    tensors = load_file(with_drafts / "model.safetensors")
    whole = reference_model(with_drafts, "deepseek_v4", dtype=torch.float32)
    streams: list[torch.Tensor] = []
    whole.model.hc_head.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    part = {name.removeprefix("mtp.0."): x for name, x in tensors.items() if name.startswith("mtp.0.")}
    with torch.inference_mode():
        plan = runner.backend.plan(Step(prefill=(chunk(ids, 0, rows, num_pages=10, prompt=True),)))
        shifted = torch.zeros(plan.num_rows, dtype=torch.int64)
        shifted[:rows] = torch.tensor(ids[1:])
        found = drafter.head(drafter.forward(shifted, runner.model.hidden(plan), plan))[:rows]

        whole(torch.tensor([ids[:-1]]))
        token = rms(whole.model.embed_tokens(torch.tensor([ids[1:]])), part["enorm.weight"])
        hidden = rms(streams[0], part["hnorm.weight"]) @ part["h_proj.weight"].T
        joined = hidden + (token @ part["e_proj.weight"].T).unsqueeze(2)
        expected = whole.lm_head(rms(alone_layer(with_drafts, whole, part, joined), part["norm.weight"]))[0]
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def alone_layer(model: Path, whole: Any, part: dict[str, torch.Tensor], streams: torch.Tensor) -> torch.Tensor:
    """Run a layer of multi-token prediction as a model of one layer, from given streams, up to the last norm."""
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers, config.layer_types, config.mlp_layer_types = 1, ["sliding_attention"], ["moe"]
    layer = type(whole)(config).eval()
    saved = {f"layers.0.{name}": x for name, x in part.items() if name.startswith(("attn", "ffn", "hc_attn", "hc_ffn"))}
    saved |= {name: x for name, x in part.items() if name.startswith("hc_head")}
    kept = load_file(model / "model.safetensors")
    saved |= {name: kept[name] for name in ("embed.weight", "head.weight", "norm.weight")}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file(saved, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        layer = type(whole).from_pretrained(folder, dtype=torch.float32).eval()
    mixed: list[torch.Tensor] = []
    layer.model.hc_head.register_forward_hook(lambda _, args, out: mixed.append(out))
    layer.model.layers[0].register_forward_pre_hook(lambda _, args: (streams, *args[1:]))
    layer(torch.zeros(1, streams.shape[1], dtype=torch.int64))
    return mixed[0]


def test_drafts_need_rows_of_their_own(with_drafts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without spare rows in the slots, refused drafts overwrite keys that are still needed."""
    common: dict[str, Any] = {"max_num_seqs": 2, "max_batch_tokens": 160, "prefill_chunk": 128}
    with Rank(with_drafts, **common) as rank:
        expected = rank.run(requests())[0]
    drafting = {"speculate": "mtp", "draft_tokens": 3, **common}
    with Rank(with_drafts, **drafting) as rank:
        found, stats = rank.run(requests())
        assert found == expected
        assert 0.2 < stats.accepted[0] / stats.drafts[0] < 1
    monkeypatch.setattr(compressed, "SPARE", 0)
    with Rank(with_drafts, **drafting) as rank:
        assert rank.run(requests())[0] != expected


@pytest.mark.slow
def test_prompts_that_end_at_every_offset(tmp_path: Path) -> None:
    """Prompts of 129 to 256 tokens, whole, in chunks of 128 beside others, and behind a known prefix of 128."""
    directory = make_checkpoint(tmp_path, "deepseek_v4", dtype=torch.bfloat16)
    ids = torch.randint(VOCAB_SIZE, (256,), generator=torch.Generator().manual_seed(8)).tolist()
    sampling = SamplingParams(max_tokens=6, temperature=0.8, seed=4, logprobs=1, ignore_eos=True)
    asked = {str(n): (ids[:n], sampling) for n in range(129, 257)}
    common: dict[str, Any] = {"kv_memory": 64 << 20, "max_batch_tokens": 512}
    with Rank(directory, **common, max_num_seqs=1, prefill_chunk=256, prefix_caching=False) as rank:
        expected = rank.run(asked)[0]
    with Rank(directory, **common, max_num_seqs=8, prefill_chunk=128, prefix_caching=False) as rank:
        assert rank.run(asked)[0] == expected
    with Rank(directory, **common, max_num_seqs=8, prefill_chunk=256, snapshot_memory=8 << 20) as rank:
        found, stats = rank.run(asked)
        assert found == expected
        assert stats.prefix_hit_tokens > 100 * 128


# docs/deepseek_v4.md tells of a run with 200.
LONG_PROMPTS = int(os.environ.get("MOEYARD_LONG_PROMPTS", "10"))


@pytest.mark.slow
@pytest.mark.parametrize(("speculate", "draft_tokens"), [("mtp", 3), ("dspark", 5)])
def test_drafts_behind_long_prompts(speculate: str, draft_tokens: int, tmp_path: Path) -> None:
    """Prompts of 1 to 30,000 tokens, in which an indexer chooses 64 of up to 7,500 entries."""
    directory = make_checkpoint(tmp_path, "deepseek_v4", seed=2, max_position_embeddings=32768, index_topk=64)
    publish_v4(directory)
    add_v4_drafts(directory, dspark=speculate == "dspark")
    edit_config(directory, rope_scaling={"type": "yarn", "factor": 8, "original_max_position_embeddings": 4096})
    generator = torch.Generator().manual_seed(6)
    asked = {}
    for i in range(LONG_PROMPTS):
        length = round(30_000 ** (i / (LONG_PROMPTS - 1)))
        prompt = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        sampling = SamplingParams(max_tokens=24, temperature=0.8 * (i % 2), seed=i, logprobs=1, ignore_eos=True)
        asked[f"{i}: {length}"] = (prompt, sampling)
    common: dict[str, Any] = {"max_num_seqs": 8, "kv_memory": 256 << 20, "snapshot_memory": 32 << 20}
    with Rank(directory, **common) as rank:
        expected = rank.run(asked)[0]
    with Rank(directory, speculate=speculate, draft_tokens=draft_tokens, **common) as rank:
        found, stats = rank.run(asked)
    assert found == expected
    assert stats.accepted[2] > 0


PARTS = ("first", "second", "third")


def requests() -> dict[str, tuple[list[int], SamplingParams]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB_SIZE, (400,), generator=generator).tolist()
    # The second shares two blocks of 128 with the first, the third one of them.
    prompts = (ids[:280], [*ids[:256], *ids[300:330]], [*ids[:128], *ids[350:400]])
    sampling = SamplingParams(max_tokens=40, temperature=0.8, seed=4, logprobs=2, ignore_eos=True)
    return {name: (prompt, sampling) for name, prompt in zip(PARTS, prompts, strict=True)}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("options", [{"kv_memory": 1 << 20}, {"prefill_chunk": 128, "expert_slots": 3}], ids=str)
def test_prefixes_slots_and_preemption(options: dict[str, Any], tmp_path: Path) -> None:
    """Known prefixes, few pages and few expert slots change no bit."""
    model = make_checkpoint(tmp_path, "deepseek_v4")
    common = {"max_num_seqs": 4, "max_batch_tokens": 256}
    expected = {}
    for name, request in requests().items():
        with Rank(model, **common, prefix_caching=False) as rank:
            expected |= rank.run({name: request})[0]
    with Rank(model, **common, **options) as rank:
        found, stats = rank.run(requests())
        # There is no snapshot where the third prompt leaves the first one.
        assert stats.prefix_hit_tokens == 256
        scarce = rank.scheduler(num_pages=33)
        again = rank.serve(scarce, requests(), lambda _number, wanted: wanted)
        assert scarce.stats.num_preemptions > 0
    for name in PARTS:
        for answer in (found[name], again[name]):
            assert (answer.token_ids, answer.logprobs) == (expected[name].token_ids, expected[name].logprobs), name


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown ratio": ({"compress_ratios": [0, 4, 64, 4]}, r"compress_ratios has 64, .* \(supported: 0, 4, 128\)"),
    "few ratios": ({"compress_ratios": [0, 4]}, "compress_ratios is .* expected a list of 4 numbers or more"),
    "other rates": ({"compress_rates": {"compressed_sparse_attention": 8}}, "expected 4 and 128"),
    "other scores": ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
    "odd groups": ({"o_groups": 3}, "o_groups is 3, which does not divide 4 heads"),
    "odd window": ({"sliding_window": 100}, "sliding_window is 100, expected a multiple of 64"),
    "wide rotation": ({"qk_rope_head_dim": 24}, "qk_rope_head_dim is 24: expected an even number up to 16"),
    "more entries than exist": ({"index_topk": 129}, "index_topk is 129, expected an integer from 1 to 128"),
    "V4.1": ({"model_type": "deepseek_v41"}, "model_type 'deepseek_v41' is not supported"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_named(case: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v4")
    edit_config(tmp_path, **WRONG[case][0])
    with pytest.raises(CheckpointError, match=WRONG[case][1]):
        load_model_config(tmp_path)


def test_wrong_tables_of_experts_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v4")
    key = "model.layers.0.ffn.gate.tid2eid"
    file = re.escape(str(tmp_path / "model.safetensors"))
    for low, high in ((8, 8), (5, 12), (-1, 7)):
        table = torch.full((VOCAB_SIZE, 2), low)
        table[-1, 1] = high
        edit_tensors(tmp_path, add={key: table})
        with pytest.raises(CheckpointError, match=f"^{file}: {key} names experts {low} to {high}, of 8$"):
            local_runner(tmp_path, dtype=torch.float32, num_pages=4)
    edit_tensors(tmp_path, remove=(key,))
    with pytest.raises(CheckpointError, match=f"no tensor {key} of shape"):
        local_runner(tmp_path, dtype=torch.float32, num_pages=4)


def test_refusals(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "deepseek_v4")
    with pytest.raises(ValueError, match="--prefill-chunk 64: deepseek_v4 computes 128 positions of a prompt together"):
        served_model(EngineConfig(model_path=str(directory), prefill_chunk=64))
    asked = SamplingParams(max_tokens=2, kv_compression=KvCompression(method="snapkv", budget=40, window=16))
    with Rank(directory) as rank:
        submit = Submit(request_id="a", prompt_token_ids=tuple(range(100)), sampling=asked)
        refused = rank.scheduler().add(submit, b"client", 0.0)
    assert isinstance(refused, Rejected)
    assert refused.message.startswith("kv_compression is not supported for this model")
