"""The one door to the kernels: each op runs as Triton on CUDA tensors and as the torch reference on CPU tensors.

A CUDA tensor given to an op of the CPU engine alone raises NotImplementedError naming the op to use. Wrong ranks,
shapes, dtypes, devices and strides raise ValueError naming the argument and both values, before anything is launched. T
counts tokens, M and R rows, P (token, k) pairs.

One answer: on a CPU with one thread, a row of any result depends on that row's inputs alone, never on how many rows
there are, on its place among them or on its neighbours.
"""

from moeyard_kernels.cpu.decode_plan import DecodePlan, plan_decode
from moeyard_kernels.door.decode import attn_combine, gqa_decode, mla_decode
from moeyard_kernels.door.elementwise import (
    add_rms_norm,
    mla_split_qkv_a_norm,
    residual_add_scaled,
    rms_norm,
    scale_rows_,
    silu_mul,
)
from moeyard_kernels.door.experts import expert_layout, grouped_gemm, grouped_mlp, moe_weighted_reduce
from moeyard_kernels.door.linear import linear, linear_pair, pack_weight, padded_rows
from moeyard_kernels.door.prefill import attn_prefill, attn_prefill_varlen
from moeyard_kernels.door.rope import rope, rope_cache_write_gqa, rope_cache_write_mla
from moeyard_kernels.door.routing import topk_gate
from moeyard_kernels.door.sampling import sample
from moeyard_kernels.types.decode_tables import BLOCK, DecodeTables
from moeyard_kernels.types.expert_layout import ExpertLayout, expert_block_rows
from moeyard_kernels.types.logit_edits import LogitEdits
from moeyard_kernels.types.prefill_plan import PrefillPlan, plan_prefill

__all__ = [
    "BLOCK",
    "DecodePlan",
    "DecodeTables",
    "ExpertLayout",
    "LogitEdits",
    "PrefillPlan",
    "add_rms_norm",
    "attn_combine",
    "attn_prefill",
    "attn_prefill_varlen",
    "expert_block_rows",
    "expert_layout",
    "gqa_decode",
    "grouped_gemm",
    "grouped_mlp",
    "linear",
    "linear_pair",
    "mla_decode",
    "mla_split_qkv_a_norm",
    "moe_weighted_reduce",
    "pack_weight",
    "padded_rows",
    "plan_decode",
    "plan_prefill",
    "residual_add_scaled",
    "rms_norm",
    "rope",
    "rope_cache_write_gqa",
    "rope_cache_write_mla",
    "sample",
    "scale_rows_",
    "silu_mul",
    "topk_gate",
]
