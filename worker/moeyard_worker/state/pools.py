"""State pools: the paged memory behind a model's attention, one layer's part as one view.

A page holds `page_size` positions of one sequence in every layer; which sequence owns which page is the scheduler's
business. Pools start as zeros, since attention multiplies unseen entries by zero and so needs them finite.
"""

import torch

from moeyard_worker.models.attention_config import GqaConfig, MlaConfig


class KvPool:
    """Keys and values of grouped-query attention: `k`, `v` [layers, Hkv, num_pages, page_size, D]."""

    def __init__(
        self,
        config: GqaConfig,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        shape = (num_layers, config.num_kv_heads, num_pages, page_size, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, index: int) -> "KvLayer":
        """The part of one layer."""
        return KvLayer(self.k[index], self.v[index])


class KvLayer:
    """One layer's `k`, `v` [Hkv, num_pages, page_size, D]."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k, self.v = k, v
        self._flat_k, self._flat_v = k.flatten(1, 2), v.flatten(1, 2)

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [T, Hkv, D] in the entries slots [T]."""
        self._flat_k.index_copy_(1, slots, k.transpose(0, 1))
        self._flat_v.index_copy_(1, slots, v.transpose(0, 1))

    def read(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of pages [n] in order, each [Hkv, n * page_size, D]."""
        return self.k.index_select(1, pages).flatten(1, 2), self.v.index_select(1, pages).flatten(1, 2)


class LatentPool:
    """Rows of latent attention, normalised latent then rotated shared key: [layers, num_pages, page_size, R + Dr]."""

    def __init__(
        self,
        config: MlaConfig,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.rows = torch.zeros(num_layers, num_pages, page_size, config.latent_dim, dtype=dtype, device=device)

    def layer(self, index: int) -> "LatentLayer":
        """The part of one layer."""
        return LatentLayer(self.rows[index])


class LatentLayer:
    """One layer's `rows` [num_pages, page_size, R + Dr]."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self._flat = rows.flatten(0, 1)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store rows [T, R + Dr] in the entries slots [T]."""
        self._flat.index_copy_(0, slots, rows)

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """Rows of pages [n] in order: [n * page_size, R + Dr]."""
        return self.rows.index_select(0, pages).flatten(0, 1)
