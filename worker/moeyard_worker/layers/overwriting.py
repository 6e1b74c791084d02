"""Overwrite the weights of a layer in place, with those of a layer of the same model.

Captured graphs hold the addresses of weights, so new weights must be written to the old addresses. Backends keep
weights in forms of their own (packed, transposed, joined). So a second layer is built from the new weights, and its
tensors are copied into those of the first one. Both layers have the same structure, because one model built them.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

# Values that hold no tensor.
_PLAIN = (str, bytes, int, float, bool, torch.dtype, torch.device, type(None))


def overwrite(target: Any, source: Any) -> None:
    """Copy every tensor that `source` holds into the tensor at the same place in `target`.

    Objects that both share are left alone, such as the backend and a layer's state. All pairs are checked before the
    first copy. Raises ValueError as `compare`.
    """
    for old, new in compare(target, source):
        old.copy_(new)


def compare(target: Any, source: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the pairs of tensors that `overwrite` copies. The new ones may be on another device.

    Raises ValueError, naming the place, if two tensors differ in shape or dtype. Backends choose some dtypes by the
    values of a weight.
    """
    pairs = list(_pairs(target, source, type(target).__name__, set()))
    for old, new, place in pairs:
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            kinds = " and ".join(f"{each.dtype} {list(each.shape)}" for each in (old, new))
            raise ValueError(f"{place} cannot be overwritten in place: {kinds}; start the server with these weights")
    return [(old, new) for old, new, _ in pairs]


def tensors(value: Any, place: str, without: Collection[int] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor that an object holds, with the name of its place. Packed tensors come unpacked.

    without: the ids of objects that do not count.
    """
    seen = set(without)
    waiting = [(place, value)]
    while waiting:
        place, each = waiting.pop()
        if isinstance(each, _PLAIN) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield place, each if each.layout == torch.strided else each.to_dense()
            continue
        waiting += [(f"{place}.{name}", member) for name, member in reversed(_members(each).items())]


def _pairs(target: Any, source: Any, place: str, seen: set[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor, str]]:
    """Yield the tensors of two objects of one structure, with the name of their place."""
    if target is source or isinstance(target, _PLAIN) or id(target) in seen:
        return
    if isinstance(target, torch.Tensor):
        if isinstance(source, torch.Tensor) and not _same_memory(target, source):
            yield target, source, place
        return
    seen.add(id(target))
    old, new = _members(target), _members(source)
    if type(target) is not type(source) or old.keys() != new.keys():
        raise ValueError(f"{place} has another structure with the new weights; start the server with these weights")
    for name, each in old.items():
        yield from _pairs(each, new[name], f"{place}.{name}", seen)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.layout == other.layout == torch.strided:
        return False  # a packed tensor has no address
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _members(value: Any) -> dict[str, Any]:
    """Return what an object holds, by name. Functions and foreign objects hold nothing."""
    if isinstance(value, Mapping):
        return {str(name): each for name, each in value.items()}
    if isinstance(value, list | tuple):
        return {str(i): each for i, each in enumerate(value)}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if type(value).__module__.startswith("moeyard"):
        names = [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
        found = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return found | getattr(value, "__dict__", {})
    return {}
