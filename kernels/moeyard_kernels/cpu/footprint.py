"""Memory that the CPU backend's attention needs (`cpu/attention.py`), as `Footprints`. Pure: launchers run without
torch."""

from moeyard_kernels.types.footprint import Footprint

# Scores of one tile of prompt rows: this many bytes, or 16 rows per head over the whole prefix (attn_prefill).
FIXED = 32 << 20
_SCORE_ROWS = 16
# malloc keeps freed blocks of other sizes. Measured: 1.0 to 1.35 with the alignment that cpu_config.py sets, 1.0 to 1.7
# without (512 rows behind 3584 positions, 16 key heads; 112 processes, torch 2.13, glibc 2.36).
ALLOCATED = 1.5
# Missing experts are packed and computed one after the other.
STREAM_SLOTS = 1
# Experts are read from the mapped checkpoint.
HOST_EXPERTS = False


def gqa(*, num_heads: int, num_kv_heads: int, head_dim: int, head_norm: bool, fp32_norm: bool) -> Footprint:
    """A norm per head is stored as one row per head. Rows: query, key, value, rotated, scaled and as output. Positions:
    keys and values gathered from pages."""
    gathered = 2 * num_kv_heads * head_dim
    norms = (num_heads + num_kv_heads - 2) * head_dim if head_norm else 0
    return Footprint(
        extra=0 if fp32_norm else norms,
        fp32_extra=norms if fp32_norm else 0,
        per_row=8 * num_heads * head_dim,
        per_position=gathered,
        copied_per_position=gathered,
        fp32_per_position=_SCORE_ROWS * num_heads,
    )


def gdn(*, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int, conv_size: int) -> Footprint:
    """Rows: projected; q, k and v convolved and activated; q and k normalised; v cut into chunks, output and its gate.
    A piece of a prompt's chunks fits in `FIXED`."""
    keys, values = num_k_heads * k_dim, num_v_heads * v_dim
    return Footprint(extra=0, per_row=8 * keys + 7 * values, per_position=0)


def kda(*, num_heads: int, head_dim: int) -> Footprint:
    """As `gdn`, and per row the rates and their exponentials. Pairs of a block of 16 positions fit in `FIXED`."""
    return Footprint(extra=0, per_row=18 * num_heads * head_dim, per_position=0)


def mla(*, num_heads: int, nope_dim: int, rope_dim: int, v_dim: int, rank: int) -> Footprint:
    """kv_b exists in three forms. A form whose columns are a multiple of 16 is a view, another is a padded copy. kv_b
    is freed if no form is a view.

    Rows: query, key, value, rotated, scaled and as output. Positions: latents gathered from pages, decompressed into
    every head's key and value, each key joined with its rotated part.
    """
    forms = ((rank, nope_dim + v_dim), (nope_dim, rank), (rank, v_dim))
    copies = sum(rows * (columns + -columns % 16) for rows, columns in forms if columns % 16)
    viewed = any(columns % 16 == 0 for _, columns in forms)
    qk_dim = nope_dim + rope_dim
    used = num_heads * (qk_dim + v_dim)
    return Footprint(
        extra=num_heads * (copies - (0 if viewed else rank * (nope_dim + v_dim))),
        per_row=8 * num_heads * qk_dim,
        per_position=rank + rope_dim + used + num_heads * nope_dim,
        copied_per_position=used,
        fp32_per_position=_SCORE_ROWS * num_heads,
    )


def compressed(
    *, num_heads: int, head_dim: int, ratio: int, index_heads: int, index_dim: int, top_k: int, groups_width: int
) -> Footprint:
    """The weight of a norm without weights is a row of ones.

    Rows: the product, its normalised heads, the rotated query and the output; the indexer's queries; the
    groups' projections. Positions: entries gathered from pages, in fp32 and as served, and scores of a tile.
    """
    entries = -(-head_dim // ratio) if ratio else 0
    index = -(-index_dim // ratio) if ratio else 0
    return Footprint(
        extra=head_dim,
        per_row=4 * num_heads * head_dim + 3 * index_heads * index_dim + 2 * groups_width,
        per_position=entries + index,
        copied_per_position=entries + index,
        fp32_per_position=-(-_SCORE_ROWS * max(num_heads, index_heads) // ratio) if ratio else 0,
    )
