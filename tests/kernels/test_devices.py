"""Every op refuses a tensor on another device than the first one's, and names both, before it computes."""

from collections.abc import Callable

import pytest
import torch

from moeyard_kernels import ops


def floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


ROPE = {"x": floats(2, 3, 8), "cos": floats(2, 4), "sin": floats(2, 4)}
SLOTS = torch.zeros(2, dtype=torch.int64)
CASES: tuple[tuple[str, Callable, dict[str, torch.Tensor], dict], ...] = (
    ("rms_norm", ops.rms_norm, {"x": floats(2, 8), "weight": floats(8)}, {"eps": 1e-6}),
    (
        "add_rms_norm",
        ops.add_rms_norm,
        {"x": floats(2, 8), "residual": floats(2, 8), "weight": floats(8)},
        {"eps": 1.0},
    ),
    (
        "mla_split_qkv_a_norm",
        ops.mla_split_qkv_a_norm,
        {"qkv_a": floats(2, 9), "q_weight": floats(4), "kv_weight": floats(4)},
        {"eps": 1e-6},
    ),
    ("scale_rows_", ops.scale_rows_, {"x": floats(2, 8), "scale": floats(2)}, {}),
    ("rope", ops.rope, ROPE, {"interleaved": False}),
    (
        "rope_cache_write_mla",
        ops.rope_cache_write_mla,
        {"q_rope": floats(2, 3, 8), "kv_a": floats(2, 16), "k_rope": floats(2, 8)}
        | {"cos": floats(2, 4), "sin": floats(2, 4), "slot_mapping": SLOTS, "cache": floats(1, 4, 24)},
        {"interleaved": True},
    ),
    (
        "rope_cache_write_gqa",
        ops.rope_cache_write_gqa,
        {"q": floats(2, 4, 8), "k": floats(2, 2, 8), "v": floats(2, 2, 8), "cos": floats(2, 4), "sin": floats(2, 4)}
        | {"slot_mapping": SLOTS, "k_cache": floats(2, 1, 4, 8), "v_cache": floats(2, 1, 4, 8)},
        {"interleaved": False},
    ),
    (
        "topk_gate",
        ops.topk_gate,
        {"logits": floats(2, 8), "bias": floats(8), "counts": torch.zeros(8).long(), "entries": torch.zeros(2).long()},
        {"top_k": 2, "scoring": "sigmoid", "renormalize": True},
    ),
    (
        "moe_weighted_reduce",
        ops.moe_weighted_reduce,
        {"partial": floats(2, 3, 8), "weights": floats(2, 3), "shared": floats(2, 8), "residual": floats(2, 8)},
        {},
    ),
    ("linear", ops.linear, {"x": floats(2, 8), "weight": floats(4, 8), "bias": floats(4)}, {}),
    ("head_linear", ops.head_linear, {"x": floats(2, 3, 8), "weight": floats(3, 4, 8)}, {}),
    ("linear_pair", ops.linear_pair, {"x": floats(2, 8), "weight_a": floats(4, 8), "weight_b": floats(6, 8)}, {}),
)


@pytest.mark.parametrize(
    ("op", "call", "tensors", "options", "moved"),
    [(op, call, tensors, options, name) for op, call, tensors, options in CASES for name in list(tensors)[1:]],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_tensor_on_another_device_is_refused(
    op: str, call: Callable, tensors: dict[str, torch.Tensor], options: dict, moved: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{op}: {moved} is on meta, "):
        call(**tensors | {moved: tensors[moved].to("meta")}, **options)
