"""Switches of thinking: the fields in which clients ask for it, and what they tell the chat template.

`reasoning_effort` is OpenAI's, `enable_thinking` is Qwen's, and `think` is Ollama's. `thinking` is Anthropic's, and
DeepSeek, GLM and Kimi have it too. `reasoning` is OpenRouter's and OpenAI's. `chat_template_args` is Baseten's name of
`chat_template_kwargs`.
"""

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from moeyard_router.api.fields import Strict
from moeyard_router.text.template import TemplateTraits

# Names of a template's switch: Qwen3's and others' first, DeepSeek-V3.1's and Kimi's second.
_TEMPLATE_SWITCHES = ("enable_thinking", "thinking")
THINKING_OBJECTS = ("thinking", "reasoning")
THINKING_FIELDS = frozenset(("reasoning_effort", "enable_thinking", "thinking", "think", "reasoning"))


class Thinking(Strict):
    """Whether the model thinks first. Thinking budgets are not enforced."""

    harmless = frozenset(("budget_tokens", "keep"))

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    display: Literal["summarized", "omitted"] | None = None
    clear_thinking: bool | None = None


class ReasoningConfig(Strict):
    """`reasoning` of a request. There are no summaries: thoughts are shown as the model wrote them."""

    harmless = frozenset(("generate_summary", "summary", "max_tokens"))
    unserved = MappingProxyType({"context": ("auto",), "mode": ("standard",)})

    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None


def _bool_or_object(value: Any) -> Any:
    if isinstance(value, dict):
        return Thinking.model_validate(value)
    if isinstance(value, bool | Thinking):
        return value
    raise PydanticCustomError("thinking", "expected true, false or an object with a type")


def _bool_or_effort(value: Any) -> Any:
    if isinstance(value, bool | str):
        return value
    raise PydanticCustomError("think", "expected true, false or an effort")


class ThinkingFields(BaseModel):
    """What a request may say about thinking. Fields that contradict each other are an error."""

    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: Annotated[Thinking | bool | None, BeforeValidator(_bool_or_object)] = None
    think: Annotated[bool | str | None, BeforeValidator(_bool_or_effort)] = None
    reasoning: ReasoningConfig | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template_args: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _agree(self) -> "ThinkingFields":
        for named in (self.switches, self.efforts):
            (first, value), *others = [*named.items()] or [("", None)]
            for name, other in others:
                if other != value:
                    raise PydanticCustomError(
                        name.partition(".")[0],
                        "'{name}' and '{first}' contradict each other",
                        {"name": name, "first": first},
                    )
        return self

    @property
    def switches(self) -> dict[str, bool]:
        """Fields that switch thinking on or off."""
        given: dict[str, bool | None] = {"enable_thinking": self.enable_thinking}
        if isinstance(self.thinking, Thinking):
            given["thinking"] = {"enabled": True, "disabled": False}.get(self.thinking.type)
        else:
            given["thinking"] = self.thinking
        given["think"] = self.think if isinstance(self.think, bool) else None
        given["reasoning.enabled"] = None if self.reasoning is None else self.reasoning.enabled
        return {name: value for name, value in given.items() if value is not None}

    @property
    def efforts(self) -> dict[str, str]:
        """Fields that say how much to think."""
        given = {"reasoning_effort": self.reasoning_effort}
        given["reasoning.effort"] = None if self.reasoning is None else self.reasoning.effort
        given["think"] = self.think if isinstance(self.think, str) else None
        return {name: value for name, value in given.items() if value is not None}

    @property
    def clears_thoughts(self) -> bool | None:
        """Whether thoughts of earlier turns are left out of the prompt (GLM)."""
        return self.thinking.clear_thinking if isinstance(self.thinking, Thinking) else None

    @property
    def shows_reasoning(self) -> bool:
        """Whether the answer contains the model's thoughts."""
        excluded = self.reasoning is not None and self.reasoning.exclude is True
        return self.include_reasoning is not False and not excluded


def template_variables(request: ThinkingFields, traits: TemplateTraits) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the template's variables beside the messages, and the fields for which it has none.

    `chat_template_kwargs` win, then an explicit switch, then the effort: "none" turns the switch off, any other on. A
    template without a switch gets the effort "none" or "medium" for an explicit switch.
    """
    own = {**(request.chat_template_args or {}), **(request.chat_template_kwargs or {})}
    switches, efforts = request.switches, request.efforts
    on, effort = next(iter(switches.values()), None), next(iter(efforts.values()), None)
    has_switch = not traits.variables.isdisjoint(_TEMPLATE_SWITCHES)
    if on is False:
        effort = "none" if effort is not None or not has_switch else None
    elif on is True and effort in (None, "none"):
        effort = None if has_switch else "medium"
    names: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if on is None and effort is not None:
        on = effort != "none"
    names |= {} if on is None else dict.fromkeys(_TEMPLATE_SWITCHES, on)
    found = {name: value for name, value in names.items() if name in traits.variables}
    unused = () if found else tuple(dict.fromkeys((*switches, *efforts)))
    if request.clears_thoughts is not None:
        if "clear_thinking" in traits.variables:
            found["clear_thinking"] = request.clears_thoughts
        else:
            unused += ("thinking.clear_thinking",)
    return {**found, **own}, unused
