"""A checkpoint's chat template: its traits, and its rendering as by `transformers`, but within limits."""

import contextlib
import json
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import product
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import psutil
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import safe_range

from moeyard_router.errors import ApiError, bad_request
from moeyard_router.text.bounded import BoundedEnvironment, Elsewhere, UnfoldedEnvironment

# Renders messages. Returns None if the template refuses them.
Render = Callable[[Sequence[dict[str, Any]]], str | None]
# Texts to search for in a rendering. No template has them.
_FIRST, _SECOND = "moeyardfirst", "moeyardsecond"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """Properties of a chat template. Those after `null_content` are found by `tried`.

    variables: names that the template reads from outside.
    words: its string literals and names of attributes.
    null_content: whether it tests if a message's content is none.
    alone_first: (first role, other role, whether after a turn) of system and developer messages, if the template
        shows only the first or refuses both.
    part_roles: roles whose content may be a list of parts. `only_parts`: roles whose content must be one.
    object_arguments: whether arguments of a call must be an object.
    """

    variables: frozenset[str]
    words: frozenset[str]
    null_content: bool
    alone_first: frozenset[tuple[str, str, bool]] = frozenset()
    part_roles: frozenset[str] = frozenset()
    only_parts: frozenset[str] = frozenset()
    object_arguments: bool = False

    def knows(self, word: str) -> bool:
        """Return whether the template refers to this role or key. Otherwise it cannot show it to the model."""
        return word in self.words


def template_traits(environment: UnfoldedEnvironment, source: str) -> TemplateTraits:
    """Return the traits of a template that its source shows. Raises `jinja2.TemplateSyntaxError`."""
    tree = environment.parse(source)
    words = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    words |= {node.attr for node in tree.find_all(nodes.Getattr)}
    tested = [node.node for node in tree.find_all(nodes.Test) if node.name == "none"]
    tested += [node.expr for node in tree.find_all(nodes.Compare) if any(_is_none(op.expr) for op in node.ops)]
    null_content = any(_is_content(node) for node in tested)
    return TemplateTraits(variables=environment.undeclared(tree), words=frozenset(words), null_content=null_content)


def tried(traits: TemplateTraits, render: Render) -> TemplateTraits:
    """Add the traits about system messages, parts and arguments, found by some twenty renderings."""
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
    """Return whether the template accepts a message of role `first`, but none of role `other` after it."""
    head, user = {"role": first, "content": _FIRST}, {"role": "user", "content": "Hello."}
    if not _shows(render([head, user]), _FIRST):
        return False
    between = [user, {"role": "assistant", "content": "Hello."}] if later else []
    text = render([head, *between, {"role": other, "content": _SECOND}, user])
    return not (_shows(text, _FIRST) and _shows(text, _SECOND))


def _takes_parts(render: Render, role: str) -> bool:
    """Return whether the template iterates over a list of parts. One that prints the list quotes its texts."""
    text = render(_turns(role, [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}]))
    quoted = text is not None and (f"'{_FIRST}'" in text or f'"{_FIRST}"' in text)
    return _shows(text, _FIRST) and _shows(text, _SECOND) and not quoted


def _turns(role: str, content: Any) -> list[dict[str, Any]]:
    message, user = {"role": role, "content": content}, {"role": "user", "content": "Hello."}
    if role == "tool":
        return [*_call({}), {**message, "tool_call_id": "call00000", "name": "look"}]
    return {"user": [message], "assistant": [user, message]}.get(role, [message, user])


def _call(arguments: Any) -> list[dict[str, Any]]:
    """Return a conversation with a call. Mistral's templates require ids of nine letters and digits."""
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


MAX_SOURCE = 256 * 1024  # characters; compiling takes 20 us each. The longest published ones have 20,000 (2026-11)
# Limits of one rendering in a process of `api/large.py`: CPU seconds, further CPU seconds per character of messages,
# and bytes of memory. (16 MB in 100,000 messages took 3.5 s with one of the longer templates.)
RENDER_SECONDS = 0.5
RENDER_SECONDS_PER_CHARACTER = 5e-7
RENDER_MEMORY = 1 << 30
# Errors of rendering for messages that a template does not accept.
_REFUSALS = (
    *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError),
)
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of a message that is continued, as in transformers
_MAX_COMPLAINT = 500  # characters of a template's error message
_OPTIONS: Mapping[str, Any] = MappingProxyType({"trim_blocks": True, "lstrip_blocks": True})


class ChatTemplate:
    """A Hugging Face chat template: sandboxed jinja with trimmed blocks and a few helpers.

    With `killable`, a rendering that takes too long ends this process by SIGPROF. Otherwise it raises `Elsewhere`
    within about 10 ms. Raises `ValueError` for an invalid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, killable: bool = False) -> None:
        if len(source) > MAX_SOURCE:
            raise ValueError(f"chat template: has {len(source)} characters, at most {MAX_SOURCE} are allowed")
        extensions = [_GenerationBlocks, jinja2.ext.loopcontrols]
        environment = UnfoldedEnvironment(extensions=extensions, **_OPTIONS)
        environment.filters["tojson"] = _tojson
        bounded = BoundedEnvironment(
            tojson=_tojson,
            safe_calls=(_raise_exception, _strftime_short, safe_range),
            extensions=extensions,
            **_OPTIONS,
        )
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        bounded.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_short}
        try:
            self.traits = template_traits(environment, source)
            self._template: jinja2.Template | None = None
            if killable or bounded.admits(bounded.parse(source)):
                self._template = (environment if killable else bounded).from_string(source)
            else:
                environment.compile(source)  # raises errors of the template now
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, SyntaxError, MemoryError, OverflowError) as error:
            raise ValueError(f"chat template: is too deeply nested: {type(error).__name__}") from error
        self._bounded = None if killable else bounded
        self._lock = threading.Lock()  # the environment has one budget
        self._special_tokens = dict(special_tokens)
        self.source = source
        with contextlib.suppress(Elsewhere):  # boundary: then this process renders no messages
            self.traits = tried(self.traits, self._attempt)

    def _attempt(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the prompt without any addition, or None if the template refuses the messages."""
        try:
            return self.render(messages, add_generation_prompt=False, continue_final_message=False, variables={})
        except ApiError:
            return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the prompt. Raises `ApiError` 400 with the template's own message, or `Elsewhere`."""
        given = [dict(m) for m in messages]
        if continue_final_message:
            given[-1] = _tagged(given[-1])
        names: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": given,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._render(names)
        except _REFUSALS as error:
            said = str(error)[:_MAX_COMPLAINT]
            raise bad_request(f"the chat template refused the messages: {said}", "messages") from error
        except MemoryError as error:
            message = f"the chat template takes more than {RENDER_MEMORY >> 20} MiB of memory for these messages"
            raise bad_request(message, "messages") from error
        return _cut_at_tag(text, messages[-1]["content"]) if continue_final_message else text

    def _render(self, names: dict[str, Any]) -> str:
        if self._template is None:
            raise Elsewhere
        if self._bounded is not None:
            with self._lock:
                self._bounded.begin()
                return self._template.render(names)
        size = sum(len(str(m.get("content"))) for m in names["messages"])
        with _limited(RENDER_SECONDS + size * RENDER_SECONDS_PER_CHARACTER):
            return self._template.render(names)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End this process by SIGPROF after `seconds` of CPU in the block. MemoryError beyond RENDER_MEMORY."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = psutil.Process().memory_info().data
    resource.setrlimit(resource.RLIMIT_DATA, (used + RENDER_MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks assistant text for training. It renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _tagged(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with a tag after its last text. Raises `ApiError` 400 if it has no text."""
    content = message["content"]
    if content is None:
        raise bad_request("continue_final_message: the last message has no content to continue", "messages")
    if isinstance(content, str):
        return {**message, "content": content + _TAG}
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _TAG}]}


def _cut_at_tag(text: str, content: Any) -> str:
    """Return the text up to the tag, as transformers does. Without blanks there if the template trims the text."""
    last = content if isinstance(content, str) else content[-1]["text"]
    place = text.rfind(_TAG.strip())
    if place < 0 or last.strip() not in text:
        raise bad_request(
            "continue_final_message: the chat template does not show the last message's text as it is", "messages"
        )
    return text[:place] if text.startswith(_TAG, place) else text[:place].rstrip()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON. Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _strftime_short(pattern: str) -> str:
    """Format the time, but leave patterns with numbers to other processes, because a number may be a huge width."""
    if not isinstance(pattern, str) or len(pattern) > 64 or any(map(str.isdigit, pattern)):
        raise Elsewhere
    return _strftime_now(pattern)
