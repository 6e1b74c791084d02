"""Jinja's sandbox without the optimizer: to compile a template from anybody must not be to run it."""

from collections.abc import Iterable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.meta import TrackingCodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment


class UnfoldedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates are not run while they are compiled: jinja computes constant expressions then."""

    def undeclared(self, tree: nodes.Template) -> frozenset[str]:
        """The variables that a template takes from outside. Changes nothing of the tree."""
        generator = _Tracking(self)
        generator.visit(tree)
        return frozenset(generator.undeclared_identifiers)


class _Unfolded(CodeGenerator):
    """Computes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.optimizer = None

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Tracking(_Unfolded, TrackingCodeGenerator):
    """Notes which variables are undeclared, and computes nothing."""


UnfoldedEnvironment.code_generator_class = _Unfolded


def tree_units(within: Iterable[nodes.Node]) -> int:
    """Nodes, and constant text, of these parts of a tree."""
    units, waiting = 0, list(within)
    while waiting:
        node = waiting.pop()
        units += 1
        if isinstance(node, nodes.TemplateData):
            units += len(node.data) >> 6
        waiting += node.iter_child_nodes()
    return units


def is_constant(node: nodes.Node) -> bool:
    """Written out in the template: as small as that."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(is_constant, node.items))
    return isinstance(node, nodes.Const)
