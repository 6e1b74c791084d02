"""What the dense weights of a rank take in memory, as the layers keep them. Pure: nothing is loaded."""

from moeyard_worker.layers.weights import num_elements
from moeyard_worker.models.attention_config import GqaConfig, MlaConfig
from moeyard_worker.models.spec import ModelSpec

_FP32 = 4


def resident_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Bytes of everything that every rank holds but experts and state, served in values of `itemsize` bytes.

    Checkpoint dtypes do not matter: what is loaded has the served dtype, or fp32 where the weight says so.
    """
    config = spec.config
    weights = sum(num_elements(each.shape) * (_FP32 if each.fp32 else itemsize) for each in spec.dense())
    rope = config.max_position * config.rope.dim * _FP32
    attention = config.attention
    extra = _mla_extra(attention) if isinstance(attention, MlaConfig) else _gqa_extra(attention)
    return weights + rope + config.num_layers * extra * itemsize


def _gqa_extra(attention: GqaConfig) -> int:
    """Values of one layer beside its weights (layers/gqa.py): both norms become one row per head and one of ones."""
    if not attention.qk_norm:
        return 0
    return (attention.num_heads + attention.num_kv_heads - 1) * attention.head_dim


def _mla_extra(attention: MlaConfig) -> int:
    """Values of one layer beside its weights (layers/mla.py): kv_b in three forms.

    A form whose columns are a multiple of 16 is a view of kv_b, another is a padded copy; kv_b goes when none is left.
    """
    nope, v, rank = attention.nope_dim, attention.v_dim, attention.kv_lora_rank
    forms = ((rank, nope + v), (nope, rank), (rank, v))
    copies = sum(rows * (columns + -columns % 16) for rows, columns in forms if columns % 16)
    viewed = any(columns % 16 == 0 for _, columns in forms)
    return attention.num_heads * (copies - (0 if viewed else rank * (nope + v)))
