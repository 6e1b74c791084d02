"""The effective settings of a server: their values, where these come from, and that no secret is among them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import make_checkpoint

from moeyard.cli.commands import build_parser, with_sources
from moeyard.fleet.messages import Rank
from moeyard.local.effective import effective_settings
from moeyard.local.serve import router_config
from moeyard.local.serve_config import ServeConfig
from moeyard.local.settings import access_config, answer_formats_of, api_settings, engine_config, log_config
from moeyard.options import declared, values
from moeyard_router.config import AccessConfig, RouterConfig, Setting
from moeyard_router.text.chat import open_codec
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.models.shapes import served_model

SECRET = "sk-5d1f2a9b"
REPORT = {
    "max_model_len": 96,
    "prefix_caching": True,
    "fingerprint": "f",
    "dtype": "bfloat16",
    "exchange": "local",
    "exchange_why": "one worker",
    "num_pages": 12,
    "expert_slots": 7,
    "num_experts": 8,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_checkpoint(tmp_path_factory.mktemp("hidden") / "tiny", "qwen3_moe", tokenizer=True)
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    return directory


def effective(*words: str, **report: Any) -> dict[str, Setting]:
    """Return the settings of `moeyard serve` with these arguments, by name."""
    line = ["serve", *words]
    args = with_sources(build_parser().parse_args(line), line)
    access, log = access_config(args), log_config(args)
    config = engine_config(args)
    api, model = api_settings(args, config), served_model(config)
    ranks = [Rank(rank=0, frontend="ipc://x", metrics_url="", report={**REPORT, **report})]
    router = router_config(args, config, model, api=api, ranks=ranks, port=8123)
    found = effective_settings(
        args,
        config,
        model=model,
        options=ServeConfig(**values(ServeConfig, args)),
        router=dataclasses.replace(router, access=access, max_connections=500),
        log=log,
        api=api,
        formats=answer_formats_of(open_codec(Path(str(config.model_path)), api.chat_template), api),
        ranks=ranks,
    )
    assert len({each.name for each in found}) == len(found)
    groups = [each.group for each in found]
    assert [g for i, g in enumerate(groups) if g not in groups[:i]] == list(dict.fromkeys(groups))
    json.dumps([dataclasses.asdict(each) for each in found])
    return {each.name: each for each in found}


def test_every_flag_has_a_setting(checkpoint: Path) -> None:
    found = effective(str(checkpoint))
    for config in (EngineConfig, ServeConfig, RouterConfig, AccessConfig):
        for field, option, _ in declared(config):
            flag = option.flag or f"--{field.name.replace('_', '-')}"
            assert flag.removeprefix("--").removeprefix("no-") in found, flag


def test_values_and_sources(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "server.yml"
    file.write_text("max-num-seqs: 7\nprefill-chunk: 64\nno-prefix-caching: true\naccess-log: false\n")
    monkeypatch.setenv("MOEYARD_API_KEY", SECRET)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    found = effective(
        str(checkpoint),
        *("--config", str(file), "--prefill-chunk", "32", "--kv-memory", "64MiB", "--port", "0", "--device", "cpu"),
        *("--otlp-traces-endpoint", f"http://user:{SECRET}@collector:4318/v1/traces?token={SECRET}"),
    )

    def of(name: str) -> tuple[Any, str]:
        return found[name].value, found[name].source

    assert of("model") == ("tiny", "flag")
    assert of("max-num-seqs") == (7, "config file")
    assert of("prefill-chunk") == (32, "flag"), "the command line goes first"
    assert of("prefix-caching") == (False, "config file")
    assert of("access-log") == (False, "config file")
    assert of("kv-memory") == ("64 MiB", "flag")
    assert of("config") == ("server.yml", "flag")
    assert of("device") == ("cpu", "flag")
    assert of("threads") == (1, "default")
    assert of("dtype") == ("bfloat16", "checkpoint")
    assert of("exchange") == ("local", "derived")
    assert found["exchange"].why == "one worker"
    assert of("max-model-len") == (96, "derived")
    assert found["max-model-len"].why == "what the KV pages hold"
    assert found["max-queue-seconds"].why.startswith("no limit for a burst")
    assert of("expert-slots") == (7, "derived")
    assert of("max-inflight") == (7 + 1024, "derived")
    assert of("port")[0] == 8123
    assert of("served-model-name") == (["tiny"], "derived")
    assert of("default temperature") == (0.6, "checkpoint")
    assert of("default top_k") == (20, "checkpoint")
    assert of("API keys") == (1, "environment")
    assert of("otlp-traces-protocol") == ("grpc", "environment")
    assert of("otlp-traces-endpoint") == ("http://collector:4318/v1/traces", "flag")
    assert of("connections") == (500, "derived")
    text = json.dumps([dataclasses.asdict(each) for each in found.values()])
    assert SECRET not in text
    assert str(checkpoint.parent) not in text
    assert str(tmp_path) not in text


def test_given_values_are_not_called_derived(checkpoint: Path) -> None:
    found = effective(
        str(checkpoint),
        *("--max-model-len", "96", "--max-inflight", "9", "--expert-slots", "5", "--tool-call-parser", "none"),
        *("--served-model-name", "a", "org/b", "--dtype", "float32", "--max-num-seqs", "3"),
        expert_slots=5,
    )
    for name, value in (
        ("max-model-len", 96),
        ("max-inflight", 9),
        ("expert-slots", 5),
        ("tool-call-parser", "none"),
        ("served-model-name", ["a", "org/b"]),
        ("dtype", "float32"),
        ("max-num-seqs", 3),
    ):
        assert (found[name].value, found[name].source) == (value, "flag")


def test_device_has_its_reason(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeyard.local.device_choice._DRIVER_FILES", ())
    device = effective(str(checkpoint))["device"]
    assert (device.value, device.source, device.why) == ("cpu", "derived", "auto: no NVIDIA driver here")


def test_longest_sequence_is_the_models(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    limit = config["max_position_embeddings"]
    found = effective(str(checkpoint), max_model_len=limit)["max-model-len"]
    assert (found.value, found.source, found.why) == (limit, "checkpoint", "the model's limit")
