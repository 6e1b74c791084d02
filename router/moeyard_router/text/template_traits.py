"""What a chat template knows, read from its syntax tree, and what it does with messages, tried at start."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from jinja2 import nodes

from moeyard_router.text.unfolded import UnfoldedEnvironment

# Renders messages; returns None where the template refuses them.
Render = Callable[[Sequence[dict[str, Any]]], str | None]
# Texts to look for in a rendering. No template has them.
_FIRST, _SECOND = "moeyardfirst", "moeyardsecond"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """`variables` are what the template takes from outside, `words` its string literals and the names of attributes.

    `null_content` is whether it looks if a message's content is none. The others are found by `tried`:
    `alone_first` holds (first role, other role, whether behind a turn) for system and developer messages of which the
    template shows the first only, or refuses both. `part_roles` are the roles whose content may be a list of parts, and
    `only_parts` those whose content must be one. `object_arguments` is whether arguments of a call must be an object.
    """

    variables: frozenset[str]
    words: frozenset[str]
    null_content: bool
    alone_first: frozenset[tuple[str, str, bool]] = frozenset()
    part_roles: frozenset[str] = frozenset()
    only_parts: frozenset[str] = frozenset()
    object_arguments: bool = False

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


def tried(traits: TemplateTraits, render: Render) -> TemplateTraits:
    """Add what a template does with system messages, parts and arguments, as some twenty renderings show."""
    roles = ("system", "developer") if traits.knows("developer") else ("system",)
    part_roles = frozenset(role for role in (*roles, "user", "assistant", "tool") if _takes_parts(render, role))
    return replace(
        traits,
        alone_first=frozenset(place for place in product(roles, roles, (False, True)) if _is_alone(render, *place)),
        part_roles=part_roles,
        only_parts=frozenset(role for role in part_roles if not _shows(render(_turns(role, _FIRST)), _FIRST)),
        object_arguments=not _shows(render(_call(f'{{"{_FIRST}": "{_SECOND}')), _SECOND)
        and _shows(render(_call({_FIRST: _SECOND})), _SECOND),
    )


def _is_alone(render: Render, first: str, other: str, later: bool) -> bool:
    """Whether the template takes a message of role `first`, and not one of role `other` after it."""
    head, user = {"role": first, "content": _FIRST}, {"role": "user", "content": "Hello."}
    if not _shows(render([head, user]), _FIRST):
        return False
    between = [user, {"role": "assistant", "content": "Hello."}] if later else []
    text = render([head, *between, {"role": other, "content": _SECOND}, user])
    return not (_shows(text, _FIRST) and _shows(text, _SECOND))


def _takes_parts(render: Render, role: str) -> bool:
    """Whether the template goes through a list of parts; one that prints the list quotes its texts."""
    text = render(_turns(role, [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}]))
    quoted = text is not None and (f"'{_FIRST}'" in text or f'"{_FIRST}"' in text)
    return _shows(text, _FIRST) and _shows(text, _SECOND) and not quoted


def _turns(role: str, content: Any) -> list[dict[str, Any]]:
    """A conversation with a message of this role."""
    message, user = {"role": role, "content": content}, {"role": "user", "content": "Hello."}
    if role == "tool":
        return [*_call({}), {**message, "tool_call_id": "call00000", "name": "look"}]
    return {"user": [message], "assistant": [user, message]}.get(role, [message, user])


def _call(arguments: Any) -> list[dict[str, Any]]:
    """A conversation with a call. Mistral's templates want ids of nine letters and digits."""
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [{"role": "user", "content": "Hello."}, message]


def _shows(text: str | None, word: str) -> bool:
    return text is not None and word in text


def _is_none(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and node.value is None


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"
