"""The clients of bench/drills.py with a scripted fleet: what they read, and what disconnecting clients leave behind."""

import asyncio
import time

from drilling.asks import Ask
from drilling.load import Client, references
from drilling.rough import Rough
from drilling.streams import compare
from tests.limits import HANG_SECONDS
from tests.router.conftest import Service


def asks() -> list[Ask]:
    """Requests of every type, short enough for the scripted model."""
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    text = {"prompt": "Once", "max_tokens": 12, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "temperature": 0}
    return [
        Ask("text", "/v1/completions", {**text, **streamed, "logprobs": 2}),
        Ask("pair", "/v1/completions", {**text, **streamed, "n": 2}),
        Ask("chat", "/v1/chat/completions", {**chat, **streamed, "logprobs": True, "top_logprobs": 2}),
        Ask("whole", "/v1/completions", {**text, "logprobs": 1, "prompt_logprobs": 1, "return_token_ids": True}),
    ]


def test_answers_are_read_whole(service: Service) -> None:
    async def run() -> None:
        client = Client(service.url, seconds=HANG_SECONDS)
        first = await references(client, asks(), streams=4)
        second = await references(client, asks(), streams=2)
        await client.http.aclose()
        for name, exchange in first.items():
            assert exchange.answer.error is None
            assert not compare(exchange.answer, second[name].answer)
            assert exchange.arrivals
        assert {name: e.answer.num_tokens for name, e in first.items()} == {
            "text": 12,
            "pair": 24,
            "chat": 9,
            "whole": 12,
        }
        assert all(choice.text for e in first.values() for choice in e.answer.choices.values())
        assert len(first["text"].answer.choices[0].logprobs) == 12
        assert len(first["chat"].answer.choices[0].logprobs) == 9
        assert first["whole"].answer.choices[0].prompt_logprobs
        assert first["pair"].answer.usage is not None

    asyncio.run(run())


def test_disconnecting_clients_leave_nothing_behind(service: Service) -> None:
    for worker in service.workers:
        worker.pace = 0.01

    async def run() -> None:
        rough = Rough(service.url, asks(), clients=8, seed=1)
        wanted = {"cancelled", "hung up", "nonsense refused"}
        deadline = time.monotonic() + HANG_SECONDS
        while not wanted <= rough.seen.keys() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await rough.close()
        assert wanted <= rough.seen.keys() <= {*wanted, "read slowly"}

    asyncio.run(run())
    service.wait_idle()
    assert service.failures == []
