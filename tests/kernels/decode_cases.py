"""Inputs and exact answers for tests of decode attention with tables on the device."""

from dataclasses import dataclass

import torch
from kernel_cases.case import assert_bits

from moeyard_kernels.types.decode_tables import DecodeTables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, kw_only=True)
class Paged:
    """Sequences in a paged cache [heads, num_pages, page, D] that is NaN elsewhere."""

    caches: tuple[torch.Tensor, ...]
    table: torch.Tensor
    page: int

    def tables(self, lens: torch.Tensor, rows: list[int] | None = None, window: int | None = None) -> DecodeTables:
        """Return tables of some of the sequences, kv_lens [B] or [B, Q]."""
        table = self.table if rows is None else self.table[rows]
        return DecodeTables(
            page_table=table.contiguous(), kv_lens=lens.to(DEVICE, torch.int32), page_size=self.page, window=window
        )

    def moved(self) -> "Paged":
        """Return the same sequences on other pages."""
        order = torch.randperm(self.caches[0].shape[1], device=DEVICE)
        caches = tuple(torch.empty_like(cache) for cache in self.caches)
        for new, old in zip(caches, self.caches, strict=True):
            new[:, order] = old
        return Paged(caches=caches, table=order[self.table.long()].int(), page=self.page)

    def of(self, cache: int, row: int, length: int) -> torch.Tensor:
        """Return [heads, length, D] of one sequence, float64 on the CPU."""
        pages = self.table[row, : -(-length // self.page)].long()
        return self.caches[cache][:, pages].flatten(1, 2)[:, :length].double().cpu()


def paged(
    lens: list[int],
    page: int,
    *,
    heads: int,
    dims: tuple[int, ...],
    dtype: torch.dtype,
    slack: int = 2,
    window: int | None = None,
) -> Paged:
    """Return random sequences of these lengths on pages in random order, with NaN past their ends and in unused pages.

    With a `window`, keys further below the end than that are NaN too.
    """
    per_row = -(-max(lens) // page) + slack
    num_pages = per_row * len(lens) + 3
    table = torch.randperm(num_pages)[: per_row * len(lens)].view(len(lens), per_row)
    caches = []
    for dim in dims:
        cache = torch.full((heads, num_pages, page, dim), float("nan"), dtype=dtype)
        for row, length in enumerate(lens):
            used = table[row, : -(-length // page)]
            held = torch.full((heads, len(used) * page, dim), float("nan"))
            low = max(0, length - window) if window else 0
            held[:, low:length] = torch.randn(heads, length - low, dim)
            cache[:, used] = held.view(heads, -1, page, dim).to(dtype)
        caches.append(cache.to(DEVICE))
    return Paged(caches=tuple(caches), table=table.int().to(DEVICE), page=page)


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one row in float64: q [Hq, D], k [Hkv, L, D], v [Hkv, L, Dv] -> out [Hq, Dv], log-sum-exp [Hq]."""
    low = max(0, k.shape[1] - window) if window else 0
    group = q.shape[0] // k.shape[0]
    k, v = (x[:, low:].double().repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("hd,hld->hl", q.double().cpu(), k) * scale
    return (scores.softmax(-1).unsqueeze(1) @ v).squeeze(1), scores.logsumexp(-1)


def torch_chain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None = None
) -> torch.Tensor:
    """Compute `exact` with scores and probabilities in q's dtype, like an eager model."""
    low = max(0, k.shape[1] - window) if window else 0
    group = q.shape[0] // k.shape[0]
    q = q.cpu()
    k, v = (x[:, low:].to(q.dtype).repeat_interleave(group, 0) for x in (k, v))
    scores = (q.unsqueeze(1) @ k.transpose(1, 2)) * scale
    return (scores.float().softmax(-1).to(q.dtype) @ v).squeeze(1)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return ((got.double().cpu() - wanted.cpu()).norm() / wanted.norm().cpu()).item()


def assert_same(got: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor], what: str) -> None:
    """Check that bytes of (out, lse) are equal."""
    assert_bits(what, got, wanted)
