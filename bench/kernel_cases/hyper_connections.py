"""Bench of hyper-connections: the streams of DeepSeek-V4 after a block, before a block, and in front of the head."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kernel_cases.case import Case, assert_bits
from moeyard_kernels import ops
from moeyard_kernels.hyper_connections import hyper_enter, hyper_leave, hyper_write
from moeyard_kernels.hyper_connections.hyper_sums import CONFIGS
from moeyard_kernels.ops.hyper_connections import in_pieces
from moeyard_kernels.types.layers import HyperLayer, HyperMix
from moeyard_kernels.types.matrix import Matrix

OPS = ("hyper_enter", "hyper_leave", "hyper_write")
# Name and hidden size. All have 4 streams and 6 experts per token besides the shared one.
MODELS = (("Flash", 4096), ("Pro", 7168))
STREAMS, TOP_K = 4, 6


def cases() -> Iterator[Case]:
    """Yield decode steps and a prompt: the experts' results, attention's result, a first block, and the head."""
    for name, hidden in MODELS:
        for num_rows in (1, 8, 64, 8192):
            yield leave_case(name, num_rows, hidden, parts=True)
            yield leave_case(name, num_rows, hidden, parts=False)
            yield enter_case(name, num_rows, hidden)
        yield enter_case(name, 64, hidden, head=True)
        yield _write_case(name, 64, hidden)


def make_site(hidden: int, *, head: bool = False) -> HyperLayer:
    """Return random weights of a site on the GPU, in pieces."""
    num = STREAMS if head else STREAMS * (STREAMS + 2)
    return in_pieces(
        HyperLayer(
            weight=Matrix.plain(torch.randn(num, STREAMS * hidden, device="cuda") * (STREAMS * hidden) ** -0.5),
            base=torch.randn(num, device="cuda"),
            scale=torch.ones(1 if head else 3, device="cuda"),
            norm=_rows(hidden),
            eps=1e-6,
            rms_eps=1e-6,
            iterations=20,
        )
    )


def make_mix(num_rows: int) -> HyperMix:
    """Return random weights of the streams after a block."""
    post, comb = (torch.rand(num_rows, STREAMS, *more, device="cuda") for more in ((), (STREAMS,)))
    return HyperMix(post=post, comb=comb / comb.sum(1, keepdim=True))


def block_result(num_rows: int, hidden: int, *, parts: bool) -> dict[str, Any]:
    """Return a block's result: rows of attention, or parts of experts with their weights and the shared part."""
    if not parts:
        return {"result": _rows(num_rows, hidden)}
    weights = torch.rand(num_rows, TOP_K, device="cuda")
    return {"result": _rows(num_rows, TOP_K, hidden), "weights": weights, "shared": _rows(num_rows, hidden)}


def tensors(results: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors among the results of an op, post and comb last."""
    *found, mix = results
    return (*found, *(() if mix is None else (mix.post, mix.comb)))


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _chain(
    result: torch.Tensor, streams: torch.Tensor, mix: HyperMix, site: HyperLayer, **parts: Any
) -> tuple[torch.Tensor, torch.Tensor, HyperMix | None]:
    after = hyper_write.hyper_write(result, streams, mix, **parts)
    return after, *hyper_enter.hyper_enter(after, site)


def leave_case(name: str, num_rows: int, hidden: int, *, parts: bool) -> Case:
    """Return the case of a block's result and the next site."""
    site, streams, mix = make_site(hidden), _rows(num_rows, STREAMS, hidden), make_mix(num_rows)
    given = block_result(num_rows, hidden, parts=parts)
    run = partial(hyper_leave.hyper_leave, streams=streams, mix=mix, site=site, **given)

    def prove() -> None:
        whole = tensors(run())
        assert_bits("write, then enter", tensors(_chain(streams=streams, mix=mix, site=site, **given)), whole)
        last = {key: x[-1:].clone() for key, x in given.items()}
        last_mix = HyperMix(post=mix.post[-1:], comb=mix.comb[-1:])
        alone = ops.hyper_leave(streams=streams[-1:].clone(), mix=last_mix, site=site, **last)
        assert_bits("row alone", tensors(alone), tuple(x[-1:] for x in whole))

    values = num_rows * hidden * (2 * STREAMS + 1 + (TOP_K + 1 if parts else 1))
    return Case(
        op="hyper_leave",
        shape=f"{name} T{num_rows} H{hidden}{f' K{TOP_K} shared' if parts else ''}",
        run=run,
        prove=prove,
        num_bytes=2 * values + site.weight.data.nbytes,
        num_flops=2 * site.weight.data.numel() * num_rows,
        baseline=partial(_chain, streams=streams, mix=mix, site=site, **given),
        baseline_name="hyper_write, hyper_enter",
        variants=[(config, partial(run, config=config)) for config in CONFIGS],
    )


def enter_case(name: str, num_rows: int, hidden: int, *, head: bool = False) -> Case:
    """Return the case of streams in front of the first block, or of the head."""
    site, streams = make_site(hidden, head=head), _rows(num_rows, STREAMS, hidden)
    run = partial(hyper_enter.hyper_enter, streams, site)

    def prove() -> None:
        whole = tensors(run())
        assert_bits("row alone", tensors(ops.hyper_enter(streams[-1:].clone(), site)), tuple(x[-1:] for x in whole))

    return Case(
        op="hyper_enter",
        shape=f"{name} T{num_rows} H{hidden}{' head' if head else ''}",
        run=run,
        prove=prove,
        num_bytes=2 * num_rows * hidden * (STREAMS + 1) + site.weight.data.nbytes,
        num_flops=2 * site.weight.data.numel() * num_rows,
        variants=[(config, partial(run, config=config)) for config in CONFIGS],
    )


def _write_case(name: str, num_rows: int, hidden: int) -> Case:
    streams, mix, given = (
        _rows(num_rows, STREAMS, hidden),
        make_mix(num_rows),
        block_result(num_rows, hidden, parts=True),
    )
    run = partial(hyper_write.hyper_write, streams=streams, mix=mix, **given)

    def prove() -> None:
        last = {key: x[-1:].clone() for key, x in given.items()}
        last_mix = HyperMix(post=mix.post[-1:], comb=mix.comb[-1:])
        assert_bits("row alone", ops.hyper_write(streams=streams[-1:].clone(), mix=last_mix, **last), run()[-1:])

    return Case(
        op="hyper_write",
        shape=f"{name} T{num_rows} H{hidden} K{TOP_K} shared",
        run=run,
        prove=prove,
        num_bytes=2 * num_rows * hidden * (2 * STREAMS + TOP_K + 1),
    )
