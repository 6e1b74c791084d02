"""Make Triton's interpreter four times as fast, with the same results.

The interpreter (Triton 3.6 and 3.7) spends most of its time on bookkeeping that it repeats for every operation. These
patches keep what was computed once: the patched language, numpy's dtypes, the types and shapes of blocks, constants.
"""

import builtins
from types import SimpleNamespace
from typing import Any

import numpy as np

MOST_CONSTANTS = 1000


class LanguagePatches:
    """The interpreter's replacements in `triton.language`, set once per launch instead of once per device function."""

    def __init__(self, interpreter: Any) -> None:
        language, core = interpreter.tl, interpreter.tl.core
        self._interpreter = interpreter
        self._active: Any = None
        scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": core}))
        self._values = {(id(obj), name): (obj, name, self._direct(vars(obj)[name])) for obj, name, _ in scope._changes}
        scope.restore()

    def __call__(self, fn: Any) -> Any:
        """Return the scope that the launch restores; a device function in it needs no other scope."""
        if self._active is not None:
            return SimpleNamespace(restore=lambda: None)
        self._active = self._interpreter._LangPatchScope()
        for obj, name, value in self._values.values():
            self._active.set_attr(obj, name, value)
        return SimpleNamespace(restore=self._restore)

    def _direct(self, patched: Any) -> Any:
        """Return a patched builtin that calls the function below two wrappers; return anything else as it is."""
        member = (getattr(patched, "__kwdefaults__", None) or {}).get("member")
        if not self._interpreter.tl.core.is_builtin(member):
            return patched
        function, semantic = getattr(member, "__wrapped__", member), self._interpreter.interpreter_semantic

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        return call

    def _restore(self) -> None:
        scope, self._active = self._active, None
        scope.restore()


def install(*, check_overflow: bool) -> None:
    """Patch the interpreter of this process. Without `check_overflow` integers are not checked for overflow."""
    from triton.language import core
    from triton.runtime import interpreter

    if isinstance(interpreter._patch_lang, LanguagePatches):
        return
    interpreter._patch_lang = LanguagePatches(interpreter)
    _keep_dtypes(interpreter)
    _keep_blocks(core)
    _unwrap_plain_values(core)
    _keep_broadcasts(core, interpreter)
    _keep_operands(core, interpreter.TritonSemantic)
    if not check_overflow:
        object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


def _keep_dtypes(interpreter: Any) -> None:
    compute, kept = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        # Every pointer has one numpy dtype, also in a block.
        scalar = dtype.scalar
        key = "pointer" if scalar.is_ptr() else scalar.name
        if key not in kept:
            kept[key] = compute(dtype)
        return kept[key]

    interpreter._get_np_dtype = get_np_dtype


def _keep_blocks(core: Any) -> None:
    block_init, tensor_init = core.block_type.__init__, core.tensor.__init__
    # Blocks of one shape share the object that holds it, so that its id is a key.
    shapes: dict[Any, Any] = {}
    sizes: dict[int, Any] = {}
    names: dict[Any, str] = {}
    tensors: dict[int, Any] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        if id(shape) not in sizes:
            key = builtins.tuple(each.value if isinstance(each, core.constexpr) else each for each in shape)
            if key not in shapes:
                block_init(self, element_ty, shape)
                shapes[key], sizes[id(self.shape)] = self.shape, self.numel
            shape = shapes[key]
        self.element_ty, self.shape, self.numel = element_ty, shape, sizes[id(shape)]
        key = element_ty.name, id(shape)
        if key not in names:
            names[key] = f"<{shape}, {element_ty}>"
        self.name = names[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = id(type.shape) if type.is_block() else 0
        if key in tensors:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel, _ = tensors[key]
        else:
            tensor_init(self, handle, type)
            # The reference keeps another shape from getting this id.
            tensors[key] = self.shape, self.numel, type.shape if key else None

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor


def _unwrap_plain_values(core: Any) -> None:
    unwrap = core._unwrap_if_constexpr
    plain = {bool, int, float, str, type(None), core.tensor, core.dtype}

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        return value.value if kind is core.constexpr else value if kind in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrap_if_constexpr


def _keep_broadcasts(core: Any, interpreter: Any) -> None:
    semantic = interpreter.TritonSemantic
    broadcast = semantic.broadcast_impl_value
    common: dict[Any, Any] = {}

    def widened(x: Any, shape: Any) -> Any:
        if x.type.is_block() and x.type.shape is shape:
            return x
        # Triton 3.8 writes through pointers as if they were contiguous.
        data = np.broadcast_to(x.handle.data, shape.values).copy()
        return core.tensor(interpreter.TensorHandle(data, x.dtype), core.block_type(x.dtype, shape))

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        a = id(lhs.type.shape) if lhs.type.is_block() else 0
        b = id(rhs.type.shape) if rhs.type.is_block() else 0
        if a == b:
            return lhs, rhs
        if (a, b) in common:
            shape = common[a, b]
            return widened(lhs, shape), widened(rhs, shape)
        left, right = broadcast(self, lhs, rhs)
        common[a, b] = left.type.shape
        return left, right

    semantic.broadcast_impl_value = broadcast_impl_value


def _keep_operands(core: Any, semantic: Any) -> None:
    """Keep which types need no cast, and the blocks of constants."""
    check = semantic.binary_op_type_checking_impl
    uncast: set[Any] = set()
    constants: dict[Any, Any] = {}

    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        a, b = isinstance(lhs, core.tensor), isinstance(rhs, core.tensor)
        if named or not (a or b):
            return check(self, lhs, rhs, *flags, **named)
        if a and b:
            key = lhs.dtype.name, rhs.dtype.name, flags
            if key in uncast:
                return self.broadcast_impl_value(lhs, rhs)
            left, right = check(self, lhs, rhs, *flags)
            if (left.dtype, right.dtype) == (lhs.dtype, rhs.dtype):
                uncast.add(key)
            return left, right
        block, constant = (lhs, rhs) if a else (rhs, lhs)
        shape = id(block.type.shape) if block.type.is_block() else 0
        key = type(constant), constant, block.dtype.name, shape, a, flags
        if key not in constants:
            left, right = check(self, lhs, rhs, *flags)
            same, other = (left, right) if a else (right, left)
            if same is not block:
                return left, right
            if len(constants) == MOST_CONSTANTS:
                constants.clear()
            other.handle.data.flags.writeable = False
            constants[key] = other
        return (lhs, constants[key]) if a else (constants[key], rhs)

    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl
