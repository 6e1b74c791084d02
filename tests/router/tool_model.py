"""A model with tools and reasoning, and a service whose model says what a test wants."""

import dataclasses
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

CHAT = "/v1/chat/completions"
# Like Qwen3's in what it knows: tools, calls, tool messages, and a block of thinking that a switch closes at once.
TEMPLATE = (
    "{% if tools %}<|system|>Tools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call: <tool_call>{"name": ..., "arguments": ...}</tool_call>{{ eos_token }}\n{% endif %}'
    "{% for m in messages %}{% if m.role == 'tool' %}<|user|><tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|{{ m.role }}|>{% if m.content is not none %}{{ m.content }}{% endif %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
KIMI = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{# <|tool_calls_section_begin|> #}<|assistant|>"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": None,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = [{"role": "user", "content": "Wie ist das Wetter?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SECOND = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nI should look. 🙂\n</think>\n\n"


def lengthen(worker):
    """Before the router knows the worker: prompts with tools are long."""
    worker.snapshot = dataclasses.replace(worker.snapshot, max_model_len=4096)


LONG = {"max_model_len": 4096, "prepare": lengthen}


def make_tool_checkpoint(checkpoint: Path, directory: Path) -> Path:
    """The tokenizer with Qwen3's markers as added tokens and Kimi's as special ones, and a template with tools."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>", "<think>", "</think>")]
    )
    kimi = ("section_begin", "section_end"), ("begin", "end", "argument_begin")
    markers = [f"<|tool_calls_{end}|>" for end in kimi[0]] + [f"<|tool_call_{end}|>" for end in kimi[1]]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in markers])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text((checkpoint / "tokenizer_config.json").read_text())
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "kimi.jinja").write_text(KIMI)
    (directory / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return directory


class Model:
    """A service whose model answers with texts of one's choice, in turns."""

    def __init__(self, service, codec):
        self.service = service
        self.codec = codec
        (self.worker,) = service.workers

    def says(self, *texts):
        """The next answers; an end-of-sequence token follows each."""
        answers = [[*self.codec.encode(text, add_special_tokens=False), 1] for text in texts]
        self.worker.script = lambda submit: answers[min(len(self.worker.submits), len(answers)) - 1]

    def prompt(self, number=-1):
        """The prompt's text of one request."""
        return self.codec.decode(self.worker.submits[number].prompt_token_ids)

    def chat(self, **body):
        """The only choice of an answer."""
        (choice,) = self.service.chat(messages=ASK, **body)["choices"]
        return choice

    def streamed(self, **body):
        """Message and finish reason put together from a stream, as clients do it, and the deltas."""
        chunks = [e["choices"][0] for e in self.service.stream(CHAT, messages=ASK, **body)]
        assert all(c["finish_reason"] is None for c in chunks[:-1])
        message = {"content": "", "reasoning_content": "", "tool_calls": []}
        for delta in (c["delta"] for c in chunks):
            assert len(delta.keys() - {"role"} - {k for k, v in delta.items() if v is None}) <= 1
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key) or ""
            for part in delta.get("tool_calls") or ():
                if "id" in part:
                    assert part["index"] == len(message["tool_calls"])
                    assert part["function"]["arguments"] == ""
                    message["tool_calls"].append({**part, "function": dict(part["function"])})
                else:
                    message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        assert chunks[0]["delta"]["role"] == "assistant"
        assert all("role" not in c["delta"] for c in chunks[1:])
        return message, chunks[-1]["finish_reason"], chunks
