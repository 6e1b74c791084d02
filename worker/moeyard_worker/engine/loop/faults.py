"""Faults of a rank by name. Loads no torch: a launcher reads them too.

A fault leaves this rank's memory or device in an unknown state: only a new process may go on. Requests that are known
to have caused it end with its name; the others go on elsewhere.
"""

import re
from collections.abc import Sequence

# Prefixes of CUDA errors in torch and Triton; the lines behind them are advice.
_CUDA = re.compile(r"(?:CUDA error: |Triton Error \[CUDA\]: )([^\n]+)")
# Torch's text when the host has no memory left, behind a location in its source.
_HOST_MEMORY = "DefaultCPUAllocator: "
_NAMED = 4


class RankFault(RuntimeError):
    """This rank cannot go on; the message names it, the step and what happened. `requests` are to blame, if any are."""

    def __init__(self, message: str, requests: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.requests = tuple(requests)


def not_finite(request_ids: Sequence[str], *, step: int) -> RankFault:
    """The fault of requests whose rows of a step had no finite largest logit."""
    named = ", ".join(request_ids[:_NAMED])
    more = f" and {len(request_ids) - _NAMED} more" if len(request_ids) > _NAMED else ""
    return RankFault(f"logits of step {step} are not finite: request {named}{more}", request_ids)


def out_of_memory(error: BaseException) -> bool:
    """Whether this says that the device, or the host, has no memory left.

    torch has a class for what its allocator finds; what CUDA tells graphs, pinned memory and Triton is a RuntimeError.
    """
    return _of_the_host(error) or (isinstance(error, RuntimeError) and "out of memory" in str(error).lower())


def name_of(error: BaseException, *, rank: int, step: int) -> str:
    """One line that names what ended a rank at a step."""
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
    """Return the first sentence of an error; the name of its class if it has none."""
    return _first_line(error).split(". ", 1)[0] or type(error).__name__


def _of_the_host(error: BaseException) -> bool:
    """Whether it is the host's memory that ran out."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _HOST_MEMORY in str(error))


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
