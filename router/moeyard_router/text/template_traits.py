"""What a chat template knows, read from its syntax tree: its variables, and the words that it asks for."""

from dataclasses import dataclass

from jinja2 import nodes

from moeyard_router.text.unfolded import UnfoldedEnvironment


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """`variables` are what the template takes from outside, `words` its string literals and the names of attributes.

    `null_content` is whether it looks if a message's content is none.
    """

    variables: frozenset[str]
    words: frozenset[str]
    null_content: bool

    def knows(self, word: str) -> bool:
        """Whether the template asks for this role, or this key of a message; one that does not cannot show it.

        A template that prints whatever role it is given knows none: the model never saw the others.
        """
        return word in self.words


def template_traits(environment: UnfoldedEnvironment, source: str) -> TemplateTraits:
    """Traits of a template; raises `jinja2.TemplateSyntaxError`."""
    tree = environment.parse(source)
    words = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    words |= {node.attr for node in tree.find_all(nodes.Getattr)}
    tested = [node.node for node in tree.find_all(nodes.Test) if node.name == "none"]
    tested += [node.expr for node in tree.find_all(nodes.Compare) if any(_is_none(op.expr) for op in node.ops)]
    null_content = any(_is_content(node) for node in tested)
    return TemplateTraits(variables=environment.undeclared(tree), words=frozenset(words), null_content=null_content)


def _is_none(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and node.value is None


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"
