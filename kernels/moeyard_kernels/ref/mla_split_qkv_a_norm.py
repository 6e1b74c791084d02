"""What follows the fused down projection of latent attention: two norms and a copy."""

import torch

from moeyard_kernels.ref.rms_norm import rms_norm


def mla_split_qkv_a_norm(
    qkv_a: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv_a [T, Rq + R + Dr] -> (normed queries [T, Rq], normed latents [T, R], the last Dr columns [T, Dr])."""
    num_q, num_kv = q_weight.shape[0], kv_weight.shape[0]
    q, kv, rope = qkv_a.split((num_q, num_kv, qkv_a.shape[1] - num_q - num_kv), 1)
    return rms_norm(q, q_weight, eps), rms_norm(kv, kv_weight, eps), rope.clone()
