"""Lists of module names in quantisation settings, which say what is quantised and what is not. Pure.

Exporters write such names in several ways:

- in full ("model.layers.3.mlp.gate"), or the beginning ("model.layers.0"), end ("lm_head") or middle ("self_attn")
- as a module that an inference engine fuses ("gate_up_proj")
- as a pattern ("re:...")
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moeyard_worker.config.fields import Fields

# A checkpoint is untrusted, and Python's `re` can take exponential time.
MAX_NAMES, MAX_NAME, _MAX_REPEATS = 1 << 17, 512, 3
_MAX_PATTERNS, _MAX_ALTERNATIVES = 64, 8
# Modules that other engines fuse, and the checkpoint's modules in them.
_FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
    }
)


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """A list of module names. `names` match a run of whole parts of a name, `patterns` by `re`."""

    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()

    def __contains__(self, module: str) -> bool:
        parts = module.split(".")
        if self.names:
            for begin in range(len(parts)):
                for end in range(begin + 1, len(parts) + 1):
                    if ".".join(parts[begin:end]) in self.names:
                        return True
        return any(pattern.match(module) for pattern in self.patterns)


def module_names(settings: Fields, key: str) -> ModuleNames:
    """Read the list of names under `key`, empty if absent. Raises CheckpointError for anything else."""
    found = settings.values.get(key)
    if found is None:
        return ModuleNames()
    if not isinstance(found, list) or len(found) > MAX_NAMES or not all(isinstance(each, str) for each in found):
        raise settings.error(key, "is not a list of module names")
    return names_of(settings, key, found)


def names_of(settings: Fields, key: str, found: Iterable[str]) -> ModuleNames:
    """Return the list of `found` names. Raises CheckpointError for an unusable pattern."""
    names: set[str] = set()
    patterns = []
    for each in found:
        if each.startswith("re:"):
            patterns.append(pattern_of(settings, key, each[3:]))
            continue
        names.add(each := each.strip(".").removesuffix(".weight"))
        at, _, last = each.rpartition(".")
        names.update(f"{at}.{one}" if at else one for one in _FUSED.get(last, ()))
    if len(patterns) > _MAX_PATTERNS:
        raise settings.error(key, f"has {len(patterns)} patterns, at most {_MAX_PATTERNS} are expected")
    return ModuleNames(frozenset(names - {""}), tuple(patterns))


def pattern_of(settings: Fields, key: str, text: str) -> re.Pattern[str]:
    """Compile a pattern of module names. Raises CheckpointError if it is malformed or could take too long."""
    # Repeats within repeats and many alternatives take exponential time, so only a single character or class may be
    # repeated. Several repeats in a row take polynomial time.
    repeats = len(re.findall(r"(?<!\\)(?:[*+]|(?<!\()\?|\{\d*,)", text))
    unsafe = re.search(r"\)[*+?{]|\\[1-9]|\(\?P", text)
    if len(text) > MAX_NAME or repeats > _MAX_REPEATS or text.count("|") > _MAX_ALTERNATIVES or unsafe:
        raise settings.error(key, f"has the pattern {text!r:.80}, which is too complex to be matched safely")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise settings.error(key, f"has the pattern {text!r:.80}: {error}") from error
