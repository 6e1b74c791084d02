"""The ops: each checks its arguments and runs as Triton on CUDA tensors, or as its reference on CPU tensors.

An op has one signature and one kind of result on all devices. Wrong ranks, shapes, dtypes, devices and strides raise
ValueError naming the argument and both values, before anything is launched (`op.py`). T counts tokens, M and R rows, P
(token, k) pairs.

One answer: on a GPU, the bits of a result row depend on that row's inputs alone. They depend neither on the number of
rows nor on other rows. The references are plain formulas in torch. A CPU serves with `moeyard_kernels.cpu`, which keeps
that promise there.
"""

from moeyard_kernels.ops.attention import (
    attn_combine,
    attn_prefill_varlen,
    gqa_decode,
    mla_decode,
    rope,
    rope_cache_write_gqa,
    rope_cache_write_mla,
    rope_gqa_decode,
    snapkv_scores,
)
from moeyard_kernels.ops.compressed import attend_entries, choose_entries, index_scores, keep_last, pool_blocks
from moeyard_kernels.ops.compressed_attention import (
    compressed_decode,
    compressed_pool,
    compressed_rotate,
    output_choice,
    output_scores,
    rotate_back,
)
from moeyard_kernels.ops.elementwise import (
    add_rms_norm,
    gated_rms_norm,
    mla_split_qkv_a_norm,
    rms_norm,
    scale_rows_,
    sigmoid_mul,
    silu_mul,
)
from moeyard_kernels.ops.expert_cache import cache_access, fetch_experts, gather_experts
from moeyard_kernels.ops.experts import (
    expert_layout,
    grouped_gemm,
    grouped_gemm_packed,
    moe_reduce_add_norm,
    moe_weighted_reduce,
    topk_gate,
)
from moeyard_kernels.ops.hyper_connections import hyper_enter, hyper_leave, hyper_write
from moeyard_kernels.ops.linear_attention import (
    causal_conv1d_prefill,
    causal_conv1d_update,
    gdn_chunk_prefill,
    gdn_recurrent,
    gdn_step,
    kda_chunk_prefill,
    kda_recurrent,
    kda_step,
    restore_slots,
)
from moeyard_kernels.ops.peer_exchange import combine_rows, dispatch_rows
from moeyard_kernels.ops.projections import head_linear, linear, linear_packed, linear_pair, write_values
from moeyard_kernels.ops.sampling import sample, token_logprobs
