"""fp8 checkpoints: e4m3 codes with a scale per block, per row or per tensor. Pure.

DeepSeek-V3, Kimi-K2 and the "-FP8" releases of Qwen have blocks of 128 x 128 and the method "fp8". Their scales are
called `weight_scale_inv`, but multiply. The last block of rows or columns may be partial. DeepSeek-V4 calls them
`scale`, and the experts of its releases have e2m1 codes of 4 bits. DeepSeek-V3 has fp32 scales, and Qwen
has bf16 scales. From DeepSeek-V3.1 on they are powers of two ("ue8m0"), stored as F32 or F8_E8M0.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from moeyard_kernels.types.weight_form import WeightForm, blocks, fp4_tiles, fp8_tiles
from moeyard_worker.checkpoint.formats.format import StoredTensor
from moeyard_worker.checkpoint.formats.module_names import ModuleNames, module_names
from moeyard_worker.checkpoint.formats.quantized import QuantizedFormat, QuantizedScheme, Scales
from moeyard_worker.config.fields import Fields
from moeyard_worker.layers.weights import Part

# Dtypes of stored scales. The first is the one that `converting.py` writes.
_SCALES = ("BF16", "F32", "F16", "F8_E8M0")
# Those whose values are bf16 values.
_BF16_SCALES = frozenset({"BF16", "F8_E8M0"})
# The key of scales in DeepSeek-V4's releases, in place of ".weight".
SCALE = ".scale"
# Columns of an expert of DeepSeek-V4 that share a scale.
FP4_GROUP = 32
# Column blocks of a matrix whose codes stay in memory.
_MOST_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """w = bf16(fp32(code) * fp32(scale)), with one scale per block of `rows` x `columns`; None means all of them.

    `suffix` follows the key of the codes, or replaces its ".weight" if it is `SCALE`.
    """

    rows: int | None
    columns: int | None
    suffix: str = "_scale"

    def marker(self, key: str) -> str:
        return key.removesuffix(".weight") + SCALE if self.suffix == SCALE else key + self.suffix

    def refusal(self, part: Part) -> str | None:
        if part.whole is None or (self.rows and not part.shape[0] % self.rows):
            return None
        return f"its {part.shape[0]} rows are cut out of one tensor for all experts, through a block of scales"

    def untiled(self, columns: int) -> str | None:
        return columns_untiled(columns, 64) or block_untiled(self.columns, columns, least=64)

    def tiles(self, columns: int) -> WeightForm | None:
        return None if self.untiled(columns) else fp8_tiles(self.rows, self.columns)

    def stored(self, part: Part) -> Mapping[str, StoredTensor]:
        shape = part.whole or part.shape
        grid = (*shape[:-2], blocks(shape[-2], self.rows), blocks(shape[-1], self.columns))
        others: tuple[tuple[int, ...], ...] = ()
        if len(shape) == 2 and self.columns is None:
            others = (grid[:1], ()) if self.rows is None else (grid[:1],)
        return {
            part.key: StoredTensor(shape, ("F8_E4M3",)),
            self.marker(part.key): StoredTensor(grid, _SCALES, others, self._why()),
        }

    def _why(self) -> str:
        if self.rows is None:
            return "one scale for the tensor"
        return "a scale per row" if self.columns is None else f"a scale per block of {self.rows} x {self.columns}"


@dataclass(frozen=True, slots=True)
class Fp4Scheme:
    """w = code * scale, with e2m1 codes, two per byte with the first in the lower bits, and a power of two per
    `FP4_GROUP` columns of a row. bfloat16 holds the product exactly."""

    def marker(self, key: str) -> str:
        return key.removesuffix(".weight") + SCALE

    def refusal(self, part: Part) -> str | None:
        return None if part.whole is None else "a tensor of all experts has no codes of 4 bits"

    def untiled(self, columns: int) -> str | None:
        return columns_untiled(columns, 128) or block_untiled(FP4_GROUP, columns, least=FP4_GROUP)

    def tiles(self, columns: int) -> WeightForm | None:
        return None if self.untiled(columns) else fp4_tiles(FP4_GROUP)

    def stored(self, part: Part) -> Mapping[str, StoredTensor]:
        rows, columns = part.shape
        return {
            part.key: StoredTensor((rows, columns // 2), ("I8", "U8")),
            self.marker(part.key): StoredTensor((rows, blocks(columns, FP4_GROUP)), ("F8_E8M0",)),
        }


def columns_untiled(columns: int, tile: int) -> str | None:
    """Return the reason why products over codes read no matrices with `columns` columns, or None."""
    return f"their {columns} columns are not a multiple of {tile}" if columns % tile else None


def block_untiled(block: int | None, columns: int, *, least: int) -> str | None:
    """Return the reason why products over codes read no blocks of `block` columns (None: all columns), or None.

    A step of a product begins and ends with blocks, or lies within one. The scales of a row must fit on the chip.
    """
    if block is None:
        return None
    if block < least or block & (block - 1):
        return f"blocks of {block} columns are no power of two from {least} on"
    if (count := blocks(columns, block)) > _MOST_BLOCKS:
        return f"their {columns} columns have {count} blocks of scales, more than {_MOST_BLOCKS}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format(QuantizedFormat):
    """The method "fp8": one scheme for all modules that are not excluded. With `fp4` experts have another."""

    excluded: ModuleNames
    one: Fp8Scheme
    fp4: bool = False

    def promised(self, module: str) -> QuantizedScheme | None:
        if module in self.excluded:
            return None
        return Fp4Scheme() if self.fp4 and ".experts." in module else self.one

    def named(self, scheme: QuantizedScheme, part: Part, keys: Container[str]) -> QuantizedScheme:
        if isinstance(scheme, Fp8Scheme) and (other := replace(scheme, suffix=SCALE)).marker(part.key) in keys:
            return other
        return scheme


def stored_scales(dtypes: Mapping[str, str]) -> Scales:
    """Return the kind of the scales of all e4m3 codes. `dtypes` are the safetensors dtypes of all tensors by key."""
    found = set()
    for key, dtype in dtypes.items():
        if dtype == "F8_E4M3":
            names = (f"{key}_scale_inv", f"{key}_scale", key.removesuffix(".weight") + SCALE)
            found.add(next((dtypes[name] for name in names if name in dtypes), None))
    return "bfloat16" if found and found <= _BF16_SCALES else "float32"


def block_size(settings: Fields, key: str) -> tuple[int, int]:
    """Read the rows and columns of a block. Raises CheckpointError for anything but two positive sizes."""
    size = settings.integers(key)
    if len(size) != 2 or min(size) < 1:
        raise settings.error(key, f"is {list(size)}, expected two positive sizes")
    return size[0], size[1]


def parse_fp8(settings: Fields, dtype: str) -> Fp8Format:
    """Read the settings of the method "fp8". Raises CheckpointError for a variant that is not supported."""
    settings.require("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    settings.require("activation_scheme", ("dynamic", "static"), "dynamic")
    exponents = settings.require("scale_fmt", ("ue8m0", "float"), "float") == "ue8m0"
    experts = settings.require("expert_dtype", ("fp8", "fp4"), "fp8")
    excluded = module_names(settings, "modules_to_not_convert")
    if settings.values.get("weight_block_size") is None:
        one = Fp8Scheme(None, None)
    else:
        one = Fp8Scheme(*block_size(settings, "weight_block_size"), "_scale_inv")
    markers = ("_scale_inv", ".weight_scale_inv", ".weight_scale", SCALE)
    return Fp8Format(
        file=settings.file,
        markers=markers,
        excluded=excluded,
        one=one,
        fp4=experts == "fp4",
        left_plain=("activations",) if "activation_scheme" in settings.values else (),
        scales="ue8m0" if exponents else None,
    )
