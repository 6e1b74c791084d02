"""A model with tools and reasoning, and a service whose model says what a test wants."""

CHAT = "/v1/chat/completions"
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


# Prompts with tools are long.
LONG = {"max_model_len": 4096}


class Model:
    """A service whose model answers with given texts in turn."""

    def __init__(self, service, codec):
        self.service = service
        self.codec = codec
        (self.worker,) = service.workers

    def says(self, *texts):
        """Set the next answers; an end-of-sequence token follows each."""
        answers = [[*self.codec.encode(text, add_special_tokens=False), 1] for text in texts]
        self.worker.script = lambda submit: answers[min(len(self.worker.submits), len(answers)) - 1]

    def prompt(self, number=-1):
        """Return the text of one request's prompt."""
        return self.codec.decode(self.worker.submits[number].prompt_token_ids)

    def chat(self, **body):
        """Return the only choice of an answer."""
        (choice,) = self.service.chat(messages=ASK, **body)["choices"]
        return choice

    def streamed(self, **body):
        """Merge a stream like a client; return its message, finish reason and deltas."""
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
