"""Weight forms: how a matrix, and the three matrices of an expert, lie in bytes. Pure.

Code that counts bytes of weights asks a form. A form with codes, scales or zero points has one part for each of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Bytes of one element, by torch's name.
_ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}
)
# Every part of an expert but the first begins at a multiple of this.
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class FormPart:
    """One array of a matrix [N, K]: an element stands for a block of `rows` x `columns` values.

    None stands for all rows, or all columns. The last block may be partial. `dtype` is torch's name.
    """

    name: str
    dtype: str
    rows: int | None = 1
    columns: int | None = 1

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the array of a matrix [rows, columns]."""
        return _blocks(rows, self.rows), _blocks(columns, self.columns)

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of the array of a matrix [rows, columns]."""
        return math.prod(self.shape(rows, columns)) * _ELEMENT_BYTES[self.dtype]


def _blocks(count: int, block: int | None) -> int:
    return -(-count // (block or max(count, 1)))


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How a matrix [N, K] lies in bytes: one array per part. The first part holds the values or their codes."""

    name: str
    parts: tuple[FormPart, ...]

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of all arrays of a matrix [rows, columns]."""
        return sum(part.num_bytes(rows, columns) for part in self.parts)


def plain_form(dtype: str) -> WeightForm:
    """Return the form of a matrix that is nothing but its values."""
    return WeightForm("plain", (FormPart("data", dtype),))


@dataclass(frozen=True, slots=True)
class PartPlace:
    """The bytes [begin, begin + num_bytes) of a region: one array of `shape`."""

    part: FormPart
    shape: tuple[int, int]
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Region:
    """`count` matrices [rows, columns] of one form, joined array by array: for each part, those of all matrices."""

    form: WeightForm
    count: int
    rows: int
    columns: int

    def places(self) -> tuple[PartPlace, ...]:
        """Return the place of every part."""
        found, end = [], 0
        for part in self.form.parts:
            blocks, width = part.shape(self.rows, self.columns)
            begin = end + -end % _ALIGNED
            size = self.count * part.num_bytes(self.rows, self.columns)
            found.append(PartPlace(part, (self.count * blocks, width), begin, size))
            end = begin + size
        return tuple(found)

    @property
    def num_bytes(self) -> int:
        """Bytes of the region, up to a place where another region may begin."""
        last = self.places()[-1]
        end = last.begin + last.num_bytes
        return end if len(self.form.parts) == 1 else end + -end % _ALIGNED


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertForm:
    """How an expert lies in bytes: gate [I, H] joined with up [I, H], then down [H, I]. The whole is its blob.

    `gate_up` is the form of gate and of up, `down` that of down.
    """

    hidden: int
    intermediate: int
    gate_up: WeightForm
    down: WeightForm

    @property
    def regions(self) -> tuple[Region, Region]:
        """gate_up [2 I, H] and down [H, I]."""
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
