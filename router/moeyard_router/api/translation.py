"""A request of another API said in the words of chat completions, run as one, and its errors said back."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BeforeValidator, TypeAdapter
from pydantic_core import PydanticCustomError

from moeyard_router.api.fields import Strict, refuse
from moeyard_router.api.intake import Intake, Job
from moeyard_router.api.schema import ChatRequest
from moeyard_router.api.validation import validate
from moeyard_router.errors import ApiError

_MESSAGE = re.compile(r"messages\.(\d+)(\..*)?")
_TOOL = re.compile(r"tools\.(\d+)(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """`chat` is the body of a chat completion; `origins` says for each of its messages where the client has it.

    `tool_origins` says the same of its tools, if the client has these in other places.
    `names` maps patterns of fields of `chat` to the client's names. `ignored` are the client's fields without effect;
    `asked` is what the answer repeats of its request.
    """

    chat: dict[str, Any]
    origins: tuple[str, ...]
    names: Mapping[str, str]
    tool_origins: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    asked: dict[str, Any] = field(default_factory=dict)

    def theirs(self, name: str) -> str:
        """The client's name of a field of `chat`."""
        message = _MESSAGE.fullmatch(name)
        if message is not None and int(message[1]) < len(self.origins):
            return self.origins[int(message[1])]
        tool = _TOOL.fullmatch(name)
        if tool is not None and int(tool[1]) < len(self.tool_origins):
            name = self.tool_origins[int(tool[1])] + tool[2]
        for pattern, words in self.names.items():
            found = re.fullmatch(pattern, name)
            if found is not None:
                return found.expand(words)
        return name

    async def job(self, intake: Intake) -> Job:
        """The job; raises `ApiError` that names the client's own fields."""
        try:
            job = await intake.chat(validate(self.chat, ChatRequest))
        except ApiError as error:
            raise self._said_back(error) from error
        ignored = dict.fromkeys((*self.ignored, *map(self.theirs, job.ignored)))
        return replace(job, ignored=tuple(ignored), asked=self.asked)

    def _said_back(self, error: ApiError) -> ApiError:
        if error.param is None:
            return error
        param = self.theirs(error.param)
        message = error.message.replace(f"'{error.param}'", f"'{param}'").replace(f"{error.param}=", f"{param}=")
        return ApiError(error.status, message, param=param, reason=error.reason, retry_after=error.retry_after)


def chosen(value: Any, kinds: Mapping[str, type[Strict]], usual: str | None = None) -> Strict:
    """Validate an object by the class that its `type` names (`usual` if it has none): errors are of that one."""
    if not isinstance(value, dict):
        raise PydanticCustomError("object", "expected an object")
    kind = value.get("type")
    kind = usual if kind is None else kind
    if not isinstance(kind, str) or kind not in kinds:
        refuse("type", kind, f"is not served here; expected one of {', '.join(kinds)}")
    return kinds[kind].model_validate(value)


def one_of(kinds: Mapping[str, type[Strict]], usual: str | None = None) -> BeforeValidator:
    """Return a validator that chooses among `kinds`, as `chosen` does."""
    return BeforeValidator(lambda value: chosen(value, kinds, usual))


def text_or(parts: TypeAdapter[Any]) -> BeforeValidator:
    """Lets text through, and lists as `parts` has them; errors are of the part at fault."""

    def check(value: Any) -> Any:
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return parts.validate_python(value)
        raise PydanticCustomError("content", "expected a string or a list of objects")

    return BeforeValidator(check)


def text_parts(content: "str | list[Any] | None", text: Callable[[Any], str]) -> "str | list[dict[str, Any]]":
    """The content of a chat's message, of text or of parts whose text `text` finds."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": text(part)} for part in content or ()] or ""


def below(prefix: str, items: "list[Any] | str | None") -> list[str]:
    """Names of the fields without effect in a list of objects, as paths."""
    if items is None or isinstance(items, str):
        return []
    return [f"{prefix}.{name}" for item in items for name in item.ignored]


def given(**fields: Any) -> dict[str, Any]:
    """Those fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
