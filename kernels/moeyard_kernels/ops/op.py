"""Declare an op once: one function holds its signature, checks, documentation and reference.

    @op("linear.linear", x="float [M, K]", weight="x [N, K]", bias="x [N]?")
    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ...  # the reference

A call checks the arguments. Then it runs the function of the same name in the Triton module `linear.linear` if the
tensors are on a GPU, else the reference. The first call on a GPU loads Triton; a missing kernel raises there.

**Specs.** The spec of a tensor is "DTYPE [DIMS] LAYOUT". Its key is an argument or an attribute of one ("edits.words").
- DTYPE: alternatives joined by `|`. Each is a word of `DTYPES`, `any`, an argument whose dtype the tensor shares, or an
  attribute that holds a dtype (`window.dtype`).
- DIMS: a new name binds a size. A known name, a number, or an expression over sizes and arguments must equal the size.
  `2*I` binds I to half of an even size, `_` takes any size, a leading `...` takes any dimensions in front.
- LAYOUT: nothing, `contiguous`, `rows` (the last dimension is contiguous) or `host` (on any device).
"like x" means the shape and dtype of x. With a trailing `?` the tensor may be None; the sizes that it binds are 0 then.
All tensors are on the device of the first spec's tensor.

**Rules.** A string is an expression over arguments and sizes that must hold. A function takes arguments, sizes and `op`
(the op's name) by the names of its parameters, and raises ValueError itself.

A failed check raises ValueError with the op, the argument and both values. The checks of an op are compiled into one
Python function, as `dataclasses` does: to interpret specs in each call would cost more than the checks themselves.
"""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, cast

import torch

from moeyard_kernels.common.checks import FLOATS, show

P = ParamSpec("P")
R = TypeVar("R")
Rule = str | Callable[..., None]

DTYPES = MappingProxyType(
    {
        "float": ("torch.float32", "torch.bfloat16"),
        "fp32": ("torch.float32",),
        "fp64": ("torch.float64",),
        "int": ("torch.int64", "torch.int32"),
        "int32": ("torch.int32",),
        "int64": ("torch.int64",),
        "any": (),
    }
)
_SPEC = re.compile(r"(?:like (\w+)|([\w.|]+) \[([^]]*)\](?: (contiguous|rows|host))?)(\??)")
_MULTIPLE = re.compile(r"(?:(\d+)\*)?([A-Za-z]\w*)")


@functools.cache
def load(name: str) -> ModuleType:
    """Import a module of this package when it is first needed, because it imports Triton."""
    return importlib.import_module(f"moeyard_kernels.{name}")


class Op(Protocol[P, R]):
    """A declared op."""

    # The body as declared: no checks, no kernel.
    reference: Callable[P, R]
    # The checks alone.
    check: Callable[P, None]
    # Folder and file of the kernel, as "linear.linear".
    stem: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


def op(stem: str, *rules: Rule, **specs: str) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declare the decorated function as an op whose kernel is in the module `stem`."""

    def declare(reference: Callable[P, R]) -> Op[P, R]:
        checks = _Checks(reference, rules, specs)

        @functools.cache
        def kernel() -> Any:
            return getattr(load(stem), checks.op)

        known: dict[str, Any] = {**checks.constants, "kernel": kernel}
        exec(checks.source(), known)
        found: Any = functools.update_wrapper(known[checks.op], reference)
        found.reference, found.check, found.stem = reference, known["check"], stem
        return cast("Op[P, R]", found)

    return declare


@dataclass(frozen=True, slots=True)
class _Size:
    """One dimension of a spec. It `binds` a name, or equals the expression `text` (`_` takes any size)."""

    text: str
    binds: str = ""
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    """The spec of one tensor. more: other dimensions may precede `sizes`."""

    name: str
    like: str
    dtypes: tuple[str, ...]
    sizes: tuple[_Size, ...]
    more: bool
    layout: str
    optional: bool

    def allowed(self) -> list[str]:
        """Return the allowed dtypes as expressions. An empty list allows all."""
        return [each for word in self.dtypes for each in _dtypes(word)]


class _Checks:
    """The checks of one op: their source, and the error of a failed check."""

    def __init__(self, reference: Callable[..., Any], rules: Sequence[Rule], specs: Mapping[str, str]) -> None:
        self.op: str = reference.__name__
        self._parameters = inspect.signature(reference).parameters
        self._rules = rules
        # The tensor that binds each size.
        self._owner: dict[str, str] = {}
        self._specs = {name: self._parse(name, text) for name, text in specs.items()}
        self._first = next(iter(specs))
        self.constants = {"torch": torch, "FLOATS": FLOATS, "refuse": self.refuse}
        self.constants |= {f"rule_{n}": rule for n, rule in enumerate(rules)}
        self.constants |= {f"default_{name}": p.default for name, p in self._parameters.items()}

    def _parse(self, name: str, text: str) -> _Spec:
        found = _SPEC.fullmatch(text)
        assert found is not None, f"{self.op}: {text!r} is no spec for {name}"
        assert name.partition(".")[0] in self._parameters, f"{self.op} has no {name}"
        like, dtypes, dims, layout, optional = found.groups(default="")
        texts = [dim.strip() for dim in dims.split(",") if dim.strip()]
        more = bool(like) or texts[:1] == ["..."]
        return _Spec(
            name=name,
            like=like,
            dtypes=tuple(dtypes.split("|")) if dtypes else (like,),
            sizes=tuple(self._size(name, dim) for dim in texts if dim != "..."),
            more=more,
            layout=layout,
            optional=bool(optional),
        )

    def _size(self, tensor: str, text: str) -> _Size:
        found = _MULTIPLE.fullmatch(text)
        if found is None or found[2] in self._owner or found[2] in self._parameters:
            return _Size(text)
        self._owner[found[2]] = tensor
        return _Size(text, found[2], int(found[1] or 1))

    def source(self) -> str:
        """Return two functions with the reference's parameters: `check`, and the op, which checks and dispatches."""
        given, passed = list[str](), list[str]()
        for name, p in self._parameters.items():
            keyword = p.kind is p.KEYWORD_ONLY
            if keyword and "*" not in given:
                given.append("*")
            given.append(name if p.default is p.empty else f"{name}=default_{name}")
            passed.append(f"{name}={name}" if keyword else name)
        lines = [
            f"device = {self._first}.device",
            *(line for spec in self._specs.values() for line in self._lines(spec)),
        ]
        for n, rule in enumerate(self._rules):
            if isinstance(rule, str):
                lines.append(f"if not ({rule}): refuse({n}, locals())")
            else:
                wanted = inspect.signature(rule).parameters
                arguments = (f"op={self.op!r}" if name == "op" else f"{name}={name}" for name in wanted)
                lines.append(f"rule_{n}({', '.join(arguments)})")
        call = f"({', '.join(passed)})"
        last = f"return kernel(){call} if {self._first}.is_cuda else {self.op}.reference{call}"
        bodies = {"check": lines, self.op: [*lines, last]}
        return "\n".join("\n    ".join([f"def {name}({', '.join(given)}):", *body]) for name, body in bodies.items())

    def _lines(self, spec: _Spec) -> list[str]:
        """Return the source of the checks of one tensor."""
        refuse = f"refuse({spec.name!r}, locals())"
        count = len(spec.sizes)
        lines, wrong = [f"t = {spec.name}; s = t.shape"], list[str]()
        if spec.like:
            wrong.append(f"s != {spec.like}.shape")
        else:
            lines.append(f"if len(s) {'<' if spec.more else '!='} {count}: {refuse}")
        for i, size in enumerate(spec.sizes, -count):
            if size.times > 1:
                wrong.append(f"s[{i}] % {size.times}")
            if size.binds:
                lines.append(f"{size.binds} = s[{i}]" + (f" // {size.times}" if size.times > 1 else ""))
            elif size.text != "_":
                wrong.append(f"s[{i}] != {size.text}")
        if allowed := spec.allowed():
            wrong.append(f"t.dtype not in ({', '.join(allowed)},)")
        if spec.layout != "host" and spec.name != self._first:
            wrong.append("t.device != device")
        if spec.layout in ("contiguous", "rows"):
            wrong.append("not t.is_contiguous()" if spec.layout == "contiguous" else "t.stride(-1) != 1 < s[-1]")
        lines.append(f"if {' or '.join(wrong)}: {refuse}")
        argument = spec.name.partition(".")[0]
        missing = {argument: self._parameters[argument].default is None, spec.name: spec.optional}
        if not any(missing.values()):
            return lines
        absent = [f"{name} = 0" for name, tensor in self._owner.items() if tensor == spec.name]
        guard = " and ".join(f"{name} is not None" for name, may_be in missing.items() if may_be)
        return [*absent, f"if {guard}:", *(f"    {line}" for line in lines)]

    def refuse(self, what: str | int, known: dict[str, Any]) -> NoReturn:
        """Raise ValueError for the tensor named `what` or rule number `what`. known: arguments and sizes by name."""
        if isinstance(what, int):
            rule = cast("str", self._rules[what])
            raise ValueError(f"{self.op}: {', '.join(self._values(rule, known))}, expected {rule}")
        spec, x = self._specs[what], self._value(what, known)
        other = self._misfit(spec, x, known)
        if other is not None:
            beside = f" for {other} {show(self._value(other, known))}" if other else ""
            raise ValueError(f"{self.op}: {what} {show(x)}, expected {self._expected(spec, known)}{beside}")
        if x.device != known["device"] and spec.layout != "host":
            raise ValueError(f"{self.op}: {what} is on {x.device}, {self._first} on {known['device']}")
        where = " in its last dimension" if spec.layout == "rows" else ""
        raise ValueError(f"{self.op}: {what} {show(x)} with strides {x.stride()} is not contiguous{where}")

    def _misfit(self, spec: _Spec, x: torch.Tensor, known: dict[str, Any]) -> str | None:
        """Return the tensor whose shape or dtype x does not fit, "" if x fits no spec at all, and None if it fits."""
        if spec.like and x.shape != self._value(spec.like, known).shape:
            return spec.like
        count = len(spec.sizes)
        if x.dim() < count or (x.dim() > count and not spec.more):
            return ""
        for size, found in zip(spec.sizes, x.shape[x.dim() - count :], strict=True):
            if found % size.times if size.binds else size.text != "_" and found != self._value(size.text, known):
                owners = (self._owner.get(name, "") for name in _names(size.text))
                return next((owner for owner in owners if owner not in ("", spec.name)), "")
        allowed = spec.allowed()
        if allowed and x.dtype not in [self._value(each, known) for each in allowed]:
            return next((word for word in spec.dtypes if word in self._specs), "")
        return None

    def _expected(self, spec: _Spec, known: dict[str, Any]) -> str:
        """Return the spec with values for the sizes and dtypes that other arguments determine."""
        if spec.like:
            return show(self._value(spec.like, known))
        dims = ["..."] * spec.more
        for size in spec.sizes:
            fixed = not size.binds and size.text != "_" and spec.name not in map(self._owner.get, _names(size.text))
            dims.append(str(self._value(size.text, known)) if fixed else size.text.replace("*", " "))
        dtypes = dict.fromkeys(str(self._value(each, known)).removeprefix("torch.") for each in spec.allowed())
        return f"{' or '.join(dtypes)} [{', '.join(dims)}]".strip()

    def _values(self, rule: str, known: dict[str, Any]) -> list[str]:
        """Return the arguments and sizes that a rule reads, with their values. A size comes with its tensor."""
        found = []
        for name in _names(rule):
            if re.split(r"\W", name)[0] not in known:
                continue
            value, tensor = self._value(name, known), self._owner.get(name, "")
            shown = show(value) if isinstance(value, torch.Tensor) else str(value)
            x = self._value(tensor, known) if tensor else None
            found.append(f"{name} {shown}" + ("" if x is None else f" of {tensor} {show(x)}"))
        return found

    def _value(self, expression: str, known: dict[str, Any]) -> Any:
        return eval(expression, self.constants, known)


def _dtypes(word: str) -> Sequence[str]:
    """Return the dtypes that one alternative of a spec allows, as expressions."""
    return DTYPES.get(word, (word if "." in word else f"{word}.dtype",))


def _names(expression: str) -> list[str]:
    """Return the names and attributes that an expression reads: x.a for `min(x.a)` and for `x.a.dim()`."""

    def found(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Name | ast.Attribute):
            return [ast.unparse(node)]
        nodes: list[ast.AST] = [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.Call):
            nodes = [*([node.func.value] if isinstance(node.func, ast.Attribute) else []), *node.args]
        return [name for each in nodes for name in found(each)]

    return list(dict.fromkeys(found(ast.parse(expression, mode="eval").body)))
