"""Work on a side stream beside a layer's launches gives the same bits as one launch after the other."""

from types import SimpleNamespace

import pytest
import torch
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.cuda.backend import CudaBackend

ROWS = (1, 8, 64, 65)


def test_without_a_gpu_work_runs_when_its_result_is_needed() -> None:
    backend, ran = CudaBackend(page_size=64, device=torch.device("cpu")), []

    def run() -> torch.Tensor:
        ran.append(1)
        return torch.ones(1)

    later = backend.beside(run, SimpleNamespace(num_rows=1))
    assert not ran
    assert later() == 1
    assert ran == [1]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", ROWS)
def test_layers_with_products_on_two_streams(num_rows: int) -> None:
    """The next layer reuses freed memory of the layer before, on either stream."""
    hidden, inner, layers, plan = 1024, 2816, 5, SimpleNamespace(num_rows=num_rows)
    x, norm = torch.randn(num_rows, hidden, device="cuda").bfloat16(), torch.ones(hidden, device="cuda").bfloat16()
    weights = [
        [torch.randn(shape, device="cuda").mul(shape[1] ** -0.5).bfloat16() for shape in shapes]
        for shapes in [((2 * inner, hidden), (hidden, inner), (64, hidden), (hidden, 64))] * layers
    ]

    def chain(backend: CudaBackend | None) -> torch.Tensor:
        rows = x
        for gate_up, down, choice, back in weights:

            def shared(rows: torch.Tensor = rows, gate_up: torch.Tensor = gate_up, down: torch.Tensor = down):  # type: ignore[no-untyped-def]
                return ops.linear(ops.silu_mul(ops.linear(rows, gate_up, static_weight=True)), down, static_weight=True)

            later = shared if backend is None else backend.beside(shared, plan)
            routed = ops.linear(ops.linear(rows, choice, static_weight=True), back, static_weight=True)
            rows = ops.add_rms_norm(ops.sigmoid_mul(routed, later()), rows, norm, 1e-6)[1]
        return rows

    beside = CudaBackend(page_size=64, device=torch.device("cuda"))
    assert_replays(lambda: (chain(beside), chain(None)), lambda: x.normal_())
    assert torch.equal(chain(beside), chain(None))
