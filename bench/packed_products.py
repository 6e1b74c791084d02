"""Compare products over codes with products over the bf16 values on this GPU: bits first, then times.

`python bench/packed_products.py [PART ...] [--match REGEX]` runs some of PARTS, all by default, or the products in them
whose names match. Several processes compile the kernels
first, so that the times take about a minute. A line has the time of the product over codes, that of bf16, their ratio,
and the share of a copy's bandwidth that the codes alone need. Weights rotate through memory larger than L2.
"""

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from kernel_cases.grouped_packed import random_stack, values
from kernel_cases.timing import capture, replay_seconds

from moeyard.clients.bench.bandwidth import copy_bandwidth
from moeyard_kernels import ops
from moeyard_kernels.experts import expert_layout, grouped_gemm, grouped_packed
from moeyard_kernels.experts.packed_product import PackedConfig
from moeyard_kernels.linear import linear_packed
from moeyard_kernels.types.expert_layout import FEW_PAIRS, ExpertLayout, ExpertPairs, expert_block_rows
from moeyard_kernels.types.matrix import Matrix, dequantize
from moeyard_kernels.types.weight_form import WeightForm, fp4_tiles, fp8_tiles, int4_tiles

PARTS = ("experts", "experts-configs", "dense", "dense-configs", "prompts")
# Bytes of weights that launches rotate through: more than L2 holds.
_ROTATED = 256 << 20
# The longest time to compile kernels ahead.
_COMPILE_SECONDS = 120
_FP8, _FP8_FP32 = fp8_tiles(128, 128, scales="bfloat16"), fp8_tiles(128, 128)
_FP8_ROWS, _FP4 = fp8_tiles(1, None, scales="bfloat16"), fp4_tiles(32)
_INT4 = int4_tiles(128, scales="bfloat16", zeros=False)

# name, outputs, columns
_DENSE = (
    ("Qwen3-30B qkv", 5120, 2048),
    ("Qwen3-30B o", 2048, 4096),
    ("V3 q_kv_a", 2112, 7168),
    ("V3 q_b", 24576, 1536),
    ("V3 o", 7168, 16384),
    ("V3 shared gate_up", 4096, 7168),
    ("V3 shared down", 7168, 2048),
    ("V4-Flash q_kv_a", 1536, 4096),
    ("V4-Flash q_b", 32768, 1024),
    ("V4-Flash o_b", 4096, 8192),
)
# name, form, experts, experts per token, hidden size, inner size, numbers of tokens
_EXPERTS = (
    ("Qwen3-30B fp8", _FP8, 128, 8, 2048, 768, (1, 8, 64, 1024, 8192)),
    ("Qwen3-30B fp8, fp32 scales", _FP8_FP32, 128, 8, 2048, 768, (1, 8, 64, 1024, 8192)),
    ("Qwen3-30B int4", _INT4, 128, 8, 2048, 768, (1, 8, 64, 1024, 8192)),
    ("Qwen3-30B fp4", _FP4, 128, 8, 2048, 768, (1, 64, 8192)),
    ("V4-Flash fp4", _FP4, 256, 6, 4096, 2048, (1, 8, 64, 8192)),
    ("V3, 32 experts, fp8", _FP8, 32, 8, 7168, 2048, (8, 1024)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product: `run(i)` uses copy i of `copies` of the weights. `read`: bytes of codes that one run reads."""

    name: str
    run: Callable[[int], torch.Tensor]
    bf16: Callable[[int], torch.Tensor] | None
    copies: int
    read: int


def microseconds(run: Callable[[int], object], copies: int) -> float:
    """Return the median time of a launch in a CUDA graph of at least 8 launches over all copies."""
    launches = copies * -(-8 // copies)

    def body() -> None:
        for i in range(launches):
            run(i % copies)

    graph = capture(body)
    found = [replay_seconds(graph) for _ in range(8)]
    return statistics.median(found[1:]) * 1e6 / launches


def clones(matrix: Matrix, count: int) -> list[Matrix]:
    """Return `count` matrices of the same codes in memory of their own."""
    return [matrix, *(replace(matrix, arrays=tuple(a.clone() for a in matrix.arrays)) for _ in range(count - 1))]


def dense_matrix(form: WeightForm, num_out: int, dim: int, warm: bool) -> tuple[list[Matrix], list[torch.Tensor]]:
    """Return copies of a random matrix of codes and of its values."""
    stack = random_stack(form, 1, matrices=1, rows=num_out, columns=dim)
    matrix = stack[0]
    count = 1 if warm else max(1, _ROTATED // (num_out * dim))
    return clones(matrix, count), [dequantize(matrix).clone() for _ in range(count)]


def dense(warm: bool) -> Iterator[Product]:
    """Yield dense products of few rows, with blocks of scales and with scales per row."""
    for (name, num_out, dim), form in itertools.product(_DENSE, (_FP8, _FP8_ROWS)):
        if form is _FP8_ROWS and not name.startswith("Qwen"):
            continue
        coded, plain = dense_matrix(form, num_out, dim, warm)
        for rows in (1, 8, 16, 64):
            x = torch.randn(rows, dim, device="cuda").bfloat16()
            yield Product(
                name=f"{name} [{num_out} x {dim}] {'rows' if form is _FP8_ROWS else 'blocks'} M={rows}",
                run=lambda i, x=x, coded=coded: ops.linear_packed(x, coded[i]),
                bf16=lambda i, x=x, plain=plain: ops.linear(x, plain[i], static_weight=True),
                copies=len(coded),
                read=num_out * dim,
            )


def dense_configs(warm: bool) -> Iterator[Product]:
    """Yield all configs of some dense products."""
    for name, num_out, dim in (_DENSE[0], _DENSE[1], _DENSE[2], _DENSE[4], _DENSE[8], _DENSE[9]):
        coded, plain = dense_matrix(_FP8, num_out, dim, warm)
        for rows in (8, 16, 32, 64):
            x = torch.randn(rows, dim, device="cuda").bfloat16()
            for config in linear_packed.CONFIGS:
                if rows < config.BM or rows > 2 * config.BM or dim // 64 % config.tiles:
                    continue
                yield Product(
                    name=f"{name} M={rows} BM={config.BM} BN={config.BN} tiles={config.tiles} "
                    f"stages={config.num_stages} {'warps' if config.warp_products else 'groups'}",
                    run=lambda i, x=x, coded=coded, c=config: linear_packed.linear_packed(x, coded[i], config=c),
                    bf16=lambda i, x=x, plain=plain: ops.linear(x, plain[i], static_weight=True),
                    copies=len(coded),
                    read=num_out * dim,
                )


def prompts(warm: bool) -> Iterator[Product]:
    """Yield dense products of many rows: values written and then multiplied, and products that decode on the chip."""
    for name, num_out, dim in (_DENSE[0], _DENSE[1], _DENSE[4]):
        coded, plain = dense_matrix(_FP8, num_out, dim, warm)
        scratch = torch.empty(num_out, dim, dtype=torch.bfloat16, device="cuda")
        given: dict[str, Any] = {"copies": len(coded), "read": num_out * dim}
        yield Product(
            name=f"{name} [{num_out} x {dim}] values only",
            run=lambda i, coded=coded, s=scratch: ops.write_values(s, coded[i]),
            bf16=None,
            **{**given, "read": 3 * num_out * dim},
        )
        for rows in (128, 256, 1024, 8192):
            x = torch.randn(rows, dim, device="cuda").bfloat16()
            both = {"bf16": lambda i, x=x, plain=plain: ops.linear(x, plain[i], static_weight=True), **given}
            yield Product(
                name=f"{name} M={rows} values, then product",
                run=lambda i, x=x, coded=coded, s=scratch: ops.linear(x, ops.write_values(s, coded[i])),
                **both,
            )
            if rows <= 256:
                yield Product(
                    name=f"{name} M={rows} decoded on the chip",
                    run=lambda i, x=x, coded=coded: ops.linear_packed(x, coded[i]),
                    **both,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The experts of a layer, and `layouts` of different choices of its tokens.

    They read more than L2 holds, so that each launch reads its codes from memory. `read`: bytes that a launch reads on
    average.
    """

    gate_up: Matrix
    down: Matrix
    top_k: int
    x: torch.Tensor
    layouts: list[ExpertLayout | ExpertPairs]
    read: int


def stacks_of(form: WeightForm, count: int, hidden: int, inner: int, *, warm: bool) -> tuple[Matrix, Matrix]:
    """Return gate_up and down of random experts: 8 if only kernels are compiled."""
    slots = 8 if warm else count
    gate_up = random_stack(form, slots, matrices=2, rows=inner, columns=hidden)
    return gate_up, random_stack(form, slots, matrices=1, rows=hidden, columns=inner)


def layer_of(stacks: tuple[Matrix, Matrix], count: int, top_k: int, num_tokens: int, *, rows: int = 0) -> Layer:
    """Return random choices among `count` experts. rows: of the layouts' blocks, 0 for the number in the engine."""
    gate_up, down = stacks
    slots = gate_up.shape[0]
    expert = sum(a[0].nbytes for a in (*gate_up.arrays, *down.arrays))
    slot_of = torch.arange(count, dtype=torch.int32, device="cuda") % slots
    layouts: list[ExpertLayout | ExpertPairs] = []
    active = 0
    while not layouts or (active * expert < _ROTATED and slots == count):
        ids = torch.rand(num_tokens, count, device="cuda").argsort(1)[:, :top_k].contiguous()
        block = rows or expert_block_rows(ids.numel(), count)
        laid_out = expert_layout.expert_layout(ids, slot_of, num_slots=slots, block_rows=block)
        active += int((laid_out.counts > 0).sum())
        few = ids.numel() <= FEW_PAIRS
        layouts.append(ExpertPairs(topk_ids=ids, slot_of_expert=slot_of, num_slots=slots) if few else laid_out)
    x = torch.randn(num_tokens, gate_up.shape[-1], device="cuda").bfloat16()
    return Layer(gate_up=gate_up, down=down, top_k=top_k, x=x, layouts=layouts, read=active * expert // len(layouts))


def experts(warm: bool) -> Iterator[Product]:
    """Yield the experts of models."""
    for name, form, count, top_k, hidden, inner, tokens in _EXPERTS:
        stacks = stacks_of(form, count, hidden, inner, warm=warm)
        plain = values(stacks[0]), values(stacks[1])
        for num_tokens in tokens:
            its = layer_of(stacks, count, top_k, num_tokens)
            yield Product(
                name=f"{name} T={num_tokens} blocks of {its.layouts[0].block_rows}",
                run=lambda i, of=its: grouped_packed.grouped_gemm_packed(
                    of.x, of.gate_up, of.down, of.layouts[i], top_k=of.top_k
                ),
                bf16=lambda i, of=its, w=plain: grouped_gemm.grouped_gemm(of.x, *w, of.layouts[i], top_k=of.top_k),
                copies=len(its.layouts),
                read=its.read,
            )


def experts_configs(warm: bool) -> Iterator[Product]:
    """Yield both products in several configs: of 8192 tokens, and of few."""
    many = [
        (*each, rows, warps)
        for each in itertools.product((1, 2), (2, 3))
        for rows, warps in ((128, 4), (128, 8), (256, 8))
    ]
    few = [(*each, rows, 4) for each in itertools.product((1, 2, 4), (2, 3, 4)) for rows in (64, 128)]
    by_warps = [
        (*each, rows, warps, True)
        for each in itertools.product((1, 2, 4), (2, 3, 4))
        for rows, warps in ((64, 4), (128, 4), (128, 8))
    ]
    models = (each for each in _EXPERTS if each[0] in ("Qwen3-30B fp8", "Qwen3-30B int4", "V4-Flash fp4"))
    for model, num_tokens in itertools.product(models, (1, 8, 8192)):
        name, form, count, top_k, hidden, inner, _ = model
        stacks = stacks_of(form, count, hidden, inner, warm=warm)
        its = layer_of(stacks, count, top_k, num_tokens, rows=128 if num_tokens > 64 else 0)
        first = its.layouts[0]
        rows = grouped_packed.block_rows(first)
        h = torch.randn(grouped_packed.num_blocks(first) * rows, its.down.shape[-1], device="cuda").bfloat16()
        out = torch.empty(first.num_pairs, its.x.shape[1], dtype=torch.bfloat16, device="cuda")
        tried = many if num_tokens > 64 else few + (by_warps if num_tokens == 1 else [])
        for (tiles, stages, width, warps, *rest), gated in itertools.product(tried, (True, False)):
            matrix, source, target = (its.gate_up, its.x, h) if gated else (its.down, h, out)
            config = PackedConfig(
                BN=width // (1 + gated), tiles=tiles, num_stages=stages, num_warps=warps, warp_products=bool(rest)
            )
            dim = matrix.shape[-1]
            needed = grouped_packed.shared_bytes(config, matrix.form, dim=dim, rows=rows, gated=gated)
            if needed > grouped_packed.MAX_SHARED or dim // matrix.form.tile_columns % tiles:
                continue
            run = grouped_packed.gate_up_rows if gated else grouped_packed.down_pairs
            more = {"top_k": its.top_k} if gated else {}
            yield Product(
                name=f"{name} T={num_tokens} {'gate_up' if gated else 'down'} rows={rows} tiles={tiles} "
                f"stages={stages} warps={warps} BN={config.BN}{' by warps' * len(rest)}",
                run=lambda i, run=run, s=source, m=matrix, y=its.layouts, t=target, c=config, more=more: run(
                    s, m, y[i], out=t, config=c, **more
                ),
                bf16=None,
                copies=len(its.layouts),
                read=its.read
                * sum(a.nbytes for a in matrix.arrays)
                // sum(a.nbytes for a in (*its.gate_up.arrays, *its.down.arrays)),
            )


_MAKE = {
    "dense": dense,
    "dense-configs": dense_configs,
    "prompts": prompts,
    "experts": experts,
    "experts-configs": experts_configs,
}


def made(part: str, match: str, *, warm: bool) -> Iterator[Product]:
    """Yield the products of a part whose names match."""
    return (each for each in _MAKE[part](warm=warm) if re.search(match, each.name))


def warm_up(parts: list[str], match: str, index: int, count: int) -> None:
    """Run every count-th product once, which compiles its kernels into the cache."""
    for i, product in enumerate(each for part in parts for each in made(part, match, warm=True)):
        if i % count == index:
            try:
                product.run(0)
                if product.bf16 is not None:
                    product.bf16(0)
                torch.cuda.synchronize()
            except Exception:
                pass


def compile_all(parts: list[str], match: str, count: int) -> None:
    """Compile the kernels of these parts in several processes at once. Kill those that hang."""
    command = [sys.executable, __file__, *parts, "--match", match, "--of", str(count), "--index"]
    running = [subprocess.Popen([*command, str(i)], stderr=subprocess.DEVNULL) for i in range(count)]
    end = time.monotonic() + _COMPILE_SECONDS
    for each in running:
        try:
            each.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.kill()


def report(parts: list[str], match: str) -> int:
    """Check and time all products. Return the number of failures."""
    copy, failures = copy_bandwidth(), 0
    print(f"copy {copy / 1e12:.2f} TB/s", flush=True)
    for part in parts:
        print(f"\n{part}\n{'':64} {'bits':>5} {'us':>9} {'bf16 us':>9} {'ratio':>6} {'copy':>6}")
        for product in made(part, match, warm=False):
            try:
                same = ""
                if product.bf16 is not None:
                    same = "equal" if torch.equal(product.run(0), product.bf16(0)) else "DIFFER"
                    failures += same != "equal"
                took = microseconds(product.run, product.copies)
                share = product.read / copy / (took * 1e-6)
                plain = microseconds(product.bf16, product.copies) if product.bf16 is not None else 0.0
                rest = f"{plain:9.2f} {plain / took:6.2f}" if plain else f"{'':9} {'':6}"
                print(f"{product.name:64} {same:>6} {took:8.2f} {rest} {share:6.1%}", flush=True)
            except Exception as error:
                failures += 1
                print(f"{product.name:64} FAILED {type(error).__name__}: {str(error)[:200]}", flush=True)
                traceback.print_exc(limit=-2)
        torch.cuda.empty_cache()
    return failures


def main() -> int:
    """Run the command line of the bench."""
    parser = argparse.ArgumentParser(prog="python bench/packed_products.py", description="products over codes")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--match", metavar="REGEX", default="", help="only products with such names")
    parser.add_argument("--of", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    parts = args.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}")
    torch.manual_seed(0)
    if args.of:
        warm_up(parts, args.match, args.index, args.of)
        return 0
    begin = time.monotonic()
    compile_all(parts, args.match, max(1, min(12, (os.cpu_count() or 2) - 2)))
    print(f"compiled in {time.monotonic() - begin:.0f} s")
    failures = report(parts, args.match)
    print(f"\n{failures} failures, {time.monotonic() - begin:.0f} s in all")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
