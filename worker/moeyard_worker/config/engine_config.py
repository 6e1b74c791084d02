"""Engine configuration: frozen, resolved once. Sizes are bytes, times are seconds. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from moeyard_worker.options import option, option_of

ExchangeKind = Literal["auto", "local", "zmq", "zmq-tcp", "nvlink", "nccl"]
ExpertFetch = Literal["auto", "alone", "shared"]
ExpertHostStore = Literal["auto", "none", "missing", "all"]
EXCHANGES: tuple[str, ...] = ("auto", "local", "zmq", "zmq-tcp", "nvlink", "nccl")
DTYPE_BYTES = MappingProxyType({"float32": 4, "bfloat16": 2})
DTYPES: tuple[str, ...] = ("auto", *DTYPE_BYTES)
EXPERT_FETCHES: tuple[str, ...] = ("auto", "alone", "shared")
EXPERT_HOST_STORES: tuple[str, ...] = ("auto", "none", "missing", "all")
EXPERT_POLICIES: tuple[str, ...] = ("slru", "lru")
# The most drafts per token by kind of drafter. A block of DSpark has five.
SPECULATIONS = MappingProxyType({"mtp": 3, "dspark": 5})
MAX_DRAFTS = max(SPECULATIONS.values())
LOAD_FORMATS: tuple[str, ...] = ("auto", "safetensors", "dummy")
# A rank with heartbeats may take this many step deadlines for one layer before it counts as hanging. Reading cold
# experts on a CPU, or compiling a kernel at its first launch, can take that long.
STALL = 12
# Sequences that run at once on a rank.
DEFAULT_SEQS = 64
# Numbers that may be below 1, or are checked elsewhere.
_OTHER_NUMBERS = ("num_state_slots", "num_snapshots", "num_drafts", "max_in_flight", "draft_tokens", "routing_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one rank's scheduler.

    max_batch_tokens: rows of one step, prompt and output together.
    max_num_seqs: running sequences.
    prefill_chunk: prompt rows of one sequence in one step.
    mixed_prefill_tokens: prompt rows of a step in which any rank has output rows, because these wait for the prompt
        rows. None: as many as fit.
    max_waiting: queued requests that cannot start yet, before `queue_full`.
    max_queue_seconds: how long a request may wait for its start before `queue_timeout`. None: no limit.
    max_in_flight: steps planned and not completed, 1 or 2.
    num_drafts: most drafts verified per sequence and step, 0 to 5. `adaptive_drafts`: measure to choose the number.
    num_state_slots: most sequences with state in slots, 0 if the model has no such state. Each has `state_ring` slots.
    num_snapshots: slots for snapshots of such state. Without them, prefixes are not reused.
    chunk_alignment: every prompt chunk but the last ends at a multiple of this.
    by_position: whether a slot holds rows by position (`StateSpec`).
    compressible: whether requests may have `kv_compression`.
    routing_bytes: bytes of the experts that one position chooses in all layers, 0 if they are not kept.
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
    by_position: bool = False
    compressible: bool = True
    routing_bytes: int = 0

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
        """State slots of one sequence.

        Without rows by position, a step stores the state after each row, because drafts may be rejected.
        """
        return 1 if self.by_position else 1 + self.num_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings that all workers of a server share. Fields with a help text are flags with these defaults.

    model_path: directory of a checkpoint; None if load_format is "dummy". Load format "auto" means "safetensors".
    gguf: the GGUF file, or the first of several, that holds the weights. `model_path` then has config and tokenizer.
    device: "cpu", "cuda:N" (one worker only) or "cuda". With "cuda", each worker takes the GPU of its rank, or the one
        that a Ray cluster assigned.
    expert_slots, expert_memory: if both are None, as many slots as fit.
    kv_memory: None for all free memory.
    draft_tokens: None to choose at each step, at most as many as `speculate` allows.
    """

    model_path: str | None
    gguf: str | None = None
    load_format: str = option(
        "auto",
        "dummy: no checkpoint, random weights for --shape (default auto: safetensors)",
        choices=LOAD_FORMATS,
        group="the model",
    )
    shape: str | None = option(None, "one of {choices}", metavar="NAME")
    num_layers: int | None = option(None, "the shape's first N layers (default: all)", flag="--layers")
    quantization: str | None = option(
        None, "of the random weights of a shape: fp8, int4-g32, int4-g128 or fp4 (default: none)", metavar="FORM"
    )
    weights: str = option(
        "auto",
        "quantised weights: auto keeps the codes of experts in GPU memory; codes keeps those of other matrices, too, "
        "which saves memory and takes time beyond 16 rows; bfloat16 converts all of them when they are loaded",
        choices=("auto", "codes", "bfloat16"),
    )
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
        "nvlink: GPUs of one host with peer access, inside CUDA graphs; nccl: any GPUs; zmq: shared memory on one "
        "host, TCP between hosts; zmq-tcp: always TCP (default auto: nvlink if possible, nccl between other GPUs of "
        "one host, else zmq)",
        choices=EXCHANGES,
    )
    mesh_encryption: bool = option(
        True,
        "of activations over TCP; off: a password in clear text keeps strangers out, but traffic can be read",
        choices=("on", "off"),
        words={"on": True, "off": False},
    )
    dtype: str = option("auto", "dtype of weights and activations (default: the checkpoint's)", choices=DTYPES)
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
        "shared: GPUs of one host (--exchange nvlink) read missing experts for each other, over all PCIe links; "
        "auto: shared if possible; alone: each reads its own",
        choices=EXPERT_FETCHES,
    )
    expert_host_store: ExpertHostStore = option(
        "auto",
        "host memory of a GPU's expert cache: all holds every expert, so that a miss only reads; missing holds the "
        "experts without a slot, and a miss exchanges two; none holds none, and a miss reads the checkpoint's files; "
        "auto: the first of these that host memory allows, but none only for one worker",
        choices=EXPERT_HOST_STORES,
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
        "part of --kv-memory for snapshots of linear attention's state, for prefix caching (default: half)",
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
    prefix_caching: bool = option(True, "compute every prompt from its first token on", flag="--no-prefix-caching")
    async_scheduling: bool = option(
        False, "plan a step while the previous one runs (default: on a GPU)", on_gpu=True, both=True
    )
    enforce_eager: bool = option(False, "capture no step in a CUDA graph")
    enable_return_routed_experts: bool = option(
        False, "return the experts that each token chose, for trainers; keeps them with the pages of prompts"
    )
    speculate: str | None = option(
        None,
        "draft tokens with the checkpoint's layer for multi-token prediction (mtp) or its drafter DSpark (dspark), and "
        "verify them a step later; answers do not change",
        choices=tuple(SPECULATIONS),
        words={"off": None},
    )
    draft_tokens: int | None = option(
        None,
        "with --speculate: drafts per token, "
        + ", ".join(f"1 to {most} with {name}" for name, most in SPECULATIONS.items())
        + ", or auto: 0 to that many, chosen at each step by measured speed",
        kind="drafts",
        metavar="K",
        words={"auto": None},
    )
    max_waiting: int = option(
        1024,
        "waiting requests of a rank that cannot start yet, before 429",
        group="limits for clients",
        per_rank=True,
    )
    max_queue_seconds: float | None = option(
        None,
        "longest wait of a request for its start, then 429 (default: no limit for a burst; in overload, half the time "
        "to the first token; use 3600 for batches that may wait)",
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
            raise ValueError(f"exchange {self.exchange!r} needs GPUs; use device 'cuda', or exchange 'zmq'")
        if ":" in self.device and self.num_workers > 1:
            raise ValueError(
                f"device {self.device!r} is one GPU, num_workers {self.num_workers} take one each; use device 'cuda'"
            )
        if self.device != "cpu" and self.record_routing is not None and not self.enforce_eager:
            # A rank knows what its own rows chose, but not what the rows of other ranks or drafts need here.
            for name, unknown in (("num_workers", self.num_workers > 1), ("speculate", self.speculate is not None)):
                if unknown:
                    value = getattr(self, name)
                    raise ValueError(f"record_routing on GPUs with {name} {value} needs enforce_eager")
        _require_source(self)
        _require_rows(self)
        _require_speculation(self)
        if self.max_queue_seconds is not None and not 0 < self.max_queue_seconds < float("inf"):
            raise ValueError(f"max_queue_seconds must be a positive number of seconds, got {self.max_queue_seconds}")
        if not 0 < self.step_deadline < float("inf"):
            raise ValueError(f"step_deadline must be a positive number of seconds, got {self.step_deadline}")
        if self.threads > 2:
            # Measured: with three threads, torch splits elementwise operations inside a row. The end of the row then
            # takes a scalar path with other bits. With two threads it splits between rows.
            raise ValueError(f"threads must be 1 or 2, got {self.threads}: with more, bits depend on the batch")
        if self.exchange == "local" and self.num_workers != 1:
            raise ValueError(f"exchange 'local' is for one worker, got {self.num_workers} workers")
        if self.expert_slots is not None and self.expert_memory is not None:
            raise ValueError("give expert_slots or expert_memory, not both")
        if self.snapshot_memory is not None and not self.prefix_caching:
            # The message names the flag, because the field's name would read as the opposite of the flag.
            raise ValueError("snapshot_memory has no use with --no-prefix-caching")
        if 64 % self.page_size:
            raise ValueError(f"page_size must divide 64 (attention splits keys every 64 tokens), got {self.page_size}")

    @property
    def num_drafts(self) -> int:
        """The most drafts per token; 0 without speculation."""
        return 0 if self.speculate is None else self.draft_tokens or SPECULATIONS[self.speculate]


# Defaults by device. On a GPU, pages have the size of attention's blocks, and larger steps are planned in advance.
DEVICE_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "cpu": MappingProxyType({}),
        "cuda": MappingProxyType(
            {f.name: o.on_gpu for f in fields(EngineConfig) if (o := option_of(f)) and o.on_gpu is not None}
        ),
    }
)


def _require_source(config: EngineConfig) -> None:
    """Raise ValueError unless there is one source of weights: a checkpoint, or random weights of a shape."""
    if config.load_format == "dummy":
        if config.model_path is not None:
            raise ValueError(f"load_format dummy reads no checkpoint, got {config.model_path}; give a shape instead")
        if config.shape is None:
            raise ValueError("load_format dummy draws the weights of a shape; name one")
    elif config.model_path is None or config.shape is not None:
        raise ValueError(f"a shape ({config.shape}) has no checkpoint to read: it goes with load_format dummy")
    if config.num_layers is not None and config.shape is None:
        raise ValueError(f"num_layers {config.num_layers} cuts a shape, and none is given")
    if config.quantization is not None and config.shape is None:
        raise ValueError(
            f"--quantization {config.quantization} is for the random weights of a --shape; config.json says how a "
            "checkpoint is quantised"
        )


def _require_speculation(config: EngineConfig) -> None:
    """Raise ValueError for invalid settings of speculation."""
    most, name = MAX_DRAFTS, ""
    if config.speculate is not None:
        most, name = SPECULATIONS[config.speculate], f" for {config.speculate}"
    if config.draft_tokens is not None and not 1 <= config.draft_tokens <= most:
        raise ValueError(f"draft_tokens must be in [1, {most}]{name}, got {config.draft_tokens}")
    if config.speculate is None:
        return
    rows, drafts = config.max_num_seqs * (1 + config.num_drafts), config.draft_tokens or "auto"
    if rows > config.max_batch_tokens:
        raise ValueError(
            f"max_num_seqs {config.max_num_seqs} with draft_tokens {drafts} needs {rows} rows of a step, "
            f"which exceeds max_batch_tokens {config.max_batch_tokens}"
        )


def _require_numbers(config: SchedulerConfig | EngineConfig) -> None:
    """Raise ValueError naming the first integer below 1. None means unset and passes."""
    for each in fields(config):
        value = getattr(config, each.name)
        if type(value) is int and value < 1 and each.name not in _OTHER_NUMBERS:
            raise ValueError(f"{each.name} must be at least 1, got {value}")


def _require_rows(config: SchedulerConfig | EngineConfig) -> None:
    """Raise ValueError if a step has fewer rows than running sequences."""
    if config.max_num_seqs > config.max_batch_tokens:
        raise ValueError(
            f"max_num_seqs {config.max_num_seqs} exceeds max_batch_tokens {config.max_batch_tokens}: "
            "every running sequence needs a row of the step"
        )


def rows_beside(config: SchedulerConfig | EngineConfig) -> int:
    """Return the rows of a step that all sequences but one take while they decode."""
    return (config.max_num_seqs - 1) * (1 + config.num_drafts)


def prompt_rows(config: SchedulerConfig | EngineConfig) -> int:
    """Return the prompt rows of one sequence for which a step always has room beside decoding sequences.

    If these may fill the step, it is half of the step's rows. A request that needs that many waits until there is room,
    and so do later ones.
    """
    room = max(config.max_batch_tokens - rows_beside(config), config.max_batch_tokens // 2)
    return min(config.prefill_chunk, room, config.mixed_prefill_tokens or room)


def window_rows(config: SchedulerConfig | EngineConfig, chunk_alignment: int) -> int:
    """Return the largest window for compression of a prompt. Its chunk may have to start earlier for alignment."""
    return prompt_rows(config) - (chunk_alignment - 1)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "512MiB", "2GiB", "1.5GB" or a plain number. Raises ValueError."""
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
    """Return a log line about the loading of weights. `read_rate`: bytes/s of reading the files, if known."""
    rate = f"{num_bytes / seconds * 1e-9:.2f} GB/s" if seconds else "at once"
    read = "" if read_rate is None else f", the files alone {read_rate * 1e-9:.2f} GB/s"
    return f"loaded {format_size(num_bytes)} of weights in {seconds:.1f} s ({rate}{read})"


def format_size(num_bytes: float) -> str:
    """Return a size as text with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
