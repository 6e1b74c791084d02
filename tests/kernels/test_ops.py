"""Ops are declared once, with checks from specs and rules. Without a GPU they do not import Triton."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import moeyard_kernels
from moeyard_kernels import ops
from moeyard_kernels.ops.op import op

FOLDER = Path(moeyard_kernels.__path__[0])
# Arguments that only tests and the bench may pass, and only to a kernel.
KERNEL_ONLY = frozenset(("config", "configs", "split"))
OPS = sorted(name for name in vars(ops) if hasattr(getattr(ops, name), "reference"))


def parameters(function: object) -> list[tuple[str, object]]:
    """Return names and kinds of a function's parameters."""
    every = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(p.name, p.kind) for p in every if p.name not in KERNEL_ONLY]


@pytest.mark.parametrize("name", OPS)
def test_kernel_has_the_parameters_of_the_op(name: str) -> None:
    declared = getattr(ops, name)
    kernel = getattr(importlib.import_module(f"moeyard_kernels.{declared.stem}"), name)
    assert parameters(kernel) == parameters(declared)
    assert declared.__doc__, "an op needs a docstring"


def test_cpu_tensors_import_no_triton() -> None:
    code = "import sys, torch; before = 'triton' in sys.modules; from moeyard_kernels import ops; x = torch.ones(2, 2)"
    code += "; ops.silu_mul(ops.linear(x, x)); print(before or 'triton' not in sys.modules)"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(FOLDER.parent)!r}); {code}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "True"


def even(op: str, rows: int) -> None:
    if rows % 2:
        raise ValueError(f"{op}: {rows} rows")


@op(
    "no.kernel",
    "scale > 0",
    "bias is None or N > 1",
    even,
    x="float [rows, K] rows",
    weight="x|fp32 [N, 2*half, K]",
    like="like x",
    bias="int [N] contiguous?",
    stored="any [_, N + K] host",
    **{"pair.real": "fp32 [..., half]"},
)
def declared(
    x: torch.Tensor,
    weight: torch.Tensor,
    like: torch.Tensor,
    stored: torch.Tensor,
    pair: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
) -> float:
    """Return the scale."""
    return scale


def arguments() -> dict[str, torch.Tensor]:
    return {
        "x": torch.zeros(2, 3),
        "weight": torch.zeros(4, 6, 3),
        "like": torch.zeros(2, 3),
        "stored": torch.zeros(1, 7, device="meta"),
        "pair": torch.zeros(5, 3, dtype=torch.complex64),
        "bias": torch.zeros(4).int(),
    }


def test_valid_arguments_reach_the_reference() -> None:
    assert declared(**arguments(), scale=2.0) == 2.0  # type: ignore[arg-type]
    assert declared(*list(arguments().values())[:5]) == 1.0
    assert str(inspect.signature(declared)) == str(inspect.signature(declared.reference))
    assert declared.check(**arguments()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": torch.zeros(3)}, "x float32 [3], expected float32 or bfloat16 [rows, K]"),
        ({"x": torch.zeros(2, 3).half()}, "x float16 [2, 3], expected float32 or bfloat16 [rows, K]"),
        ({"x": torch.zeros(3, 2).t()}, "x float32 [2, 3] with strides (1, 2) is not contiguous in its last dimension"),
        (
            {"weight": torch.zeros(4, 6, 2)},
            "weight float32 [4, 6, 2], expected float32 [N, 2 half, 3] for x float32 [2, 3]",
        ),
        ({"weight": torch.zeros(4, 5, 3)}, "weight float32 [4, 5, 3], expected float32 [N, 2 half, 3]"),
        (
            {"weight": torch.zeros(4, 6, 3).half()},
            "weight float16 [4, 6, 3], expected float32 [N, 2 half, 3] for x float32 [2, 3]",
        ),
        ({"like": torch.zeros(2, 4)}, "like float32 [2, 4], expected float32 [2, 3] for x float32 [2, 3]"),
        ({"like": torch.zeros(2, 3).half()}, "like float16 [2, 3], expected float32 [2, 3] for x float32 [2, 3]"),
        ({"like": torch.zeros(2, 3, device="meta")}, "like is on meta, x on cpu"),
        ({"bias": torch.zeros(4)}, "bias float32 [4], expected int64 or int32 [4]"),
        ({"bias": torch.zeros(8).int()[::2]}, "bias int32 [4] with strides (2,) is not contiguous"),
        ({"stored": torch.zeros(1, 8)}, "stored float32 [1, 8], expected [_, 7] for weight float32 [4, 6, 3]"),
        (
            {"pair": torch.zeros(5, 2, dtype=torch.complex64)},
            "pair.real float32 [5, 2], expected float32 [..., 3] for weight float32 [4, 6, 3]",
        ),
        ({"scale": 0.0}, "scale 0.0, expected scale > 0"),
        ({"x": torch.zeros(3, 3), "like": torch.zeros(3, 3)}, "3 rows"),
        (
            {"weight": torch.zeros(1, 6, 3), "bias": torch.zeros(1).int(), "stored": torch.zeros(1, 4)},
            "bias int32 [1], N 1 of weight float32 [1, 6, 3], expected bias is None or N > 1",
        ),
    ],
    ids=str,
)
def test_invalid_arguments_are_named_with_both_values(wrong: dict, message: str) -> None:
    for call in (declared, declared.check):
        with pytest.raises(ValueError, match="declared: ") as refused:
            call(**arguments() | wrong)  # type: ignore[arg-type]
        assert str(refused.value) == f"declared: {message}"


def test_missing_kernel_raises() -> None:
    """The first call on a GPU finds this error."""
    with pytest.raises(ModuleNotFoundError, match=r"moeyard_kernels\.no"):
        declared.__globals__["kernel"]()  # type: ignore[attr-defined]


def test_meaningless_spec_is_refused_at_its_declaration() -> None:
    for specs in ({"x": "float M, K"}, {"y": "float [M]"}):

        def one(x: torch.Tensor) -> Callable[[], None] | None:
            return None

        with pytest.raises(AssertionError, match="one"):
            op("no.kernel", **specs)(one)
