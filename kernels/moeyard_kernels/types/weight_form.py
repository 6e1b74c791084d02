"""Weight forms: the byte layout of a matrix, and of the three matrices of an expert. Pure.

All code that counts bytes of weights uses a form. A form has one part for the values or their codes, and one more part
for each array of scales or zero points. To add a quantized form, write its `WeightForm` and return it from the
checkpoint's reader: regions, blobs and byte counts follow from its parts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Bytes of one element, by torch's name.
_ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}
)
# Alignment in bytes of the parts of an expert.
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class FormPart:
    """One array of a matrix [N, K]. Each element belongs to a block of `rows` x `columns` values.

    None means all rows, or all columns. The last block may be partial. `dtype` is torch's name of the dtype.
    """

    name: str
    dtype: str
    rows: int | None = 1
    columns: int | None = 1

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the array of a matrix [rows, columns]."""
        return blocks(rows, self.rows), blocks(columns, self.columns)

    def tiled_shape(self, count: int, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the array of `count` matrices in tiles: see `WeightForm`."""
        num_rows, num_columns = self.shape(rows, columns)
        if self.name == "codes":
            return num_columns // TILE, count, num_rows, TILE
        return num_columns, count, num_rows

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of the array of a matrix [rows, columns]."""
        return math.prod(self.shape(rows, columns)) * _ELEMENT_BYTES[self.dtype]


def blocks(count: int, block: int | None) -> int:
    """Return the number of blocks of `block` elements that cover `count`. None is one block."""
    return -(-count // (block or max(count, 1)))


# int16 words of a row in a tile.
TILE = 32


@dataclass(frozen=True, slots=True)
class WeightForm:
    """Byte layout of a matrix [N, K]: one array per part. The first part holds the values or their codes.

    tiled: the layout of a GPU's products. The codes are int16 words [tiles, matrices, N, 32], and the other arrays are
    [column blocks, matrices, row blocks]. A tile of a row has 32 words, and slices of 32 neighbouring columns. Words
    2 i and 2 i + 1 hold codes 2 i and 2 i + 1 of all slices, as the instructions of `common.codes` read them. So two
    neighbouring words give two neighbouring values of each slice, and products add in the order of K.
    """

    name: str
    parts: tuple[FormPart, ...]
    tiled: bool = False

    @property
    def tile_columns(self) -> int:
        """Columns of a tile of codes."""
        return TILE * (self.parts[0].columns or 1)

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of all arrays of a matrix [rows, columns]."""
        return sum(part.num_bytes(rows, columns) for part in self.parts)


def plain_form(dtype: str) -> WeightForm:
    """Return the form of an unquantized matrix: its values only."""
    return WeightForm("plain", (FormPart("data", dtype),))


def fp8_form(rows: int | None, columns: int | None, *, scales: str = "float32") -> WeightForm:
    """Return the form of e4m3 codes with a scale per block of `rows` x `columns`: w = bf16(fp32(code * scale)).

    `scales` is their dtype.
    """
    return WeightForm("fp8", (FormPart("codes", "float8_e4m3fn"), FormPart("scales", scales, rows, columns)))


def int4_form(group: int | None, *, scales: str, zeros: bool) -> WeightForm:
    """Return the form of 4-bit codes, 8 per int32 along the columns with the first in the lowest bits.

    w = bf16(fp32(code - zero) * fp32(scale)) with a scale of dtype `scales` per row and `group` columns (None: all).
    Without `zeros` every zero point is 8.
    """
    parts = (FormPart("codes", "int32", 1, 8), FormPart("scales", scales, 1, group))
    return WeightForm("int4", (*parts, FormPart("zeros", "uint8", 1, group)) if zeros else parts)


def fp4_form(group: int) -> WeightForm:
    """Return the form of e2m1 codes, packed as those of `int4_form`, with an fp32 scale per row and `group` columns.

    w = bf16(code * scale). With scales that are powers of two the product is exact.
    """
    return WeightForm("fp4", (FormPart("codes", "int32", 1, 8), FormPart("scales", "float32", 1, group)))


def fp8_tiles(rows: int | None, columns: int | None, *, scales: str = "float32") -> WeightForm:
    """Return the tiled form of `fp8_form`. K is a multiple of 64.

    With `scales` "bfloat16" they must be bf16 values below 128, and no code may be NaN. Such codes take fewer
    instructions to decode.
    """
    return WeightForm("fp8", (FormPart("codes", "int16", 1, 2), FormPart("scales", scales, rows, columns)), True)


def int4_tiles(group: int | None, *, scales: str, zeros: bool) -> WeightForm:
    """Return the tiled form of `int4_form`. K is a multiple of 128."""
    parts = (FormPart("codes", "int16", 1, 4), *int4_form(group, scales=scales, zeros=zeros).parts[1:])
    return WeightForm("int4", parts, True)


def fp4_tiles(group: int) -> WeightForm:
    """Return the tiled form of `fp4_form`. K is a multiple of 128.

    A scale is its exponent as a byte: 2^(byte - 127). So groups of 32 columns take 4.25 bits per value, not 4.5.
    """
    return WeightForm("fp4", (FormPart("codes", "int16", 1, 4), FormPart("scales", "uint8", 1, group)), True)


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Location of one array of `shape`: bytes [begin, begin + num_bytes) of a region."""

    part: FormPart
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Region:
    """Byte layout of `count` matrices [rows, columns] of one form, part by part: each part's arrays are adjacent."""

    form: WeightForm
    count: int
    rows: int
    columns: int

    def places(self) -> tuple[PartPlace, ...]:
        """Return the place of every part."""
        found, end = [], 0
        for part in self.form.parts:
            blocks, width = part.shape(self.rows, self.columns)
            shape: tuple[int, ...] = (self.count * blocks, width)
            if self.form.tiled:
                shape = part.tiled_shape(self.count, self.rows, self.columns)
            begin = end + -end % _ALIGNED
            size = self.count * part.num_bytes(self.rows, self.columns)
            found.append(PartPlace(part, shape, begin, size))
            end = begin + size
        return tuple(found)

    @property
    def num_bytes(self) -> int:
        """Bytes of the region, padded so that another region may follow."""
        last = self.places()[-1]
        end = last.begin + last.num_bytes
        return end if len(self.form.parts) == 1 else end + -end % _ALIGNED


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertForm:
    """Byte layout of an expert, called its blob: gate [I, H] and up [I, H] as one region, then down [H, I].

    `gate_up` is the form of gate and of up, `down` the form of down. `limit` bounds gates and ups (`ops.silu_mul`).
    """

    hidden: int
    intermediate: int
    gate_up: WeightForm
    down: WeightForm
    limit: float | None = None

    @property
    def regions(self) -> tuple[Region, Region]:
        """Regions of gate_up [2 I, H] and of down [H, I]."""
        return (
            Region(self.gate_up, 2, self.intermediate, self.hidden),
            Region(self.down, 1, self.hidden, self.intermediate),
        )

    @property
    def region_bytes(self) -> tuple[int, int]:
        """Bytes of gate_up and of down."""
        gate_up, down = self.regions
        return gate_up.num_bytes, down.num_bytes

    @property
    def blob_bytes(self) -> int:
        """Bytes of an expert."""
        return sum(self.region_bytes)


def plain_expert(*, hidden: int, intermediate: int, dtype: str) -> ExpertForm:
    """Return the form of an expert of plain matrices."""
    form = plain_form(dtype)
    return ExpertForm(hidden=hidden, intermediate=intermediate, gate_up=form, down=form)
