"""Request fields that control thinking, and the chat template variables that they set.

`reasoning_effort` is OpenAI's, `enable_thinking` Qwen's, `think` Ollama's. `thinking` is Anthropic's, DeepSeek's, GLM's
and Kimi's. `reasoning` is OpenRouter's and OpenAI's. `chat_template_args` is Baseten's `chat_template_kwargs`.
"""

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from moeyard_router.api.fields import Strict
from moeyard_router.text.template import TemplateTraits

# Template variables that switch thinking: of Qwen3 and others, and of DeepSeek-V3.1 and Kimi.
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
    """The field `reasoning`. Answers contain the model's own reasoning, never a summary."""

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
    """The fields of a request that control thinking. They must not contradict each other."""

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
        thinking = self.thinking
        if isinstance(thinking, Thinking):
            thinking = {"enabled": True, "disabled": False}.get(thinking.type)
        given = {
            "enable_thinking": self.enable_thinking,
            "thinking": thinking,
            "think": self.think if isinstance(self.think, bool) else None,
            "reasoning.enabled": None if self.reasoning is None else self.reasoning.enabled,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def efforts(self) -> dict[str, str]:
        """Fields that set the effort."""
        given = {
            "reasoning_effort": self.reasoning_effort,
            "reasoning.effort": None if self.reasoning is None else self.reasoning.effort,
            "think": self.think if isinstance(self.think, str) else None,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def shows_reasoning(self) -> bool:
        """Whether the answer contains the reasoning."""
        excluded = self.reasoning is not None and self.reasoning.exclude is True
        return self.include_reasoning is not False and not excluded


def template_variables(request: ThinkingFields, traits: TemplateTraits) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the template's variables, and the names of fields that it does not use.

    `chat_template_kwargs` take precedence, then an explicit switch, then the effort. The effort "none" turns the switch
    off, any other turns it on. A template without a switch gets the effort "none" or "medium" instead.
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
    if isinstance(request.thinking, Thinking) and request.thinking.clear_thinking is not None:  # GLM's
        if "clear_thinking" in traits.variables:
            found["clear_thinking"] = request.thinking.clear_thinking
        else:
            unused += ("thinking.clear_thinking",)
    return {**found, **own}, unused
