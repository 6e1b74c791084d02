"""Config and tokenizer out of a GGUF file's metadata equal those of the original directory, or are refused by name."""

import inspect
import json
import random
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import BOS_ID, DEMO, EOS_ID, MLA, VOCAB_SIZE, edit_config, make_checkpoint
from tokenizers import Tokenizer
from transformers import GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from moeyard.local import gguf_description
from moeyard.local.model_source import gguf_source
from moeyard_router.text.chat import TextCodec
from moeyard_router.text.template import ChatTemplate
from moeyard_worker.checkpoint.gguf_config import shortest
from moeyard_worker.checkpoint.gguf_tokenizer import PRE_TOKENIZERS
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.fields import read_json
from moeyard_worker.models.families import load_model_config
from moeyard_worker.tokenizer import read_tokenizer

# The package is needed to write files only. An environment without it cannot run these tests.
pytest.importorskip("gguf")
files = pytest.importorskip("tests.gguf_files")

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
DEEPSEEK_YARN = {**YARN, "rope_theta": 5e4, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
# Families, with settings whose values a file of 32-bit numbers must give back exactly.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"head_dim": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960}),
    "qwen3_moe yarn": ("qwen3_moe", {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    "qwen3_moe linear": (
        "qwen3_moe",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5e6}, "tie_word_embeddings": True},
    ),
    "olmoe": ("olmoe", {"rms_norm_eps": 1e-5, "norm_topk_prob": False}),
    "mixtral": ("mixtral", {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "deepseek_v2": ("deepseek_v2", {**MLA, "n_group": 1, "topk_group": 1, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v3": ("deepseek_v3", {**MLA, "rope_parameters": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v3 plain": ("deepseek_v3", {**MLA, "q_lora_rank": None, "norm_topk_prob": False}),
    "kimi_k2": ("kimi_k2", {**MLA, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}),
}


GROUPS = {"deepseek2.expert_group_count": 4, "deepseek2.expert_group_used_count": 2}
ADD_BOS = {"tokenizer.ggml.add_bos_token": True}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gguf_description, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def write(tmp_path: Path, family: str, metadata: dict[str, Any] | None = None, **settings: Any) -> tuple[Path, Path]:
    """Return (original directory, GGUF file). The tokenizer is that of bytes, with one merge."""
    source = make_checkpoint(tmp_path / "source", family, tokenizer=True, **settings)
    keys = files.tokenizer_keys(source, "gpt-2", VOCAB_SIZE)
    keys["tokenizer.ggml.tokens"][-1], keys["tokenizer.ggml.token_type"][-1] = "ab", 1
    keys |= {"tokenizer.ggml.merges": ["a b"], **(metadata or {})}
    file = files.write_gguf(source, tmp_path / "plain", tmp_path / "m.gguf", lambda _: "F16", metadata=keys)
    return source, file


def describe(file: Path, config: Path | None = None, tokenizer: Path | None = None) -> Path:
    return gguf_description.gguf_description(file, config=config, tokenizer=tokenizer)


@pytest.mark.parametrize("case", CASES)
def test_config_equals_that_of_the_original(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    source, file = write(tmp_path, family, **settings)
    edit_config(source, dtype="bfloat16")
    (source / "generation_config.json").unlink()
    wanted, found = load_model_config(source, gguf=True), load_model_config(describe(file), gguf=True)
    # Their formats are equal, and the file does not say which of both it is.
    assert found == replace(wanted, family=wanted.family.replace("kimi_k2", "deepseek_v3"))


def test_config_has_the_values_that_transformers_finds(tmp_path: Path) -> None:
    _, file = write(tmp_path, "qwen3_moe")
    found, theirs = read_json(describe(file) / "config.json"), load_gguf_checkpoint(str(file))["config"]
    shared = found.keys() & theirs.keys()
    assert len(shared) > 12
    found["eos_token_id"] = found["eos_token_id"][0]
    for key in shared:
        wanted = theirs[key]
        assert found[key] == (pytest.approx(wanted, rel=1e-7) if isinstance(wanted, float) else wanted), key


def test_shortest_numbers_are_those_of_config_files() -> None:
    numbers = [1e-6, 1e-5, 1e4, 1e6, 5e6, 2.5, 2.827, 16.0, 0.707, 0.1, 3.4e38, 1e-45]
    assert [shortest(float(files.np.float32(number))) for number in numbers] == numbers
    assert shortest(1e300) == 1e300


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("qwen3_moe", {"qwen3moe.rope.freq_base": None}, r"qwen3moe\.rope\.freq_base is missing; give .* --hf-config"),
        ("qwen3_moe", {"qwen3moe.context_length": None}, r"qwen3moe\.context_length is missing"),
        ("qwen3_moe", {"qwen3moe.expert_feed_forward_length": None}, r"expert_feed_forward_length is missing"),
        ("qwen3_moe", {"qwen3moe.rope.dimension_count": 8}, r"dimension_count is 8, but 16 follows from the rest"),
        ("qwen3_moe", {"qwen3moe.expert_shared_count": 1}, r"expert_shared_count is a key that is not known; give"),
        ("qwen3_moe", {"qwen3moe.attention.head_count": [4, 4, 4]}, r"head_count is \(\), expected an integer"),
        ("qwen3_moe", {"qwen3moe.rope.scaling.type": "longrope"}, r"'longrope' is not supported .*none, linear, yarn"),
        ("olmoe", {"olmoe.attention.clamp_kqv": 8.0}, r"olmoe\.attention\.clamp_kqv is a key that is not known"),
        ("mixtral", {"llama.expert_count": None}, r"llama\.expert_count is missing, and only models with experts"),
        ("mixtral", {"llama.vocab_size": 99}, r"llama\.vocab_size is 99, but 272 follows from the rest"),
        ("deepseek_v3", {"deepseek2.expert_group_count": None}, r"deepseek2\.expert_group_count is missing"),
        ("deepseek_v2", GROUPS, r"is 4, and no key says how DeepSeek-V2 chooses groups"),
        ("qwen3_moe", {"tokenizer.ggml.model": "llama"}, r"ggml\.model is 'llama', .*supported: gpt2.; give .*--token"),
        ("qwen3_moe", {"tokenizer.ggml.pre": "tekken"}, r"ggml\.pre is 'tekken', which is not supported .*gpt-2, olmo"),
        ("qwen3_moe", {"tokenizer.ggml.pre": None}, r"ggml\.pre is None, which is not supported"),
        ("qwen3_moe", {"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens is missing, or no list of strings"),
        ("qwen3_moe", {"tokenizer.ggml.tokens": ["a"] * 272}, r"tokenizer\.ggml\.tokens holds a token twice"),
        ("qwen3_moe", {"tokenizer.ggml.token_type": [1, 1]}, r"token_type does not give each of the 272 tokens"),
        ("qwen3_moe", {"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges is missing, or no list of strings"),
        ("qwen3_moe", {"tokenizer.ggml.merges": ["ab"]}, r"tokenizer\.ggml\.merges or the tokens cannot be used"),
        (
            "qwen3_moe",
            {**ADD_BOS, "tokenizer.ggml.bos_token_id": None},
            r"add_bos_token is true, but .*bos_token_id is missing",
        ),
        ("qwen3_moe", {"tokenizer.ggml.eos_token_id": 272}, r"eos_token_id is 272, but there are 272 tokens"),
    ],
)
def test_what_a_file_does_not_determine_is_refused(
    family: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = MLA if family.startswith("deepseek") else {}
    _, file = write(tmp_path, family, metadata, **settings)
    with pytest.raises(CheckpointError, match=message) as caught:
        describe(file)
    assert str(caught.value).startswith(str(file))
    assert " DIR" in str(caught.value)


def gpt2(spec: dict[str, Any]) -> None:
    """Keep the demo's own tokenizer, whose pre-tokenizer is that of GPT-2."""


def split(spec: dict[str, Any], *patterns: str) -> None:
    parts = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in patterns
    ]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*parts, last]}


def like(spec: dict[str, Any], tokenizer: Any) -> None:
    theirs = json.loads(tokenizer(vocab={"a": 0}, merges=[])._tokenizer.to_str())
    spec |= {key: theirs[key] for key in ("normalizer", "pre_tokenizer")}


def llama3(spec: dict[str, Any]) -> None:
    split(spec, inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default)
    spec["model"]["ignore_merges"] = True


def deepseek(spec: dict[str, Any]) -> None:
    last = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    last += "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    split(spec, r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", last)
    spec["normalizer"] = {"type": "Sequence", "normalizers": []}


# The original tokenizers: transformers' own classes, or the parts of the published tokenizer.json.
ORIGINALS: dict[str, Callable[[dict[str, Any]], None]] = {
    "gpt-2": gpt2,
    "qwen2": lambda spec: like(spec, Qwen2Tokenizer),
    "olmo": lambda spec: like(spec, GPTNeoXTokenizer),
    "llama-bpe": llama3,
    "deepseek-v3": deepseek,
}
PIECES = (
    *(
        "a",
        "Z",
        "the",
        " The",
        "é",
        "e\u0301",
        "ß",
        "ſ",
        "中文",
        "かな",
        "カナ",
        "한국",
        "й",
        "ا",
        "क्षि",
        "กำ",
        "\u200d",
    ),
    *(
        "1",
        "12",
        "1234567",
        "٣",
        "Ⅳ",
        "½",
        " ",
        "  ",
        "\t",
        "\n",
        "\r\n",
        "\n\n ",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\x00",
    ),
    *(
        "'s",
        "'RE",
        "'ll",
        "’s",
        "!",
        "?!",
        "...",
        "-",
        "_",
        "#a",
        "«",
        "。",
        "€",
        "∑",
        "🦙",
        "👩‍🚀",
        "\ufeff",
        "K",
        "Å",
    ),
    *("<|begin|>", "<|end|>", "<|turn|>", "<|im_start|>", "<think>", "<thin", "|>", "<|"),
)


def texts() -> list[str]:
    """Return held-out documents of the demo, and random strings of pieces that tokenizers treat differently."""
    draw = random.Random(0)
    made = ["".join(draw.choices(PIECES, k=draw.randint(1, 12))) for _ in range(3000)]
    return [json.loads(line)["text"] for line in (DEMO / "heldout.jsonl").read_text().splitlines()] + made


def original(directory: Path, pre: str) -> Path:
    """Write the demo's description with another pre-tokenizer, and with added tokens behind the vocabulary."""
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).write_text((DEMO / name).read_text())
    spec = read_json(DEMO / "tokenizer.json")
    ORIGINALS[pre](spec)
    # Only a whole word can be one of the tokens whose merges are absent.
    del spec["model"]["merges"][-500:]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for number, (text, special) in enumerate((("<|im_start|>", True), ("<think>", False)), len(spec["model"]["vocab"])):
        spec["added_tokens"].append({"id": number, "content": text, "special": special, **flags})
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    return directory


def rendered(template: ChatTemplate | None, messages: list[dict[str, Any]]) -> str:
    assert template is not None
    return template.render(messages, add_generation_prompt=True, continue_final_message=False, variables={})


@pytest.mark.parametrize("pre", ORIGINALS)
def test_token_ids_equal_those_of_the_original(pre: str, tmp_path: Path) -> None:
    source = original(tmp_path / "original", pre)
    _, file = write(tmp_path, "qwen3_moe", files.tokenizer_keys(source, pre, 4112), vocab_size=4112)
    made = describe(file)
    theirs, ours = (Tokenizer.from_file(str(each / "tokenizer.json")) for each in (source, made))
    # The pre-tokenizer sees no special tokens, so a part of the texts is enough for them.
    for special, some in ((False, texts()), (True, texts()[:400])):
        pairs = (each.encode_batch(some, add_special_tokens=special) for each in (theirs, ours))
        for text, wanted, found in zip(some, *pairs, strict=True):
            assert found.ids == wanted.ids, repr(text)
    wanted, found = (TextCodec(each) for each in (source, made))
    assert found.special_tokens == wanted.special_tokens
    chat = [{"role": "system", "content": "a <think>"}, {"role": "user", "content": "é 12"}]
    assert rendered(found.template, chat) == rendered(wanted.template, chat)
    ids = wanted.encode("The é <think> <|im_start|> 12", add_special_tokens=False)
    assert found.decode(ids) == wanted.decode(ids)
    assert found.spell(range(4112)) == wanted.spell(range(4112))


def test_all_names_are_compared() -> None:
    assert {id(each) for each in PRE_TOKENIZERS.values()} == {id(PRE_TOKENIZERS[name]) for name in ORIGINALS}


def test_patterns_tell_the_pre_tokenizers_apart(tmp_path: Path) -> None:
    """The texts would show a wrong expression: each pair of tokenizers differs on some of them."""
    found = {}
    for pre in ORIGINALS:
        tokenizer = Tokenizer.from_file(str(original(tmp_path / pre, pre) / "tokenizer.json"))
        found[pre] = [each.ids for each in tokenizer.encode_batch(texts())]
    assert len({str(ids) for ids in found.values()}) == len(ORIGINALS)


def test_chat_templates_sampling_and_ends(tmp_path: Path) -> None:
    keys = {
        "tokenizer.chat_template": "A",
        "tokenizer.chat_template.tool_use": "B",
        "tokenizer.ggml.add_bos_token": None,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.eot_token_id": 261,
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
    }
    _, file = write(tmp_path, "qwen3_moe", keys)
    made = describe(file)
    codec = TextCodec(made)
    assert [rendered(each, []) for each in (codec.template, codec.tool_template)] == ["A", "B"]
    assert codec.encode("ab", add_special_tokens=True) == [VOCAB_SIZE - 1, EOS_ID]
    assert load_model_config(made, gguf=True).eos_token_ids == (EOS_ID, 261)
    assert read_json(made / "generation_config.json") == {"temperature": 0.6, "top_k": 20}


def test_llama_bpe_begins_with_bos_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    for number, value in enumerate((None, False, True)):
        (tmp_path / str(number)).mkdir()
        keys = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": value}
        _, file = write(tmp_path / str(number), "qwen3_moe", keys)
        wanted = [] if value is False else [BOS_ID]
        assert TextCodec(describe(file)).encode("", add_special_tokens=True) == wanted


def test_given_directories_win(tmp_path: Path, cache: Path) -> None:
    source, file = write(tmp_path, "qwen3_moe", {"tokenizer.ggml.model": "llama"})
    args = Namespace(model=str(file), hf_config_path=str(source), tokenizer=None, ray_address=None)
    assert gguf_source(args) == (str(file), str(source))
    assert not cache.exists()
    args.hf_config_path = None
    with pytest.raises(CheckpointError, match="--tokenizer DIR"):
        gguf_source(args)
    args.tokenizer = str(source)
    made = Path(gguf_source(args)[1])
    assert gguf_source(args) == (str(file), str(made))
    assert [each.name for each in cache.iterdir()] == [made.name]
    assert read_json(made / "config.json")["dtype"] == "bfloat16"
    files_read, wanted = read_tokenizer(made), read_tokenizer(source)
    assert files_read is not None
    assert wanted is not None
    assert files_read.json == wanted.json
    args.hf_config_path = str(source)
    both = Path(gguf_source(args)[1])
    assert read_json(both / "config.json") == read_json(source / "config.json")
    args.ray_address = "host:1"
    with pytest.raises(ValueError, match="--ray-address: every host needs config and tokenizer"):
        gguf_source(args)
    args.tokenizer = None
    assert gguf_source(args) == (str(file), str(source))


def test_a_directory_with_only_a_config_leaves_the_tokenizer_to_the_file(tmp_path: Path) -> None:
    source, file = write(tmp_path, "deepseek_v2", {**GROUPS}, **MLA)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).unlink()
    made = describe(file, source)
    assert read_json(made / "config.json") == read_json(source / "config.json")
    assert TextCodec(made).encode("ab", add_special_tokens=True) == [VOCAB_SIZE - 1]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = write(tmp_path, "qwen3_moe")
    monkeypatch.setattr(gguf_description, "CACHE", file)
    with pytest.raises(ValueError, match=r"m\.gguf: its description cannot be written: .*give --hf-config-path DIR"):
        describe(file)
