"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).

The noise of a token depends on (seed, position, token id) alone, so sampling is the same in any batch, on any rank and
after any recompute. Triton's `tl.rand4x` is the same generator.
"""

import numpy as np
from numpy.typing import NDArray

_ROUND_A, _ROUND_B = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counter: tuple[NDArray[np.uint64], int, int, int], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Ten rounds over counters (c0 [N], c1, c2, c3) with a 2 x 32 bit key; returns [N, 4] uint32."""
    c0 = counter[0]
    c1, c2, c3 = (np.full_like(c0, c & 0xFFFFFFFF) for c in counter[1:])
    k0, k1 = key
    for _ in range(10):
        product_a, product_b = _ROUND_A * c0, _ROUND_B * c2
        c0 = (product_b >> _SHIFT) ^ c1 ^ np.uint64(k0)
        c1 = product_b & _LOW
        c2 = (product_a >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c3 = product_a & _LOW
        k0, k1 = (k0 + _KEY_A) & 0xFFFFFFFF, (k1 + _KEY_B) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def exponential_noise(seed: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """One Exp(1) variate per token id [N] for the token at `position` of a request with `seed` (taken modulo 2^64).

    Token id v uses word v % 4 of block v // 4. Uniforms are (word + 0.5) / 2^32, so the logarithm is finite.
    """
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    blocks, index = np.unique(token_ids >> 2, return_inverse=True)
    words = philox4x32((blocks.astype(np.uint64), position, 0, 0), key)
    uniform = (words[index, token_ids & 3].astype(np.float64) + 0.5) * 2.0**-32
    noise: NDArray[np.float64] = -np.log(uniform)
    return noise
