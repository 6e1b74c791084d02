"""Read stored tensors into matrices: copy plain values, and bring quantised ones from the layout of their exporter.

The layouts are described in `formats/`. All of them become `fp8_form` or `int4_form`, whose rounding `dequantize`
defines. A matrix in memory then holds those codes in tiles, or their bfloat16 values.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from moeyard_kernels.types.matrix import (
    NIBBLES,
    Matrix,
    dequantize,
    holds_nan,
    pack_codes,
    tile_,
    unpack_codes,
)
from moeyard_kernels.types.weight_form import fp4_form, fp8_form, int4_form
from moeyard_worker.checkpoint.formats.compressed_tensors import PackedInt4Scheme
from moeyard_worker.checkpoint.formats.format import Scheme
from moeyard_worker.checkpoint.formats.fp8 import FP4_GROUP, Fp4Scheme, Fp8Scheme
from moeyard_worker.checkpoint.formats.gguf import PairedScheme, SplitKvScheme
from moeyard_worker.checkpoint.formats.gptq import AwqScheme, GptqScheme
from moeyard_worker.checkpoint.index import TensorEntry
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.layers.weights import Part, num_elements

# The bits at which AWQ stores row i of 8 rows.
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
_ADVICE = ", so its codes cannot stay in GPU memory; serve the checkpoint with --weights bfloat16"


class TensorError(CheckpointError):
    """The stored values of the tensor `key` cannot be served."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key} {why}")
        self.key = key


class Read(Protocol):
    """Reads a checkpoint's tensors."""

    def __call__(self, key: str, out: torch.Tensor, begin: int = 0) -> None:
        """Fill the contiguous `out` from element `begin` of tensor `key` on, converted to the dtype of `out`.

        On a GPU the copy may still run on return.
        """
        ...


def fill(
    out: Matrix, part: Part, scheme: Scheme, read: Read, entries: Mapping[str, TensorEntry] = MappingProxyType({})
) -> None:
    """Write `part`, stored as `scheme` says, into `out`, a matrix of its rows.

    Raises CheckpointError naming the tensor, and its file if it is among `entries`: for codes that are NaN, scales that
    are not finite or 0, a stored shape that differs, and scales that the form of `out` cannot hold.
    """
    try:
        _fill(out, part, scheme, read)
    except TensorError as error:
        if error.key not in entries:
            raise
        raise CheckpointError(f"{entries[error.key].file}: {error}") from error


def _fill(out: Matrix, part: Part, scheme: Scheme, read: Read) -> None:
    device = out.data.device
    match scheme:
        case Fp8Scheme():
            found = _fp8(part, scheme, read, device)
        case Fp4Scheme():
            found = _fp4(part, scheme, read, device)
        case PackedInt4Scheme():
            narrow = out.form.tiled and out.scales.dtype == torch.bfloat16
            found = _packed_int4(part, scheme, read, device, scales="bfloat16" if narrow else "float32")
        case GptqScheme():
            found = _gptq(part, scheme, read, device)
        case AwqScheme():
            found = _awq(part, scheme, read, device)
        case PairedScheme():
            read(part.key, out.data)
            rows = out.data.unflatten(0, (-1, scheme.dim // 2, 2))
            out.data.copy_(rows.transpose(1, 2).flatten(0, 2))
            return
        case SplitKvScheme():
            out.data.copy_(_joined_kv(part, scheme, read, out.data))
            return
        case _:
            assert not out.form.tiled, f"{part.key} has no codes"
            # `part.begin` counts rows of the stored tensor, and `read` counts elements.
            read(part.key, out.data, part.begin * num_elements(part.shape[1:]))
            if part.regroup is not None:
                out.data.copy_(_regroup(out.data, part))
            return
    if not out.form.tiled:
        out.data.copy_(_regroup(dequantize(found), part))
        return
    assert part.regroup is None, "rows of experts are stored in order"
    try:
        tile_(out, found)
    except ValueError as error:
        key = scheme.marker(part.key) if isinstance(scheme, Fp8Scheme | Fp4Scheme) else part.key
        raise TensorError(key, f"cannot be put in tiles: {error}{_ADVICE}") from error


def _regroup(rows: torch.Tensor, part: Part) -> torch.Tensor:
    """Reorder rows that are stored group by group, as `Part.regroup` describes."""
    if part.regroup is None:
        return rows
    groups, pieces = part.regroup
    stored = rows.unflatten(0, (groups, -1))
    return torch.cat([stored[:, begin:end].flatten(0, 1) for begin, end in pieces])


def _joined_kv(part: Part, scheme: SplitKvScheme, read: Read, like: torch.Tensor) -> torch.Tensor:
    """Return kv_b [heads * (nope + v), rank]: the rows of k_b and v_b head by head."""
    k_b, v_b = (like.new_empty(stored.shape) for stored in scheme.stored(part).values())
    for key, tensor in zip(scheme.keys(part), (k_b, v_b), strict=True):
        read(key, tensor)
    return torch.cat([k_b.transpose(1, 2), v_b], dim=1).flatten(0, 1)


def _fp8(part: Part, scheme: Fp8Scheme, read: Read, device: torch.device) -> Matrix:
    rows, columns = part.shape
    matrix = Matrix.empty(fp8_form(scheme.rows or rows, scheme.columns), rows, columns, device)
    codes, scales = matrix.arrays
    read(part.key, codes, part.begin * columns)
    if holds_nan(codes):
        raise TensorError(part.key, "holds a code that is NaN; the file is damaged")
    key = scheme.marker(part.key)
    # All matrices of one tensor begin at a block.
    read(key, scales, part.begin // (scheme.rows or rows) * scales.shape[1])
    _check_scales(key, scales)
    return matrix


def _fp4(part: Part, scheme: Fp4Scheme, read: Read, device: torch.device) -> Matrix:
    matrix = Matrix.empty(fp4_form(FP4_GROUP), part.shape[0], part.shape[1], device)
    read(part.key, matrix.data.view(torch.int8))
    key = scheme.marker(part.key)
    read(key, matrix.scales)
    _check_scales(key, matrix.scales)
    return matrix


def _packed_int4(part: Part, scheme: PackedInt4Scheme, read: Read, device: torch.device, *, scales: str) -> Matrix:
    (rows, columns), at = part.shape, part.key.removesuffix(".weight")
    matrix = Matrix.empty(int4_form(scheme.group, scales=scales, zeros=scheme.zeros), rows, columns, device)
    shape = torch.empty(2, dtype=torch.int64)
    read(f"{at}.weight_shape", shape)
    if shape.tolist() != [rows, columns]:
        raise TensorError(f"{at}.weight_shape", f"is {shape.tolist()}, but config.json calls for {[rows, columns]}")
    read(f"{at}.weight_packed", matrix.data)
    stored = matrix.scales if scales == "float32" else torch.empty(matrix.scales.shape, device=device)
    read(f"{at}.weight_scale", stored)
    _check_scales(f"{at}.weight_scale", stored)
    if stored is not matrix.scales:
        matrix.scales.copy_(stored)
        if not torch.equal(matrix.scales.float(), stored):
            raise TensorError(f"{at}.weight_scale", f"holds a scale that is no bfloat16 value{_ADVICE}")
    if scheme.zeros:
        zeros = torch.empty(-(-rows // 8), matrix.scales.shape[1], dtype=torch.int32, device=device)
        read(f"{at}.weight_zero_point", zeros)
        matrix.arrays[2].copy_(unpack_codes(zeros.T).T[:rows])
    return matrix


def _gptq(part: Part, scheme: GptqScheme, read: Read, device: torch.device) -> Matrix:
    (rows, columns), at = part.shape, part.key.removesuffix(".weight")
    group = scheme.group or columns
    words = torch.empty(columns // 8, rows, dtype=torch.int32, device=device)
    index = torch.empty(columns, dtype=torch.int64, device=device)
    read(f"{at}.qweight", words)
    read(f"{at}.g_idx", index)
    zeros, scales = _zeros_and_scales(at, rows, columns // group, NIBBLES, read, device)
    if bool((index < 0).any()) or bool((index >= len(scales)).any()):
        raise TensorError(f"{at}.g_idx", f"names a group that does not exist: there are {len(scales)}")
    if scheme.ordered and not torch.equal(index, torch.arange(columns, device=device) // group):
        raise TensorError(f"{at}.g_idx", "permutes the columns, but config.json says desc_act: false")
    if scheme.zero_less_one:
        # A word of 15 stands for 16, as the kernels of GPTQ computed it.
        zeros += 1
    if not scheme.ordered:
        codes = unpack_codes(words.T).T.float()
        return Matrix.plain((codes - zeros[index]).mul_(scales[index]).bfloat16().T)
    form = int4_form(scheme.group, scales="float32", zeros=not scheme.symmetric)
    if scheme.symmetric and bool((zeros != 8).any()):
        raise TensorError(f"{at}.qzeros", "holds zero points other than 8, but config.json says sym: true")
    arrays = (words.T.contiguous(), scales.T.contiguous(), zeros.T.to(torch.uint8).contiguous())
    return Matrix(form, (rows, columns), arrays[: len(form.parts)])


def _awq(part: Part, scheme: AwqScheme, read: Read, device: torch.device) -> Matrix:
    (rows, columns), at = part.shape, part.key.removesuffix(".weight")
    stored = torch.empty(columns, rows // 8, dtype=torch.int32, device=device)
    read(f"{at}.qweight", stored)
    zeros, scales = _zeros_and_scales(at, rows, columns // (scheme.group or columns), _AWQ_SHIFTS, read, device)
    words = pack_codes(unpack_codes(stored, _AWQ_SHIFTS).T)
    form = int4_form(scheme.group, scales="float32", zeros=True)
    return Matrix(form, (rows, columns), (words, scales.T.contiguous(), zeros.T.to(torch.uint8).contiguous()))


def _zeros_and_scales(
    at: str, rows: int, groups: int, shifts: tuple[int, ...], read: Read, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return zero points and scales, fp32 [groups, rows]."""
    words = torch.empty(groups, rows // 8, dtype=torch.int32, device=device)
    scales = torch.empty(groups, rows, device=device)
    read(f"{at}.qzeros", words)
    read(f"{at}.scales", scales)
    _check_scales(f"{at}.scales", scales)
    return unpack_codes(words, shifts).float(), scales


def _check_scales(key: str, scales: torch.Tensor) -> None:
    # An exponent byte of 0 means 2^-127. Trained weights have no such scale, but files with holes do.
    least, most = torch.aminmax(scales.abs())  # NaN if any value is
    if not bool((least >= torch.finfo(torch.float32).tiny) & (most <= torch.finfo(torch.float32).max)):
        raise TensorError(key, "holds a scale that is 0 or not finite; the file is damaged or not complete")
