"""One line of the kernel bench: an op at a shape, its proof of equality, and its target."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from moeyard_kernels.common.tuning import Config


@dataclass(frozen=True, slots=True)
class Target:
    """The target of an op.

    "copy": at least `bound` of the copy bandwidth of the same run. "us": at most `bound` microseconds. "tflops": at
    least `bound` TFLOP/s. "speedup": at least `bound` times as fast as the baseline of the same run.
    """

    kind: Literal["copy", "us", "tflops", "speedup"]
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An op at a shape. `run` launches it without a host sync and may be captured in a graph; so may `baseline`.

    Every tensor that they and the runs of `variants` read or write is among their arguments, so that `with_own_tensors`
    finds it.

    `prove` checks the op's bits on this device and these shapes (smaller ones if that would take long), and raises
    AssertionError with the difference. `num_bytes` are the fewest bytes that must move (each input read once, each
    output written once), `num_flops` the operations of the matrix products. `variants`: every config for this shape, as
    (config, run with it), for `--tune`; `tune_key` is (op, shape class) of the store. `early`: whether the op's first
    launch may begin early, for `Timer.seconds`.
    """

    op: str
    shape: str
    run: partial[Any]
    prove: Callable[[], None]
    num_bytes: int
    num_flops: int = 0
    target: Target | None = None
    baseline: partial[Any] | None = None
    baseline_name: str = ""
    variants: Sequence[tuple[Config, partial[Any]]] = ()
    tune_key: tuple[str, str] | None = None
    early: bool = True


def with_own_tensors(run: partial[Any]) -> partial[Any]:
    """Return the same call with copies of its tensors, including those in tuples, lists, dicts and dataclasses.

    Offsets and strides stay, and tensors that share memory share the copy.
    """
    # Configs need no copies.
    memo = {id(x): x for x in (*run.args, *run.keywords.values()) if isinstance(x, Config)}
    args, keywords = copy.deepcopy((run.args, run.keywords), memo)
    return partial(run.func, *args, **keywords)


def assert_bits(what: str, got: object, wanted: object) -> None:
    """Raise AssertionError unless two tensors (or tuples of them, or None) hold the same bytes; a NaN equals itself."""
    if got is None and wanted is None:
        return
    if isinstance(got, tuple | list) and isinstance(wanted, tuple | list):
        assert len(got) == len(wanted), f"{what}: {len(got)} results, {len(wanted)} wanted"
        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert_bits(f"{what}[{i}]", a, b)
        return
    assert isinstance(got, torch.Tensor), what
    assert isinstance(wanted, torch.Tensor), what
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), f"{what}: {got.shape} {got.dtype}"
    a, b = (x.contiguous().view(torch.uint8).view(-1, x.element_size()) for x in (got, wanted))
    differing = int((a != b).any(1).sum())
    assert differing == 0, f"{what}: {differing} of {got.numel()} values differ"
