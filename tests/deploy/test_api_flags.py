"""Flags of the API and their config file: their meaning, and the one-line refusals."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moeyard.cli.commands import build_parser, main
from moeyard.cli.config_file import with_config_file
from moeyard.fleet.messages import Rank
from moeyard.local.before_start import check_before_start
from moeyard.local.serve import fleet_fingerprint
from moeyard.local.settings import (
    answer_formats_of,
    api_settings,
    check_compression,
    engine_config,
    sampling_defaults,
    start_notes,
)
from moeyard_router.config import RouterConfig, SamplingDefaults, WorkerAddress
from moeyard_router.text.chat import TextCodec
from moeyard_worker.checkpoint.formats.fp8 import Fp8Format, Fp8Scheme
from moeyard_worker.checkpoint.formats.module_names import ModuleNames
from moeyard_worker.models.families import load_model_config
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.shapes import SHAPES, served_model, shape_model
from moeyard_worker.protocol import KvCompression

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo"
# Qwen3's published values and more.
QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "bos_token_id": 1, "eos_token_id": [1, 2]}


def settings(*words: str) -> Any:
    """Return the API settings of a command line."""
    args = build_parser().parse_args(["serve", *words])
    return api_settings(args, engine_config(args))


@pytest.fixture
def generation(tmp_path: Path) -> Path:
    """Write a generation_config.json; return its directory."""
    (tmp_path / "generation_config.json").write_text(json.dumps(QWEN))
    return tmp_path


def test_defaults_of_a_generation_config(generation: Path) -> None:
    said = settings("--generation-config", str(generation))
    assert said.defaults == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert said.describe_defaults() == (
        f"sampling defaults of {generation}/generation_config.json: temperature 0.6, top_p 0.95, top_k 20 "
        "(--generation-config none: neutral)"
    )
    (generation / "generation_config.json").write_text(json.dumps({"max_new_tokens": 9, "min_p": None, "top_p": 1}))
    assert settings("--generation-config", str(generation)).defaults == SamplingDefaults(max_tokens=9, top_p=1.0)


def test_unknown_fields_are_refused_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings(str(DEMO)).unknown_fields == "reject"
    assert settings(str(DEMO), "--unknown-fields", "ignore").unknown_fields == "ignore"
    with pytest.raises(SystemExit):
        settings(str(DEMO), "--unknown-fields", "warn")
    assert "--unknown-fields" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown_fields: 'warn' is none of reject, ignore"):
        RouterConfig(
            model_name="m",
            model_path=None,
            workers=(WorkerAddress(rank=0, endpoint="tcp://a"),),
            max_model_len=9,
            vocab_size=9,
            unknown_fields="warn",
        )


def test_checkpoint_defaults_apply_by_default(generation: Path) -> None:
    """The directory needs no weights, because only this file is opened."""
    assert settings(str(generation)).defaults.temperature == 0.6
    for word in ("none", "vllm"):
        assert settings(str(generation), "--generation-config", word).defaults == SamplingDefaults()
    assert settings(str(generation / "..")).describe_defaults() is None
    assert settings(str(DEMO)).describe_defaults() is None
    dummy = settings("--load-format", "dummy", "--shape", "DeepSeek-V2-Lite")
    assert (dummy.defaults, dummy.names) == (SamplingDefaults(), ("DeepSeek-V2-Lite",))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', expected a number"),
        ({"temperature": -1}, "temperature: expected 0 to inf, got -1"),
        ({"top_k": 1.5}, "top_k is 1.5, expected an integer"),
        ({"top_k": True}, "top_k is True"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected 1 to inf, got 0"),
        ([], "expected a JSON object"),
    ],
)
def test_a_bad_generation_config_is_named(tmp_path: Path, values: Any, says: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=says) as caught:
        sampling_defaults(path)
    assert str(path) in str(caught.value)


def test_names() -> None:
    assert settings().names == ("demo",)
    assert settings("--served-model-name", "a", "org/b").names == ("a", "org/b")
    assert settings(str(DEMO), "--served-model-name", "a", str(DEMO)).names == ("a", str(DEMO))


def parse(tmp_path: Path, text: str, *words: str) -> Any:
    """Parse a command line with a config file of this text."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    words = ("--config", str(path), *words)
    return with_config_file(build_parser().parse_args(["serve", *words]), words)


FILE = """
# every kind of value
model: /some/model
port: 8132
served-model-name: [large, org/large]
no-prefix-caching: true
enforce_eager: false
async-scheduling: false
kv-memory: 2GiB
step-deadline: 7.5
expert-slots: null
chat-template: own.jinja
"""


def test_config_file_equals_a_command_line(tmp_path: Path) -> None:
    args = parse(tmp_path, FILE)
    plain = build_parser().parse_args(
        [
            "serve",
            "/some/model",
            "--port",
            "8132",
            "--served-model-name",
            "large",
            "org/large",
            "--no-prefix-caching",
            "--no-async-scheduling",
            "--kv-memory",
            "2GiB",
            "--step-deadline",
            "7.5",
            "--chat-template",
            "own.jinja",
        ]
    )
    left, right = (
        {k: v for k, v in vars(a).items() if k not in ("config", "parser", "command", "sources")} for a in (args, plain)
    )
    assert left == right


def test_command_line_overrides_the_file(tmp_path: Path) -> None:
    args = parse(tmp_path, FILE, "/other", "--port", "1", "--served-model-name", "x", "--async-scheduling")
    assert (args.model, args.port, args.served_model_name) == ("/other", 1, ["x"])
    assert (args.async_scheduling, args.no_prefix_caching, args.step_deadline) == (True, True, 7.5)
    assert parse(tmp_path, "").port == 8000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", ["config.yaml: 'prot' is no flag of this command"]),
        ("por: 1", ["config.yaml: 'por' is no flag"]),  # no abbreviations
        ("config: x", ["config.yaml: 'config': a config file cannot name another one"]),
        ("port: 1\n\nport: 2", ["config.yaml: line 3: 'port' is given already in line 1"]),
        ("max-num-seqs: 1\nmax_num_seqs: 2", ["config.yaml: line 2: 'max_num_seqs' is given already in line 1"]),
        ("text", ["config.yaml: expected names of flags with their values, got one value"]),
        ("run: x", ["'run' is no flag"]),
        ("port: 99999", ["config.yaml: ", "--port", "99999", "65535"]),
        ("exchange: pigeon", ["config.yaml: ", "--exchange", "pigeon"]),
        ("port: [1, 2]", ["config.yaml: 'port' takes one value, got [1, 2]"]),
        ("port: {a: 1}", ["config.yaml: 'port' takes a value or a list"]),
        ("port: false", ["config.yaml: ", "--no-port"]),
        ("- a", ["config.yaml: expected names of flags with their values, got a list"]),
        ("a: b: c", ["config.yaml: "]),
        ("workers: 0", ["--workers must be at least 1, got 0"]),
    ],
)
def test_bad_file_is_one_line(tmp_path: Path, text: str, says: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    check_line(["--config", str(path)], says, capsys)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config", "/no/file.yaml"], ["moeyard: --config /no/file.yaml: No such file"]),
        (["--hf-config-path", "/no"], ["--hf-config-path /no: only a GGUF file needs it, and the demo is none"]),
        (["--served-model-name", "a", "a"], ["--served-model-name", "'a', 'a'"]),
        (["--served-model-name", ""], ["--served-model-name", "not be empty"]),
        (["--served-model-name", "a", str(DEMO)], [f"'{DEMO}' is a directory", "MODEL stands before"]),
        (["--generation-config", "/no"], ["--generation-config /no: expected auto, none or a directory"]),
        (["--chat-template", "/no/x.jinja", "--port", "0"], ["moeyard: --chat-template /no/x.jinja: No such file"]),
        (["--chat-template", str(DEMO / "model.safetensors")], ["--chat-template ", "model.safetensors: ", "utf-8"]),
        (
            ["--load-format", "dummy", "--shape", "DeepSeek-V2-Lite", "--layers", "2", "--chat-template", "x.jinja"],
            ["chat template x.jinja: chats need a tokenizer"],
        ),
    ],
    ids=lambda value: value[0],
)
def test_bad_flag_is_one_line(words: list[str], says: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    check_line(words, says, capsys)


def test_file_flags_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether the command line or a config file gives the path, and whatever is wrong with the file."""
    config, bad = tmp_path / "config.yaml", str(DEMO / "config.json")
    for words in (
        *(["api-key-file", "/no/x"], ["ssl-certfile", "/no/x"], ["log-requests", "/no/x"], ["chat-template", "/no/x"]),
        ["ssl-keyfile", "/no/x", "ssl-certfile", bad],
        ["control-key-file", "/no/x", "control-listen", "127.0.0.1:0"],
        *(["api-key-file", str(tmp_path)], ["api-key-file", bad], ["ssl-certfile", bad]),
    ):
        flags = dict(zip(words[::2], words[1::2], strict=True))
        says = [f"moeyard: --{words[0]} {words[1]}"]
        check_line([f"--{name}={value}" for name, value in {**flags, "port": "0"}.items()], says, capsys)
        config.write_text("".join(f"{name}: {value}\n" for name, value in {**flags, "port": "0"}.items()))
        check_line(["--config", str(config)], says, capsys)


def check_line(words: list[str], says: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("moeyard: ")
    for part in says:
        assert part in line


def test_parsers_of_tool_calls_and_reasoning(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools }}<tool_call><think>")
    plain, calling = TextCodec(DEMO), TextCodec(DEMO, template)
    assert answer_formats_of(plain, settings(str(DEMO))).describe() == "tool calls: none, reasoning: none"
    assert answer_formats_of(calling, settings(str(DEMO))).describe() == "tool calls: hermes, reasoning: qwen3"
    said = settings(str(DEMO), "--tool-call-parser", "kimi_k2", "--reasoning-parser", "none")
    assert answer_formats_of(calling, said).describe() == "tool calls: kimi_k2, reasoning: none"
    assert answer_formats_of(plain, settings(str(DEMO), "--enable-auto-tool-choice", "--tool-call-parser", "hermes"))
    assert not answer_formats_of(calling, settings(str(DEMO), "--no-enable-auto-tool-choice")).auto_tools
    with pytest.raises(ValueError, match=r"^--enable-auto-tool-choice: .* name one with --tool-call-parser: hermes"):
        answer_formats_of(plain, settings(str(DEMO), "--enable-auto-tool-choice"))


def test_prompt_compression_flags() -> None:
    assert settings(str(DEMO)).kv_compression is None
    said = settings(str(DEMO), "--kv-compression", '{"method": "snapkv", "budget": 256}')
    assert said.kv_compression == KvCompression(method="snapkv", budget=256, window=32)
    assert settings(
        str(DEMO), "--device", "cuda", "--kv-compression", '{"method": "snapkv", "budget": 64}'
    ).kv_compression


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("snapkv", 'expected {"method": "snapkv", "budget": N, "window": N}, got snapkv'),
        ('{"method": "snapkv"}', "expected {"),
        ('{"method": "snapkv", "budget": 40, "pool": 5}', "expected {"),
        ('{"method": "h2o", "budget": 40}', "method 'h2o' is not one of snapkv"),
        ('{"method": "snapkv", "budget": 40.5}', "budget is 40.5, expected an integer"),
        ('{"method": "snapkv", "budget": 31}', "window 32 must be in [1, budget 31]"),
    ],
)
def test_invalid_prompt_compression_flags(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^--kv-compression: .*{re.escape(says)}"):
        settings(str(DEMO), "--kv-compression", text)


@pytest.mark.parametrize(
    "flags", ["--prefill-chunk 16", "--max-batch-tokens 31 --max-num-seqs 4", "--mixed-prefill-tokens 16"]
)
def test_window_larger_than_a_step_is_refused_at_startup(flags: str) -> None:
    """Otherwise every long prompt would be refused for a setting that its client did not choose."""
    args = build_parser().parse_args(
        ["serve", str(DEMO), *flags.split(), "--kv-compression", '{"method": "snapkv", "budget": 256}']
    )
    config = engine_config(args)
    with pytest.raises(ValueError, match=r"^--kv-compression: the window of 32 exceeds the (16|28) prompt rows"):
        check_before_start(config, load_model_config(DEMO), api=api_settings(args, config), local=True)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_default_compression_that_the_model_lacks_is_refused_at_startup(shape: str) -> None:
    """Every request would be refused for a field that its client did not send."""
    words = f"serve --load-format dummy --shape {shape} --layers 4 --kv-compression"
    args = build_parser().parse_args([*words.split(), '{"method": "snapkv", "budget": 64}'])
    config, model = engine_config(args), shape_model(shape, 4)
    if model.family == "deepseek_v4":
        with pytest.raises(ValueError, match=r"^--kv-compression: deepseek_v4 cannot be compressed, because its cache"):
            check_before_start(config, model, api=api_settings(args, config), local=True)
    else:
        check_compression(api_settings(args, config), config, model)


def test_window_fits_after_a_chunk_of_positions() -> None:
    """A chunk ends at a multiple of 64, so up to 63 rows accompany the window."""
    words = "serve --load-format dummy --shape Qwen3-Next-80B-A3B --layers 4 --max-num-seqs 1 --prefill-chunk 94"
    args = build_parser().parse_args([*words.split(), "--kv-compression", '{"method": "snapkv", "budget": 40}'])
    config, model = engine_config(args), shape_model("Qwen3-Next-80B-A3B", 4)
    with pytest.raises(ValueError, match=r"^--kv-compression: the window of 32 exceeds the 31 prompt rows"):
        check_before_start(config, model, api=api_settings(args, config), local=True)
    wider = replace(config, prefill_chunk=95)
    check_before_start(wider, model, api=api_settings(args, wider), local=True)


def notes(words: str, model: ModelConfig) -> list[str]:
    args = build_parser().parse_args(["serve", *words.split()])
    config = engine_config(args)
    return start_notes(api_settings(args, config), config, model)


def test_startup_notes_about_prompt_compression() -> None:
    """Prompts kept in part, and steps without room for them next to output; nothing otherwise."""
    demo = load_model_config(DEMO)
    assert notes(str(DEMO), demo) == []
    [kept] = notes(f'{DEMO} --kv-compression {{"method":"snapkv","budget":40}}', demo)
    assert kept.startswith("prompts of more than 40 tokens are kept in part (snapkv, window 32; --kv-compression)")
    shape = "--load-format dummy --shape Qwen3-Next-80B-A3B --layers 4 --max-num-seqs 8 --max-batch-tokens"
    model = shape_model("Qwen3-Next-80B-A3B", 4)
    assert notes(f"{shape} 71", model) == []
    [narrow] = notes(f"{shape} 70", model)
    assert narrow.startswith("--max-batch-tokens 70: qwen3_next computes 64 positions of a prompt together")
    assert narrow.endswith("7 rows of output: prompts will wait for sequences to end; 71 or more let them in")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("int4-g32", "no product reads them (their 14336 columns have 448 blocks of scales, more than 256)"),
        ("int4-g32 --weights bfloat16", None),
        ("int4-g128", None),
        ("fp8", None),
    ],
)
def test_startup_note_about_codes_that_become_bfloat16(options: str, why: str | None) -> None:
    words = f"--load-format dummy --shape Mixtral-8x7B --layers 1 --device cuda --quantization {options}"
    model = served_model(engine_config(build_parser().parse_args(["serve", *words.split()])))
    assert notes(words, model) == ([] if why is None else [f"the codes of experts become bfloat16 on the GPU: {why}"])
    assert model.expert_form("bfloat16").down.tiled == (why is None and "bfloat16" not in options)


def test_startup_note_about_what_is_never_quantised() -> None:
    demo = load_model_config(DEMO)
    weights = Fp8Format(
        file="config.json",
        markers=(),
        excluded=ModuleNames(),
        one=Fp8Scheme(128, 128),
        left_plain=("activations", "the KV cache"),
    )
    assert notes(str(DEMO), replace(demo, weights=weights)) == [
        "config.json has activations and the KV cache quantised, which the server does not do"
    ]


def test_fingerprint_of_a_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    def of(*found: str, compression: KvCompression | None = None) -> str:
        ranks = [SimpleNamespace(report={"fingerprint": each}) for each in found]
        return fleet_fingerprint(cast(list[Rank], ranks), compression)

    one = of("a")
    assert of("a", "a") == one
    assert not capsys.readouterr().err
    assert of("a", "b") == of("b", "a")
    assert "ranks differ" in capsys.readouterr().err
    assert len({one, of("b"), of("a", "b"), of("a", compression=KvCompression(method="snapkv", budget=64))}) == 4
