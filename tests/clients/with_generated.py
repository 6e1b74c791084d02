"""A client that `openapi-python-client` generates from /openapi.json: `python with_generated.py URL`.

It runs a chat, a stream and an error. Generated clients do not read event streams. So the stream uses the request and
the types of the generated code with its httpx client.
"""

import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAME = "generated_moeyard"


def generate(url: str, folder: Path) -> None:
    """Write the package below `folder`. Raises `AssertionError` with the warnings of the generator."""
    command = [
        sys.executable,
        "-m",
        "openapi_python_client",
        "generate",
        "--url",
        f"{url}/openapi.json",
        "--meta",
        "none",
    ]
    done = subprocess.run([*command, "--output-path", folder / NAME], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stdout, done.stdout


def part(name: str) -> Any:
    """Return a module of the generated package."""
    return importlib.import_module(f"{NAME}.{name}")


def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        generate(url, Path(folder))
        sys.path.insert(0, folder)
        client, chats, models = (
            part("client").Client(base_url=url),
            part("api.default.post_v1_chat_completions"),
            part("models"),
        )
        hello = [{"role": "user", "content": "Name a season."}]
        fields: dict[str, Any] = {"messages": hello, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}

        whole = chats.sync(client=client, body=models.ChatRequest.from_dict(fields))
        assert isinstance(whole, models.ChatCompletion), whole
        text = whole.choices[0].message.content
        assert text
        assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 8)
        print("chat: one answer with its usage")

        body = models.ChatRequest.from_dict({**fields, "stream": True})
        pieces = []
        with client.get_httpx_client().stream(**chats._get_kwargs(body=body)) as answer:
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert events.pop() == "[DONE]"
        for event in events:
            chunk = models.ChatCompletionChunk.from_dict(json.loads(event))
            pieces += [choice.delta.content for choice in chunk.choices if choice.delta.content]
        assert "".join(pieces) == text
        assert chunk.choices[0].finish_reason == "length"
        print(f"stream: the same text in {len(pieces)} chunks")

        wrong = chats.sync_detailed(client=client, body=models.ChatRequest.from_dict({**fields, "model": "unknown"}))
        assert isinstance(wrong.parsed, models.Error), wrong
        assert (wrong.status_code, wrong.parsed.error.param) == (404, "model")
        print("error: 404 with its field")


if __name__ == "__main__":
    main(sys.argv[1])
