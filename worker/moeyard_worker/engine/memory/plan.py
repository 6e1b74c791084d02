"""Division of a rank's memory between weights, KV pages and expert slots. Pure: sizes in, sizes out (bytes)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moeyard_kernels.types.footprint import CAPTURED, LAUNCHED, Footprints
from moeyard_kernels.types.peer_shape import FetchShape
from moeyard_worker.config.engine_config import DTYPE_BYTES, EngineConfig, ExpertHostStore, format_size
from moeyard_worker.exchange.shape import ExchangeShape
from moeyard_worker.experts.slots import resolve_slots, slot_bytes
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.state.spec import StateSpec

# Without --kv-memory, KV pages and attention to the longest sequence in them get at most this share of the memory that
# weights and reserve leave. On a GPU they get all that is left beside all experts, because nothing else uses it.
AUTO_KV_SHARE = 0.25
# They get less, down to this share, if all experts then have slots: a miss costs more than a page.
LEAST_KV_SHARE = 1 / 16
# Share of the available memory that no plan uses: the allocator's rounding, Python's objects, sockets.
MARGIN_SHARE = 0.05
# Most of it on a GPU. An H200 had 7.6 GiB left at the peak, beside a margin of 6.9 (DeepSeek-V4-Flash, 2026-11-30).
GPU_MARGIN = 3 << 30
# Rows whose logits exist at once when prompts are scored (engine/sampling/scoring.py). With this many, a CPU spends its
# time on their products and not on reading the head's weight.
SCORED_ROWS = 64
# Host memory per token of the vocabulary that grammars take: 836 and 858 bytes of 4,096 and 151,643
# tokens (llguidance 1.9.1, 2026-11-23). A grammar itself took 20 kB.
GRAMMAR_BYTES = 1024
# The kernels compute in this many bytes per value, whatever dtype is served.
_FP32 = 4
# GPU memory of NCCL, and of its channels to each peer: an upper estimate, not measured.
NCCL_BYTES, NCCL_PEER_BYTES = 512 << 20, 32 << 20
# If a model keeps state per sequence, this share of KV memory is for snapshots of it, up to SNAPSHOTS_PER_SEQUENCE for
# each sequence that may run.
SNAPSHOT_SHARE = 0.5
SNAPSHOTS_PER_SEQUENCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Bytes reserved before memory is divided.

    workspace: the tensors of one step.
    sums: partial sums of decode attention, for each split of the keys.
    """

    exchange: int
    workspace: int
    sums: int
    grammars: int
    margin: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.exchange + self.workspace + self.sums + self.grammars + self.margin

    def __str__(self) -> str:
        sums = f", sums of split keys {format_size(self.sums)}" if self.sums else ""
        return (
            f"a reserve of {format_size(self.total)} (exchange {format_size(self.exchange)}, one step "
            f"{format_size(self.workspace)}{sums}, grammars {format_size(self.grammars)}, margin "
            f"{format_size(self.margin)})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Division of a rank's memory. All sizes are bytes.

    stream_slots: slots beside `expert_slots`, if these do not hold all experts.
    host_bytes: host memory that the experts then take.
    host_store: which experts are in that memory: "all", "missing" (those without a slot) or "none".
    max_model_len: tokens of the longest sequence in the pages.
    reserve: reserved before the division.
    prefix_bytes: what attention to the longest sequence takes.
    available: the memory that was divided.
    resident_bytes: the dense weights and all slots of state.
    reasons: texts that explain the shares of KV and experts.
    """

    num_pages: int
    num_snapshots: int
    expert_slots: int
    stream_slots: int
    host_bytes: int
    host_store: ExpertHostStore
    max_model_len: int
    reserve: Reserve
    prefix_bytes: int
    available: int
    resident_bytes: int
    reasons: tuple[str, ...]

    def held_bytes(self, *, page_bytes: int, expert_bytes: int) -> int:
        """Return all bytes that the rank takes, with pages and slots of these sizes."""
        slots = (self.expert_slots + self.stream_slots) * expert_bytes
        return self.resident_bytes + self.reserve.total + self.num_pages * page_bytes + slots

    def __str__(self) -> str:
        return (
            f"{format_size(self.available)} free: dense weights {format_size(self.resident_bytes)}; "
            f"{'; '.join(self.reasons)}; {self.reserve}"
        )


def exchange_shape(config: EngineConfig, model: ModelConfig) -> ExchangeShape:
    """Return the sizes of the exchange for the fleet's largest step, which a GPU captures with padding."""
    padding = 0 if config.device == "cpu" else config.max_num_seqs
    return ExchangeShape(
        num_experts=model.num_experts,
        top_k=model.top_k,
        hidden=model.hidden_size,
        dtype=model.served_dtype(config.dtype),
        max_tokens=config.max_batch_tokens + padding,
    )


def exchange_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return the bytes of the exchange in a rank's memory: its slab, its window for peers, or NCCL's memory."""
    if config.exchange == "nccl":
        return NCCL_BYTES + (config.num_workers - 1) * NCCL_PEER_BYTES if config.num_workers > 1 else 0
    shape = exchange_shape(config, model)
    return shape.window(config.num_workers).num_bytes if config.exchange == "nvlink" else shape.slab_bytes


def step_bytes(config: EngineConfig, model: ModelConfig, footprints: Footprints) -> int:
    """Estimate the peak bytes of the largest step's tensors. `prefix_bytes` has those of a reused prefix.

    Values per row, in fp32:

    - residual, its norm, a block's input and output: 4 H; with S streams S H more
    - the largest of attention (`Footprint.per_row`), MLP (gate, up, activation and product: 4 I) and the mix of
      streams (before, after and a product: 3 S H)
    - the experts' outputs, sorted and in place: 2 K H
    - with peers, the gathered rows, in a buffer that grows by doubling, and frames in both directions: 4 W H
    - over nvlink and nccl instead, room for all (row, k) of all ranks: W K I in the served dtype
    - over nccl also results, all rows and returned rows, each twice, because they are tensors of the step
    - with drafts, the step's hidden states beside the pair that joins them with tokens: 3 H
    - with DSpark, the outputs of n layers, twice: 2 n H

    Then come the logits of all sampled rows, of DSpark's drafts and of SCORED_ROWS, twice, and a row of the sampler's
    fp64 scratch. With drafts on a GPU, the sampled rows' logits count once more, and so do the penalties' counts of
    every token for these rows (engine/sampling/edit_counts.py).

    In bf16 a step takes at most half of this (docs/journal.md). The other half is for captured steps, which keep their
    memory. tests/engine/test_memory.py compares the estimate with the measured peak.
    """
    hidden, peers = model.hidden_size, config.num_workers
    attention = max(kind.footprint(footprints).per_row for kind in model.attention_kinds())
    wide = max(model.intermediate_size, model.shared_intermediate_size, model.moe_intermediate_size)
    moved = 2 * model.top_k * hidden + (4 * peers * hidden if peers > 1 else 0)
    if config.exchange in ("nvlink", "nccl"):
        room = peers * model.top_k * model.moe_intermediate_size
        if config.exchange == "nccl":
            room += hidden * (peers * 2 * (model.top_k + 1) + 2 * model.top_k)
        moved = max(moved, room * DTYPE_BYTES[model.served_dtype(config.dtype)] // _FP32)
    streams = 0 if model.hyper is None else model.hyper.streams
    held = (7 if model.drafts else 4) + streams + 2 * len(model.read_layers)
    row = held * hidden + max(attention, 4 * wide + moved, 3 * streams * hidden)
    sampled = config.max_num_seqs * (1 + config.num_drafts)
    drafted = 0
    if model.drafts and model.block_drafts is not None:
        drafted = config.max_num_seqs * min(model.block_drafts.size, config.num_drafts)
    logits = model.vocab_size * (2 * _FP32 * (sampled + drafted + SCORED_ROWS) + 64)
    if config.num_drafts and config.device != "cpu":
        logits += model.vocab_size * 2 * _FP32 * sampled
    return int((config.max_batch_tokens * row * _FP32 + logits + footprints.FIXED) * footprints.ALLOCATED)


def sums_bytes(config: EngineConfig, model: ModelConfig, itemsize: int, footprints: Footprints) -> int:
    """Return the bytes of decode attention's partial sums, in one layer at a time (`SplitSums`).

    Captured steps share a pool, so the widest one counts: every sequence with all drafts, or a block for them, over the
    longest tables. A launched step is added. All its rows may be recomputed output.
    """
    longest, rows = config.max_model_len or model.max_position, 1 + config.num_drafts
    if model.drafts and model.block_drafts is not None:
        rows = max(rows, model.block_drafts.size)
    if config.kv_memory is not None:
        longest = min(longest, config.kv_memory // max(1, model.state_spec(itemsize).bytes_per_token))
    longest += -longest % config.page_size
    found = [taken for kind in model.attention_kinds() if (taken := kind.footprint(footprints).sums) is not None]
    captured = max((each.num_bytes(config.max_num_seqs, rows, longest, CAPTURED) for each in found), default=0)
    launched = max((each.num_bytes(config.max_batch_tokens, 1, longest, LAUNCHED) for each in found), default=0)
    return int(((0 if config.enforce_eager else captured) + launched) * footprints.ALLOCATED)


def prefix_bytes(model: ModelConfig, itemsize: int, footprints: Footprints) -> int:
    """Return the bytes of a prompt chunk, in one layer at a time, per position of its sequence up to its end.

    They are those of `Footprint`: gathered values, copies in fp32 if another dtype is served, and fp32 values.
    """
    most = 0
    for kind in model.attention_kinds():
        taken = kind.footprint(footprints)
        copied = taken.copied_per_position * _FP32 if itemsize < _FP32 else 0
        most = max(most, taken.per_position * itemsize + copied + taken.fp32_per_position * _FP32)
    return int(most * footprints.ALLOCATED)


def plan_memory(
    *,
    config: EngineConfig,
    model: ModelConfig,
    dtype: str,
    resident_bytes: int,
    num_local_experts: int,
    available: int,
    footprints: Footprints,
    slab_allocated: bool = False,
    host_available: int | None = None,
    staging: int = 0,
) -> MemoryPlan:
    """Divide `available` bytes of one rank that serves `dtype`.

    resident_bytes: the dense weights in memory.
    num_local_experts: (layer, expert) pairs of this rank.
    footprints: memory of the backend's attention.
    slab_allocated: whether `available` excludes the exchange's slab already.
    host_available: bytes of the host's memory, if the rank computes in another.
    staging: bytes of the exchange for experts that peers read.

    Without --kv-memory, pages get AUTO_KV_SHARE of the free memory. They get less, down to LEAST_KV_SHARE, if all
    experts then have slots. Experts get the rest, or the number of their flags. On a GPU whose experts all fit beside
    that share, pages get the rest.

    Raises ValueError with both numbers and the flag to change if something does not fit.
    """
    itemsize = DTYPE_BYTES[dtype]
    # No row leaves a fleet of one rank, unless a flag names its exchange.
    shares = config.num_workers > 1 or config.exchange not in ("auto", "local")
    grammars = model.vocab_size * GRAMMAR_BYTES if config.model_path else 0
    reserve = Reserve(
        exchange=staging + exchange_bytes(config, model) if shares and not slab_allocated else 0,
        workspace=step_bytes(config, model, footprints),
        sums=sums_bytes(config, model, itemsize, footprints),
        grammars=0 if footprints.HOST_EXPERTS else grammars,
        margin=min(int(available * MARGIN_SHARE), GPU_MARGIN if footprints.HOST_EXPERTS else available),
    )
    state = model.state_spec(itemsize)
    slots_bytes = config.max_num_seqs * state.slots_per_sequence(config.num_drafts) * state.bytes_per_sequence
    held = resident_bytes + slots_bytes
    free = available - held - reserve.total
    if free <= 0:
        kept = f", the state of {config.max_num_seqs} sequences {format_size(slots_bytes)}" if slots_bytes else ""
        lower = ("--max-num-seqs" + ", --draft-tokens" * bool(config.num_drafts) + " or ") * bool(slots_bytes)
        raise ValueError(
            f"the dense weights need {format_size(resident_bytes)}{kept} beside {reserve}, this worker has "
            f"{format_size(available)} of free memory; lower {lower}--max-batch-tokens, use fewer workers on this host "
            "or a machine with more memory"
        )
    max_model_len = config.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ValueError(f"--max-model-len {max_model_len} exceeds the model's {model.max_position}")
    per_position = prefix_bytes(model, itemsize, footprints)
    expert_bytes = model.expert_form(dtype).blob_bytes
    budget, reasons = _kv_budget(
        config, free=free, all_experts=num_local_experts * expert_bytes, fills=footprints.HOST_EXPERTS
    )
    # --kv-memory is for pages. Attention to them takes more.
    both = config.page_size * (state.bytes_per_token + (per_position if config.kv_memory is None else 0))
    num_snapshots = _num_snapshots(
        config, state, whole=config.kv_memory or budget, longest=-(-max_model_len // config.page_size) * both
    )
    snapshot_bytes = num_snapshots * state.bytes_per_sequence
    held, free = held + snapshot_bytes, free - snapshot_bytes
    num_pages = _num_pages(
        config,
        state,
        budget=budget - snapshot_bytes,
        snapshot_bytes=snapshot_bytes,
        max_model_len=max_model_len,
        per_position=per_position,
    )
    max_model_len = min(max_model_len, num_pages * config.page_size)
    kv, prefix = num_pages * config.page_size * state.bytes_per_token, max_model_len * per_position
    if kv + prefix > free:
        assert config.kv_memory is not None, "an automatic size fits"
        raise ValueError(
            f"--kv-memory {format_size(config.kv_memory)} does not fit: this worker has "
            f"{format_size(free + snapshot_bytes)} of free memory beside its dense weights and {reserve}, of which "
            f"attention over {max_model_len} tokens takes {format_size(prefix)}; lower --kv-memory"
        )
    left = free - kv - prefix
    try:
        slots = resolve_slots(
            slots=config.expert_slots,
            memory_bytes=config.expert_memory,
            expert_bytes=expert_bytes,
            num_experts=num_local_experts,
            available_bytes=left,
            stream_slots=footprints.STREAM_SLOTS,
        )
    except ValueError as error:
        if config.expert_memory is not None and config.expert_memory <= left:
            raise
        raise ValueError(f"{error} (beside {format_size(kv)} of KV and {reserve})") from None
    partial = slots < num_local_experts
    most = math.inf if host_available is None else max(0, host_available * (1 - MARGIN_SHARE) - grammars)
    sizes = {"all": num_local_experts * expert_bytes, "missing": (num_local_experts - slots) * expert_bytes, "none": 0}
    if not partial or not footprints.HOST_EXPERTS:
        store: ExpertHostStore = "none"
    elif config.expert_fetch != "alone":
        store = "all"  # peers read experts that stay where they are
    elif config.expert_host_store != "auto":
        store = config.expert_host_store
    else:
        # Peers must know before they meet how long a rank may read files, so several ranks need the flag.
        stores: list[ExpertHostStore] = ["all", "missing"]
        store = next((each for each in stores if sizes[each] <= most), "none" if config.num_workers == 1 else "missing")
    those, host_bytes = "all" if store == "all" else "the others", sizes[store]
    if host_bytes > most:
        raise ValueError(
            f"{slots} of {num_local_experts} experts have slots, so that {those} need {format_size(host_bytes)} of "
            f"host memory, but this host has {format_size(host_available or 0)} for this worker; use a host with more "
            "memory, raise --expert-slots or lower --kv-memory until all have slots, or read experts from the "
            "checkpoint's files with --expert-host-store none, which is slow"
        )
    elsewhere = f"{format_size(host_bytes)} of pinned host memory" if host_bytes else "the checkpoint's files"
    held_bytes = slot_bytes(
        slots, expert_bytes=expert_bytes, num_experts=num_local_experts, stream_slots=footprints.STREAM_SLOTS
    )
    return MemoryPlan(
        num_pages=num_pages,
        num_snapshots=num_snapshots,
        expert_slots=slots,
        stream_slots=footprints.STREAM_SLOTS if partial else 0,
        host_bytes=host_bytes,
        host_store=store,
        max_model_len=max_model_len,
        reserve=reserve,
        prefix_bytes=prefix,
        available=available,
        resident_bytes=held,
        reasons=(
            *reasons,
            *_slot_reasons(config, slots_bytes, num_snapshots, snapshot_bytes, by_position=state.by_position),
            f"{num_pages} KV pages, {format_size(kv)}, for sequences of up to {max_model_len} tokens",
            f"{slots} of {num_local_experts} experts in slots, {format_size(held_bytes)}"
            + (f", and {those} in {elsewhere}" if partial else ""),
        ),
    )


def _slot_reasons(
    config: EngineConfig, num_bytes: int, num_snapshots: int, snapshot_bytes: int, *, by_position: bool
) -> Iterator[str]:
    """Yield the reasons for the division of state per sequence, if there is any."""
    if not num_bytes:
        return
    behind = f", behind each of {1 + config.num_drafts} rows" if config.num_drafts and not by_position else ""
    yield f"state of {config.max_num_seqs} sequences{behind}, {format_size(num_bytes)}"
    if num_snapshots:
        yield f"{num_snapshots} snapshots of it behind prompts, {format_size(snapshot_bytes)} of KV memory"
    elif config.prefix_caching:
        yield "prefixes are not reused: there is no snapshot of the state behind them"


def _kv_budget(config: EngineConfig, *, free: int, all_experts: int, fills: bool) -> tuple[int, tuple[str, ...]]:
    """Return the bytes for KV pages and attention to them, without --kv-memory, and the reason.

    fills: whether they get all that is left beside all experts.
    """
    share = int(free * AUTO_KV_SHARE)
    words = f"of {format_size(free)} that are free, KV may take"
    if config.kv_memory is not None:
        return share, (f"--kv-memory {format_size(config.kv_memory)}",)
    if config.expert_slots is not None or config.expert_memory is not None:
        return share, (f"{words} {AUTO_KV_SHARE:.0%}, {format_size(share)}; experts as their flag says",)
    left = free - all_experts
    if left >= share and not fills:
        return share, (f"{words} {AUTO_KV_SHARE:.0%}, {format_size(share)}: all experts fit beside it",)
    if left >= int(free * LEAST_KV_SHARE):
        return left, (f"{words} {format_size(left)}: what is left beside all experts, {format_size(all_experts)}",)
    return share, (
        f"{words} {AUTO_KV_SHARE:.0%}, {format_size(share)}; not all experts fit, {format_size(all_experts)}, even "
        f"beside {LEAST_KV_SHARE:.0%} for KV",
    )


def _num_snapshots(config: EngineConfig, state: StateSpec, *, whole: int, longest: int) -> int:
    """Return the number of snapshots in `whole` bytes of KV memory: by --snapshot-memory, or by SNAPSHOT_SHARE.

    With --max-model-len, pages for one sequence of that length, `longest` bytes, come before the share. Raises
    ValueError if --snapshot-memory has no effect.
    """
    if config.snapshot_memory is not None:
        if not state.bytes_per_sequence:
            raise ValueError("--snapshot-memory is for linear attention: here no state is kept per sequence")
        found = config.snapshot_memory // state.bytes_per_sequence
        if not found:
            raise ValueError(
                f"--snapshot-memory {format_size(config.snapshot_memory)} holds no snapshot: each takes "
                f"{format_size(state.bytes_per_sequence)}"
            )
        return found
    if not (state.bytes_per_sequence and config.prefix_caching):
        return 0
    share = int(whole * SNAPSHOT_SHARE)
    if config.max_model_len is not None:
        share = max(0, min(share, whole - longest))
    return min(share // state.bytes_per_sequence, SNAPSHOTS_PER_SEQUENCE * config.max_num_seqs)


def _num_pages(
    config: EngineConfig, state: StateSpec, *, budget: int, snapshot_bytes: int, max_model_len: int, per_position: int
) -> int:
    """Return the number of pages in --kv-memory beside its snapshots. Without it, use as many as `budget` allows."""
    page_bytes = config.page_size * state.bytes_per_token
    longest = -(-max_model_len // config.page_size)
    if config.kv_memory is not None:
        num_pages = (config.kv_memory - snapshot_bytes) // page_bytes
    else:
        # Pages that lengthen the longest sequence also increase the memory of its attention.
        both = page_bytes + config.page_size * per_position
        num_pages = budget // both
        if num_pages > longest:
            num_pages = min(longest + (budget - longest * both) // page_bytes, config.max_num_seqs * longest)
    if num_pages < 2:
        beside, lower = "", ""
        if config.snapshot_memory is not None:
            beside, lower = f" beside {format_size(snapshot_bytes)} of snapshots", " or lower --snapshot-memory"
        raise ValueError(
            f"KV memory holds {max(num_pages, 0)} pages of {format_size(page_bytes)}{beside}, at least 2 are needed; "
            f"raise --kv-memory{lower}"
        )
    if config.max_model_len is not None and num_pages < longest:
        raise ValueError(
            f"--max-model-len {max_model_len} needs {longest} KV pages, memory holds {num_pages}; "
            "raise --kv-memory or lower --max-model-len"
        )
    return num_pages


def plan_with_fetch(*, config: EngineConfig, model: ModelConfig, **rest: Any) -> MemoryPlan:
    """Return `plan_memory`, with room for experts that peers read for this rank if it misses some and they may."""
    plan = plan_memory(config=config, model=model, **rest)
    if config.expert_fetch == "alone" or not plan.stream_slots:
        return plan
    # With less memory, experts do not get more slots.
    return plan_memory(config=config, model=model, **rest, staging=fetch_shape(config, model).num_bytes)


def fetch_shape(config: EngineConfig, model: ModelConfig) -> FetchShape:
    """Return the sizes of the missed experts that ranks read for each other."""
    up_bytes, down_bytes = model.expert_form(model.served_dtype(config.dtype)).region_bytes
    return FetchShape(world_size=config.num_workers, up_bytes=up_bytes, down_bytes=down_bytes)
