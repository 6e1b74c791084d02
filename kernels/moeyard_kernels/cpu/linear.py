"""y = x @ weight.T (+ bias), with the bits of a row independent of the number of rows.

CPU matrix products choose their kernel, and the order of the sum over K, by the number of rows M. Measured with torch
2.13 on AVX-512 for fp32 and bf16 with 1 and 2 threads. K was 16 to 7168 and N 1 to 4096, odd ones too, and M 1 to 160
with rows at any offset:
- A packed weight gives a row the same bits for every M >= 2, and is 1.2 to 2 times as fast (oneDNN).
- A plain bf16 weight does so for every M >= 2 (oneDNN).
- A plain fp32 weight does so for every M >= 4 (MKL). With N < 12 and K not a multiple of 4, however, a row's bits
depend on its place at any M. Zero padding to a multiple of 4 fixes that.

Packed and plain weights may differ in bits, so a model packs a given weight always or never.

These are measurements of an AMD EPYC. An Intel Xeon with AMX (torch 2.11) agrees for packed fp32 weights. For plain
fp32 and for bf16 it needs two environment variables before torch is loaded: MKL_CBWR=AVX512,STRICT and
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16. Otherwise MKL's order depends on a row's place, and AMX's on the row count. Both
variables are correct and cost nothing on the EPYC.
"""

import torch
import torch.nn.functional as F

from moeyard_kernels.types.matrix import Matrix


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return weight [N, K] in oneDNN's blocked layout (an opaque copy of the same size), or itself without oneDNN."""
    # A single output is a vector product, for which oneDNN's order of summation depends on the row count.
    if weight.shape[0] == 1 or not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def pack_matrix(weight: Matrix) -> Matrix:
    """Return a plain matrix packed by `pack_weight`. Raises ValueError for any other form."""
    if weight.form.name != "plain":
        raise ValueError(f"a CPU has no products of {weight.form.name} weights")
    return Matrix(weight.form, weight.shape, (pack_weight(weight.data),))


def padded_rows(num_rows: int) -> int:
    """Return the row count with which `num_rows` rows are computed; 0 stays 0.

    Plain weights need 4. oneDNN also reads a packed weight from memory faster for 4 rows than for 2 (1024 x 512 fp32:
    186 against 230 us). Larger counts are sparse, because oneDNN compiles a kernel per count (about 1 ms once) and
    keeps 1024 of them.
    """
    if num_rows <= 16:
        tile = 4
    elif num_rows <= 64:
        tile = 8
    else:
        tile = 32 if num_rows <= 512 else 128
    return num_rows + -num_rows % tile


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the product for x whose row count is one of `padded_rows`."""
    if weight.is_mkldnn:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    num_out, dim = weight.shape
    if num_out < 16 and dim % 4 and x.dtype == torch.float32:
        x, weight = F.pad(x, (0, -dim % 4)), F.pad(weight, (0, -dim % 4))
    return F.linear(x, weight, bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K], weight [N, K] (plain or packed), bias [N] -> [M, N], all of one dtype (fp32 or bf16)."""
    num_rows = x.shape[0]
    if num_rows == 0:
        return x.new_empty(0, weight.shape[0])
    total = padded_rows(num_rows)
    if total == num_rows:
        return project(x, weight, bias)
    padded = x.new_zeros(total, x.shape[1])
    padded[:num_rows] = x
    return project(padded, weight, bias)[:num_rows]
