"""What the GPU backend's attention takes (`cuda/attention.py`), as `Footprints`. Pure."""

from moeyard_kernels.types.footprint import GQA_SPLIT, Footprint, SplitSums, mla_split

# Positions of a chunk of the formula.
CHUNK = 64

# Plans, and what captured graphs keep beside `SplitSums`, in their pool and the driver's memory: on an H100 0.6 GiB of
# DeepSeek-V2-Lite, 1.1 of 8 layers of Kimi-Linear (2026-11-26).
FIXED = 1 << 30
# Torch's caching allocator keeps blocks of other sizes.
ALLOCATED = 1.25
# Two halves: one is computed while one is copied, 24 experts at once. A group costs the host about as many launches
# whatever its size, 0.3 to 0.7 ms: with groups of 8 the host was slower than the link (1.4 ms for 8 experts of 9.4 MB,
# copied one by one, and 12 groups in a layer of Qwen3-30B-A3B at a quarter: 7.1 ms a layer, 4.8 of them the link's).
STREAM_SLOTS = 48
# Experts that have no slot are read from pinned memory of the host, where all are kept.
HOST_EXPERTS = True
# Where a part of a prompt is kept (common/kept.py), in values of 4 bytes per position: a key head's scores, pooled,
# sorted, with positions of 8 bytes, and as much again while they are sorted; and the places of all positions in pages.
_CHOICE, _PLACES = 11, 4


def gqa(*, num_heads: int, num_kv_heads: int, head_dim: int, head_norm: bool, fp32_norm: bool) -> Footprint:
    """Rows: the product, its normalised heads, the rotated query and the output; keys are read where they lie.

    Positions: what is chosen by where a part of a prompt is kept, for each key head.
    """
    return Footprint(
        extra=0, per_row=(4 * num_heads + 4 * num_kv_heads) * head_dim, per_position=0,
        fp32_per_position=_CHOICE * num_kv_heads + _PLACES,
        sums=SplitSums(heads=num_heads, dim=head_dim, split=GQA_SPLIT),
    )  # fmt: skip


def gdn(*, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int, conv_size: int) -> Footprint:
    """Rows: projected, convolved, mixed and normalised; and what the chunk formula makes of them on the way."""
    keys, values = num_k_heads * k_dim, num_v_heads * v_dim
    return Footprint(extra=0, per_row=4 * keys + 4 * values + num_v_heads * _chunked(0), per_position=0)


def kda(*, num_heads: int, head_dim: int) -> Footprint:
    """As `gdn`; and per row the rates and the output's gate."""
    per_row = num_heads * (9 * head_dim + _chunked(head_dim))
    return Footprint(extra=0, per_row=per_row, per_position=0)


def _chunked(width: int) -> int:
    """What passes between the launches of the chunk formula (`delta_chunk`), per row of a head, in values of 2 bytes:
    two squares of a chunk's rows, and one of 4 bytes; five numbers; with a gate of each row of the state, of `width`
    of them, sums of gates, and keys and queries three times."""
    return 4 * CHUNK + 2 * (5 + 1) + 5 * width


def mla(*, num_heads: int, nope_dim: int, rope_dim: int, v_dim: int, rank: int) -> Footprint:
    """kv_b serves as it is. Positions: latents gathered from pages, decompressed into every head's key and value; the
    scores of all heads and their halves, and one choice, where a part of a prompt is kept."""
    return Footprint(
        extra=0,
        per_row=4 * num_heads * (nope_dim + rope_dim) + 2 * num_heads * rank,
        per_position=2 * (rank + rope_dim) + num_heads * (nope_dim + v_dim),
        fp32_per_position=2 * num_heads + _CHOICE + _PLACES,
        sums=SplitSums(heads=num_heads, dim=rank, split=mla_split(num_heads)),
    )
