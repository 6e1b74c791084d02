"""Checkpoints of the method "compressed-tensors": int4 codes in groups, and fp8 codes. Pure.

The format is that of github.com/neuralmagic/compressed-tensors (0.20). Kimi-K2-Thinking and Kimi-K2.5 are published in
it. A group of the configuration names modules ("targets") and one scheme for their weights. Settings of activations and
of the KV cache are only named at the start (`left_plain`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from moeyard_kernels.types.weight_form import WeightForm, blocks, int4_tiles
from moeyard_worker.checkpoint.formats.format import StoredTensor
from moeyard_worker.checkpoint.formats.fp8 import Fp8Scheme, block_size, block_untiled, columns_untiled
from moeyard_worker.checkpoint.formats.module_names import ModuleNames, module_names, names_of
from moeyard_worker.checkpoint.formats.quantized import QuantizedFormat, QuantizedScheme
from moeyard_worker.config.fields import Fields, shown
from moeyard_worker.layers.weights import Part

# Dtypes of stored scales by their dtype in memory. The first is the one that `converting.py` writes.
_STORED = MappingProxyType({"bfloat16": ("BF16", "F16", "F32"), "float32": ("F32", "F16", "BF16")})
_FORMATS = ("pack-quantized", "float-quantized")
_MAX_GROUPS = 64
_CLASS = re.compile(r"[A-Z]\w*", re.ASCII)


@dataclass(frozen=True, slots=True)
class PackedInt4Scheme:
    """w = bf16(fp32(code - zero) * fp32(scale)), with one scale per row and group of `group` columns.

    `weight_packed` holds 8 codes of 4 bits per int32 along the columns, the first in the lowest bits. A code is the
    value plus 8. `zeros`: each group has a zero point, packed along the rows. Without them the zero point is 8.

    `scales`: their dtype in memory if no tensors are known. Exporters store them in the dtype of the model.
    """

    group: int | None
    zeros: bool = False
    scales: Literal["bfloat16", "float32"] = "bfloat16"

    def marker(self, key: str) -> str:
        return key.removesuffix(".weight") + ".weight_packed"

    def refusal(self, part: Part) -> str | None:
        return group_refusal(part, self.group)

    def untiled(self, columns: int) -> str | None:
        return group_untiled(self.group, columns)

    def tiles(self, columns: int) -> WeightForm | None:
        return None if self.untiled(columns) else int4_tiles(self.group, scales=self.scales, zeros=self.zeros)

    def stored(self, part: Part) -> Mapping[str, StoredTensor]:
        (rows, columns), at = part.shape, part.key.removesuffix(".weight")
        groups = blocks(columns, self.group)
        found = {
            f"{at}.weight_packed": StoredTensor((rows, columns // 8), ("I32",)),
            f"{at}.weight_scale": StoredTensor((rows, groups), _STORED[self.scales], why=group_text(self.group)),
            f"{at}.weight_shape": StoredTensor((2,), ("I64", "I32")),
        }
        if self.zeros:
            found[f"{at}.weight_zero_point"] = StoredTensor(
                (blocks(rows, 8), groups), ("I32",), why=f"symmetric: false, and {group_text(self.group)}"
            )
        return found


def group_text(group: int | None) -> str:
    """Return how columns share scales, for an error message."""
    return "a scale per row" if group is None else f"a scale per {group} columns of a row"


def group_untiled(group: int | None, columns: int) -> str | None:
    """Return the reason why no product reads tiles of int4 codes in groups of columns, or None."""
    return columns_untiled(columns, 128) or block_untiled(group, columns, least=32)


def group_refusal(part: Part, group: int | None) -> str | None:
    """Return the reason why the codes of 4 bits of a matrix cannot be cut into groups of columns, or None."""
    columns = part.shape[1]
    if part.whole is not None:
        return "one tensor of codes for all experts is not supported"
    if columns % (group or columns):
        return f"its {columns} columns are not a multiple of the group size {group}"
    if columns % 8:
        return f"its {columns} columns are not a multiple of 8, the codes of a word"
    return None


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """Modules and the scheme of their weights. `everything`: all linear modules. `classes`: other targets that look
    like classes, which name no modules here."""

    everything: bool
    names: ModuleNames
    scheme: QuantizedScheme
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTensorsFormat(QuantizedFormat):
    """The method "compressed-tensors": the first group that names a module decides, exact names before classes."""

    ignored: ModuleNames
    groups: tuple[TargetGroup, ...]

    def promised(self, module: str) -> QuantizedScheme | None:
        if module in self.ignored:
            return None
        named = next((each for each in self.groups if module in each.names), None)
        named = named or next((each for each in self.groups if each.everything), None)
        return None if named is None else named.scheme

    def exclusion(self, module: str) -> str:
        classes = [name for each in self.groups for name in each.classes]
        if module in self.ignored or not classes:
            return "config.json excludes it" if module in self.ignored else "no target of config.json names it"
        return f"no target names it: of classes only Linear is supported (targets: {', '.join(classes)[:200]})"


def stored_int4_scales(dtypes: Mapping[str, str]) -> Literal["bfloat16", "float32"]:
    """Return the dtype that holds the scales of all int4 codes. `dtypes` are the safetensors dtypes by key."""
    codes = [key.removesuffix("_packed") for key in dtypes if key.endswith(".weight_packed")]
    return "bfloat16" if codes and {dtypes.get(f"{key}_scale") for key in codes} == {"BF16"} else "float32"


def parse_compressed_tensors(settings: Fields, dtype: str) -> CompressedTensorsFormat:
    """Read the settings of a model of `dtype`. Raises CheckpointError for a variant that is not supported."""
    found = settings.values.get("config_groups")
    if not isinstance(found, dict) or not 0 < len(found) <= _MAX_GROUPS:
        raise settings.error("config_groups", f"is {shown(found)}, expected one or more groups")
    for key, kind in (("sparsity_config", "sparse weights"), ("transform_config", "transformed weights")):
        value = settings.values.get(key)
        if value and not (isinstance(value, dict) and value.get("format") in (None, "dense")):
            raise settings.error(key, f"describes {kind}, which are not supported")
    groups = tuple(_group(settings, dtype, name, value) for name, value in found.items())
    plain = []
    if any(isinstance(each, dict) and each.get("input_activations") for each in found.values()):
        plain.append("activations")
    if settings.values.get("kv_cache_scheme"):
        plain.append("the KV cache")
    return CompressedTensorsFormat(
        file=settings.file,
        markers=(".weight_packed", ".weight_scale"),
        ignored=module_names(settings, "ignore"),
        groups=groups,
        left_plain=tuple(plain),
        scales=None if any(isinstance(each.scheme, Fp8Scheme) for each in groups) else "float32",
        int4_scales=None if any(isinstance(each.scheme, PackedInt4Scheme) for each in groups) else "float32",
    )


def _group(settings: Fields, dtype: str, name: str, found: Any) -> TargetGroup:
    group = Fields(f"{settings.file}: config_groups: {name:.80}", found if isinstance(found, dict) else {})
    targets = group.values.get("targets")
    if not isinstance(targets, list) or not targets or not all(isinstance(each, str) for each in targets):
        raise group.error("targets", f"is {shown(targets)}, expected names of modules or classes")
    weights = group.values.get("weights")
    fields = Fields(f"{group.file}: weights", weights if isinstance(weights, dict) else {})
    kind = group.values.get("format") or settings.values.get("format")
    if kind not in _FORMATS:
        raise group.error("format", f"{shown(kind)} is not supported (supported: {', '.join(_FORMATS)})")
    names = names_of(group, "targets", (each for each in targets if each != "Linear"))
    classes = tuple(each for each in targets if _CLASS.fullmatch(each) and each != "Linear")
    return TargetGroup("Linear" in targets, names, _PARSE[kind](fields, dtype), classes)


def _int4(weights: Fields, dtype: str) -> QuantizedScheme:
    weights.require("num_bits", (4,), None)
    weights.require("type", ("int",), "int")
    weights.require("dynamic", (False,), False)
    # With "group" the columns are permuted. "static" and "weight" only changed how codes were chosen.
    weights.require("actorder", ("static", "weight", False), False)
    by_group = weights.require("strategy", ("group", "channel"), "group") == "group"
    group = weights.integer("group_size") if by_group else None
    scales: Literal["bfloat16", "float32"] = "bfloat16" if dtype == "bfloat16" else "float32"
    return PackedInt4Scheme(group, zeros=not weights.boolean("symmetric", True), scales=scales)


def _fp8(weights: Fields, dtype: str) -> QuantizedScheme:
    weights.require("num_bits", (8,), None)
    weights.require("type", ("float",), None)
    weights.require("symmetric", (True,), True)
    weights.require("dynamic", (False,), False)
    strategy = weights.require("strategy", ("tensor", "channel", "block"), "tensor")
    if strategy != "block":
        return Fp8Scheme(1 if strategy == "channel" else None, None)
    return Fp8Scheme(*block_size(weights, "block_structure"))


_PARSE = MappingProxyType({"pack-quantized": _int4, "float-quantized": _fp8})
