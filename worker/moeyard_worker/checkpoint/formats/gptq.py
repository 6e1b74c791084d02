"""Checkpoints of GPTQ and AWQ: int4 codes in groups along the columns, stored transposed. Pure.

GPTQ (github.com/ModelCloud/GPTQModel) packs 8 codes of a column per int32, AWQ (github.com/casper-hansen/AutoAWQ) 8
rows in another order. Scales are float16. `checkpoint_format` "gptq" stores zero points less one, "gptq_v2" does not.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moeyard_kernels.types.weight_form import WeightForm, blocks, int4_tiles
from moeyard_worker.checkpoint.formats.compressed_tensors import group_refusal, group_text, group_untiled
from moeyard_worker.checkpoint.formats.format import StoredTensor
from moeyard_worker.checkpoint.formats.module_names import ModuleNames, module_names, names_of, pattern_of
from moeyard_worker.checkpoint.formats.quantized import QuantizedFormat, QuantizedScheme
from moeyard_worker.config.fields import Fields, shown
from moeyard_worker.layers.weights import Part

_MAX_RULES = 256
_SCALES = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """w = bf16(fp32(code - zero) * fp32(scale)). `zero_less_one`: a stored zero point is one less than the true one.

    `g_idx` [K] names the group of each column. With `ordered` the groups are runs of `group` columns. `symmetric`:
    every zero point is 8.
    """

    group: int | None
    zero_less_one: bool
    ordered: bool
    symmetric: bool

    def marker(self, key: str) -> str:
        return key.removesuffix(".weight") + ".qweight"

    def refusal(self, part: Part) -> str | None:
        return _refusal(part, self.group)

    def untiled(self, columns: int) -> str | None:
        return group_untiled(self.group, columns) if self.ordered else "desc_act permutes their columns"

    def tiles(self, columns: int) -> WeightForm | None:
        return None if self.untiled(columns) else int4_tiles(self.group, scales="float32", zeros=not self.symmetric)

    def stored(self, part: Part) -> Mapping[str, StoredTensor]:
        (rows, columns), at, groups = part.shape, part.key.removesuffix(".weight"), blocks(part.shape[1], self.group)
        return {
            f"{at}.qweight": StoredTensor((columns // 8, rows), ("I32",)),
            f"{at}.qzeros": StoredTensor((groups, rows // 8), ("I32",), why=_why(self.group)),
            f"{at}.scales": StoredTensor((groups, rows), _SCALES, why=_why(self.group)),
            f"{at}.g_idx": StoredTensor((columns,), ("I32", "I64")),
        }


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """w = bf16(fp32(code - zero) * fp32(scale)), with 8 rows per int32 in the order 0, 2, 4, 6, 1, 3, 5, 7."""

    group: int | None

    def marker(self, key: str) -> str:
        return key.removesuffix(".weight") + ".qweight"

    def refusal(self, part: Part) -> str | None:
        return _refusal(part, self.group)

    def untiled(self, columns: int) -> str | None:
        return group_untiled(self.group, columns)

    def tiles(self, columns: int) -> WeightForm | None:
        return None if self.untiled(columns) else int4_tiles(self.group, scales="float32", zeros=True)

    def stored(self, part: Part) -> Mapping[str, StoredTensor]:
        (rows, columns), at, groups = part.shape, part.key.removesuffix(".weight"), blocks(part.shape[1], self.group)
        return {
            f"{at}.qweight": StoredTensor((columns, rows // 8), ("I32",)),
            f"{at}.qzeros": StoredTensor((groups, rows // 8), ("I32",), why=_why(self.group)),
            f"{at}.scales": StoredTensor((groups, rows), _SCALES, why=_why(self.group)),
        }


def _why(group: int | None) -> str:
    return f"zero points and {group_text(group)}"


def _refusal(part: Part, group: int | None) -> str | None:
    if part.shape[0] % 8:
        return f"its {part.shape[0]} rows are not a multiple of 8, the zero points of a word"
    return group_refusal(part, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Format(QuantizedFormat):
    """The methods "gptq" and "awq": one scheme for all modules, with exceptions by pattern.

    rules: (pattern, its scheme or None if excluded), from the key `dynamic` of GPTQModel.
    head: whether the output head may be quantised, too.
    """

    excluded: ModuleNames
    one: QuantizedScheme
    rules: tuple[tuple[re.Pattern[str], QuantizedScheme | None], ...] = ()
    head: bool = True

    def promised(self, module: str) -> QuantizedScheme | None:
        for pattern, scheme in self.rules:
            if pattern.match(module):
                return scheme
        return None if module in self.excluded or self._lacks_head(module) else self.one

    def exclusion(self, module: str) -> str:
        return 'config.json lacks "lm_head": true' if self._lacks_head(module) else "config.json excludes it"

    def _lacks_head(self, module: str) -> bool:
        return not self.head and module.rpartition(".")[2] == "lm_head"


def parse_gptq(settings: Fields, dtype: str) -> Int4Format:
    """Read the settings of GPTQ. Raises CheckpointError for a variant that is not supported."""
    settings.require("bits", (4,), None)
    one = _gptq(settings, settings.values)
    found = settings.values.get("dynamic") or {}
    if not isinstance(found, dict) or len(found) > _MAX_RULES:
        raise settings.error("dynamic", f"is {shown(found)}, expected patterns of modules")
    names, rules = [], []
    for pattern, changes in found.items():
        if not pattern.startswith(("+:", "-:")):
            # A name without changes is excluded, as the exporters of Qwen write it.
            names.append(pattern)
            continue
        changed = {**settings.values, **(changes if isinstance(changes, dict) else {})}
        scheme = None if pattern.startswith("-:") else _gptq(settings, changed)
        rules.append((pattern_of(settings, "dynamic", pattern[2:]), scheme))
    excluded = names_of(settings, "dynamic", names)
    head = settings.boolean("lm_head", False)
    return Int4Format(
        file=settings.file, markers=(".qweight",), excluded=excluded, one=one, rules=tuple(rules), head=head
    )


def _gptq(settings: Fields, values: Mapping[str, Any]) -> GptqScheme:
    settings = Fields(settings.file, values)
    settings.require("bits", (4,), None)
    kind = settings.require("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return GptqScheme(
        _group_size(settings),
        zero_less_one=kind == "gptq",
        ordered=not settings.boolean("desc_act", False),
        symmetric=settings.boolean("sym", True),
    )


def parse_awq(settings: Fields, dtype: str) -> Int4Format:
    """Read the settings of AWQ. Raises CheckpointError for a variant that is not supported."""
    settings.require("bits", (4,), None)
    settings.require("version", ("gemm", "GEMM"), "gemm")
    settings.require("zero_point", (True,), True)
    excluded = module_names(settings, "modules_to_not_convert")
    one = AwqScheme(_group_size(settings))
    return Int4Format(file=settings.file, markers=(".qweight",), excluded=excluded, one=one)


def _group_size(settings: Fields) -> int | None:
    return None if settings.values.get("group_size") in (-1, None) else settings.integer("group_size")
