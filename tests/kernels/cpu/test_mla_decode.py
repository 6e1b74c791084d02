"""Absorbed latent decode attention: values against float64, equal bits in every batch."""

import pytest
import torch

from moeyard_kernels.cpu.attention import mla_decode
from moeyard_kernels.cpu.plan import plan_decode

LENS = [5, 64, 190, 65, 1, 256]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("heads", "rank", "rope", "page"),
    [(4, 48, 16, 16), (16, 128, 32, 64), (5, 33, 8, 8), (128, 512, 64, 16)],
    ids=lambda v: str(v),
)
def test_values_and_batches(heads: int, rank: int, rope: int, page: int, dtype: torch.dtype) -> None:
    per_row = -(-max(LENS) // page)
    cache = torch.randn(per_row * len(LENS), page, rank + rope).to(dtype)
    q_latent, q_rope = torch.randn(len(LENS), heads, rank).to(dtype), torch.randn(len(LENS), heads, rope).to(dtype)
    table = torch.randperm(per_row * len(LENS)).view(len(LENS), per_row)
    scale = (rank + rope) ** -0.5

    def run(rows: list[int]) -> torch.Tensor:
        plan = plan_decode(table[rows], [LENS[r] for r in rows], page_size=page)
        return mla_decode(q_latent[rows], q_rope[rows], cache, plan=plan, scale=scale)

    whole = run(list(range(len(LENS))))
    assert whole.shape == q_latent.shape
    assert whole.dtype == dtype
    worst, rounded_worst = 0.0, 0.0
    for row, length in enumerate(LENS):
        latent = cache[table[row]].flatten(0, 1)[:length]
        q = torch.cat((q_latent[row], q_rope[row]), -1)
        wanted = (q.double() @ latent.double().T * scale).softmax(-1) @ latent[:, :rank].double()
        worst = max(worst, (whole[row].double() - wanted).abs().max().item())
        # The same with scores and probabilities in the dtype, as an eager model computes it.
        p = (q @ latent.T * scale).float().softmax(-1).to(dtype)
        rounded_worst = max(rounded_worst, ((p @ latent[:, :rank]).double() - wanted).abs().max().item())
    assert worst <= (5e-6 if dtype == torch.float32 else rounded_worst)

    for row in range(len(LENS)):
        assert torch.equal(run([row])[0], whole[row]), f"row {row} alone"
    for rows in ([3, 2, 1, 0], [5, 4, 3, 2, 1, 0] * 2):
        assert torch.equal(run(rows), whole[rows])


def test_no_rows() -> None:
    cache, none = torch.zeros(3, 16, 12), plan_decode(torch.zeros(0, 1, dtype=torch.int64), [], page_size=16)
    assert mla_decode(torch.zeros(0, 2, 8), torch.zeros(0, 2, 4), cache, plan=none, scale=1.0).shape == (0, 2, 8)
