"""The door: one signature for an op's oracle and its kernel, and no Triton where there is no GPU."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moeyard_kernels
from moeyard_kernels import ops

FOLDER = Path(moeyard_kernels.__path__[0])
# What tests and the bench may give a kernel, and callers of the op may not.
OWN = frozenset(("config", "configs", "split"))
CALLS = sorted(
    {
        call
        for file in (FOLDER / "door").glob("*.py")
        for call in re.findall(r'kernel\("(\w+)\.(\w+)", \w+\)\.(\w+)\(', file.read_text())
    }
)


def parameters(function: object) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults."""
    every = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(p.name, p.kind, p.default) for p in every if p.name not in OWN]


def test_every_op_is_loaded_so() -> None:
    functions = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    assert {op for _, _, op in CALLS} == functions - {"can_share", "expert_block_rows", "plan_prefill"}


@pytest.mark.parametrize(("folder", "stem", "op"), CALLS, ids=lambda name: name)
def test_oracle_and_kernel_take_what_the_op_takes(folder: str, stem: str, op: str) -> None:
    wanted = parameters(getattr(ops, op))
    for module in (f"ref.{stem}", f"{folder}.{stem}"):
        found = parameters(getattr(importlib.import_module(f"moeyard_kernels.{module}"), op))
        assert [(name, kind) for name, kind, _ in found] == [(name, kind) for name, kind, _ in wanted], module


def test_no_triton_for_tensors_of_a_cpu() -> None:
    code = "import sys, torch; before = 'triton' in sys.modules; from moeyard_kernels import ops; x = torch.ones(2, 2)"
    code += "; ops.silu_mul(ops.linear(x, x)); print(before or 'triton' not in sys.modules)"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(FOLDER.parent)!r}); {code}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "True"
