"""One name for each of Gluon's calls that Triton 3.8 or 3.9 renamed.

- load_block(descriptor, coordinates, barrier, shared, pred=True): copies a block into shared memory by TMA
- load_rows(shared, pointers, mask=None): copies elements into shared memory, as `cp.async` does
- reinterpret(shared, dtype, shape, layout): returns another view of the same bytes of shared memory
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

load_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
load_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_shared = gl.shared_memory_descriptor
reinterpret = _shared.reinterpret if hasattr(_shared, "reinterpret") else _shared._reinterpret
