"""Hyper-connections: several residual streams, mixed by small matrices that depend on the row.

Manifold-constrained hyper-connections (DeepSeek-V4). All sums are fp32 with a fixed order. Streams are rounded once per
block. On a CPU, `moeyard_kernels.cpu` shares the formulas and has products of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import torch

from moeyard_kernels.common.checks import show
from moeyard_kernels.ops.elementwise import rms_norm, rows_apart, scale_rows_, sum_in_order
from moeyard_kernels.ops.experts import moe_weighted_reduce
from moeyard_kernels.ops.op import op
from moeyard_kernels.types.layers import HyperLayer, HyperMix
from moeyard_kernels.types.matrix import Matrix


def in_pieces(layer: HyperLayer) -> HyperLayer:
    """Return the layer with its weight [M, S H] in pieces [P, M, S H], whose sum is the weight, in the norm's dtype.

    Three bf16 pieces hold all bits of an fp32 weight. Products with bf16 streams are then exact on tensor cores.
    """
    rest, dtype = layer.weight.data.float(), layer.norm.dtype
    pieces = [rest.to(dtype)]
    while dtype == torch.bfloat16 and len(pieces) < 3:
        rest = rest - pieces[-1].float()
        pieces.append(rest.to(dtype))
    return replace(layer, weight=Matrix.plain(torch.stack(pieces)))


def read_streams(
    streams: torch.Tensor, site: HyperLayer, product: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, HyperMix | None]:
    """Return rows [num_rows, H] and the mix at a site. product: maps streams [num_rows, S H] in fp32 to [num_rows, M]
    by the site's weight."""
    count = streams.shape[1]
    wide = streams.float()
    flat = wide.flatten(1)
    scale = flat.square().mean(-1, keepdim=True).add_(site.rms_eps).rsqrt_()
    # [num_rows, S], or [num_rows, 2 S + S^2] in front of a block.
    mixed = product(flat) * scale
    before = rows_apart(mixed[:, :count] * site.scale[0] + site.base[:count]).sigmoid_() + site.eps
    rows = sum_in_order(before.unsqueeze(-1) * wide, 1).to(streams.dtype)
    mix = None if mixed.shape[1] == count else _mix(mixed[:, count:], count, site)
    return rms_norm.reference(rows, site.norm, site.rms_eps), mix


def _mix(mixed: torch.Tensor, count: int, site: HyperLayer) -> HyperMix:
    base = site.base[count:]
    post = rows_apart(mixed[:, :count] * site.scale[1] + base[:count]).sigmoid_() * 2
    comb = mixed[:, count:] * site.scale[2] + base[count:]
    comb = comb.view(-1, count, count)
    comb = rows_apart((comb - comb.amax(-1, keepdim=True)).flatten(1)).exp_().unflatten(1, (count, count))
    comb = comb / sum_in_order(comb, -1).unsqueeze(-1) + site.eps
    comb = comb / (sum_in_order(comb, -2).unsqueeze(-2) + site.eps)
    for _ in range(site.iterations - 1):
        comb = comb / (sum_in_order(comb, -1).unsqueeze(-1) + site.eps)
        comb = comb / (sum_in_order(comb, -2).unsqueeze(-2) + site.eps)
    return HyperMix(post=post, comb=comb)


def write_streams(result: torch.Tensor, streams: torch.Tensor, mix: HyperMix) -> torch.Tensor:
    """Return the streams after a block: stream k is post[k] * result + the sum over j of comb[j, k] * stream j."""
    wide = streams.float()
    out = mix.post.unsqueeze(-1) * result.float().unsqueeze(1)
    for j in range(streams.shape[1]):
        out += mix.comb[:, j].unsqueeze(-1) * wide[:, j : j + 1]
    return out.to(streams.dtype)


def _check_site(op: str, site: HyperLayer, S: int, M: int) -> None:
    """Raise ValueError for a weight of another number of sums, and for too few scales."""
    if M not in (S, S * (S + 2)) or site.scale.shape[0] < (1 if M == S else 3):
        raise ValueError(f"{op}: a weight of {M} sums and {site.scale.shape[0]} scales for {S} streams")


_SITE = MappingProxyType(
    {
        "site.weight.data": "streams [P, M, S*H]",
        "site.base": "fp32 [M]",
        "site.scale": "fp32 [_]",
        "site.norm": "streams|fp32 [H]",
    }
)


@op("hyper_connections.hyper_enter", _check_site, **{"streams": "float [T, S, H]"}, **_SITE)
def hyper_enter(streams: torch.Tensor, site: HyperLayer) -> tuple[torch.Tensor, HyperMix | None]:
    """Read streams [T, S, H] into the rows [T, H] of a block or head. The mix is None in front of the head.

    The site's weight is in pieces (`in_pieces`). The weights of the sum are sigmoids of products of all streams of the
    row. The sum is rounded, then normalised. comb is exp(products), normalised by `iterations` of Sinkhorn-Knopp.
    """
    pieces = site.weight.data.float().sum(0)
    return read_streams(streams, site, lambda flat: flat @ pieces.T)


def _check_result(op: str, result: torch.Tensor, weights: torch.Tensor | None, T: int, K: int) -> None:
    """Raise ValueError for results that are neither rows nor, with weights, parts."""
    if tuple(result.shape[:-1]) != ((T,) if weights is None else (T, K)):
        known = "no weights" if weights is None else f"weights {show(weights)}"
        raise ValueError(f"{op}: result {show(result)} of {T} rows with {known}")


_RESULT = MappingProxyType(
    {
        "streams": "float [T, S, H]",
        "result": "streams [..., H]",
        "mix.post": "fp32 [T, S] contiguous",
        "mix.comb": "fp32 [T, S, S] contiguous",
        "weights": "fp32 [T, K]?",
        "shared": "streams [T, H]?",
        "shared_gate": "float [T]?",
    }
)
_RESULT_RULES = _check_result, "shared is None or weights is not None", "shared_gate is None or shared is not None"


@op("hyper_connections.hyper_write", *_RESULT_RULES, **_RESULT)
def hyper_write(
    result: torch.Tensor,
    streams: torch.Tensor,
    mix: HyperMix,
    *,
    weights: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write a block's result into streams [T, S, H]. Return the new streams.

    Stream k becomes post[k] * result + the sum over j of comb[j, k] * stream j, rounded once. result: rows [T, H], or
    with weights [T, K] parts [T, K, H], which are summed and rounded as in `moe_weighted_reduce` with shared [T, H].
    With shared_gate [T], `scale_rows_(shared, shared_gate, sigmoid=True)` replaces `shared`.
    """
    if weights is not None:
        if shared is not None and shared_gate is not None:
            shared = scale_rows_.reference(shared.clone(), shared_gate, sigmoid=True)
        result = moe_weighted_reduce.reference(result, weights, shared)
    return write_streams(result, streams, mix)


@op("hyper_connections.hyper_leave", _check_site, *_RESULT_RULES, **_RESULT, **_SITE)
def hyper_leave(
    result: torch.Tensor,
    streams: torch.Tensor,
    mix: HyperMix,
    site: HyperLayer,
    *,
    weights: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, HyperMix | None]:
    """`hyper_write`, then `hyper_enter` at the next site. Return (streams [T, S, H], rows [T, H], mix)."""
    parts = {"weights": weights, "shared": shared, "shared_gate": shared_gate}
    streams = hyper_write.reference(result, streams, mix, **parts)
    return streams, *hyper_enter.reference(streams, site)
