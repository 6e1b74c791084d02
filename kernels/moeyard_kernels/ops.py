"""The one door to the kernels: each op runs as Triton on CUDA tensors and as the torch reference on CPU tensors.

A CUDA tensor given to an op that has no Triton kernel yet raises NotImplementedError naming the op. Wrong ranks, shapes
and dtypes raise ValueError naming the argument and both values. T counts tokens, M and R rows, P (token, k) pairs.

One answer: on a CPU with one thread, a row of any result depends on that row's inputs alone, never on how many rows
there are, on its place among them or on its neighbours.
"""

from moeyard_kernels.decode_plan import BLOCK, DecodePlan, plan_decode
from moeyard_kernels.door.decode import gqa_decode, mla_decode
from moeyard_kernels.door.elementwise import add_rms_norm, rms_norm, rope, scale_rows_, silu_mul
from moeyard_kernels.door.experts import grouped_mlp, moe_weighted_reduce
from moeyard_kernels.door.linear import linear, pack_weight, padded_rows
from moeyard_kernels.door.prefill import attn_prefill
from moeyard_kernels.door.routing import topk_gate

__all__ = [
    "BLOCK",
    "DecodePlan",
    "add_rms_norm",
    "attn_prefill",
    "gqa_decode",
    "grouped_mlp",
    "linear",
    "mla_decode",
    "moe_weighted_reduce",
    "pack_weight",
    "padded_rows",
    "plan_decode",
    "rms_norm",
    "rope",
    "scale_rows_",
    "silu_mul",
    "topk_gate",
]
