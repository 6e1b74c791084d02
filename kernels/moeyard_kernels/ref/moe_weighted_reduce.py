"""The weighted sum of a token's expert outputs, in top-k order, with the rounding of a chain of fused multiply-adds.

Torch has no fused multiply-add that is one on every path, so the chain runs in fp64. There a product of two fp32
values is exact, hence one step is an addition in fp64 and a rounding to fp32: two roundings. They could differ from one
only if the fp64 sum lay so close to the middle of two fp32 values that its own error mattered. So each sum is moved by
one to two of its last places to either side, which encloses the exact one: if both ends round to the same fp32 value,
rounding being monotonic, so does the exact sum. If not, and the sum was inexact, the chain is run again with sums
rounded to odd, which makes the second rounding the only one.
"""

import torch

# Rows are summed in pieces of about this many fp64 values, which stay in a core's cache.
_PIECE = 16 * 1024


def moe_weighted_reduce(
    partial: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.moe_weighted_reduce`."""
    if residual is not None:
        return residual + moe_weighted_reduce(partial, weights, shared)
    num_tokens, _, hidden = partial.shape
    step = max(1, _PIECE // max(1, hidden))
    w64 = weights.double().unsqueeze(2)
    if num_tokens <= step:
        return _reduce(w64, partial, shared)
    out = torch.empty(num_tokens, hidden, dtype=partial.dtype)
    for t in range(0, num_tokens, step):
        piece = slice(t, t + step)
        out[piece] = _reduce(w64[piece], partial[piece], None if shared is None else shared[piece])
    return out


def _reduce(w: torch.Tensor, partial: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    acc = _chain(w, partial.double())
    if shared is not None:
        acc += shared
    return acc.to(partial.dtype)


def _chain(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """fp32 chain acc = fma(w[:, k], x[:, k], acc) over k, of fp32 values held in fp64: w [T, K, 1], x [T, K, H]."""
    num_tokens, top_k, hidden = x.shape
    # Adding zero turns a product of -0 into the +0 that fma(a, b, +0) is.
    acc = (w[:, 0] * x[:, 0]).add_(0.0).float()
    if top_k == 1:
        return acc
    accs = x.new_empty(num_tokens, top_k - 1, hidden)
    sums = torch.empty_like(accs)
    for k in range(1, top_k):
        c, s = accs[:, k - 1], sums[:, k - 1]
        c.copy_(acc)
        acc = torch.addcmul(c, w[:, k], x[:, k], out=s).float()
    apart = (sums * (1 + 2.0**-52)).float() != (sums * (1 - 2.0**-52)).float()
    if apart.any():
        # A sum is exact if taking off either summand, of which one is at least an exact operation, gives the other.
        p = w[:, 1:] * x[:, 1:]
        if (apart & ((sums - accs != p) | (sums - p != accs))).any():
            return _chain_to_odd(w, x)
    return acc


def _chain_to_odd(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The chain with every fp64 sum rounded to odd (towards the odd neighbour if inexact), then to fp32.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008.
    """
    acc = torch.zeros_like(x[:, 0])
    for k in range(x.shape[1]):
        p = w[:, k] * x[:, k]
        s = p + acc
        # Knuth's two-sum: p + acc - s exactly.
        t = s - p
        error = (p - (s - t)) + (acc - t)
        away = torch.where(s > 0, error > 0, error < 0)
        toward = torch.where(s > 0, error < 0, error > 0)
        bits = s.view(torch.int64)
        bits += (away.long() - toward.long()) * (1 - (bits & 1))
        acc = s.float().double()
    return acc.float()
