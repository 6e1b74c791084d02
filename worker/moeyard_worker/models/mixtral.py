"""Mixtral: grouped-query attention, optionally in a sliding window; MoE in every layer."""

from moeyard_worker.models.names import Names

NAMES = Names(moe=("block_sparse_moe.", "mlp."), expert=("w1", "w3", "w2"))
