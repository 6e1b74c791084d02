"""DSpark, the drafter of DeepSeek-V4's later releases, against its definition in plain torch; its settings and answers.

Some tests also run the steps of a GPU over the kernels' references (engine/captured_on_cpu.py). More options of
requests are in engine/test_hybrid_speculation.py and test_hybrid_speculation_cuda.py. Several ranks are in
engine/test_peer_drafts.py and e2e/test_one_answer.py.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.checkpoints import VOCAB_SIZE, add_v4_drafts, edit_config, edit_tensors, make_checkpoint, publish_v4
from tests.engine.captured_on_cpu import GPU, gpu_steps
from tests.models.test_deepseek_v4 import publish_codes
from tests.rank import Rank, Reply

from moeyard_kernels.backend import Backend
from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_worker.checkpoint.check import DRAFT_LAYER
from moeyard_worker.checkpoint.converting import dequantized
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_checkpoint
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.engine.assembly.local import PAGE_SIZE, local_runner
from moeyard_worker.engine.assembly.verify import reference_model
from moeyard_worker.engine.steps.drafting import BlockSpeculation
from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.models.families import load_model_config
from moeyard_worker.models.shapes import served_model
from moeyard_worker.protocol import SamplingParams
from moeyard_worker.scheduling.request import Request, SchedulerStats
from moeyard_worker.scheduling.step import Chunk, Step

Tensors = dict[str, torch.Tensor]
READ = (1, 3)


@pytest.fixture(scope="module")
def dspark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = publish_v4(make_checkpoint(tmp_path_factory.mktemp("dspark"), "deepseek_v4", seed=2))
    add_v4_drafts(directory, dspark=True)
    return directory


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint whose layers add as much as their random weights do."""
    directory = publish_v4(make_checkpoint(tmp_path_factory.mktemp("random"), "deepseek_v4", seed=3))
    add_v4_drafts(directory, dspark=True, scale=1.0)
    return directory


class Definition:
    """The drafter for one sequence, in fp32, with loops where that is plainer. Written from the authors' formulas."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.tensors = {name: x.float() for name, x in load_file(directory / "model.safetensors").items()}

    def logits(self, means: torch.Tensor, anchor: int) -> torch.Tensor:
        """Return [5, V] without the bias. `means` [T, n H]: of the streams behind the layers read, at all positions."""
        config, all_ = self.config, self.tensors
        main = rms(means @ all_["mtp.0.main_proj.weight"].T) * all_["mtp.0.main_norm.weight"]
        ids = [anchor, *[config["dspark_noise_token_id"]] * 4]
        streams = all_["embed.weight"][ids].unsqueeze(1).repeat(1, config["hc_mult"], 1)
        for i in range(len(READ)):
            part = {name.removeprefix(f"mtp.{i}."): x for name, x in all_.items() if name.startswith(f"mtp.{i}.")}
            for block, name in ((self.attention, "attn"), (self.experts, "ffn")):
                rows, post, comb = self.read(streams, part, name)
                result = block(rms(rows) * part[f"{name}_norm.weight"], main, part)
                mixed = torch.einsum("tjk,tjh->tkh", comb, streams)
                streams = post.unsqueeze(-1) * result.unsqueeze(1) + mixed
        flat = streams.flatten(1)
        weights = (rms(flat) @ part["hc_head_fn"].T * part["hc_head_scale"] + part["hc_head_base"]).sigmoid()
        rows = ((weights + config["hc_eps"]).unsqueeze(-1) * streams).sum(1)
        return rms(rows) * part["norm.weight"] @ all_["head.weight"].T

    def bias(self, token: int) -> torch.Tensor:
        first, second = (self.tensors[f"mtp.1.markov_head.markov_w{i}.weight"] for i in (1, 2))
        return second @ first[token]

    def read(self, streams: torch.Tensor, part: Tensors, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count, eps = streams.shape[1], self.config["hc_eps"]
        mixed = rms(streams.flatten(1)) @ part[f"hc_{name}_fn"].T
        scale, base = part[f"hc_{name}_scale"], part[f"hc_{name}_base"]
        before, post, comb = mixed.split((count, count, count * count), 1)
        before = (before * scale[0] + base[:count]).sigmoid() + eps
        post = 2 * (post * scale[1] + base[count : 2 * count]).sigmoid()
        comb = (comb * scale[2] + base[2 * count :]).view(-1, count, count).softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return (before.unsqueeze(-1) * streams).sum(1), post, comb

    def attention(self, x: torch.Tensor, main: torch.Tensor, part: Tensors) -> torch.Tensor:
        config, known = self.config, main.shape[0]
        heads, dim, groups = (config[key] for key in ("num_attention_heads", "head_dim", "o_groups"))
        window = range(max(0, known - config["sliding_window"]), known)
        places = torch.arange(known, known + 5)
        q = rms(x @ part["attn.wq_a.weight"].T) * part["attn.q_norm.weight"] @ part["attn.wq_b.weight"].T
        q = self.rotated(rms(q.view(5, heads, dim)), places)
        rows = torch.cat((main[window.start :], x)) @ part["attn.wkv.weight"].T
        keys = rms(rows) * part["attn.kv_norm.weight"]
        keys = self.rotated(keys.unsqueeze(1), torch.cat((torch.tensor(list(window)), places)))[:, 0]
        out = torch.zeros(5, heads, dim)
        for row in range(5):
            for head in range(heads):
                scores = (keys @ q[row, head] * dim**-0.5).exp()
                total = scores.sum() + part["attn.attn_sink"][head].exp()
                out[row, head] = scores @ keys / total
        out = self.rotated(out, -places).view(5, groups, -1)
        low = part["attn.wo_a.weight"].view(groups, config["o_lora_rank"], -1)
        return torch.einsum("tgd,grd->tgr", out, low).flatten(1) @ part["attn.wo_b.weight"].T

    def rotated(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Rotate pairs of the last values by the plain theta, as complex numbers."""
        width = self.config["qk_rope_head_dim"]
        angles = self.config["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        turn = torch.polar(torch.ones(len(places), width // 2), places.unsqueeze(1) * angles).unsqueeze(1)
        pairs = torch.view_as_complex(x[..., -width:].unflatten(-1, (-1, 2)).contiguous()) * turn
        return torch.cat((x[..., :-width], torch.view_as_real(pairs).flatten(-2)), -1)

    def experts(self, x: torch.Tensor, _main: torch.Tensor, part: Tensors) -> torch.Tensor:
        config = self.config
        scores = F.softplus(x @ part["ffn.gate.weight"].T).sqrt()
        chosen = (scores + part["ffn.gate.bias"]).topk(config["num_experts_per_tok"]).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) * config["routed_scaling_factor"]
        out = self.mlp(x, part, "ffn.shared_experts.")
        for row in range(len(x)):
            for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
                out[row] += weight * self.mlp(x[row], part, f"ffn.experts.{expert}.")
        return out

    def mlp(self, x: torch.Tensor, part: Tensors, at: str) -> torch.Tensor:
        limit = self.config["swiglu_limit"]
        gate, up = ((x @ part[f"{at}{name}.weight"].T) for name in ("w1", "w3"))
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) @ part[f"{at}w2.weight"].T


def rms(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def rows_of(ids: list[int], start: int, *, prompt: bool) -> Chunk:
    """Return rows of the only sequence, in the first pages."""
    common: dict[str, Any] = {"key": (b"", ""), "pages": tuple(range(26)), "state_slot": 0, "num_sampled": 1}
    return Chunk(start=start, token_ids=tuple(ids), prompt=prompt, **common)


BACKENDS = pytest.mark.parametrize("backend", ["cpu", "gpu"])


def runner_of(directory: Path, kind: str) -> Runner:
    """Return a runner with drafts on a CPU, or with a GPU's backend, which runs the references if there is no GPU."""
    backend: Backend = CpuBackend(page_size=PAGE_SIZE)
    if kind == "gpu":
        backend = CudaBackend(page_size=PAGE_SIZE, device=torch.device("cuda" if GPU else "cpu"))
    return local_runner(directory, dtype=torch.float32, num_pages=26, drafts=True, backend=backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_mean_of_streams_has_the_same_bits_in_every_step(dtype: torch.dtype) -> None:
    """Else a step's padding could change a draft."""
    streams = torch.randn(700, 4, 4096).to("cuda" if GPU else "cpu", dtype)
    whole = streams.mean(1)
    for count in (1, 2, 5, 8, 30, 64, 384):
        assert torch.equal(streams[:count].mean(1), whole[:count]), count
        assert torch.equal(streams[-count:].mean(1), whole[-count:]), count


@BACKENDS
@pytest.mark.parametrize("length", [1, 6, 127, 128, 131, 270])
def test_blocks_match_the_definition(random: Path, length: int, backend: str) -> None:
    """Keys of prompts in chunks of 128, then of output positions, some of which are refused. Then a block."""
    runner = runner_of(random, backend)
    assert isinstance(runner.speculation, BlockSpeculation)
    drafter, model = runner.speculation.drafter, runner.model
    ids = torch.randint(VOCAB_SIZE, (length + 8,), generator=torch.Generator().manual_seed(length)).tolist()
    whole, definition = reference_model(random, "deepseek_v4", dtype=torch.float32), Definition(random)
    streams: dict[int, torch.Tensor] = {}
    for i in READ:
        whole.model.layers[i].register_forward_hook(lambda _, args, out, i=i: streams.__setitem__(i, out))
    chunks = [rows_of(ids[i : min(length, i + 128)], i, prompt=True) for i in range(0, length, 128)]
    steps = [Step(prefill=(each,)) for each in chunks]
    # Two output positions, then refused drafts behind them, then the true tokens in their place.
    steps += [
        Step(decode=(rows_of(ids[length : length + 2], length, prompt=False),)),
        Step(decode=(rows_of([ids[length + 2], 7, 8, 9, 3, 1], length + 2, prompt=False),)),
    ]
    known = length + 5
    steps.append(Step(decode=(rows_of(ids[length + 3 : known], length + 3, prompt=False),)))
    with torch.inference_mode():
        for step in steps:
            plan = runner.backend.plan(step)
            drafter.store(model.hidden(plan), plan)
        noise = definition.config["dspark_noise_token_id"]
        plan = runner.backend.plan(Step(decode=(rows_of([ids[known], *[noise] * 4], known, prompt=False),)))
        found = drafter.head(drafter.forward(plan)[:5]).cpu()
        whole(torch.tensor([ids[:known]]))
        means = torch.cat([streams[i][0].mean(1) for i in READ], 1)
        expected = definition.logits(means, ids[known])
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4
        token = torch.tensor([ids[known], 3])
        biases = torch.stack([definition.bias(int(each)) for each in token])
        bias = drafter.bias(token.to(runner.backend.device)).cpu()
        assert float((bias - biases).abs().max() / biases.abs().max()) < 1e-4
        # The comparison would show a wrong key: what the drafter reads matters.
        other = definition.logits(means.flip(0) if known > 6 else -means, ids[known])
        assert float((other - expected).abs().max() / expected.abs().max()) > 0.1


def asked(lengths: tuple[int, ...], **sampling: Any) -> dict[str, tuple[list[int], SamplingParams]]:
    """Return a request per length of the prompt."""
    generator = torch.Generator().manual_seed(5)
    params = SamplingParams(**{"max_tokens": 30, "temperature": 0.0, "logprobs": 1, "ignore_eos": True, **sampling})
    return {str(i): (torch.randint(VOCAB_SIZE, (i,), generator=generator).tolist(), params) for i in lengths}


DRAFTING: dict[str, Any] = {"speculate": "dspark", "draft_tokens": 5}
LIMITS: dict[str, Any] = {"max_num_seqs": 5, "prefill_chunk": 128, "max_batch_tokens": 160}


ON_CPU = pytest.mark.skipif(GPU, reason="its steps would run on the GPU, in bfloat16")
STEPS = pytest.mark.parametrize(
    "steps", ["cpu", pytest.param("graphs", marks=ON_CPU), pytest.param("launches", marks=(ON_CPU, pytest.mark.slow))]
)


@contextmanager
def drafting(directory: Path, steps: str) -> Iterator[Rank]:
    """Load a rank that drafts, with the steps of a CPU, or with those of a GPU: captured, or launched."""
    with nullcontext() if steps == "cpu" else gpu_steps(), Rank(directory, **DRAFTING, **LIMITS) as rank:
        if isinstance(rank.worker.runner, GpuRunner):
            rank.worker.runner.eager = steps == "launches"
        yield rank
        if isinstance(rank.worker.runner, GpuRunner):
            assert (rank.worker.runner.num_replayed > 0) == (steps == "graphs")


@pytest.mark.sampled(0)
@STEPS
def test_all_drafts_are_right_where_the_bias_is_the_model(tmp_path: Path, steps: str) -> None:
    """The layers add nothing, so the last token decides. The bias is the model's logits, and outweighs noise tokens."""
    directory = publish_v4(make_checkpoint(tmp_path, "deepseek_v4", seed=4))
    add_v4_drafts(directory, dspark=True, scale=0.0)
    tensors = load_file(directory / "model.safetensors")
    bias = {"w1": rms(tensors["embed.weight"]) * tensors["norm.weight"], "w2": 1e4 * tensors["head.weight"]}
    edit_tensors(directory, add={f"mtp.1.markov_head.markov_{name}.weight": x for name, x in bias.items()})
    requests = asked((1, 5, 127, 128, 200))
    with Rank(directory, **LIMITS) as plain, drafting(directory, steps) as rank:
        for name, request in requests.items():
            found, stats = rank.run({name: request}, max_in_flight=1)
            same(found, plain.run({name: request})[0], steps)
            # Steps of 1, 6, 6, 6, 6 and 5 tokens. Behind a step with the whole prompt: 1, 2, 6, 6, 6, 6, 3.
            expected = [6, 5, 4, 4, 4] if len(request[0]) <= LIMITS["prefill_chunk"] else [5, 5, 5, 5, 4]
            assert stats.drafts == stats.accepted == expected, name


def same(answers: dict[str, Reply], expected: dict[str, Reply], steps: str) -> None:
    """Compare all bits on a CPU. Sums of a GPU's references may depend on the number of rows."""
    if steps == "cpu":
        assert answers == expected
        return
    for name, answer in answers.items():
        assert answer.token_ids == expected[name].token_ids, name
        found, wanted = (torch.tensor([entry.logprob for entry in each[name].logprobs]) for each in (answers, expected))
        assert torch.allclose(found, wanted, atol=1e-4), name


@STEPS
def test_drafts_of_the_engine_match_the_definition(dspark: Path, random: Path, steps: str) -> None:
    """Known prefixes, chunks, neighbours, and drafts that were refused or kept before."""
    assert check_drafts(dspark, steps).accepted[1] > 0
    stats = check_drafts(random, steps)
    assert 0 < stats.accepted[0] < 0.5 * stats.drafts[0]


def check_drafts(directory: Path, steps: str) -> SchedulerStats:
    definition, whole = Definition(directory), reference_model(directory, "deepseek_v4", dtype=torch.float32)
    streams: dict[int, torch.Tensor] = {}
    for i in READ:
        whole.model.layers[i].register_forward_hook(lambda _, args, out, i=i: streams.__setitem__(i, out))
    requests = asked((140, 130, 3), max_tokens=14)
    # The third has the prefix of the first, which runs alone before the others.
    requests["behind"] = ([*requests["140"][0], 9, 9], requests["140"][1])
    made: list[tuple[list[int], tuple[int, ...]]] = []
    with drafting(directory, steps) as rank:
        launch: Any = rank.worker.runner.launch

        def spy(step: Step, asking: Sequence[Request], **options: Any) -> Any:
            launched = launch(step, asking, **options)
            for request, result in zip(asking, launched.results, strict=True):
                made.append(([*request.prompt, *request.output, *result.token_ids], result.drafts))
            return launched

        rank.worker.runner.launch = spy  # type: ignore[method-assign]
        # Some steps draft less or nothing.
        _, stats = rank.run(requests, lambda number, wanted: min(wanted, number % 4 * 2), max_in_flight=1)
    assert stats.prefix_hit_tokens == 128
    assert {len(drafts) for _, drafts in made} >= {0, 1, 2, 4, 5}
    with torch.inference_mode():
        for known, drafts in made:
            whole(torch.tensor([known[:-1]]))
            logits = definition.logits(torch.cat([streams[i][0].mean(1) for i in READ], 1), known[-1])
            last = known[-1]
            for row, draft in enumerate(drafts):
                assert draft == int((logits[row] + definition.bias(last)).argmax()), (len(known), row)
                last = draft
    return stats


@pytest.mark.sampled(0)
@STEPS
def test_blocks_end_at_the_last_position(dspark: Path, steps: str) -> None:
    last = load_model_config(dspark).max_position
    requests = {
        name: (ids, replace(params, max_tokens=last - len(ids)))
        for name, (ids, params) in asked((last - 29, last - 15, last - 5)).items()
    }
    with Rank(dspark, **LIMITS) as plain, drafting(dspark, steps) as rank:
        found, stats = rank.run(requests)
        same(found, plain.run(requests)[0], steps)
    assert [len(found[name].token_ids) for name in requests] == [29, 15, 5]
    assert stats.accepted[0] > 0


def test_released_codes(tmp_path: Path) -> None:
    """Drafts of fp8 and fp4 weights are those of the bfloat16 weights that they stand for."""
    pair, runs = (tmp_path / "codes", tmp_path / "plain"), []
    for directory in pair:
        publish_v4(make_checkpoint(directory, "deepseek_v4", dtype=torch.bfloat16))
        add_v4_drafts(directory, dspark=True)
    save_file(publish_codes(pair[0]), pair[1] / "model.safetensors", metadata={"format": "pt"})
    for directory in pair:
        assert ("mtp.0.main_proj.scale" in load_file(directory / "model.safetensors")) == (directory == pair[0])
        with Rank(directory, **DRAFTING, **LIMITS) as rank:
            answers, stats = rank.run(asked((5, 140)))
            runs.append((answers, stats.drafts, stats.accepted))
    assert runs[0] == runs[1]
    out = tmp_path / "out"
    dequantized(pair[0]).write(out, lambda _: None)
    assert load_model_config(out).with_drafts() == load_model_config(pair[1]).with_drafts()


def test_tensors_are_read_on_request(dspark: Path, tmp_path: Path) -> None:
    """Only the confidence head is never read. A missing or unknown tensor is named."""
    model = load_model_config(dspark)
    reasons = open_checkpoint(dspark, model).skipped
    assert {key.partition(".")[0] for key in reasons} == {"mtp"}
    assert DRAFT_LAYER in reasons.values()
    model = served_model(EngineConfig(model_path=str(dspark), **DRAFTING))
    assert model.moe_layers == tuple(range(6))
    assert list(open_checkpoint(dspark, model).skipped) == ["mtp.1.confidence_head.proj.weight"]
    directory = shutil.copytree(dspark, tmp_path / "other")
    edit_tensors(directory, add={"mtp.2.norm.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"unexpected tensor mtp\.2\.norm\.weight"):
        open_checkpoint(directory, model)
    edit_tensors(directory, remove=("mtp.2.norm.weight", "mtp.0.main_norm.weight"))
    with pytest.raises(CheckpointError, match=r"no tensor mtp\.0\.main_norm\.weight of shape"):
        open_checkpoint(directory, model)


@BACKENDS
def test_weights_change_in_place(dspark: Path, random: Path, backend: str) -> None:
    runner, wanted = (runner_of(each, backend) for each in (random, dspark))
    checkpoint = open_checkpoint(dspark, wanted.config)
    weights = CheckpointWeights(checkpoint, backend=runner.backend, dtype=torch.float32)
    runner.overwrite(checkpoint.spec, weights.load)
    found = dict(runner.weights())
    assert any(name.startswith("drafts") for name in found)
    for name, x in wanted.weights():
        assert torch.equal(found[name], x), name


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"dspark_target_layer_ids": None}, r"dspark_target_layer_ids is \[\], expected 1 to 8 ascending"),
    "descending layers": (
        {"dspark_target_layer_ids": [3, 1]},
        r"is \[3, 1\], expected 1 to 8 ascending layers below 4",
    ),
    "unknown layer": ({"dspark_target_layer_ids": [1, 4]}, r"is \[1, 4\], expected .* below 4"),
    "outside the vocabulary": ({"dspark_noise_token_id": VOCAB_SIZE}, "dspark_noise_token_id is"),
    "no rank": ({"dspark_markov_rank": 0}, "dspark_markov_rank is 0, expected an integer from 1"),
    "no block": ({"dspark_block_size": 0}, "dspark_block_size is 0, expected an integer from 1 to 16"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_named(case: str, dspark: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((dspark / "config.json").read_text())
    edit_config(tmp_path, **WRONG[case][0])
    with pytest.raises(CheckpointError, match=WRONG[case][1]):
        load_model_config(tmp_path)


def test_refusals(dspark: Path, tmp_path: Path) -> None:
    """They come before any weight is read."""
    drafts = {"model_path": str(dspark), **DRAFTING}
    with pytest.raises(
        ValueError, match=r"--speculate mtp: .*: the drafter of this model is DSpark, use --speculate ds"
    ):
        served_model(EngineConfig(model_path=str(dspark), speculate="mtp"))
    with pytest.raises(ValueError, match="blocks of 5 drafts needs 160 rows of a step, --max-batch-tokens is 128"):
        served_model(EngineConfig(**{**drafts, "draft_tokens": 1}, max_num_seqs=32, max_batch_tokens=128))
    april = publish_v4(make_checkpoint(tmp_path, "deepseek_v4"))
    with pytest.raises(ValueError, match=r"this model has no drafter DSpark \(config.json: dspark_block_size\)"):
        served_model(EngineConfig(**{**drafts, "model_path": str(april)}))
