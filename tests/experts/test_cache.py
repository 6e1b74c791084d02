"""The expert cache: residency changes no bit, and counters follow the policy.

The CPU backend decides on the host. The CUDA backend decides on the device, through kernels on a GPU and through their
references otherwise.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.expert_fill import expert_fill
from tests.experts.accesses import RandomExperts

from moeyard_kernels.backend import Backend
from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.cpu.linear import linear, pack_weight
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.types.weight_form import plain_expert
from moeyard_worker.config.engine_config import ExpertHostStore
from moeyard_worker.exchange.base import Dispatched
from moeyard_worker.experts.cache import ExpertCache
from moeyard_worker.experts.policies import POLICIES, start_policy
from moeyard_worker.experts.policy import Counters

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = (1, 2, 4), range(3, 9), 24, 20, 2
TOTAL = len(LAYERS) * len(EXPERTS)
STORES: tuple[ExpertHostStore, ...] = ("none", "missing", "all")
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def gpu_backend(stream_slots: int) -> Backend:
    backend = CudaBackend(page_size=16, device=GPU)
    backend.stream_slots = stream_slots
    return backend


# With few stream slots the misses of prompts come in many groups.
BACKENDS: dict[str, Callable[[], Backend]] = {
    "cpu": lambda: CpuBackend(page_size=16),
    "gpu": lambda: gpu_backend(16),
    "gpu2": lambda: gpu_backend(2),
}


Weights = partial(RandomExperts, LAYERS, EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE)


def make_cache(
    source: RandomExperts,
    *,
    num_slots: int,
    policy: str = "slru",
    dtype: torch.dtype,
    backend: str = "cpu",
    host_store: ExpertHostStore = "missing",
) -> ExpertCache:
    cache = ExpertCache(
        backend=BACKENDS[backend](),
        source=source,
        layers=LAYERS,
        experts=EXPERTS,
        form=plain_expert(hidden=HIDDEN, intermediate=INTERMEDIATE, dtype=str(dtype).removeprefix("torch.")),
        num_slots=num_slots,
        policy=policy,
        host_store=host_store,
    )
    cache.preload()
    return cache


def run(cache: ExpertCache, layer: int, dispatched: Dispatched, backend: str) -> torch.Tensor:
    device = torch.device("cpu") if backend == "cpu" else GPU
    # An exchange sends no mask if no row belongs to a prompt.
    assert dispatched.prompt is not None
    moved = Dispatched(
        rows=dispatched.rows.to(device),
        experts=dispatched.experts.to(device),
        prompt=dispatched.prompt.to(device) if dispatched.prompt.any() else None,
        handle=None,
    )
    return cache.run(layer, moved).cpu()


def dispatch(generator: torch.Generator, *, counts: list[int], decodes: list[int], dtype: torch.dtype) -> Dispatched:
    """Rows of two pairs, one of them a hole, in any order. The first `decodes` rows of an expert are decode rows."""
    pairs = [
        (local, i >= num_decode)
        for local, (count, num_decode) in enumerate(zip(counts, decodes, strict=True))
        for i in range(count)
    ]
    pairs = [pairs[i] for i in torch.randperm(len(pairs), generator=generator).tolist()]
    experts = torch.full((len(pairs), TOP_K), -1)
    place = torch.randint(TOP_K, (len(pairs),), generator=generator)
    experts[torch.arange(len(pairs)), place] = torch.tensor([local for local, _ in pairs], dtype=torch.int64)
    return Dispatched(
        rows=torch.randn(len(pairs), HIDDEN, generator=generator).to(dtype),
        experts=experts,
        prompt=torch.tensor([prompt for _, prompt in pairs], dtype=torch.bool),
        handle=None,
    )


def accesses(seed: int, num_steps: int, dtype: torch.dtype) -> list[tuple[int, Dispatched]]:
    """Steps over all layers: idle, decode only, prefill only and mixed, with 0 to 40 rows per expert."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for step in range(num_steps):
        for layer in LAYERS:
            wanted = torch.randint(0, 3, (len(EXPERTS),), generator=generator) == 0
            counts = (torch.randint(1, 41, (len(EXPERTS),), generator=generator) * wanted).tolist()
            share = torch.randint(0, 2, (len(EXPERTS),), generator=generator).tolist()
            decodes = [(0, count, share[i] * (count + 1) // 2)[step % 3] for i, count in enumerate(counts)]
            if step % 7 == 6:
                counts = decodes = [0] * len(EXPERTS)
            out.append((layer, dispatch(generator, counts=counts, decodes=decodes, dtype=dtype)))
    return out


def needs(dispatched: Dispatched) -> tuple[list[int], list[int]]:
    assert dispatched.prompt is not None
    decode, every = ((set(dispatched.experts[rows].flatten().tolist()) - {-1}) for rows in (~dispatched.prompt, ...))
    return [EXPERTS[e] for e in sorted(decode)], [EXPERTS[e] for e in sorted(every - decode)]


def here(dispatched: Dispatched) -> torch.Tensor:
    """Return a mask [R, K] of pairs whose expert is local. All other results are holes."""
    return dispatched.experts >= 0


def sequential(source: RandomExperts, layer: int, dispatched: Dispatched, dtype: torch.dtype) -> torch.Tensor:
    """Compute one pair at a time from the checkpoint's tensors, in double precision, with zeros in holes."""
    out = torch.zeros(*dispatched.experts.shape, HIDDEN, dtype=torch.float64)
    for row, k in here(dispatched).nonzero().tolist():
        x = dispatched.rows[row].double()
        gate, up, down = (w.to(dtype).double() for w in source.experts[layer, EXPERTS[dispatched.experts[row, k]]])
        out[row, k] = (torch.nn.functional.silu(gate @ x) * (up @ x)) @ down.T
    return out


@pytest.mark.sampled(0)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_residency_changes_no_bit(dtype: torch.dtype, backend: str) -> None:
    source = Weights(dtype=dtype)
    caches = [
        make_cache(source, num_slots=num_slots, policy=policy, dtype=dtype, backend=backend, host_store=store)
        for policy in sorted(POLICIES)
        for num_slots in (1, 2, TOTAL // 2, TOTAL - 1, TOTAL)
        for store in STORES
    ]
    for layer, dispatched in accesses(1, 20, dtype):
        first, *others = [run(cache, layer, dispatched, backend) for cache in caches]
        assert first.shape == (*dispatched.experts.shape, HIDDEN)
        assert first.dtype == dtype
        filled = here(dispatched)
        assert all(torch.equal(first[filled], other[filled]) for other in others)
        if len(first):
            exact = sequential(source, layer, dispatched, dtype)
            error = (first.double() - exact)[filled].abs().max() / exact.abs().max()
            assert error < (1e-5 if dtype == torch.float32 else 2e-2)
    for cache in caches:
        cache.validate()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("store", ["missing", "all"])
@pytest.mark.parametrize("num_slots", [1, 4, TOTAL // 2])
def test_graph_decides_and_gathers(num_slots: int, policy: str, store: ExpertHostStore) -> None:
    """One graph has the decode steps of all layers. It replays with new rows, and prompts run eager in between."""
    dtype, num_rows = torch.bfloat16, 5
    source = Weights(dtype=dtype)
    part, whole = (
        make_cache(source, num_slots=size, policy=policy, dtype=dtype, backend="gpu2", host_store=store)
        for size in (num_slots, TOTAL)
    )
    generator = torch.Generator().manual_seed(num_slots)
    rows = torch.zeros(num_rows, HIDDEN, dtype=dtype, device=GPU)
    experts = torch.zeros(num_rows, TOP_K, dtype=torch.int64, device=GPU)
    held = Dispatched(rows=rows, experts=experts, prompt=None, handle=None)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for layer in LAYERS:
            part.run(layer, held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [part.run(layer, held) for layer in LAYERS]
    prompts = iter(accesses(5, 40, dtype))
    for step in range(40):
        rows.copy_(torch.randn(num_rows, HIDDEN, generator=generator))
        experts.copy_(torch.rand(num_rows, len(EXPERTS), generator=generator).argsort(1)[:, :TOP_K])
        graph.replay()
        for layer, out in zip(LAYERS, outs, strict=True):
            assert torch.equal(out, whole.run(layer, held)), (step, layer)
        layer, mixed = next(prompts)
        filled = here(mixed)
        assert torch.equal(run(part, layer, mixed, "gpu2")[filled], run(whole, layer, mixed, "gpu2")[filled]), step
    counters = part.look(wait=True).counters
    assert counters.num_hits > 0
    assert counters.misses["decode"] == counters.num_evictions > 0
    assert counters.misses["prefill"] > 0
    part.validate()
    # With "missing" every exchange has moved two experts.
    residency = part._residency
    assert residency is not None
    for (i, layer), (local, expert) in itertools.product(enumerate(LAYERS), enumerate(EXPERTS)):
        found = residency.stored(i, local).cpu().view(dtype)
        assert torch.equal(found, torch.cat([x.to(dtype).flatten() for x in source.experts[layer, expert]]))


@pytest.mark.parametrize(
    ("backend", "store"),
    [("cpu", "none"), ("gpu", "missing"), ("gpu", "none"), ("gpu2", "missing"), ("gpu2", "none")],
)
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("num_slots", [1, 4, TOTAL // 2, TOTAL, TOTAL + 5])
def test_counters_equal_those_of_the_policy(policy: str, num_slots: int, backend: str, store: ExpertHostStore) -> None:
    source = Weights()
    arguments: dict[str, Any] = {"policy": policy, "backend": backend, "host_store": store}
    cache = make_cache(source, num_slots=num_slots, dtype=torch.float32, **arguments)
    model = start_policy(policy, layers=LAYERS, experts=EXPERTS, num_slots=num_slots)
    counters = Counters()
    num_stalls = 0
    for layer, dispatched in accesses(2, 25, torch.float32):
        decode, prefill = needs(dispatched)
        missed = counters.num_misses
        for wave in model.access(layer, decode, prefill):
            counters.count(wave)
        num_stalls += counters.num_misses > missed
        run(cache, layer, dispatched, backend)
        cache.validate()
    stats = cache.look(wait=True)
    expert_bytes = 3 * HIDDEN * INTERMEDIATE * 4
    filled = min(num_slots, TOTAL)
    assert cache.num_slots == filled
    assert stats.bytes_copied == (counters.num_misses + filled) * expert_bytes
    if backend != "cpu" and (store != "none" or num_slots >= TOTAL):
        assert stats.bytes_to_host == counters.num_evictions * expert_bytes * (num_slots < TOTAL)
        # Accesses of a fully resident cache are not counted, because the host would have to wait.
        assert stats.counters == (counters if num_slots < TOTAL else Counters())
        # Experts without a slot are in host memory, so the source was read once.
        assert source.reads == list(itertools.product(LAYERS, EXPERTS))
    else:
        assert stats.counters == counters
        assert len(stats.stall_seconds) == num_stalls
        assert len(source.reads) == counters.num_misses + filled
    if num_slots >= TOTAL:
        assert counters.num_hits > 0
        assert counters.num_misses == 0


def test_preload_reports_every_expert_and_run_demands_it() -> None:
    source, written = Weights(), list[int]()
    arguments: dict[str, Any] = {
        "backend": CpuBackend(page_size=16),
        "layers": LAYERS,
        "experts": EXPERTS,
        "form": plain_expert(hidden=HIDDEN, intermediate=INTERMEDIATE, dtype="float32"),
    }
    cache = ExpertCache(source=source, num_slots=TOTAL, **arguments)
    generator = torch.Generator().manual_seed(3)
    work = dispatch(generator, counts=[1] * 6, decodes=[1] * 6, dtype=torch.float32)
    with pytest.raises(AssertionError, match="preload"):
        cache.run(1, work)
    cache.preload(written.append)
    cache.preload(written.append)
    assert written == [3 * HIDDEN * INTERMEDIATE * 4] * TOTAL
    assert source.reads == list(itertools.product(LAYERS, EXPERTS))
    part = ExpertCache(source=source, num_slots=TOTAL - 1, **arguments)
    with pytest.raises(AssertionError, match="preload"):
        part.run(1, work)
    part.preload(written.append)
    assert len(written) == 2 * TOTAL - 1
    assert torch.equal(cache.run(4, work)[here(work)], part.run(4, work)[here(work)])


def test_load_imbalance_is_the_busiest_over_the_mean() -> None:
    cache = make_cache(Weights(), num_slots=3, dtype=torch.float32)
    generator = torch.Generator().manual_seed(4)
    cache.run(1, dispatch(generator, counts=[4, 0, 2, 0, 0, 0], decodes=[0] * 6, dtype=torch.float32))
    cache.run(2, dispatch(generator, counts=[0] * 6, decodes=[0] * 6, dtype=torch.float32))
    assert cache.stats.load_imbalance == {1: 4.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_slot_holds_its_expert_packed_and_rounded_once(dtype: torch.dtype) -> None:
    slots = CpuBackend(page_size=16).expert_slots(
        num_slots=3, form=plain_expert(hidden=16, intermediate=8, dtype=str(dtype).removeprefix("torch."))
    )
    experts = [(torch.randn(8, 16), torch.randn(8, 16), torch.randn(16, 8)) for _ in range(3)]
    # Slot 0 is written twice: its first expert must disappear, and slots must not share memory.
    for slot, expert in ((0, 2), (1, 1), (0, 0), (2, 2)):
        slots.write(slot, expert_fill(*experts[expert]))
    x, h = torch.randn(5, 16).to(dtype), torch.randn(5, 8).to(dtype)
    for slot, (gate, up, down) in enumerate(experts):
        gate_up = pack_weight(torch.cat([gate, up]).to(dtype))
        assert torch.equal(linear(x, slots.gate_up[slot]), linear(x, gate_up))
        assert torch.equal(linear(h, slots.down[slot]), linear(h, pack_weight(down.to(dtype))))


@pytest.mark.parametrize("num_slots", [1, 5, TOTAL - 1])
@pytest.mark.parametrize("backend", ["gpu", "gpu2"])
def test_prompts_copy_the_next_layers_experts_ahead(backend: str, num_slots: int) -> None:
    """Prompts go layer by layer or skip one, and decode rows change residency in between."""
    generator = torch.Generator().manual_seed(num_slots)
    all_counts, none = [9] * len(EXPERTS), [0] * len(EXPERTS)
    some = [9, 0, 9, 9, 0, 9]
    visits = [
        (1, all_counts, none),
        (2, all_counts, none),
        (4, all_counts, none),
        (1, some, none),
        (4, all_counts, none),
        (2, all_counts, [1, 0, 0, 0, 1, 0]),
        (4, some, [0, 0, 1, 0, 0, 0]),
        (1, all_counts, none),
        (2, [1] * 6, [1] * 6),
        (2, all_counts, none),
        (4, all_counts, none),
    ]
    source = Weights()
    ours, wanted = (
        make_cache(source, num_slots=slots, dtype=torch.float32, backend=backend) for slots in (num_slots, TOTAL)
    )
    for layer, counts, decodes in visits:
        rows = dispatch(generator, counts=counts, decodes=decodes, dtype=torch.float32)
        here = rows.experts >= 0
        got, expected = (run(cache, layer, rows, backend)[here] for cache in (ours, wanted))
        assert torch.equal(got, expected), layer
    ours.validate()
