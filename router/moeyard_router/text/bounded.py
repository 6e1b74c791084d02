"""Renders chat templates in the router's own process within a budget.

Checkpoints and their templates are untrusted. Jinja's sandbox limits neither time nor memory: nested loops,
`'x' * 10**10`, a list that holds a list twice, forty levels deep. Python cannot stop a call in C, so no operation of
unknown size starts here. A template that uses only the operations listed below spends a budget for every loop, call and
text. Any other template, or a larger one, renders in a process that can be killed (`api/large.py`).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.meta import TrackingCodeGenerator
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer


class UnfoldedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that evaluates nothing while it compiles. Plain jinja then computes constant expressions."""

    def undeclared(self, tree: nodes.Template) -> frozenset[str]:
        """Return the variables that a template reads from outside. Does not change the tree."""
        generator = _Tracking(self)
        generator.visit(tree)
        return frozenset(generator.undeclared_identifiers)


class _Unfolded(CodeGenerator):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.optimizer = None

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Tracking(_Unfolded, TrackingCodeGenerator):
    """Collects undeclared variables without evaluating anything."""


UnfoldedEnvironment.code_generator_class = _Unfolded


def tree_units(within: Iterable[nodes.Node]) -> int:
    """Return the units of these parts of a tree: its nodes and constant text."""
    units, waiting = 0, list(within)
    while waiting:
        node = waiting.pop()
        units += 1
        if isinstance(node, nodes.TemplateData):
            units += len(node.data) >> 6
        waiting += node.iter_child_nodes()
    return units


def is_constant(node: nodes.Node) -> bool:
    """Return whether a value is written out in the template, which limits its size."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(is_constant, node.items))
    return isinstance(node, nodes.Const)


# Budget of one rendering, 5 to 10 ms. A unit is one evaluated node of the tree (50 to 150 ns), or 64 bytes of new text.
UNITS = 40_000
_CALL = 10  # units of a call
_TEXT = 6  # a unit is 2^6 characters, as in `tree_units`
_CHAIN = 16  # additions in one expression between two checks of the size of their result

# Parts of the language that are compiled or run without being counted here.
_UNCOUNTED = (
    *(nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block, nodes.ScopedEvalContextModifier),
    *(nodes.EvalContextModifier, nodes.FilterBlock, nodes.CallBlock, nodes.Mul, nodes.Pow),
)
_PLAIN_FILTERS = frozenset(
    ("default", "d", "length", "count", "first", "last", "int", "float", "abs", "items", "string", "list", "reverse")
)
_TEXT_FILTERS = frozenset(("trim", "upper", "lower", "capitalize", "title", "safe"))
_LAZY_FILTERS = frozenset(("map", "select", "reject", "selectattr", "rejectattr"))
_OWN_FILTERS = frozenset(("tojson", "join", "replace"))
_FILTERS = _PLAIN_FILTERS | _TEXT_FILTERS | _LAZY_FILTERS | _OWN_FILTERS
_TESTS = frozenset(
    (
        *("defined", "undefined", "none", "string", "mapping", "sequence", "iterable", "number", "integer", "float"),
        *("boolean", "true", "false", "callable"),
    )
)
# Tests that compare are allowed only with constants.
_COMPARING_TESTS = frozenset(("eq", "equalto", "==", "ne", "!=", "in", "sameas"))
_STR_METHODS = frozenset(
    (
        *("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "startswith", "endswith", "upper", "lower"),
        *("title", "capitalize", "find", "rfind", "index", "rindex", "count", "isdigit", "isalpha", "isalnum"),
        *("isspace", "isnumeric", "islower", "isupper", "removeprefix", "removesuffix", "partition", "rpartition"),
    )
)
_DICT_METHODS = frozenset(("get", "items", "keys", "values"))
_SCALARS = frozenset((str, int, float, bool, type(None)))


class Elsewhere(Exception):
    """The template exceeds the budget of the event loop's process. Render it in a process of `api/large.py`."""


class BoundedEnvironment(UnfoldedEnvironment):
    """Counts the operations of its one template. Not thread-safe. `safe_calls`: globals without cost."""

    # `_Counting` checks the results of `+`. `%` may format a text. The other operators make numbers of numbers.
    intercepted_binops = frozenset("%")

    def __init__(self, *, tojson: Callable[..., str], safe_calls: Iterable[Callable[..., Any]], **kwargs: Any) -> None:
        super().__init__(finalize=self._shown, **kwargs)
        self.left = UNITS
        self._dumps = tojson
        self._safe_calls = frozenset(map(id, safe_calls))
        self._macro_units = 0
        own = {"tojson": self._tojson, "join": self._join, "replace": self._replace}
        counting = {"$loop": self._loop, "$size": self._size, "$text": self._text}
        kept = {name: DEFAULT_FILTERS[name] for name in _FILTERS - _OWN_FILTERS}
        self.filters = {**kept, **own, **counting}
        self.tests = {name: DEFAULT_TESTS[name] for name in _TESTS | _COMPARING_TESTS}

    def begin(self) -> None:
        self.left = UNITS

    def admits(self, tree: nodes.Template) -> bool:
        """Return whether all operations of a template are counted."""
        if next(tree.find_all(_UNCOUNTED), None) is not None:
            return False
        filters = list(tree.find_all(nodes.Filter))
        names = all(node.name in _FILTERS and node.dyn_args is None and node.dyn_kwargs is None for node in filters)
        lazy = all(map(_is_known_lazy, (node for node in filters if node.name in _LAZY_FILTERS)))
        return names and lazy and all(map(_is_known_test, tree.find_all(nodes.Test)))

    def _generate(self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False) -> str:
        self._macro_units = sum(tree_units([macro]) for macro in source.find_all((nodes.Macro, nodes.For)))
        return super()._generate(_Counting().visit(source), name, filename, defer_init)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Count a call and make it, if its target is known."""
        __self._spend(_CALL)
        for each in args:
            __self._size(each)
        kind = type(__obj)
        if kind is BuiltinMethodType:
            return __self._method(__obj, args, kwargs)
        if kind is Macro:
            __self._spend(__self._macro_units)
        elif kind is LoopContext:
            args = (__self._loop(args[0], __self._macro_units), *args[1:]) if args else args
        elif __obj is not Namespace and id(__obj) not in __self._safe_calls and not isinstance(__obj, Undefined):
            raise Elsewhere
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `%` of numbers. For texts it would format."""
        if operator != "%" or not isinstance(left, int | float):
            raise Elsewhere
        return left % right

    def _spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise Elsewhere

    def _method(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, name = method.__self__, method.__name__
        kwargs = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}
        for each in args:
            self._text(each)
        if type(owner) is str:
            if name == "replace" and len(args) == 2 and not kwargs:
                return self._replace(owner, *args)
            if name == "join" and len(args) == 1:
                return self._join(args[0], owner)
            if name in _STR_METHODS:
                self._spend(len(owner) >> (_TEXT - 2))
                return method(*args, **kwargs)
        elif isinstance(owner, dict) and name in _DICT_METHODS:
            return method(*args, **kwargs)
        raise Elsewhere

    def _loop(self, value: Any, units: int) -> Any:
        """Count the iterations of a loop whose body has this many units."""
        try:
            self._spend((len(value) + 1) * units)
        except TypeError:
            return self._counted(value, units) if isinstance(value, Iterator) else value
        return value

    def _counted(self, values: Iterator[Any], units: int) -> Iterator[Any]:
        for value in values:
            self._spend(units)
            yield value

    def _size(self, value: Any) -> Any:
        if isinstance(value, str):
            self.left -= len(value) >> _TEXT
        elif isinstance(value, list | tuple | dict):
            self.left -= len(value) >> 2
        if self.left < 0:
            raise Elsewhere
        return value

    def _shown(self, value: Any) -> Any:
        if type(value) is str:
            self.left -= 1 + (len(value) >> _TEXT)
            if self.left < 0:
                raise Elsewhere
            return value
        return self._text(value)

    def _text(self, value: Any) -> Any:
        """Count a value that is printed, compared or hashed, with everything in it, each time that it occurs."""
        if isinstance(value, str):
            self._spend(len(value) >> _TEXT)
        elif type(value) not in _SCALARS and not isinstance(value, Undefined):
            self._walk(value)
        return value

    def _walk(self, value: Any) -> None:
        waiting = [value]
        while waiting:
            each = waiting.pop()
            self._spend(1)
            kind = type(each)
            if kind is str:
                self._spend(len(each) >> _TEXT)
            elif isinstance(each, dict):  # arguments of tool calls are a subclass
                self._spend(len(each))
                waiting.extend(each)
                waiting.extend(each.values())
            elif kind is list or kind is tuple:
                self._spend(len(each))
                waiting.extend(each)
            elif kind not in _SCALARS and not isinstance(each, Undefined):
                raise Elsewhere

    def _tojson(self, value: Any, *args: Any, **kwargs: Any) -> str:
        self._text(value)
        indent = kwargs.get("indent", args[1] if len(args) > 1 else None)
        separators = kwargs.get("separators", args[2] if len(args) > 2 else None)
        if (indent is not None and (type(indent) is not int or indent > 8)) or len(str(separators)[:100]) > 20:
            raise Elsewhere
        return str(self._size(self._dumps(value, *args, **kwargs)))

    def _join(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        if attribute is not None or not isinstance(d, str):
            raise Elsewhere
        parts = list(itertools.islice(self._loop(value, 1), UNITS))
        self._spend((len(parts) * len(d)) >> _TEXT)
        return str(d).join(str(self._text(part)) for part in parts)

    def _replace(self, value: Any, old: Any, new: Any, count: Any = None) -> str:
        if not all(isinstance(each, str) for each in (value, old, new)) or count is not None:
            raise Elsewhere
        self._spend((len(value) + value.count(old) * len(new)) >> _TEXT)
        return str(value.replace(old, new))


class _Counting(NodeTransformer):
    """Inserts the checks of a `BoundedEnvironment` at operations that may grow, repeat or hold much data."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        units = tree_units([node])
        self.generic_visit(node)
        node.iter = _checked("$loop", node.iter, nodes.Const(units))
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        top, depth = node, 0
        while True:
            top.right, depth = self.visit(top.right), depth + 1
            if not isinstance(top.left, nodes.Add) or depth % _CHAIN == 0:
                top.left = self.visit(top.left)
                break
            top = top.left
        return _checked("$size", node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [each if is_constant(each) else _checked("$text", each) for each in node.nodes]
        return _checked("$size", node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not (is_constant(node.expr) or all(is_constant(operand.expr) for operand in node.ops)):
            node.expr = _checked("$text", node.expr)
            for operand in node.ops:
                operand.expr = _checked("$text", operand.expr)
            return node
        for operand in node.ops:
            if operand.op in ("in", "notin") and not is_constant(operand.expr):
                operand.expr = _checked("$size", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _checked("$size", node)
        if not is_constant(node.arg):
            node.arg = _checked("$text", node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not is_constant(node.key):
            node.key = _checked("$text", node.key)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.node is None or node.name.startswith("$"):
            return node
        if node.name in _LAZY_FILTERS or node.name == "list":
            node.node = _checked("$loop", node.node, nodes.Const(4))
        elif node.name in _TEXT_FILTERS or node.name in ("string", "reverse"):
            node.node = _checked("$text", node.node)
        return node


def _checked(name: str, node: Any, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _is_known_test(node: nodes.Test) -> bool:
    if node.name in _COMPARING_TESTS:
        return not node.kwargs and all(map(is_constant, node.args)) and node.dyn_args is node.dyn_kwargs is None
    return node.name in _TESTS and node.dyn_args is node.dyn_kwargs is None


def _is_known_lazy(node: nodes.Filter) -> bool:
    """Return whether a filter is `map(attribute="name")`, or names a test with constant arguments."""
    if node.name == "map":
        return (
            not node.args and [each.key for each in node.kwargs] == ["attribute"] and is_constant(node.kwargs[0].value)
        )
    if node.kwargs or not all(map(is_constant, node.args)):
        return False
    tests = node.args[1:2] if node.name.endswith("attr") else node.args[:1]
    return all(isinstance(each, nodes.Const) and each.value in _TESTS | _COMPARING_TESTS for each in tests)
