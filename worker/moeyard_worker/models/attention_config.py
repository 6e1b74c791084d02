"""The dimensions of an attention block, parsed from config.json. Pure."""

from dataclasses import dataclass
from typing import Any

from moeyard_worker.config.fields import Fields
from moeyard_worker.config.rope_config import mla_softmax_scale, parse_rope, rope_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaConfig:
    """Grouped-query attention. `sliding_window`: a row sees itself and the `sliding_window - 1` positions before."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    bias: bool
    qk_norm: bool
    sliding_window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). `bias` is that of the two down projections and o.

    `norm_eps` belongs to the norms inside the attention, which do not follow the model's.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    bias: bool
    norm_eps: float = 1e-6

    @property
    def qk_dim(self) -> int:
        """Width of a query or decompressed key head."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Width of a cached row: the latent, then the rotated key that all heads share."""
        return self.kv_lora_rank + self.rope_dim


def parse_gqa(
    config: Fields, max_position: int, *, default_theta: float, sliding_window: int | None, **options: bool
) -> Any:
    """The keys `attention` and `rope` of a ModelConfig with grouped-query attention."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads} heads")
    head_dim = config.optional_integer("head_dim") or config.integer("hidden_size") // num_heads
    rope = parse_rope(rope_fields(config, default_theta), dim=head_dim, interleaved=False, max_position=max_position)
    attention = GqaConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        sliding_window=sliding_window,
        **options,
    )
    return {"attention": attention, "rope": rope}


def parse_mla(config: Fields, max_position: int, *, interleaved: bool) -> dict[str, Any]:
    """The keys `attention` and `rope` of a ModelConfig with latent attention."""
    num_heads = config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", num_heads) != num_heads:
        raise config.error("num_key_value_heads", f"is not {num_heads}: latent attention has one key per query head")
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    fields = rope_fields(config, 10_000.0)
    attention = MlaConfig(
        num_heads=num_heads,
        q_lora_rank=config.optional_integer("q_lora_rank"),
        kv_lora_rank=config.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=config.integer("v_head_dim"),
        scale=mla_softmax_scale(fields, nope_dim + rope_dim),
        bias=config.boolean("attention_bias", False),
    )
    rope = parse_rope(fields, dim=rope_dim, interleaved=interleaved, max_position=max_position)
    return {"attention": attention, "rope": rope}
