"""Translate requests of other APIs to chats or completions, and the errors back to the client's field names."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, TypeAdapter
from pydantic_core import PydanticCustomError

from moeyard_router.api.fields import Strict, refuse
from moeyard_router.api.intake import Intake, Job
from moeyard_router.api.schema import ChatRequest, CompletionRequest
from moeyard_router.api.validation import validate
from moeyard_router.errors import ApiError

_MESSAGE = re.compile(r"messages\.(\d+)(\..*)?")
_TOOL = re.compile(r"tools\.(\d+)(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """The body of a chat or completion, and how its fields map to those of the client's request.

    `kind` is the class of the body. `origins` and `tool_origins` are the client's places of each message and tool.
    `names` maps patterns of field names. `ignored` are fields without effect; `repeated` are fields that the answer
    repeats.
    """

    body: dict[str, Any]
    names: Mapping[str, str]
    kind: type[ChatRequest] | type[CompletionRequest] = ChatRequest
    origins: Sequence[str] = ()
    tool_origins: Sequence[str] = ()
    ignored: tuple[str, ...] = ()
    repeated: dict[str, Any] = field(default_factory=dict)

    def client_name(self, name: str) -> str:
        """Return the client's name of a field of `body`."""
        message = _MESSAGE.fullmatch(name)
        if message is not None and int(message[1]) < len(self.origins):
            return self.origins[int(message[1])]
        tool = _TOOL.fullmatch(name)
        if tool is not None and int(tool[1]) < len(self.tool_origins):
            name = self.tool_origins[int(tool[1])] + tool[2]
        for pattern, replacement in self.names.items():
            found = re.fullmatch(pattern, name)
            if found is not None:
                return found.expand(replacement)
        return name

    async def job(self, intake: Intake) -> Job:
        """Return the job. Raises `ApiError` with the client's field names."""
        try:
            request = validate(self._completed(), self.kind)
            job = await (intake.chat(request) if isinstance(request, ChatRequest) else intake.completion(request))
        except ApiError as error:
            raise self._translated(error) from error
        ignored = dict.fromkeys((*self.ignored, *map(self.client_name, job.ignored)))
        fields = tuple(map(self.client_name, job.grammar_fields))
        return replace(job, ignored=tuple(ignored), repeated=self.repeated, grammar_fields=fields)

    def _completed(self) -> dict[str, Any]:
        # Answers of other APIs than completions have no place for routed experts.
        return {"return_routed_experts": False, **self.body} if self.kind is ChatRequest else self.body

    def _translated(self, error: ApiError) -> ApiError:
        if error.param is None:
            return error
        param = self.client_name(error.param)
        message = error.message.replace(f"'{error.param}'", f"'{param}'").replace(f"{error.param}=", f"{param}=")
        return replace(error, message=message, param=param)


def chosen(value: Any, kinds: Mapping[str, type[Strict]], default: str | None = None) -> Strict:
    """Validate an object by the class of its `type` (`default` if it has none), so that errors are of that class."""
    if not isinstance(value, dict):
        raise PydanticCustomError("object", "expected an object")
    kind = value.get("type")
    kind = default if kind is None else kind
    if not isinstance(kind, str) or kind not in kinds:
        refuse("type", kind, f"is not served here; expected one of {', '.join(kinds)}")
    return kinds[kind].model_validate(value)


def one_of(*classes: type[Strict], default: str | None = None) -> BeforeValidator:
    """Return a validator that chooses among `classes` by `type`, as `chosen` does."""
    kinds = {name: each for each in classes for name in get_args(each.model_fields["type"].annotation)}
    return BeforeValidator(lambda value: chosen(value, kinds, default))


def text_or(each: type[Strict] | BeforeValidator) -> BeforeValidator:
    """Return a validator of text or a list of objects that `each` validates. Errors name the object at fault."""
    item: Any = Annotated[Any, each] if isinstance(each, BeforeValidator) else each
    parts: TypeAdapter[Any] = TypeAdapter(list[item])

    def check(value: Any) -> Any:
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return parts.validate_python(value)
        raise PydanticCustomError("content", "expected a string or a list of objects")

    return BeforeValidator(check)


def text_parts(content: "str | list[Any] | None", text: Callable[[Any], str]) -> "str | list[dict[str, Any]]":
    """Return the content of a chat message. `text` returns the text of a part."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": text(part)} for part in content or ()] or ""


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
