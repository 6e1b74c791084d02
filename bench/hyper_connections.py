"""Launches of DeepSeek-V4's layers besides attention and products: equality at Flash sizes, then medians in graphs.

    python bench/hyper_connections.py

Kernels are compared with the references on the CPU, and rows with the same rows in other company. Then each op is timed
by `kernel_cases.timing`, with its share of the time in which a copy moves its bytes. Each check first runs in a process
of its own, which compiles its kernels, because one process compiles one after the other.
"""

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kernel_cases.case import Case, assert_bits
from kernel_cases.grouped_packed import random_stack, values
from kernel_cases.hyper_connections import block_result, enter_case, leave_case, make_mix, make_site, tensors
from kernel_cases.timing import Timer

from moeyard_kernels import ops
from moeyard_kernels.hyper_connections import hyper_enter, hyper_leave
from moeyard_kernels.hyper_connections.hyper_rows import hyper_rows
from moeyard_kernels.hyper_connections.hyper_sums import CONFIGS, hyper_sums
from moeyard_kernels.types.expert_layout import ExpertPairs
from moeyard_kernels.types.layers import HyperLayer, HyperMix
from moeyard_kernels.types.matrix import Matrix
from moeyard_kernels.types.weight_form import fp8_tiles

HIDDEN, STREAMS, EXPERTS, TOP_K, INNER, LIMIT = 4096, 4, 256, 6, 2048, 10.0
GATE: dict[str, Any] = {"top_k": TOP_K, "scoring": "sqrtsoftplus", "renormalize": True, "scaling": 1.5}
BF16 = torch.bfloat16


def to_cpu(value: Any) -> Any:
    """Return a tensor, site or mix on the CPU."""
    if isinstance(value, HyperLayer):
        moved = {name: getattr(value, name).cpu() for name in ("base", "scale", "norm")}
        numbers = {name: getattr(value, name) for name in ("eps", "rms_eps", "iterations")}
        return HyperLayer(weight=Matrix.plain(value.weight.data.cpu()), **moved, **numbers)
    if isinstance(value, HyperMix):
        return HyperMix(post=value.post.cpu(), comb=value.comb.cpu())
    return value.cpu() if isinstance(value, torch.Tensor) else value


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.cpu().double() - wanted.double()).norm() / wanted.double().norm())


def connections(parts: bool, head: bool = False) -> str:
    """Compare leave, or the head's enter, with the reference; then every config, and rows in other company."""
    num_rows = 300
    site, streams, mix = make_site(HIDDEN, head=head), torch.randn(num_rows, STREAMS, HIDDEN), make_mix(num_rows)
    streams = streams.to("cuda", BF16)
    given = {} if head else {**block_result(num_rows, HIDDEN, parts=parts), "mix": mix}

    def run(rows: slice, **options: Any) -> tuple[torch.Tensor, ...]:
        if head:
            return tensors(hyper_enter.hyper_enter(streams[rows].clone(), site, **options))
        some = {name: x[rows].clone() for name, x in given.items() if name != "mix"}
        of_rows = HyperMix(post=mix.post[rows], comb=mix.comb[rows])
        return tensors(
            hyper_leave.hyper_leave(streams=streams[rows].clone(), mix=of_rows, site=site, **some, **options)
        )

    whole = run(slice(None))
    cpu = {name: to_cpu(x) for name, x in given.items()}
    op = ops.hyper_enter if head else ops.hyper_leave
    wanted = tensors(op.reference(streams=streams.cpu(), site=to_cpu(site), **cpu))
    errors = [error(found, exact) for found, exact in zip(whole, wanted, strict=True)]
    wrong = []
    for rows in (slice(0, 1), slice(7, 8), slice(100, 108), slice(200, 264), slice(0, 65)):
        try:
            assert_bits(f"rows {rows}", run(rows), tuple(x[rows] for x in whole))
        except AssertionError as found:
            wrong.append(str(found))
    for config in CONFIGS:
        try:
            assert_bits(f"{config}", run(slice(None), config=config), whole)
            after = streams if head else whole[0]
            _, sums = hyper_sums(after, site, config=config)
            for apart in (False, True):
                found = tensors(hyper_rows(after, sums, site, apart=apart))
                assert_bits(f"{config} apart={apart}", found, whole if head else whole[1:])
        except Exception as failure:
            wrong.append(f"{config}: {type(failure).__name__} {failure}"[:300])
    assert not wrong, "\n".join(wrong)
    names = ("rows",) if head else ("streams", "rows", "post", "comb")
    assert max(errors) < 1e-2, errors
    return ", ".join(f"{name} {value:.1e}" for name, value in zip(names, errors, strict=True))


def limits() -> str:
    """Compare silu_mul, and experts with and without a layout, with clamped inputs of the same kernels."""
    x = torch.randn(65, 2 * INNER, device="cuda").mul(8).to(BF16)
    clamped = torch.cat((x[:, :INNER].clamp(max=LIMIT), x[:, INNER:].clamp(-LIMIT, LIMIT)), 1)
    assert_bits("silu_mul", ops.silu_mul(x, LIMIT), ops.silu_mul(clamped))
    rows = torch.randn(3, 1024, device="cuda").mul(4).to(BF16)
    gate_up, down = (torch.randn(8, *shape, device="cuda").div(8).to(BF16) for shape in ((1024, 1024), (1024, 512)))
    ids = torch.rand(3, 8, device="cuda").argsort(1)[:, :2].contiguous()
    slots = torch.arange(8, dtype=torch.int32, device="cuda")
    pairs = ExpertPairs(topk_ids=ids, slot_of_expert=slots, num_slots=8)
    layout = ops.expert_layout(ids, slots, num_slots=8, block_rows=16)
    found = ops.grouped_gemm(rows, gate_up, down, pairs, top_k=2, limit=LIMIT)
    assert_bits("layout", ops.grouped_gemm(rows, gate_up, down, layout, top_k=2, limit=LIMIT), found)
    wanted = torch.stack(
        [
            ops.linear(ops.silu_mul(ops.linear(rows[t : t + 1], gate_up[e]), LIMIT), down[e])[0]
            for t in range(3)
            for e in ids[t].tolist()
        ]
    )
    assert_bits("products one by one", found, wanted)
    assert not torch.equal(found, ops.grouped_gemm(rows, gate_up, down, pairs, top_k=2)), "the limit has no effect"
    return "bits equal"


def packed_limit() -> str:
    """Compare experts over fp8 codes with those over their values, with a limit."""
    form = fp8_tiles(128, 128)
    gate_up = random_stack(form, 4, matrices=2, rows=256, columns=512)
    down = random_stack(form, 4, matrices=1, rows=512, columns=256)
    rows = torch.randn(5, 512, device="cuda").mul(40).to(BF16)
    ids = torch.rand(5, 4, device="cuda").argsort(1)[:, :2].contiguous()
    slots = torch.arange(4, dtype=torch.int32, device="cuda")
    pairs = ExpertPairs(topk_ids=ids, slot_of_expert=slots, num_slots=4)
    found = ops.grouped_gemm_packed(rows, gate_up, down, pairs, top_k=2, limit=0.5)
    assert_bits("values", found, ops.grouped_gemm(rows, values(gate_up), values(down), pairs, top_k=2, limit=0.5))
    assert not torch.equal(found, ops.grouped_gemm_packed(rows, gate_up, down, pairs, top_k=2)), "no effect"
    return "bits equal"


CHECKS: dict[str, Callable[[], str]] = {
    "leave, experts": partial(connections, True),
    "leave, rows": partial(connections, False),
    "enter, head": partial(connections, False, True),
    "limit": limits,
    "limit, fp8 experts": packed_limit,
}


def gate_case(num_rows: int) -> Case:
    """Return the case of weights for given experts. `kernel_cases.topk_gate` has the case that chooses."""
    logits = torch.randn(num_rows, EXPERTS, device="cuda")
    ids = torch.rand(num_rows, EXPERTS, device="cuda").argsort(1)[:, :TOP_K].contiguous()
    run = partial(ops.topk_gate, logits, ids=ids, **GATE)
    num_bytes = logits.nbytes + 12 * num_rows * TOP_K
    return Case(
        op="topk_gate", shape=f"T{num_rows} E{EXPERTS} given ids", run=run, prove=lambda: None, num_bytes=num_bytes
    )


def silu_case(num_rows: int, limit: float | None) -> Case:
    x = torch.randn(num_rows, 2 * INNER, device="cuda").to(BF16)
    shape = f"T{num_rows} I{INNER} limit {limit}"
    run = partial(ops.silu_mul, x, limit)
    return Case(op="silu_mul", shape=shape, run=run, prove=lambda: None, num_bytes=6 * num_rows * INNER)


def timed(timer: Timer, case: Case, lines: list[str], *, variants: bool) -> None:
    """Add a line for the op, its chain and other configs."""
    floor = case.num_bytes / timer.copy_bandwidth
    runs: list[tuple[str, Any]] = [("", case.run)]
    if case.baseline is not None:
        runs.append((f"chain: {case.baseline_name}", case.baseline))
    if variants:
        runs += [
            (f"{'apart' if config.APART else 'loop'} BM{config.BM} st{config.num_stages}", r)
            for config, r in case.variants
        ]  # type: ignore[attr-defined]
    for name, run in runs:
        try:
            seconds = timer.seconds(run, case.num_bytes)
            share = f"{seconds * 1e6:9.2f} us   floor {floor * 1e6:8.2f}   {floor / seconds:5.2f} of copy"
        except Exception as found:
            share = f"{type(found).__name__}: {found}"[:120]
        lines.append(f"{case.op:12} {case.shape:34} {name:32} {share}")


def main() -> None:
    if len(sys.argv) > 1:
        CHECKS[sys.argv[1]]()
        return
    # Compile first.
    torch.manual_seed(1)
    running = [
        subprocess.Popen(
            [sys.executable, __file__, name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ
        )
        for name in CHECKS
    ]
    for process in running:
        process.wait()
    for name, check in CHECKS.items():
        try:
            print(f"ok    {name}: {check()}", flush=True)
        except Exception as found:
            print(f"WRONG {name}: {type(found).__name__}: {found}", flush=True)
            traceback.print_exc(limit=-2)
    timer, lines = Timer(), list[str]()
    print(f"copy {timer.copy_bandwidth / 1e12:.2f} TB/s", flush=True)
    makers: list[tuple[Callable[[], Case], bool]] = []
    for rows in (1, 8, 64, 8192):
        makers.append((partial(leave_case, "Flash", rows, HIDDEN, parts=True), rows >= 64))
        makers.append((partial(leave_case, "Flash", rows, HIDDEN, parts=False), False))
        makers.append((partial(enter_case, "Flash", rows, HIDDEN), False))
    for rows in (1, 64, 8192):
        makers.append((partial(gate_case, rows), False))
        makers.append((partial(silu_case, rows, None), False))
        makers.append((partial(silu_case, rows, LIMIT), False))
    for make, variants in makers:
        try:
            timed(timer, make(), lines, variants=variants)
        except Exception as found:
            lines.append(f"{type(found).__name__}: {found}"[:160])
        print(lines[-1], flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
