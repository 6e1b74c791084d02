"""Faults of a rank and their texts. Loads no torch, because a launcher reads them, too.

A fault leaves the rank's memory or device in an unknown state, so only a new process may continue. Requests that are
known to have caused it end with its text. The others continue elsewhere.
"""

import re
from collections.abc import Sequence

# Prefixes of CUDA errors in torch and Triton. The lines after the first are advice.
_CUDA = re.compile(r"(?:CUDA error: |Triton Error \[CUDA\]: )([^\n]+)")
# Part of torch's text when the host has no memory left, after a location in its source.
_HOST_MEMORY = "DefaultCPUAllocator: "
_NAMED = 4


class RankFault(RuntimeError):
    """This rank cannot continue. The message names it, the step and the cause. `requests` caused it, if any did."""

    def __init__(self, message: str, requests: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.requests = tuple(requests)


def not_finite(request_ids: Sequence[str], *, step: int, weights: str | None = None) -> RankFault:
    """Return the fault of requests whose rows of a step had no finite largest logit.

    weights: the version of weights that have given no finite logits before, so that they are at fault.
    """
    named = ", ".join(request_ids[:_NAMED])
    more = f" and {len(request_ids) - _NAMED} more" if len(request_ids) > _NAMED else ""
    what = f"logits of step {step} are" if weights is None else f"weights {weights} give logits that are"
    at = "" if weights is None else f", step {step}"
    return RankFault(f"{what} not finite: request {named}{more}{at}", request_ids)


def out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that the device or the host has no memory left.

    torch has a class for its allocator's errors. CUDA's errors for graphs, pinned memory and Triton are RuntimeErrors.
    """
    return _of_the_host(error) or (isinstance(error, RuntimeError) and "out of memory" in str(error).lower())


def describe_fault(error: BaseException, *, rank: int, step: int) -> str:
    """Return one line that says why a rank ended at a step."""
    if isinstance(error, RankFault):
        return f"rank {rank}: {error}"
    if type(error).__name__ == "OutOfMemoryError":
        return f"rank {rank}: out of device memory at step {step}: {_first_line(error)}"
    if _of_the_host(error):
        return f"rank {rank}: out of host memory at step {step}: {_first_line(error) or type(error).__name__}"
    if isinstance(error, RuntimeError) and (found := _CUDA.search(str(error))) is not None:
        return f"rank {rank}: CUDA error: {found[1].rstrip('.')} at step {step}"
    return f"rank {rank} failed at step {step}: {type(error).__name__}: {error}"


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error, or the name of its class if it has no text."""
    return _first_line(error).split(". ", 1)[0] or type(error).__name__


def _of_the_host(error: BaseException) -> bool:
    """Return whether the host's memory ran out."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _HOST_MEMORY in str(error))


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
