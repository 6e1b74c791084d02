"""Read stored tensors into matrices: copy plain values, and bring quantised ones from the layout of their exporter.

The layouts are described in `formats/`. All of them become one of the forms `fp8_form` and `int4_form`, whose rounding
`dequantize` defines.
"""

from typing import Protocol

import torch

from moeyard_kernels.types.matrix import Matrix, dequantize
from moeyard_kernels.types.weight_form import fp8_form, int4_form
from moeyard_worker.checkpoint.formats.compressed_tensors import PackedInt4Scheme
from moeyard_worker.checkpoint.formats.format import Scheme
from moeyard_worker.checkpoint.formats.fp8 import Fp8Scheme
from moeyard_worker.checkpoint.formats.gptq import AwqScheme, GptqScheme
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.layers.weights import Part, num_elements

# The bits at which AWQ stores row i of 8 rows.
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


class Read(Protocol):
    """Reads a checkpoint's tensors."""

    def __call__(self, key: str, out: torch.Tensor, begin: int = 0) -> None:
        """Fill the contiguous `out` from element `begin` of tensor `key` on, converted to the dtype of `out`.

        On a GPU the copy may still run on return.
        """
        ...


def fill(out: Matrix, part: Part, scheme: Scheme, read: Read) -> None:
    """Write `part`, stored as `scheme` says, into `out`, a matrix of its rows.

    Raises CheckpointError naming the tensor for scales that are not finite or 0, and for a stored shape that differs.
    """
    device = out.data.device
    match scheme:
        case Fp8Scheme():
            values = _fp8(part, scheme, read, device)
        case PackedInt4Scheme():
            values = _packed_int4(part, scheme, read, device)
        case GptqScheme():
            values = _gptq(part, scheme, read, device)
        case AwqScheme():
            values = _awq(part, scheme, read, device)
        case _:
            # `part.begin` counts rows of the stored tensor, and `read` counts elements.
            read(part.key, out.data, part.begin * num_elements(part.shape[1:]))
            return
    out.data.copy_(values)


def _fp8(part: Part, scheme: Fp8Scheme, read: Read, device: torch.device) -> torch.Tensor:
    rows, columns = part.shape
    form = fp8_form(scheme.rows or rows, scheme.columns)
    matrix = Matrix.empty(form, rows, columns, device)
    codes, scales = matrix.arrays
    read(part.key, codes, part.begin * columns)
    key = scheme.marker(part.key)
    # All matrices of one tensor begin at a block.
    read(key, scales, part.begin // (scheme.rows or rows) * scales.shape[1])
    _check_scales(key, scales)
    return dequantize(matrix)


def _packed_int4(part: Part, scheme: PackedInt4Scheme, read: Read, device: torch.device) -> torch.Tensor:
    (rows, columns), at = part.shape, part.key.removesuffix(".weight")
    form = int4_form(scheme.group, scales="float32", zeros=scheme.zeros)
    matrix = Matrix.empty(form, rows, columns, device)
    shape = torch.empty(2, dtype=torch.int64)
    read(f"{at}.weight_shape", shape)
    if shape.tolist() != [rows, columns]:
        raise CheckpointError(f"{at}.weight_shape is {shape.tolist()}, but config.json calls for {[rows, columns]}")
    read(f"{at}.weight_packed", matrix.data)
    read(f"{at}.weight_scale", matrix.scales)
    _check_scales(f"{at}.weight_scale", matrix.scales)
    if scheme.zeros:
        zeros = torch.empty(-(-rows // 8), matrix.scales.shape[1], dtype=torch.int32, device=device)
        read(f"{at}.weight_zero_point", zeros)
        matrix.arrays[2].copy_(_unpacked(zeros, range(0, 32, 4), 0)[:rows])
    return dequantize(matrix)


def _gptq(part: Part, scheme: GptqScheme, read: Read, device: torch.device) -> torch.Tensor:
    (rows, columns), at = part.shape, part.key.removesuffix(".weight")
    words = torch.empty(columns // 8, rows, dtype=torch.int32, device=device)
    index = torch.empty(columns, dtype=torch.int64, device=device)
    read(f"{at}.qweight", words)
    read(f"{at}.g_idx", index)
    zeros, scales = _zeros_and_scales(at, rows, columns // (scheme.group or columns), range(0, 32, 4), read, device)
    if bool((index < 0).any()) or bool((index >= len(scales)).any()):
        raise CheckpointError(f"{at}.g_idx names a group that does not exist: there are {len(scales)}")
    if scheme.ordered and not torch.equal(index, torch.arange(columns, device=device) // (scheme.group or columns)):
        raise CheckpointError(f"{at}.g_idx permutes the columns, but config.json says desc_act: false")
    if scheme.zero_less_one:
        # A word of 15 stands for 16, as the kernels of GPTQ computed it.
        zeros += 1
    codes = _unpacked(words, range(0, 32, 4), 0)
    return (codes.float() - zeros[index]).mul_(scales[index]).bfloat16().T


def _awq(part: Part, scheme: AwqScheme, read: Read, device: torch.device) -> torch.Tensor:
    (rows, columns), at = part.shape, part.key.removesuffix(".weight")
    words = torch.empty(columns, rows // 8, dtype=torch.int32, device=device)
    read(f"{at}.qweight", words)
    group = scheme.group or columns
    zeros, scales = _zeros_and_scales(at, rows, columns // group, _AWQ_SHIFTS, read, device)
    codes = _unpacked(words, _AWQ_SHIFTS, 1).float().unflatten(0, (-1, group))
    return (codes - zeros.unsqueeze(1)).mul_(scales.unsqueeze(1)).bfloat16().flatten(0, 1).T


def _zeros_and_scales(
    at: str, rows: int, groups: int, shifts: range | tuple[int, ...], read: Read, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return zero points and scales, fp32 [groups, rows]."""
    words = torch.empty(groups, rows // 8, dtype=torch.int32, device=device)
    scales = torch.empty(groups, rows, device=device)
    read(f"{at}.qzeros", words)
    read(f"{at}.scales", scales)
    _check_scales(f"{at}.scales", scales)
    return _unpacked(words, shifts, 1).float(), scales


def _unpacked(words: torch.Tensor, shifts: range | tuple[int, ...], dim: int) -> torch.Tensor:
    """Return the 8 codes of each int32 word, uint8, along dimension `dim` of a matrix of words."""
    of_words = torch.tensor(list(shifts), dtype=torch.int32, device=words.device)
    if dim == 0:
        return ((words.unsqueeze(1) >> of_words.unsqueeze(-1)) & 15).to(torch.uint8).flatten(0, 1)
    return ((words.unsqueeze(-1) >> of_words) & 15).to(torch.uint8).flatten(1)


def _check_scales(key: str, scales: torch.Tensor) -> None:
    if not bool((scales.isfinite() & (scales != 0)).all()):
        raise CheckpointError(f"{key} holds a scale that is 0 or not finite; the file is damaged or not complete")
