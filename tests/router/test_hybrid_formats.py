"""Chat templates of the hybrid families: the parsers picked for them read what the templates write.

The templates are our own, with the documented structure of the published ones:
- Qwen3-Next: ChatML, calls as in Hermes (Qwen's documentation, "Function Calling"); the template of the Thinking model
  opens the block at the end of the prompt;
- Qwen3.5: calls with a tag for each parameter, a block that is opened or, by `enable_thinking`, closed at once (vLLM,
  `vllm.parser.qwen3` and its Qwen3ReasoningParser);
- Kimi-Linear: Kimi-K2's (MoonshotAI/Kimi-K2, "Tool Call Guidance"; the roles in ggml-org/llama.cpp,
  models/templates/moonshotai-Kimi-K2.jinja).
"""

import pytest

from moeyard_router.text.answer_formats import answer_formats
from moeyard_router.text.chat import TextCodec
from moeyard_router.text.events import CallArguments, CallBegin, CallEnd, Content, Reasoning, joined
from moeyard_router.text.extraction import Extraction, Extractor

HERMES = "<tool_call>\n{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>"
PARAMETERS = (
    "<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>"
)
OPEN = "<think>\n"
SWITCHED = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)


def chatml(call: str, opening: str) -> str:
    """Return Qwen's template: tools in the system turn, results in the user turn."""
    return (
        "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}"
        "{% endfor %}{{ '\\n' }}</tools><|im_end|>\n{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
        "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}{{ '\\n' }}" + call + "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + opening + "{% endif %}"
    )


KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n"
    "{{ m.content }}<|im_end|>{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}"
    "<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
# Template, parsers, and whether an answer begins inside the reasoning block.
PUBLISHED = {
    "Qwen3-Next-Instruct": (chatml(HERMES, ""), "tool calls: hermes, reasoning: none", False),
    "Qwen3-Next-Thinking": (chatml(HERMES, OPEN), "tool calls: hermes, reasoning: qwen3", True),
    "Qwen3.5": (chatml(PARAMETERS, SWITCHED), "tool calls: qwen3_coder, reasoning: qwen3", True),
    "Kimi-Linear-Instruct": (KIMI, "tool calls: kimi_k2, reasoning: none", False),
}
ARGUMENTS = ({"city": "Köln", "days": [1, 2]}, {})
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
ASK = {"role": "user", "content": "Wie ist das Wetter?"}
CALLS = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(zip(("weather", "now"), ARGUMENTS, strict=True))
    ],
}


@pytest.fixture(params=PUBLISHED)
def published(request, tool_checkpoint, tmp_path):
    """Return (codec, parsers by name, begins inside) of one model."""
    source, parsers, inside = PUBLISHED[request.param]
    path = tmp_path / "chat_template.jinja"
    path.write_text(source)
    return TextCodec(tool_checkpoint, path), parsers, inside


def render(codec, *messages, ask=True, **variables):
    return codec.template.render(
        list(messages), add_generation_prompt=ask, continue_final_message=False, variables=variables
    )


def events(formats, text, *, inside):
    form = Extraction(
        visible=[],
        tools=formats.tools,
        reasoning=formats.reasoning,
        inside=inside,
        id_seed="s",
        schemas=dict.fromkeys(("weather", "now"), SCHEMA),
    )
    extractor = Extractor(form, 0)
    return joined([event for piece in text for event in extractor.push(piece)] + extractor.finish())


def test_parsers_read_the_templates_output(published):
    codec, parsers, inside = published
    formats = answer_formats(codec)
    assert formats.describe() == parsers
    prompt = render(codec, ASK, tools=[{"type": "function", "function": {"name": "weather"}}])
    assert '"weather"' in prompt
    assert (formats.reasoning is not None and formats.reasoning.inside_after(prompt)) == inside
    # The assistant's turn in a later prompt is the example that the model follows in this one.
    bare, whole = render(codec, ASK, ask=False), render(codec, ASK, CALLS, ask=False)
    turn = whole.removeprefix(bare).partition("<|im_middle|>" if "<|im_middle|>" in whole else "assistant\n")[2]
    turn = turn.removesuffix("\n").removesuffix("<|im_end|>")
    thought = [Reasoning("Hm.")] if inside else []
    found = events(formats, ("Hm.\n</think>\n\n" if inside else "") + turn, inside=inside)
    assert found[: len(thought) + 1] == [*thought, Content("I look.")]
    calls = found[len(thought) + 1 :]
    assert [type(event) for event in calls] == [CallBegin, CallArguments, CallEnd] * 2
    assert [event.name for event in calls if isinstance(event, CallBegin)] == ["weather", "now"]
    assert [event.text for event in calls if isinstance(event, CallArguments)] == [
        '{"city": "Köln", "days": [1, 2]}',
        "{}",
    ]
    if formats.tools.name == "kimi_k2":
        assert [e.id for e in calls if isinstance(e, CallBegin)] == [c["id"] for c in CALLS["tool_calls"]]
    result = {"role": "tool", "tool_call_id": "functions.weather:0", "content": "sunny"}
    assert "sunny" in render(codec, ASK, CALLS, result)


def test_thinking_switch_of_the_template(published):
    codec, parsers, inside = published
    formats, prompt = answer_formats(codec), render(codec, ASK, enable_thinking=False)
    switched = "qwen3_coder" in parsers
    begins = formats.reasoning is not None and formats.reasoning.inside_after(prompt)
    assert begins == (inside and not switched)
    assert ("enable_thinking" in codec.template.traits.variables) == switched
