"""Weight matrices, the right side of products, and typed views of the bytes of experts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from moeyard_kernels.types.weight_form import TILE, ExpertForm, FormPart, Region, WeightForm, plain_form

# The bits at which a word holds its 8 codes.
NIBBLES = tuple(range(0, 32, 4))
# Exponents of the scales of tiled e2m1 codes. Their products with 2^126, by which kernels multiply, are finite in bf16.
E2M1_EXPONENTS = (-126, 1)
# The values of e2m1 codes (OCP Microscaling Formats 1.0): a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Places of a code's bits in a word of tiles, from the sign to the lowest, for each slice. `common.codes` moves them.
FP4_BITS = ((15, 8, 7, 6), (9, 2, 1, 0), (5, 14, 13, 12), (11, 4, 3, 10))
FP8_BITS = ((15, 10, 9, 8, 7, 6, 5, 4), (11, 14, 13, 12, 3, 2, 1, 0))
# This slice of e2m1 codes has its 3 lower bits in the other word of the pair.
SWAPPED = 2
# Values that are made at once: on a CPU, in its caches; on a GPU, in 128 MiB, because it may serve at the same time.
_VALUES_OF_CPU, _VALUES_OF_GPU = 1 << 18, 1 << 24
# bf16 scales of tiled e4m3 codes are below this, so that their products with 2^120 are finite.
E4M3_SCALES_END = 128.0


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A weight matrix [N, K], or a stack of them: one array per part of its form.

    `shape` counts values, not codes. `Backend.matrix` returns a matrix whose arrays have the layout of its kernels.
    """

    form: WeightForm
    shape: tuple[int, ...]
    arrays: tuple[torch.Tensor, ...]

    @staticmethod
    def plain(data: torch.Tensor) -> "Matrix":
        """Return `data` as a matrix without further parts."""
        return Matrix(plain_form(str(data.dtype).removeprefix("torch.")), tuple(data.shape), (data,))

    @staticmethod
    def empty(form: WeightForm, rows: int, columns: int, device: torch.device) -> "Matrix":
        """Allocate a matrix [rows, columns]."""
        arrays = [
            torch.empty(
                part.tiled_shape(1, rows, columns) if form.tiled else part.shape(rows, columns),
                dtype=getattr(torch, part.dtype),
                device=device,
            )
            for part in form.parts
        ]
        return Matrix(form, (rows, columns), tuple(arrays))

    @property
    def data(self) -> torch.Tensor:
        """First part: the values, or their codes."""
        return self.arrays[0]

    @property
    def scales(self) -> torch.Tensor:
        """Second part of a form with scales."""
        return self.arrays[1]

    def __getitem__(self, index: int) -> "Matrix":
        """Return one matrix of a stack [S, N, K]."""
        return Matrix(self.form, self.shape[1:], tuple(array[index] for array in self.arrays))

    def rows(self, begin: int, count: int) -> "Matrix":
        """Return a view of rows [begin, begin + count). Row `begin` must be the first of a block in every part."""
        arrays = []
        for part, array in zip(self.form.parts, self.arrays, strict=True):
            block = part.rows or self.shape[0]
            assert begin % block == 0, f"row {begin} lies inside a block of {block} rows of {part.name}"
            blocks = slice(begin // block, -(-(begin + count) // block))
            arrays.append(array[:, :, blocks] if self.form.tiled else array[blocks])
        return Matrix(self.form, (count, *self.shape[1:]), tuple(arrays))


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack int32 codes of 4 bits [..., 8 n] into int32 words [..., n], the first code in the lowest bits."""
    return (codes.unflatten(-1, (-1, 8)) << _numbers(NIBBLES, codes.device)).sum(-1, dtype=torch.int32)


def unpack_codes(words: torch.Tensor, shifts: tuple[int, ...] = NIBBLES) -> torch.Tensor:
    """Return the 8 codes of each int32 word [..., n] as int32 [..., 8 n]. Code i is at bit `shifts[i]`."""
    return ((words.unsqueeze(-1) >> _numbers(shifts, words.device)) & 15).flatten(-2)


@cache
def _numbers(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return int32 values on a device. The copy to a GPU waits, so it is made once."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def tile_(out: Matrix, matrix: Matrix) -> None:
    """Write a matrix of an untiled form into `out`, one matrix in the tiled form of the same codes and blocks.

    No e4m3 code may be NaN. Raises ValueError for scales that the tiled form cannot hold.
    """
    assert out.form.tiled and not matrix.form.tiled and out.form.name == matrix.form.name  # noqa: PT018
    narrow = _is_narrow(out.form)
    for rows in _row_blocks(matrix):
        out.data[:, 0, rows].copy_(_tiled_words(matrix.data[rows], matrix.form.name, narrow=narrow).transpose(0, 1))
    for target, source in zip(out.arrays[1:], matrix.arrays[1:], strict=True):
        tiled = source.T.unsqueeze(1)
        if target.dtype == torch.uint8 and tiled.is_floating_point():
            tiled = _exponents(tiled)
        elif narrow:
            rounded = tiled.bfloat16()
            if not bool(((rounded == tiled) & (tiled.abs() < E4M3_SCALES_END)).all()):
                raise ValueError(f"a scale of e4m3 codes is no bfloat16 value below {E4M3_SCALES_END:.0f}")
            tiled = rounded
        if tiled.shape[2] == 1 and out.form.parts[1].rows == 1:
            tiled = tiled.expand(target.shape)  # one scale for all rows
        assert (target.shape, target.dtype) == (tiled.shape, tiled.dtype), f"{matrix.form} does not fit {out.form}"
        target.copy_(tiled)


def _row_blocks(matrix: Matrix) -> Iterator[slice]:
    """Yield the rows whose values are made at once."""
    step = max(1, (_VALUES_OF_GPU if matrix.data.is_cuda else _VALUES_OF_CPU) // matrix.shape[1])
    for begin in range(0, matrix.shape[0], step):
        yield slice(begin, min(begin + step, matrix.shape[0]))


def _tiled_words(codes: torch.Tensor, name: str, *, narrow: bool) -> torch.Tensor:
    """Return int16 words [N, tiles, 32] of the codes of N rows."""
    if name == "fp8" and not narrow:
        pairs = codes.view(torch.int16).unflatten(1, (-1, 2, TILE // 2))  # [N, tiles, slices, pairs of codes]
        return pairs.transpose(2, 3).reshape(len(codes), -1, TILE)
    if name == "fp8":
        return _placed(codes.view(torch.uint8).unflatten(1, (-1, 2, TILE)), FP8_BITS)
    nibbles = unpack_codes(codes).unflatten(1, (-1, 4, TILE))
    if name == "fp4":
        nibbles[:, :, SWAPPED : SWAPPED + 1] = _swapped(nibbles)
        return _placed(nibbles, FP4_BITS)
    places = _numbers((0, 4, 8, 12), codes.device)[:, None]
    return (nibbles << places).sum(2, dtype=torch.int32).to(torch.int16)


def untile(matrix: Matrix) -> Matrix:
    """Return one tiled matrix in the untiled form of the same codes and blocks."""
    words = matrix.data.squeeze(1).transpose(0, 1)  # [N, tiles, 32]
    parts = matrix.form.parts
    others = [array.squeeze(1).T.contiguous() for array in matrix.arrays[1:]]
    if matrix.form.name == "fp8":
        part = FormPart("codes", "float8_e4m3fn")
        if _is_narrow(matrix.form):
            codes = _taken(words, FP8_BITS).to(torch.uint8)
            others, parts = [others[0].float()], (part, replace(parts[1], dtype="float32"))
        else:
            codes = words.unflatten(-1, (TILE // 2, 2)).transpose(2, 3)
        data = codes.reshape(matrix.shape[0], -1).view(torch.float8_e4m3fn)
    else:
        if matrix.form.name == "fp4":
            nibbles = _taken(words, FP4_BITS)
            nibbles[:, :, SWAPPED : SWAPPED + 1] = _swapped(nibbles)
            others, parts = [torch.exp2(others[0].float() - 127)], (parts[0], replace(parts[1], dtype="float32"))
        else:
            shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device)[:, None]
            nibbles = (words.to(torch.int32).unsqueeze(2) >> shifts) & 15
        data = pack_codes(nibbles.reshape(matrix.shape[0], -1))
        part = FormPart("codes", "int32", 1, 8)
    return Matrix(WeightForm(matrix.form.name, (part, *parts[1:])), matrix.shape, (data, *others))


def holds_nan(codes: torch.Tensor) -> bool:
    """Return whether an e4m3 code is NaN: all bits behind its sign are 1."""
    return int((codes.view(torch.uint8) & 0x7F).max()) == 0x7F


def _is_narrow(form: WeightForm) -> bool:
    """Return whether these are tiles of e4m3 codes with bf16 scales."""
    return form.tiled and form.name == "fp8" and form.parts[1].dtype == "bfloat16"


def _runs(places: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (mask, shift) of a code's bits that move together to their places in a word."""
    found: dict[int, int] = {}
    for bit, place in zip(reversed(range(len(places))), places, strict=True):
        found[place - bit] = found.get(place - bit, 0) | 1 << bit
    return [(mask, shift) for shift, mask in found.items()]


@cache
def _table_of_places(bits: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """Return int32 [slices * codes of a slice]: each code with its bits at their places."""
    tables = []
    for places in bits:
        codes = torch.arange(1 << len(places), dtype=torch.int32)
        tables.append(sum(((codes & mask) << shift for mask, shift in _runs(places)), torch.zeros_like(codes)))
    return torch.cat(tables).to(device)


def _placed(codes: torch.Tensor, bits: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """Return int16 words [..., 32] of codes [..., slices, 32]."""
    table = _table_of_places(bits, codes.device)
    size = len(table) // len(bits)
    index = codes.to(torch.int32) + _numbers(tuple(range(0, len(table), size)), codes.device)[:, None]
    return table.index_select(0, index.flatten()).view_as(index).sum(-2, dtype=torch.int32).to(torch.int16)


def _taken(words: torch.Tensor, bits: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """Return int32 codes [..., slices, 32] of int16 words [..., 32]: the inverse of `_placed`."""
    wide = words.to(torch.int32)
    codes = [sum(((wide >> shift) & mask for mask, shift in _runs(places)), torch.zeros_like(wide)) for places in bits]
    return torch.stack(codes, -2)


def _swapped(nibbles: torch.Tensor) -> torch.Tensor:
    """Return slice `SWAPPED` of codes [..., 4, 32] with the 3 lower bits of neighbours exchanged."""
    own = nibbles[..., SWAPPED : SWAPPED + 1, :]
    return own & 8 | own.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) & 7


def _exponents(scales: torch.Tensor) -> torch.Tensor:
    """Return the exponents of powers of two as bytes. Raises ValueError for scales that `E2M1_EXPONENTS` excludes."""
    mantissa, exponent = torch.frexp(scales)
    first, last = E2M1_EXPONENTS
    if not bool(((mantissa == 0.5) & (exponent > first) & (exponent <= last + 1)).all()):
        raise ValueError(f"a scale of e2m1 codes is no power of two from 2^{first} to 2^{last}")
    return (exponent + 126).to(torch.uint8)


def dequantize(matrix: Matrix) -> torch.Tensor:
    """Return the values of a matrix [N, K]: those of a plain one, else bf16(fp32(q - zero) * fp32(scale)).

    This is the only definition of the rounding. The product is rounded to fp32, then to bf16. With 4-bit codes and
    scales of 16 bits the fp32 product is exact.
    """
    if matrix.form.name == "plain":
        return matrix.data
    if matrix.form.tiled:
        if (count := matrix.data.shape[1]) > 1:
            shape = (matrix.shape[0] // count, matrix.shape[1])
            parts = zip(*(array.split(1, 1) for array in matrix.arrays), strict=True)
            return torch.cat([dequantize(Matrix(matrix.form, shape, arrays)) for arrays in parts])
        matrix = untile(matrix)
    out = torch.empty(matrix.shape, dtype=torch.bfloat16, device=matrix.data.device)
    for rows in _row_blocks(matrix):
        values = _values_of_codes(matrix, rows)
        if len(matrix.arrays) == 3:
            zeros = _of_blocks(matrix, 2, rows.start, len(values))
            values.view(*zeros.shape[:2], -1).sub_(zeros)
        scales = _of_blocks(matrix, 1, rows.start, len(values))
        values.view(*scales.shape[:2], -1).mul_(scales)
        out[rows] = values
    return out


@cache
def _table_of_codes(name: str, signed: bool, device: torch.device) -> torch.Tensor:
    """Return a table by words of 16 bits: the exact bf16 values of their codes, as the bits of an integer."""
    words = torch.arange(1 << 16, dtype=torch.int32)
    if name == "fp8":
        codes = torch.stack([words & 255, words >> 8], -1).to(torch.uint8).view(torch.float8_e4m3fn)
        return codes.bfloat16().view(torch.int32).squeeze(-1).to(device)
    nibbles = (words[:, None] >> torch.arange(0, 16, 4, dtype=torch.int32)) & 15
    values = torch.tensor(E2M1)[nibbles] if name == "fp4" else nibbles.float() - (8.0 if signed else 0.0)
    return values.bfloat16().view(torch.int64).squeeze(-1).to(device)


def _values_of_codes(matrix: Matrix, rows: slice) -> torch.Tensor:
    """Return the codes of some rows as fp32. Those of int4 codes are q - 8, or q if there are zero points."""
    name, data = matrix.form.name, matrix.data[rows].contiguous()
    if name == "fp8" and matrix.shape[1] % 2:
        return data.float()
    words = data.view(torch.int16).flatten().to(torch.int32).bitwise_and_(0xFFFF)
    table = _table_of_codes(name, len(matrix.arrays) == 2, data.device)
    return table.index_select(0, words).view(torch.bfloat16).view(-1, matrix.shape[1]).float()


def _of_blocks(matrix: Matrix, index: int, begin: int, count: int) -> torch.Tensor:
    """Return part `index` of rows [begin, begin + count) as fp32 [count, blocks or columns, 1]."""
    part, columns = matrix.form.parts[index], matrix.shape[1]
    array = matrix.arrays[index]
    rows = torch.arange(begin, begin + count, device=array.device) // (part.rows or matrix.shape[0])
    array = array.index_select(0, rows).float()
    if part.columns is not None and columns % part.columns:
        array = array.repeat_interleave(part.columns, 1)[:, :columns]
    return array.unsqueeze(-1)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertViews:
    """Typed views of the bytes of an expert, or of a stack of experts: gate_up [2 I, H] and down [H, I]."""

    gate_up: Matrix
    down: Matrix

    @property
    def gate(self) -> Matrix:
        """Gate matrix [I, H] of one expert."""
        return self._half(0)

    @property
    def up(self) -> Matrix:
        """Up matrix [I, H] of one expert."""
        return self._half(1)

    def _half(self, half: int) -> Matrix:
        both = self.gate_up
        dim = 1 if both.form.tiled else 0
        arrays = tuple(a.chunk(2, dim)[half] for a in both.arrays)
        return Matrix(both.form, (both.shape[0] // 2, both.shape[1]), arrays)


# Writes one expert into views of its bytes.
Fill = Callable[[ExpertViews], None]


def expert_views(form: ExpertForm, gate_up: torch.Tensor, down: torch.Tensor) -> ExpertViews:
    """Return views of the two regions of experts: uint8 [..., gate_up bytes] and [..., down bytes]."""
    regions = form.regions
    return ExpertViews(_matrix(regions[0], gate_up), _matrix(regions[1], down))


def blob_views(form: ExpertForm, blob: torch.Tensor) -> ExpertViews:
    """Return views of a blob, uint8 [blob_bytes]."""
    gate_up, down = blob.split(form.region_bytes)
    return expert_views(form, gate_up, down)


def _matrix(region: Region, memory: torch.Tensor) -> Matrix:
    arrays = [
        memory[..., place.begin : place.begin + place.num_bytes]
        .view(getattr(torch, place.part.dtype))
        .unflatten(-1, place.shape)
        for place in region.places()
    ]
    return Matrix(region.form, (*memory.shape[:-1], region.count * region.rows, region.columns), tuple(arrays))
