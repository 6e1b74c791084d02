"""The one door to the kernels: each op runs as Triton on CUDA tensors, and as the oracle in `ref` on CPU tensors.

One signature and one kind of result per op, wherever its tensors are. Wrong ranks, shapes, dtypes, devices and strides
raise ValueError naming the argument and both values, before anything is launched. T counts tokens, M and R rows, P
(token, k) pairs.

One answer: on a GPU a row of any result depends on that row's inputs alone, bit for bit, never on how many rows there
are, on its place among them or on its neighbours. The oracles are plain formulas in torch; what a CPU serves with, and
keeps that promise there, is in `moeyard_kernels.cpu`.
"""

from moeyard_kernels.door.decode import attn_combine, gqa_decode, mla_decode, rope_gqa_decode
from moeyard_kernels.door.elementwise import (
    add_rms_norm,
    mla_split_qkv_a_norm,
    rms_norm,
    scale_rows_,
    sigmoid_mul,
    silu_mul,
)
from moeyard_kernels.door.expert_cache import cache_access, fetch_experts, gather_experts
from moeyard_kernels.door.experts import expert_layout, grouped_gemm, moe_reduce_add_norm, moe_weighted_reduce
from moeyard_kernels.door.linear import head_linear, linear, linear_pair
from moeyard_kernels.door.linear_attention import (
    causal_conv1d_prefill,
    causal_conv1d_update,
    gated_rms_norm,
    gdn_chunk_prefill,
    gdn_recurrent,
    gdn_step,
    kda_chunk_prefill,
    kda_recurrent,
    kda_step,
    restore_slots,
)
from moeyard_kernels.door.peer_exchange import combine_rows, dispatch_rows
from moeyard_kernels.door.prefill import attn_prefill_varlen, snapkv_scores
from moeyard_kernels.door.rope import rope, rope_cache_write_gqa, rope_cache_write_mla
from moeyard_kernels.door.routing import topk_gate
from moeyard_kernels.door.sampling import sample, token_logprobs
from moeyard_kernels.types.decode_tables import DecodeTables
from moeyard_kernels.types.expert_layout import FEW_PAIRS, ExpertLayout, ExpertPairs, can_share, expert_block_rows
from moeyard_kernels.types.logit_edits import LogitEdits
from moeyard_kernels.types.prefill_plan import PrefillPlan, plan_prefill
from moeyard_kernels.types.prompt_chunks import PromptChunks
from moeyard_kernels.types.sampled_tokens import SampledTokens
from moeyard_kernels.types.state_slots import SlotMoves, StateSlots

__all__ = [
    "FEW_PAIRS",
    "DecodeTables",
    "ExpertLayout",
    "ExpertPairs",
    "LogitEdits",
    "PrefillPlan",
    "PromptChunks",
    "SampledTokens",
    "SlotMoves",
    "StateSlots",
    "add_rms_norm",
    "attn_combine",
    "attn_prefill_varlen",
    "cache_access",
    "can_share",
    "causal_conv1d_prefill",
    "causal_conv1d_update",
    "combine_rows",
    "dispatch_rows",
    "expert_block_rows",
    "expert_layout",
    "fetch_experts",
    "gated_rms_norm",
    "gather_experts",
    "gdn_chunk_prefill",
    "gdn_recurrent",
    "gdn_step",
    "gqa_decode",
    "grouped_gemm",
    "head_linear",
    "kda_chunk_prefill",
    "kda_recurrent",
    "kda_step",
    "linear",
    "linear_pair",
    "mla_decode",
    "mla_split_qkv_a_norm",
    "moe_reduce_add_norm",
    "moe_weighted_reduce",
    "plan_prefill",
    "restore_slots",
    "rms_norm",
    "rope",
    "rope_cache_write_gqa",
    "rope_cache_write_mla",
    "rope_gqa_decode",
    "sample",
    "scale_rows_",
    "sigmoid_mul",
    "silu_mul",
    "snapkv_scores",
    "token_logprobs",
    "topk_gate",
]
