"""Memory that the GPU backend's attention needs (`cuda/attention.py`), as `Footprints`. Pure."""

from moeyard_kernels.types.footprint import COMPRESSED_SPLIT, GQA_SPLIT, Footprint, SplitSums, mla_split

# Positions of one chunk of the chunk formula.
CHUNK = 64

# Plans, and memory of captured graphs besides `SplitSums`, in their pool and in the driver. On an H100: 0.6 GiB with
# DeepSeek-V2-Lite, 1.1 GiB with 8 layers of Kimi-Linear (2026-11-26).
FIXED = 1 << 30
# Torch's caching allocator keeps blocks of other sizes.
ALLOCATED = 1.25
# Two halves of 24 experts: one is computed while the other is copied. A group costs the host 0.3 to 0.7 ms of launches,
# whatever its size. With groups of 8 the host was slower than the link. A layer of Qwen3-30B-A3B with a quarter of its
# experts has 12 groups and took 7.1 ms. The link took 4.8 ms of that (1.4 ms for 8 experts of 9.4 MB, copied one by
# one).
STREAM_SLOTS = 48
# Experts without a slot are read from pinned host memory, which holds all experts.
HOST_EXPERTS = True
# If a part of a prompt is kept (common/snapkv.py), in values of 4 bytes per position. _CHOICE: a key head's scores,
# raw, pooled and sorted with positions of 8 bytes, and the same amount again during sorting. _PLACES: the places of all
# positions in pages.
_CHOICE, _PLACES = 11, 4
# Positions of a split that holds any sequence.
_ONE_SPLIT = 1 << 62


def gqa(*, num_heads: int, num_kv_heads: int, head_dim: int, head_norm: bool, fp32_norm: bool) -> Footprint:
    """Rows: the product, its normalised heads, the rotated query and the output; keys are read in place. Positions: the
    choice of kept positions, for each key head."""
    return Footprint(
        extra=0,
        per_row=(4 * num_heads + 4 * num_kv_heads) * head_dim,
        per_position=0,
        fp32_per_position=_CHOICE * num_kv_heads + _PLACES,
        sums=SplitSums(heads=num_heads, dim=head_dim, split=GQA_SPLIT),
    )


def gdn(*, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int, conv_size: int) -> Footprint:
    """Rows: projected, convolved, mixed and normalised; and the intermediate results of the chunk formula."""
    keys, values = num_k_heads * k_dim, num_v_heads * v_dim
    return Footprint(extra=0, per_row=4 * keys + 4 * values + num_v_heads * _chunked(0), per_position=0)


def kda(*, num_heads: int, head_dim: int) -> Footprint:
    """As `gdn`, and per row the rates and the output gate."""
    per_row = num_heads * (9 * head_dim + _chunked(head_dim))
    return Footprint(extra=0, per_row=per_row, per_position=0)


def _chunked(width: int) -> int:
    """Return the intermediate values of the chunk formula (`delta_chunk`) per row of a head, in values of 2 bytes.

    Two squares of a chunk's rows, one of them of 4-byte values; five numbers. With one gate per row of the state,
    `width` in all: sums of gates, and keys and queries three times.
    """
    return 4 * CHUNK + 2 * (5 + 1) + 5 * width


def mla(*, num_heads: int, nope_dim: int, rope_dim: int, v_dim: int, rank: int) -> Footprint:
    """kv_b is used as loaded. Positions: latents gathered from pages, then decompressed into every head's key and
    value. If a part of a prompt is kept: the scores of all heads and their halves, and one choice."""
    return Footprint(
        extra=0,
        per_row=4 * num_heads * (nope_dim + rope_dim) + 2 * num_heads * rank,
        per_position=2 * (rank + rope_dim) + num_heads * (nope_dim + v_dim),
        fp32_per_position=2 * num_heads + _CHOICE + _PLACES,
        sums=SplitSums(heads=num_heads, dim=rank, split=mla_split(num_heads)),
    )


def compressed(
    *, num_heads: int, head_dim: int, ratio: int, index_heads: int, index_dim: int, top_k: int, groups_width: int
) -> Footprint:
    """Rows: queries as projected, rotated, attended and turned back; those of the indexer, projected and rotated;
    values and gates in fp32; places of chosen entries; the groups' projections. FIXED covers the scores of prompts.

    Sums: a split for the window, and splits of entries. Chosen entries fill a fixed number of splits. In their place,
    positions take the scores of the indexer.
    """
    wide = 2 * (head_dim + index_dim) * (2 if index_heads else 1) if ratio else 0
    split, more = _ONE_SPLIT, 0
    if index_heads:
        split, more = ratio * num_heads * (head_dim + 1), 1 - (-top_k // COMPRESSED_SPLIT)
    elif ratio:
        split, more = ratio * COMPRESSED_SPLIT, 1
    return Footprint(
        extra=0,
        per_row=4 * num_heads * head_dim + 2 * index_heads * index_dim + wide + top_k + groups_width,
        per_position=0,
        sums=SplitSums(heads=num_heads, dim=head_dim, split=split, more=more),
    )
