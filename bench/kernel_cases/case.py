"""One line of the kernel bench: an op at a shape, how its equality is proven, what it must reach."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from moeyard_kernels.common.tuning import Config


@dataclass(frozen=True, slots=True)
class Target:
    """What the op must reach.

    "copy": at least `bound` of the copy bandwidth of the same run. "us": at most so many microseconds. "tflops": at
    least so many TFLOP/s. "speedup": at least so many times as fast as the baseline of the same run.
    """

    kind: Literal["copy", "us", "tflops", "speedup"]
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`run` launches the op without a host sync and may be captured in a graph; so may `baseline`.

    Every tensor that they and the runs of `variants` read or write is among their arguments, so that `with_own_tensors`
    finds it.

    `prove` checks on this device and these shapes (smaller where that would take long) what the op promises bit for
    bit, and raises AssertionError saying what differs. `num_bytes` are the fewest bytes that must move (each input read
    once, each output written once), `num_flops` the operations of the matrix products. `variants`: every config that
    may be chosen for this shape, as (config, run with it), for `--tune`; `tune_key` is (op, shape class) of the store.
    `early`: whether the op's first launch may begin early, which `Timer.seconds` asks for.
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
    """The same call over copies of its tensors, those in tuples, lists, dicts and dataclasses too.

    Offsets and strides stay, and tensors that share memory share the copy.
    """
    # Configs need not be copied.
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
