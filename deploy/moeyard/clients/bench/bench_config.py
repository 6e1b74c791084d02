"""Settings of `moeyard bench URL` and `moeyard bench engine`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeyard.clients.bench.workload import KINDS, Lengths, parse_lengths
from moeyard.options import DEFAULTS
from moeyard_worker.config.engine_config import DEVICE_DEFAULTS
from moeyard_worker.options import option

_ROWS = f"{DEFAULTS['max_batch_tokens']}; on a GPU {DEVICE_DEFAULTS['cuda']['max_batch_tokens']}"

# Options of `EngineConfig` that `moeyard bench engine` takes.
_SHARED = ("shape", "num_layers", "quantization", "weights", "dtype", "enforce_eager")
ENGINE_OPTIONS = (*_SHARED, "expert_policy", "expert_host_store")


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is no JSON object")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBenchConfig:
    """Requests to a server: what they ask for, when they are sent, and where figures go."""

    model: str = ""
    endpoint: str = option(
        "chat", "/v1/chat/completions or /v1/completions (default chat)", choices=("chat", "completions")
    )
    prompts: str = option("words", "random words, or random token ids for --endpoint completions", choices=KINDS)
    vocab_size: int = option(256, "token ids go up to here (default 256, which every model has)", kind="count")
    prompt_tokens: Lengths = option(
        "512", "N, LOW:HIGH or lognormal:MEDIAN:SIGMA[:MOST]", kind=parse_lengths, metavar="DIST"
    )
    output_tokens: Lengths = option("128", "the same of the answers", kind=parse_lengths, metavar="DIST")
    shared_prefix: int = option(0, "tokens that all prompts begin with, beside their own (default none)", kind="number")
    turns: int = option(1, "requests of a conversation, history resent", kind="count", metavar="K")
    concurrency: int | None = option(None, "conversations at once (default 8; with --rate: any number)", kind="count")
    rate: float | None = option(
        None, "conversations begun per second, or inf (default: closed loop)", kind="positive", metavar="R"
    )
    burstiness: float = option(
        1.0,
        "shape of the gamma distribution of --rate's gaps: 1 is Poisson, less comes in bursts",
        kind="positive",
        metavar="B",
    )
    num_requests: int | None = option(None, "requests in all (default 100, or as --duration allows)", kind="count")
    duration: float | None = option(None, "seconds in which requests are begun", kind="positive", metavar="S")
    warmup: int = option(4, "requests before, not measured", kind="number")
    seed: int | None = option(None, "of lengths, words and arrivals (default: another one each time)")
    temperature: float = option(0.0, "default 0, greedy", metavar="T")
    ignore_eos: bool = option(
        True,
        "ask for answers of full length (default; a server that refuses the field wants --no-ignore-eos)",
        both=True,
    )
    extra_body: dict[str, Any] = option(
        "{}", "fields put into every request (default none)", kind=json_object, metavar="JSON"
    )
    timeout: float = option(600.0, "for a whole answer", kind="positive", metavar="S")
    slo: str | None = option(None, "objectives that goodput counts, e.g. ttft=500ms,tpot=30ms,e2e=5s", metavar="LIST")
    json: Path | None = option(None, "write figures and a row per request there")
    png: Path | None = option(None, "draw latencies and throughput there (needs matplotlib)")
    compare: tuple[Path, ...] = option(
        (), "with one result of --json: beside this run; with two: those, and nothing is run", nargs="+"
    )

    @property
    def is_chat(self) -> bool:
        """Whether requests are chats, not completions."""
        return self.endpoint == "chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchConfig:
    """Scenarios of one engine, and where figures go."""

    device: str = option("cuda", "cpu, cuda or cuda:N", metavar="NAME")
    streams: tuple[int, ...] = option((1, 8, 64), "requests at once (default 1 8 64)", nargs="*")
    prompt: int = option(128, "tokens of their prompts")
    output: int = option(128, "tokens answered to each")
    temperature: float = option(0.0, "0 is greedy; otherwise each its own seed (default 0)", metavar="T")
    top_p: float = option(1.0, "where tokens are sampled", metavar="P")
    context: tuple[str, ...] = option(
        (), "C streams whose prompts have N tokens, e.g. 8x32768", nargs="*", metavar="CxN"
    )
    kv_budget: int | None = option(None, "measure --context once more with N tokens of each prompt kept (SnapKV)")
    prefill: tuple[str, ...] = option(
        ("1x256", "1x1024", "1x8192", "4x4096"),
        "C prompts of N tokens at once, a token answered to each (default 1x256 1x1024 1x8192 4x4096)",
        nargs="*",
        metavar="CxN",
    )
    chunk: int | None = option(None, f"rows of a step (default {_ROWS})")
    mixed: int = option(
        0,
        "latencies of so many streams (16) while prompts arrive one behind the other",
        nargs="?",
        const=16,
        metavar="STREAMS",
    )
    mixed_prompt: int = option(8192, "tokens of those prompts")
    mixed_prompts: int = option(4, "how many of them")
    mixed_chunk: int = option(2048, "their rows in a step")
    residency: tuple[float, ...] = option((), "shares of the experts in slots, in turn", nargs="+", metavar="SHARE")
    expert_slots: int | None = option(None, "the same as a number (default: as many as fit)")
    profile: bool = option(False, "run each once more under torch's profiler, and show where time goes")
    json: Path | None = option(None, "write all figures there")
