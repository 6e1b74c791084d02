"""Compare chunk prefill with flash-linear-attention on a GPU: `bench/flash_linear_attention.py --folder WHEELS`.

WHEELS is a folder with its wheels (flash-linear-attention 0.6, fla-core, einops; pure Python), packed or unpacked. Both
sides get the same rows, raw gates and rates, and normalise inside. The output has microseconds per call, launched one
by one and replayed as a graph (if theirs can be captured). Launched calls are timed by the wall clock over many calls,
which is the host's time if that is longer. It also has the ratio of both times, the wanted ratio, and the difference of
the outputs.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from kernel_cases.timing import capture

from moeyard_kernels import ops
from moeyard_kernels.types.state_slots import PromptChunks

DIM, HEADS = 128, 32
PROMPTS = ((1024,), (4096,), (16384,), (3000, 17, 1200, 64, 1, 2100, 700, 1110))
# Wanted ratios: Kimi's by prompt length, then several prompts at once, then Gated DeltaNet.
KDA_WANTED, SEVERAL_WANTED, GDN_WANTED = {1024: 2.0, 4096: 1.5, 16384: 1.4}, 1.5, 1.3


def eager(run: Callable[[], object], count: int = 20) -> float:
    """Return the microseconds of a call by the wall clock, over `count` calls in a row."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count * 1e6


def replayed(run: Callable[[], object]) -> float | None:
    """Return the microseconds of a graph replay, or None if `run` cannot be captured."""
    try:
        graph = capture(run)
    except RuntimeError as error:
        print(f"  not captured: {str(error).splitlines()[0]}")
        torch.cuda.synchronize()
        return None
    return eager(graph.replay)


def wanted(op: str, lengths: Sequence[int]) -> float:
    """Return the wanted ratio."""
    if op == "gdn_chunk_prefill":
        return GDN_WANTED
    return KDA_WANTED[lengths[0]] if len(lengths) == 1 else SEVERAL_WANTED


def verdict(ours: float | None, theirs: float | None, least: float) -> str:
    """Format both times, their ratio, and whether it reaches the wanted one."""
    if not ours or not theirs:
        return f"{ours or float('nan'):8.1f} {theirs or float('nan'):8.1f}     -    "
    return f"{ours:8.1f} {theirs:8.1f} {theirs / ours:5.2f}x {'yes' if theirs >= least * ours else 'NO ':3}"


def compare(op: str, lengths: Sequence[int], k_heads: int, theirs: Callable[..., Any]) -> None:
    """Print one line of the table."""
    by_row, num_rows = op == "kda_chunk_prefill", sum(lengths)
    rates = HEADS * (DIM if by_row else 1)
    qkv = torch.randn(num_rows, (2 * k_heads + HEADS) * DIM, device="cuda", dtype=torch.bfloat16)
    b, a = (torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16) for width in (HEADS, rates))
    a_log = torch.linspace(-4, 1, HEADS, device="cuda")
    dt_bias = torch.randn(*((HEADS, DIM) if by_row else (HEADS,)), device="cuda")
    state = torch.zeros(len(lengths), HEADS, DIM, DIM, device="cuda")
    chunks = PromptChunks.plan(lengths, [0] * len(lengths), range(len(lengths)), device="cuda")
    prefill = ops.kda_chunk_prefill if by_row else ops.gdn_chunk_prefill
    # Their kernel needs each tensor contiguous.
    q, k, v = (x.contiguous() for x in qkv.split((k_heads * DIM, k_heads * DIM, HEADS * DIM), 1))
    q, k, v = (x.view(1, num_rows, -1, DIM) for x in (q, k, v))
    gates = a.view(1, num_rows, HEADS, DIM) if by_row else a.view(1, num_rows, HEADS)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    several: dict[str, Any] = {"cu_seqlens": ends.cuda(), "cu_seqlens_cpu": ends} if len(lengths) > 1 else {}
    more = {"use_gate_in_kernel": True, "A_log": a_log, "dt_bias": dt_bias.flatten(), "output_final_state": True}

    def ours() -> torch.Tensor:
        return prefill(qkv, b, a, a_log, dt_bias, state, chunks=chunks)

    def other() -> torch.Tensor:
        return theirs(
            q,
            k,
            v,
            gates,
            b.view(1, num_rows, HEADS),
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            **more,
            **several,
        )[0]

    with torch.no_grad():
        mine, his = ours().double(), other()[0].double()
        apart = float((mine - his).norm() / mine.norm())
        times = [eager(ours), eager(other)]
        graphs = [replayed(ours), replayed(other)]
    shape, least = f"{op} T{num_rows} of {len(lengths)}", wanted(op, lengths)
    print(f"{shape:32} {least:.1f}x  {verdict(*times, least)}  {verdict(*graphs, least)}  {apart:.1e}", flush=True)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="folder of its wheels, packed or unpacked")
    folder = parser.parse_args().folder
    sys.path[:0] = [str(folder), *map(str, sorted(folder.glob("*.whl")))]
    kda = importlib.import_module("fla.ops.kda").chunk_kda
    gdn = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds")
    sides = "ours   theirs ratio reached"
    print(f"{'':32} wanted launched: {sides}  replayed: {sides}  apart")
    for lengths in PROMPTS:
        compare("kda_chunk_prefill", lengths, HEADS, kda)
        compare("gdn_chunk_prefill", lengths, HEADS // 2, gdn)


if __name__ == "__main__":
    main()
