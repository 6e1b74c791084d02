"""A checkpoint's text files: where templates are found, how they render, and the errors of broken files."""

import asyncio
import json
import threading
from pathlib import Path

import jinja2
import pytest

from moeyard_router.api.intake import Intake
from moeyard_router.api.schema import ChatRequest
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.errors import ApiError
from moeyard_router.text.chat import ChatTemplate, TextCodec

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " <b>hi</b> "}]
# Features of real templates: trimmed blocks, loop controls, namespaces, tojson, generation blocks, strftime_now.
INTRICATE = """{%- set ns = namespace(n=0) %}
{{- bos_token }}
{%- for m in messages %}
    {% if m.role == 'system' %}
        {%- set ns.n = ns.n + 1 %}
[SYS]{{ m.content }}
        {% continue %}
    {% endif %}
    {%- generation %}[{{ m['role'] | upper }}] {{ m.content | trim }} {{ m | tojson }}{% endgeneration %}

{% endfor %}
{%- if tools is none and not thinking is defined %}no tools {{ ns.n }}{{ strftime_now('%Y')[:2] }}{% endif %}
{%- if add_generation_prompt %}<go>{% endif %}{{ unk_token }}
"""


@pytest.fixture
def directory(checkpoint, tmp_path):
    """Return a copy of the checkpoint without any template."""
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|bos|>"}))
    return tmp_path


def render(template, messages=MESSAGES, **options):
    options = {"add_generation_prompt": True, "continue_final_message": False, "variables": {}, **options}
    return template.render(messages, **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("variables", [{}, {"thinking": True}])
def test_renders_as_transformers_does(prompt, variables):
    from transformers.utils.chat_template_utils import render_jinja_template

    mine = ChatTemplate(INTRICATE, {"bos_token": "<s>"})
    theirs, _ = render_jinja_template(
        [MESSAGES], chat_template=INTRICATE, add_generation_prompt=prompt, bos_token="<s>", **variables
    )
    assert render(mine, add_generation_prompt=prompt, variables=variables) == theirs[0]


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }} </s>\n{% endfor %}"
PARTS = """{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}</s>{% endfor %}"""


@pytest.mark.parametrize("source", [PLAIN, TRIMMED, PARTS], ids=["plain", "trimmed", "parts"])
@pytest.mark.parametrize(
    "last",
    [
        "I say",
        "I say ",
        " padded \n",
        "says says",
        "s",
        "</",
        "/s>",
        ">",
        "",
        " ",
        "a\n\n",
        "</s>\n",
        [{"type": "text", "text": "one"}, {"type": "text", "text": "s"}],
    ],
)
def test_continues_as_transformers_does(last, source):
    """Cases include a last message whose text the template repeats after it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    if isinstance(last, list) and source != PARTS:
        pytest.skip("this template does not support parts")
    messages = [*MESSAGES, {"role": "assistant", "content": last}]
    theirs, _ = render_jinja_template([messages], chat_template=source, continue_final_message=True)
    mine = render(ChatTemplate(source, {}), messages, add_generation_prompt=False, continue_final_message=True)
    assert mine == theirs[0]


def test_template_without_the_message_cannot_continue():
    template = ChatTemplate("{{ messages | length }}", {})
    with pytest.raises(ApiError, match="continue_final_message"):
        render(template, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": "found", "tokenizer_config.json": json.dumps({"chat_template": "other"})},
        {"chat_template.json": json.dumps({"chat_template": "found"})},
        {"tokenizer_config.json": json.dumps({"chat_template": "found"})},
        {
            "tokenizer_config.json": json.dumps(
                {"chat_template": [{"name": "tool_use", "template": "other"}, {"name": "default", "template": "found"}]}
            )
        },
    ],
    ids=["jinja file first", "json file", "string in the config", "named ones in the config"],
)
def test_template_locations(directory, files):
    for name, text in files.items():
        (directory / name).write_text(text)
    assert render(TextCodec(directory).template) == "found"


USED = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
NAMED = {"default": "plain", "tool_use": "{{ tools | length }}", "rag": "documents"}
STORED = {
    "list": {"tokenizer_config.json": [{"name": name, "template": text} for name, text in NAMED.items()]},
    "map": {"tokenizer_config.json": NAMED},
    "one": {"tokenizer_config.json": "one for all"},
    "files": {"chat_template.jinja": "from a file", "additional_chat_templates/tool_use.jinja": "{{ tools | length }}"},
    "files before a list": {
        "tokenizer_config.json": [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}],
        "chat_template.jinja": "from a file",
    },
    "another name": {"chat_template.jinja": "from a file", "additional_chat_templates/rag.jinja": "{% if %}"},
    "default twice": {"chat_template.jinja": "x", "additional_chat_templates/default.jinja": "from the folder"},
}


def store(directory, files):
    for name, given in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".json":
            given = json.dumps({"bos_token": "<|bos|>", "chat_template": given})
        path.write_text(given)


@pytest.mark.parametrize("name", STORED)
def test_named_templates_are_chosen_as_transformers_does(directory, name):
    from transformers import PreTrainedTokenizerFast

    store(directory, STORED[name])
    codec, theirs = TextCodec(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for mine, tools in ((codec.template, None), (codec.tool_template, USED)):
        variables = {} if tools is None else {"tools": tools}
        expected = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
        assert render(mine, variables=variables) == expected


def test_a_template_for_tools_alone(directory):
    """Like transformers and vLLM, chats with tools render and all others are refused."""
    store(directory, {"additional_chat_templates/tool_use.jinja": "{{ tools | length }}<tool_call>"})
    codec = TextCodec(directory)
    assert codec.template is None
    config = RouterConfig(
        model_name="tiny",
        model_path=directory,
        workers=(WorkerAddress(rank=0, endpoint="ipc://unused"),),
        max_model_len=1000,
        vocab_size=400,
    )
    intake = Intake(config, codec)
    asked = {"messages": [{"role": "user", "content": "a"}]}
    job = asyncio.run(intake.chat(ChatRequest.model_validate({**asked, "tools": USED})))
    assert codec.decode(job.prompts[0].token_ids) == "1<tool_call>"
    with pytest.raises(ApiError, match="has no chat template for chats without tools"):
        asyncio.run(intake.chat(ChatRequest.model_validate({**asked, "tools": USED, "tool_choice": "none"})))


def test_no_template(directory):
    assert TextCodec(directory).template is None


def test_no_named_default(directory):
    named = {"chat_template": [{"name": "rag", "template": "x"}]}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(ValueError, match="rag"):
        TextCodec(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.json"])
def test_broken_file_is_named(directory, name):
    (directory / name).write_text("{")
    with pytest.raises(ValueError, match=name):
        TextCodec(directory)


REGEX_DECODER = {
    "type": "Sequence",
    "decoders": [{"type": "Replace", "pattern": {"Regex": "a+"}, "content": " "}, {"type": "ByteFallback"}],
}


def config_with(value):
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", b"[]", "a JSON object"),
        ("tokenizer_config.json", b"null", "a JSON object"),
        ("tokenizer_config.json", b"[" * 10**5, "(recursion|Stack overflow)"),
        ("tokenizer_config.json", b'{"bos_token": "\xff"}', "utf-8"),
        ("tokenizer_config.json", config_with({"bos_token": {"x": 1}}), "bos_token"),
        ("tokenizer_config.json", config_with({"eos_token": {"content": None}}), "eos_token"),
        ("tokenizer_config.json", config_with({"pad_token": 3}), "pad_token"),
        ("tokenizer_config.json", config_with({"chat_template": 3}), "chat_template"),
        ("tokenizer_config.json", config_with({"chat_template": [{"n": 1}]}), "chat_template.*'n'"),
        ("tokenizer_config.json", config_with({"chat_template": ["x"]}), "chat_template.*'x'"),
        ("tokenizer_config.json", config_with({"chat_template": [{"name": [], "template": ""}]}), "chat_template"),
        ("tokenizer_config.json", config_with({"chat_template": [{"name": "default", "template": 3}]}), "string"),
        ("tokenizer_config.json", config_with({"chat_template": "{% if %}"}), "line 1"),
        ("chat_template.json", b"[1]", "a JSON object"),
        ("chat_template.jinja", b"\xff", "utf-8"),
        ("chat_template.jinja", b"a\n{% if %}", "line 2"),
    ],
)
def test_malformed_file_is_named_in_one_line(directory, name, content, says):
    (directory / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"/{name}: .*{says}") as caught:
        TextCodec(directory)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("decoder", "says"), [(None, "no decoder"), (REGEX_DECODER, r"pattern .*a\+")])
def test_tokenizer_that_cannot_stream_is_named(directory, decoder, says):
    path = directory / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": decoder}))
    with pytest.raises(ValueError, match=rf"/tokenizer\.json: .*{says}"):
        TextCodec(directory)


@pytest.mark.parametrize(
    ("body", "threaded"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, False),
        ({"messages": [{"role": "user", "content": "a" * 9000}]}, True),
        ({"messages": [{"role": "user", "content": ""}] * 200}, True),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"thinking": True}}, True),
    ],
    ids=["small", "long text", "many messages", "variables"],
)
def test_large_chats_render_outside_the_event_loop(checkpoint, monkeypatch, body, threaded):
    codec = TextCodec(checkpoint)
    render, threads = codec.template.render, []

    def recording(*args, **options):
        threads.append(threading.current_thread())
        return render(*args, **options)

    monkeypatch.setattr(codec.template, "render", recording)
    config = RouterConfig(
        model_name="tiny",
        model_path=Path(checkpoint),
        workers=(WorkerAddress(rank=0, endpoint="ipc://unused"),),
        max_model_len=10**6,
        vocab_size=400,
    )
    job = asyncio.run(Intake(config, codec).chat(ChatRequest.model_validate(body)))
    text = render(body["messages"], add_generation_prompt=True, continue_final_message=False, variables={})
    assert list(job.prompts[0].token_ids) == codec.encode(text, add_special_tokens=False)
    assert [thread is not threading.main_thread() for thread in threads] == [threaded]


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"with a tokenizer\.json$"):
        TextCodec(tmp_path)
    (tmp_path / "tiktoken.model").touch()  # Moonshot publishes this file instead
    with pytest.raises(ValueError, match=r"/tokenizer\.json: .* from tiktoken\.model with .*TikTokenConverter \(docs/"):
        TextCodec(tmp_path)


def test_templates_are_sandboxed():
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(ApiError):
        render(template)
    with pytest.raises(ApiError):
        render(ChatTemplate("{{ messages.append(1) }}", {}))


def test_missing_names_are_empty():
    assert render(ChatTemplate("a{{ nothing }}b", {})) == "ab"
    assert issubclass(jinja2.UndefinedError, jinja2.TemplateError)


def test_special_tokens_follow_the_post_processor(codec):
    assert codec.encode("one", add_special_tokens=True) == [0, *codec.encode("one", add_special_tokens=False)]
