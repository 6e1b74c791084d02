"""Configuration checks every size, and errors name the field and the value."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeyard_worker.config import engine_config as config_module
from moeyard_worker.config.engine_config import EngineConfig, SchedulerConfig, format_size, parse_size
from moeyard_worker.experts import policies

SCHEDULER = {"num_pages": 8, "page_size": 16, "max_model_len": 64, "vocab_size": 100}
LIMITS = ("max_batch_tokens", "max_num_seqs", "prefill_chunk", "max_waiting")


@pytest.mark.parametrize("name", [*SCHEDULER, *LIMITS])
@pytest.mark.parametrize("value", [0, -16])
def test_scheduler_sizes_are_positive(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be at least 1, got {value}$"):
        SchedulerConfig(**{**SCHEDULER, name: value})


ENGINE_SIZES = ("num_workers", "page_size", "threads", "expert_slots", "expert_memory", "kv_memory", "max_model_len")


@pytest.mark.parametrize("name", [*ENGINE_SIZES, *LIMITS])
@pytest.mark.parametrize("value", [0, -16])
def test_engine_sizes_are_positive(name: str, value: int) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=rf"^{name} must be at least 1, got {value}$"):
        EngineConfig(model_path="m", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "mpi"}, "exchange 'mpi' is not one of auto, local, zmq, zmq-tcp"),
        ({"dtype": "float16"}, "dtype 'float16' is not one of auto, float32, bfloat16"),
        ({"expert_policy": "fifo"}, "expert_policy 'fifo' is not one of slru, lru"),
        ({"expert_fetch": "both"}, "expert_fetch 'both' is not one of auto, alone, shared"),
        ({"exchange": "local", "num_workers": 2}, "for one worker, got 2"),
        ({"device": "cuda:1", "num_workers": 2}, "is one GPU, num_workers 2 take one each; use device 'cuda'"),
        ({"expert_slots": 4, "expert_memory": 4096}, "not both"),
        ({"page_size": 24}, "must divide 64 .*, got 24"),
        ({"page_size": 128}, "must divide 64 .*, got 128"),
        ({"step_deadline": 0.0}, "step_deadline .*, got 0.0"),
        ({"step_deadline": float("nan")}, "step_deadline .*, got nan"),
        ({"max_num_seqs": 9, "max_batch_tokens": 8}, "max_num_seqs 9 exceeds max_batch_tokens 8"),
        ({"load_format": "gguf"}, "load_format 'gguf' is not one of auto, safetensors, dummy"),
        ({"load_format": "dummy", "shape": "s"}, "load_format dummy reads no checkpoint, got m"),
        ({"load_format": "dummy", "model_path": None}, "load_format dummy draws the weights of a shape; name one"),
        ({"shape": "s"}, r"a shape \(s\) has no checkpoint to read: it goes with load_format dummy"),
        ({"shape": "s", "model_path": None}, r"a shape \(s\) has no checkpoint"),
        ({"num_layers": 2}, "num_layers 2 cuts a shape, and none is given"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"speculate": "eagle"}, "speculate 'eagle' is not one of mtp"),
        ({"draft_tokens": 0}, r"draft_tokens must be in \[1, 5\], got 0"),
        ({"draft_tokens": 6}, r"draft_tokens must be in \[1, 5\], got 6"),
        ({"speculate": "mtp", "draft_tokens": 4}, r"draft_tokens must be in \[1, 3\] for mtp, got 4"),
        ({"speculate": "dspark", "draft_tokens": 6}, r"draft_tokens must be in \[1, 5\] for dspark, got 6"),
        ({"speculate": "mtp", "max_batch_tokens": 128}, "64 with draft_tokens auto needs 256 rows of a step.* 128"),
        (
            {"speculate": "mtp", "draft_tokens": 1, "max_num_seqs": 9, "max_batch_tokens": 17},
            "max_num_seqs 9 with draft_tokens 1 needs 18 rows of a step, which exceeds max_batch_tokens 17",
        ),
    ],
    ids=str,
)
def test_engine_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"model_path": "m", **options})


def test_scheduler_needs_a_row_per_sequence() -> None:
    with pytest.raises(ValueError, match="max_num_seqs 9 exceeds max_batch_tokens 8"):
        SchedulerConfig(**SCHEDULER, max_num_seqs=9, max_batch_tokens=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_in_flight": 0}, r"max_in_flight must be in \[1, 2\], got 0"),
        ({"max_in_flight": 3}, r"max_in_flight must be in \[1, 2\], got 3"),
        ({"num_drafts": 6}, r"num_drafts must be in \[0, 5\], got 6"),
        ({"num_state_slots": -1}, "num_state_slots must be at least 0, got -1"),
        ({"chunk_alignment": 0}, "chunk_alignment must be at least 1, got 0"),
        ({"chunk_alignment": 64, "prefill_chunk": 63}, "prefill_chunk 63 is less than chunk_alignment 64"),
        ({"chunk_alignment": 64, "max_batch_tokens": 63, "max_num_seqs": 9}, "max_batch_tokens 63 is less than"),
        ({"num_drafts": 1, "max_num_seqs": 9, "max_batch_tokens": 17}, "9 with num_drafts 1 needs 18 rows .* 17"),
    ],
    ids=str,
)
def test_scheduler_refuses(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**{**SCHEDULER, **options})


def test_defaults_are_valid_and_frozen() -> None:
    config = EngineConfig(model_path="m")
    with pytest.raises(AttributeError):
        config.page_size = 32  # type: ignore[misc]
    assert EngineConfig(model_path="m", page_size=64).page_size == 64
    assert EngineConfig(model_path="m", num_workers=1, exchange="local").exchange == "local"
    assert EngineConfig(model_path="m", num_workers=4, device="cuda").num_workers == 4


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("1b", 1),
        ("1kb", 1000),
        ("1KiB", 1024),
        ("2k", 2048),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1.5 GiB", 3 << 29),
        (" 2gib ", 2 << 30),
        ("3T", 3 << 40),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "two", "1 2MiB", "1MiBs", "1XB", "1bb", "-1", "-1GiB", "0", "0.5", "0GiB", "nan", "inf", "1e999"],
)
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size") as error:
        parse_size(text)
    assert repr(text) in str(error.value)


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 1 << 50))
def test_formatted_size_parses_back(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=1e-3)


def test_flag_offers_all_policies() -> None:
    assert set(config_module.EXPERT_POLICIES) == set(policies.POLICIES)
