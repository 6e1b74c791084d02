"""Engine configuration: frozen, resolved once. Sizes are bytes, times are seconds. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from moeyard_worker.options import option, option_of

ExchangeKind = Literal["auto", "local", "zmq", "zmq-tcp", "nvlink", "nccl"]
ExpertFetch = Literal["auto", "alone", "shared"]
EXCHANGES: tuple[str, ...] = ("auto", "local", "zmq", "zmq-tcp", "nvlink", "nccl")
DTYPE_BYTES = MappingProxyType({"float32": 4, "bfloat16": 2})
DTYPES: tuple[str, ...] = ("auto", *DTYPE_BYTES)
EXPERT_FETCHES: tuple[str, ...] = ("auto", "alone", "shared")
EXPERT_POLICIES: tuple[str, ...] = ("slru", "lru")
SPECULATIONS: tuple[str, ...] = ("mtp",)
# Tokens drafted behind every one at most.
MAX_DRAFTS = 3
LOAD_FORMATS: tuple[str, ...] = ("auto", "safetensors", "dummy")
# A rank that answers heartbeats may take so many step deadlines for one layer where it reads cold experts, on a CPU, or
# compiles what was not captured and is launched for the first time. Longer, and it hangs.
STALL = 12
# Sequences that run at once on a rank.
DEFAULT_SEQS = 64
# Numbers that have no least value of 1, or one of their own.
_OTHER_NUMBERS = ("num_state_slots", "num_snapshots", "num_drafts", "max_in_flight", "draft_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one rank's scheduler.

    max_batch_tokens: rows of one step, prompt and output together. max_num_seqs: running sequences.
    prefill_chunk: prompt rows of one sequence in one step. mixed_prefill_tokens: prompt rows of all sequences in a step
    beside rows of output, of any rank, which wait for them; None: as many as fit. max_waiting: queued requests that
    cannot start yet, before `queue_full`. max_queue_seconds: how long a request may wait for its start before
    `queue_timeout`; None: as long as it takes.
    max_in_flight: steps planned and not completed, 1 or 2. num_drafts: drafts verified per sequence and step, 0 to 3;
    adaptive_drafts: as many of them as have turned out to be worth it.
    num_state_slots: sequences with state of their own beside pages, 0 when the model has none, each of which has
    `state_ring` slots; num_snapshots: slots behind these for what prompts left there, without which their beginnings
    are not reused.
    chunk_alignment: what every prompt chunk but the last ends at a multiple of.
    """

    num_pages: int
    page_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_batch_tokens: int = 512
    max_num_seqs: int = DEFAULT_SEQS
    prefill_chunk: int = 512
    mixed_prefill_tokens: int | None = None
    max_waiting: int = 1024
    max_queue_seconds: float | None = None
    prefix_caching: bool = True
    max_in_flight: int = 1
    num_drafts: int = 0
    adaptive_drafts: bool = False
    num_state_slots: int = 0
    num_snapshots: int = 0
    chunk_alignment: int = 1

    def __post_init__(self) -> None:
        _require_numbers(self)
        _require_rows(self)
        for name, low, high in (("max_in_flight", 1, 2), ("num_drafts", 0, MAX_DRAFTS)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be in [{low}, {high}], got {getattr(self, name)}")
        for name in ("num_state_slots", "num_snapshots"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        rows = self.max_num_seqs * (1 + self.num_drafts)
        if rows > self.max_batch_tokens:
            raise ValueError(
                f"max_num_seqs {self.max_num_seqs} with num_drafts {self.num_drafts} needs {rows} rows of a step, "
                f"which exceeds max_batch_tokens {self.max_batch_tokens}"
            )
        for name in ("prefill_chunk", "max_batch_tokens", "mixed_prefill_tokens"):
            if (getattr(self, name) or self.chunk_alignment) < self.chunk_alignment:
                raise ValueError(
                    f"{name} {getattr(self, name)} is less than chunk_alignment {self.chunk_alignment}, "
                    "the rows that the model computes together"
                )

    @property
    def state_ring(self) -> int:
        """Slots of state of one sequence: a step leaves one behind each row, of which the last may not count."""
        return 1 + self.num_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that `moeyard serve` tells every worker. Fields with help texts are flags, with these defaults.

    model_path: a checkpoint's directory; None where load_format is "dummy". Load format "auto" means "safetensors".
    device: "cpu", "cuda:N" (of one worker) or "cuda": each worker takes the GPU of its rank, or the one that a Ray
    cluster gave it. Neither expert_slots nor expert_memory: as many slots as fit. kv_memory None: what is free.
    draft_tokens None: from step to step as many as are worth it, MAX_DRAFTS at most.
    """

    model_path: str | None
    load_format: str = option(
        "auto",
        "dummy: no checkpoint, random weights for --shape (default auto: safetensors)",
        choices=LOAD_FORMATS,
        group="the model",
    )
    shape: str | None = option(None, "one of {choices}", metavar="NAME")
    num_layers: int | None = option(None, "the shape's first N layers (default: all)", flag="--layers")
    num_workers: int = option(1, "expert-parallel ranks, one Ray actor each", flag="--workers", group="workers")
    device: str = option(
        "cpu",
        "cpu, cuda (a GPU each) or cuda:N; auto: cuda where each worker has a GPU, else cpu",
        kind="device",
        metavar="NAME",
        text="auto",
    )
    exchange: ExchangeKind = option(
        "auto",
        "nvlink: between GPUs of one host that reach each other, inside CUDA graphs; nccl: between any GPUs; zmq: "
        "shared memory on one host, TCP between hosts; zmq-tcp: always TCP (default auto: nvlink where it can be, nccl "
        "between other GPUs of one host, else zmq)",
        choices=EXCHANGES,
    )
    mesh_encryption: bool = option(
        True,
        "of activations over TCP; off: a password in clear still keeps strangers out, and what moves can be read",
        choices=("on", "off"),
        words={"on": True, "off": False},
    )
    dtype: str = option("auto", "of weights and activations (default: the checkpoint's)", choices=DTYPES)
    threads: int = option(1, "OpenMP threads of a worker, 1 or 2", per_rank=True)
    step_deadline: float = option(5.0, "seconds a step may wait for a peer")
    expert_slots: int | None = option(
        None, "expert-cache slots of each rank (default: as many as fit)", group="memory", per_rank=True
    )
    expert_memory: int | None = option(
        None, "expert-cache memory of each rank, e.g. 2GiB, or auto (default)", kind="size", words={"auto": None}
    )
    expert_policy: str = option("slru", "residency policy", choices=EXPERT_POLICIES, per_rank=True)
    expert_fetch: ExpertFetch = option(
        "alone",
        "shared: GPUs of one host (--exchange nvlink) read for each other the experts that have no slot, over the "
        "links of all; auto: so where it can be; alone: each its own",
        choices=EXPERT_FETCHES,
    )
    record_routing: str | None = option(None, "record the experts each step needs, for cache-sim", metavar="FILE")
    kv_memory: int | None = option(
        None,
        "KV pages of each rank, e.g. 1GiB (default: from the limits below and free memory)",
        kind="size",
        per_rank=True,
    )
    snapshot_memory: int | None = option(
        None,
        "of it for snapshots of linear attention's state, behind which prompts are reused (default: half)",
        kind="size",
    )
    page_size: int = option(16, "", on_gpu=64)
    max_model_len: int | None = option(
        None,
        "longest prompt + output (default: the model's, or what the KV pages hold)",
        group="sequences and steps",
    )
    max_num_seqs: int = option(
        DEFAULT_SEQS,
        f"sequences running at once on a rank (default {DEFAULT_SEQS}, or --max-batch-tokens if less)",
        unset=True,
        per_rank=True,
    )
    max_batch_tokens: int = option(512, "rows of one step on a rank", on_gpu=8192)
    prefill_chunk: int = option(512, "prompt rows of one sequence in a step", on_gpu=8192, per_rank=True)
    mixed_prefill_tokens: int | None = option(
        None,
        "prompt rows of a step in which any rank has output rows (default: as many as fit; on a GPU {on_gpu})",
        on_gpu=2048,
        per_rank=True,
    )
    prefix_caching: bool = option(True, "compute every prompt from its first token", flag="--no-prefix-caching")
    async_scheduling: bool = option(
        False, "plan a step while the one before runs (default: on a GPU)", on_gpu=True, both=True
    )
    enforce_eager: bool = option(False, "capture no step in a CUDA graph")
    speculate: str | None = option(
        None,
        "mtp: draft tokens with the checkpoint's layer for multi-token prediction, verify them a step later; no answer "
        "changes",
        choices=SPECULATIONS,
        words={"off": None},
    )
    draft_tokens: int | None = option(
        None,
        f"with --speculate: tokens drafted behind every one, 1 to {MAX_DRAFTS}, or auto: from step to step as many as "
        "have turned out to be worth it, or none",
        kind="drafts",
        metavar="K",
        words={"auto": None},
    )
    max_waiting: int = option(
        1024,
        "requests of a rank that wait and cannot start yet before 429",
        group="limits for clients",
        per_rank=True,
    )
    max_queue_seconds: float | None = option(
        None,
        "longest wait of a request for its start, then 429 (default: no limit for a burst; while more comes than goes, "
        "half the time of a first token. For batches that may wait, 3600)",
        kind="seconds",
    )

    def __post_init__(self) -> None:
        _require_numbers(self)
        for each in fields(self):
            allowed = getattr(option_of(each), "choices", ())
            value = getattr(self, each.name)
            if isinstance(value, str) and allowed and value not in allowed:
                raise ValueError(f"{each.name} {value!r} is not one of {', '.join(allowed)}")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device {self.device!r} is not cpu, cuda or cuda:N")
        if self.exchange in ("nvlink", "nccl") and self.device == "cpu":
            raise ValueError(f"exchange {self.exchange!r} is one of GPUs; use device 'cuda', or exchange 'zmq'")
        if ":" in self.device and self.num_workers > 1:
            raise ValueError(
                f"device {self.device!r} is one GPU, num_workers {self.num_workers} take one each; use device 'cuda'"
            )
        if self.device != "cpu" and self.record_routing is not None and not self.enforce_eager:
            raise ValueError("record_routing on a GPU needs enforce_eager: a captured step tells the host of no expert")
        _require_source(self)
        _require_rows(self)
        _require_speculation(self)
        if self.max_queue_seconds is not None and not 0 < self.max_queue_seconds < float("inf"):
            raise ValueError(f"max_queue_seconds must be a positive number of seconds, got {self.max_queue_seconds}")
        if not 0 < self.step_deadline < float("inf"):
            raise ValueError(f"step_deadline must be a positive number of seconds, got {self.step_deadline}")
        if self.threads > 2:
            # Measured: torch splits an elementwise operation over three threads inside a row, whose tail then takes a
            # scalar path with other bits. With two it splits between rows.
            raise ValueError(f"threads must be 1 or 2, got {self.threads}: with more, bits depend on the batch")
        if self.exchange == "local" and self.num_workers != 1:
            raise ValueError(f"exchange 'local' is for one worker, got {self.num_workers} workers")
        if self.expert_slots is not None and self.expert_memory is not None:
            raise ValueError("give expert_slots or expert_memory, not both")
        if self.snapshot_memory is not None and not self.prefix_caching:
            # By the field's name the command line would say that the flag which switches it off is off.
            raise ValueError("snapshot_memory is for prompts that begin alike, which is off by --no-prefix-caching")
        if 64 % self.page_size:
            raise ValueError(f"page_size must divide 64 (attention splits keys every 64 tokens), got {self.page_size}")

    @property
    def num_drafts(self) -> int:
        """Tokens drafted behind every one at most; 0 without speculation."""
        return 0 if self.speculate is None else self.draft_tokens or MAX_DRAFTS


# Defaults by device. On a GPU pages are the blocks of attention, and larger steps are planned while others run.
DEVICE_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "cpu": MappingProxyType({}),
        "cuda": MappingProxyType(
            {f.name: o.on_gpu for f in fields(EngineConfig) if (o := option_of(f)) and o.on_gpu is not None}
        ),
    }
)


def _require_source(config: EngineConfig) -> None:
    """Raise ValueError unless the weights come from one place: a checkpoint, or chance for a shape."""
    if config.load_format == "dummy":
        if config.model_path is not None:
            raise ValueError(f"load_format dummy reads no checkpoint, got {config.model_path}; give a shape instead")
        if config.shape is None:
            raise ValueError("load_format dummy draws the weights of a shape; name one")
    elif config.model_path is None or config.shape is not None:
        raise ValueError(f"a shape ({config.shape}) has no checkpoint to read: it goes with load_format dummy")
    if config.num_layers is not None and config.shape is None:
        raise ValueError(f"num_layers {config.num_layers} cuts a shape, and none is given")


def _require_speculation(config: EngineConfig) -> None:
    """Raise ValueError unless what is asked of speculation can be had."""
    if config.draft_tokens is not None and not 1 <= config.draft_tokens <= MAX_DRAFTS:
        raise ValueError(f"draft_tokens must be in [1, {MAX_DRAFTS}], got {config.draft_tokens}")
    if config.speculate is None:
        return
    rows, drafts = config.max_num_seqs * (1 + config.num_drafts), config.draft_tokens or "auto"
    if rows > config.max_batch_tokens:
        raise ValueError(
            f"max_num_seqs {config.max_num_seqs} with draft_tokens {drafts} needs {rows} rows of a step, "
            f"which exceeds max_batch_tokens {config.max_batch_tokens}"
        )


def _require_numbers(config: SchedulerConfig | EngineConfig) -> None:
    """Raise ValueError naming the first whole number that is below 1; None means unset and passes."""
    for each in fields(config):
        value = getattr(config, each.name)
        if type(value) is int and value < 1 and each.name not in _OTHER_NUMBERS:
            raise ValueError(f"{each.name} must be at least 1, got {value}")


def _require_rows(config: SchedulerConfig | EngineConfig) -> None:
    """Raise ValueError when a step has fewer rows than running sequences."""
    if config.max_num_seqs > config.max_batch_tokens:
        raise ValueError(
            f"max_num_seqs {config.max_num_seqs} exceeds max_batch_tokens {config.max_batch_tokens}: "
            "every running sequence needs a row of the step"
        )


def rows_beside(config: SchedulerConfig | EngineConfig) -> int:
    """Rows of a step that all other sequences take while they decode."""
    return (config.max_num_seqs - 1) * (1 + config.num_drafts)


def prompt_rows(config: SchedulerConfig | EngineConfig) -> int:
    """Prompt rows of one sequence that a step has room for, however many others decode beside it.

    Where these might fill it, half of its rows: one that asks for so many waits until there is room, and who comes
    behind it waits too, but only for so much.
    """
    room = max(config.max_batch_tokens - rows_beside(config), config.max_batch_tokens // 2)
    return min(config.prefill_chunk, room, config.mixed_prefill_tokens or room)


def window_rows(config: SchedulerConfig | EngineConfig, chunk_alignment: int) -> int:
    """Rows of the largest window that may choose what is kept of a prompt: the chunk that has to hold it may begin so
    much earlier than it could."""
    return prompt_rows(config) - (chunk_alignment - 1)


def parse_size(text: str) -> int:
    """Bytes of a size such as "512MiB", "2GiB", "1.5GB" or a plain number; raises ValueError naming the text."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", start=1):
        units[f"{letter}b"] = 1000**power
        units[f"{letter}ib"] = units[letter] = 1024**power
    stripped = text.strip().lower()
    digits = stripped.rstrip("bikmgt ")
    unit = stripped[len(digits) :].strip()
    try:
        value = float(digits) * units[unit]
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is not a size; write for example 512MiB or 2GiB") from None
    if not 1 <= value < float("inf"):
        raise ValueError(f"{text!r} is not a size of at least one byte")
    return int(value)


def loading_rates(num_bytes: int, seconds: float, read_rate: float | None) -> str:
    """How fast weights came into place, for people; `read_rate`: bytes/s that their files gave, where it is known."""
    rate = f"{num_bytes / seconds * 1e-9:.2f} GB/s" if seconds else "at once"
    read = "" if read_rate is None else f", the files alone {read_rate * 1e-9:.2f} GB/s"
    return f"loaded {format_size(num_bytes)} of weights in {seconds:.1f} s ({rate}{read})"


def format_size(num_bytes: float) -> str:
    """A size for people, with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
