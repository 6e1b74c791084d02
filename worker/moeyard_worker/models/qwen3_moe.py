"""Qwen3-MoE: grouped-query attention with normalised queries and keys; MoE everywhere except in named layers."""

from moeyard_worker.models.names import Names

NAMES = Names()
