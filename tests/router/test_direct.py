"""Direct streams have the same bytes as ASGI streams, follow the reader's pace and do not delay each other."""

import asyncio
import json
import socket
from pathlib import Path

import pytest
from tests.limits import HANG_SECONDS
from tests.router.scripted_worker import ready_snapshot, scripted_logprob
from tests.router.tool_model import ASK, CALL, NOW, SECOND, THOUGHT, WEATHER

from moeyard_router.api import endpoints
from moeyard_router.api.generation import Generation
from moeyard_router.api.intake import Intake
from moeyard_router.api.surfaces import READERS, SURFACES
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.errors import ApiError
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.http.connection import ChunkOutbox, DirectChunks
from moeyard_router.metrics import RouterMetrics
from moeyard_worker.protocol import Done, PromptLogprobs, Rejected, Tokens

TEXT = 'Well, "one" two 你好 🙂\nthree stop and so on'
PLAIN = {"prompt": "x", "max_tokens": 60, "stream": True}
SAID = {"messages": ASK, "max_tokens": 200, "stream": True}
REQUESTS = {
    "completion": ("completion", PLAIN),
    "usage": ("completion", {**PLAIN, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "stop": ("completion", {**PLAIN, "stop": ["three", "stop and"], "stream_options": {"include_usage": True}}),
    "choices": ("completion", {**PLAIN, "prompt": ["x", "y"], "n": 2, "logprobs": 2, "echo": True}),
    "ids": ("completion", {**PLAIN, "return_token_ids": True, "skip_special_tokens": False}),
    "chat": ("chat", SAID),
    "chat logprobs": ("chat", {**SAID, "logprobs": True, "top_logprobs": 1, "n": 2}),
    "tools": ("chat", {**SAID, "tools": [WEATHER, NOW]}),
    "response": ("response", {"input": "Hello.", "stream": True, "max_output_tokens": 200}),
    "message": ("message", {"messages": ASK, "stream": True, "max_tokens": 200}),
}


def fleet_of_one():
    """A ready fleet without connections, whose only worker is played by the test."""
    address = WorkerAddress(rank=0, endpoint="tcp://127.0.0.1:9")
    config = RouterConfig(
        model_name="tiny", model_path=Path(), workers=(address,), max_model_len=4096, vocab_size=400, eos_token_ids=(1,)
    )
    fleet = Fleet(config, RouterMetrics("tiny"))
    fleet.start()
    fleet._up(0)
    fleet._heard(0, [ready_snapshot(max_model_len=4096, vocab_size=400)])
    return fleet


class Inline:
    """Replacement for the writer thread that writes at once."""

    async def write(self, work, *args):
        return work(*args)


class Answer:
    """One streamed answer and its connection, which reads while `reading` is set."""

    def __init__(self, fleet, codec, job, api, name, *, with_direct):
        tokens, self.fleet, self.name = codec.token_bytes, fleet, name
        self.data, self.sent, self.pieces, self.waiting = b"", 0, 0, b""
        self.reading = asyncio.Event()
        self.reading.set()
        self.generation = Generation(
            job, reply_id=name, fleet=fleet, tokens=tokens, metrics=RouterMetrics("tiny"), arrived=0.0
        )
        self.writer = SURFACES[api].writer(
            job, reply_id=name, served=lambda: {"model": "tiny"}, created=0, tokens=tokens
        )
        direct = self if with_direct else None
        self.task = asyncio.create_task(self._stream(job, direct))

    async def _stream(self, job, direct):
        await endpoints._stream(job, self.generation, self.writer, self.send, Inline(), direct)

    async def send(self, message):
        await self.reading.wait()
        assert not self.waiting, "earlier pieces must leave first"
        self.data += message.get("body", b"")
        self.sent += "body" in message

    def ready(self):
        return self.reading.is_set()

    def write(self, data):
        assert data
        assert self.ready()
        self.waiting += data
        self.pieces += 1

    def flush(self):
        self.data += self.waiting
        self.waiting = b""


async def settle():
    """Let every pending task run."""
    for _ in range(12):
        await asyncio.sleep(0)


def token_fields(job, choice, ids, start):
    """Return the worker's message fields for some tokens of a choice."""
    top = job.continuations[choice].sampling.logprobs
    logprobs = () if top is None else tuple(scripted_logprob(i, top) for i in ids)
    return {"start": start, "token_ids": tuple(ids), "logprobs": logprobs}


async def run(answer, job, ids, size, *, after=lambda step: None):
    """Play the worker: `size` tokens of every choice in one batch, then the end; wait for the answer's task."""
    fleet, names = answer.fleet, [f"{answer.name}-{i}" for i in range(len(job.continuations))]
    for name, continuation in zip(names, job.continuations, strict=True):
        if continuation.sampling.prompt_logprobs is not None:
            prompt = job.prompts[continuation.prompt].token_ids
            scores = tuple(scripted_logprob(i, continuation.sampling.prompt_logprobs) for i in prompt[1:])
            fleet._heard(0, [PromptLogprobs(request_id=name, start=1, logprobs=scores)])
    for step, start in enumerate(range(0, len(ids), size)):
        some = ids[start : start + size]
        fleet._heard(0, [Tokens(request_id=n, **token_fields(job, i, some, start)) for i, n in enumerate(names)])
        await settle()
        after(step)
    counts = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": len(ids)}
    fleet._heard(0, [Done(request_id=n, finish_reason="stop", stop_token_id=1, **counts) for n in names])
    await settle()
    await asyncio.wait_for(answer.task, HANG_SECONDS)


@pytest.fixture(scope="module")
def job_of(tool_checkpoint, tool_codec):
    address = WorkerAddress(rank=0, endpoint="tcp://127.0.0.1:9")
    config = RouterConfig(
        model_name="tiny",
        model_path=tool_checkpoint,
        workers=(address,),
        max_model_len=4096,
        vocab_size=400,
        eos_token_ids=(1,),
    )
    intake = Intake(config, tool_codec)
    return lambda api, body: asyncio.run(READERS[api](intake, json.dumps(body).encode()))


def ids_of(codec, name):
    text = THOUGHT + TEXT + CALL + SECOND if name == "tools" else TEXT
    return [*codec.encode(text, add_special_tokens=False), 1]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", REQUESTS)
def test_same_bytes_on_both_paths(job_of, tool_codec, name, size):
    api, body = REQUESTS[name]
    job, ids = job_of(api, body), ids_of(tool_codec, name)

    async def both():
        fleet, answers = fleet_of_one(), []
        for with_direct in (False, True):
            answer = Answer(fleet, tool_codec, job, api, "same", with_direct=with_direct)
            await run(answer, job, ids, size)
            answers.append(answer)
            fleet.validate()
        fleet.close()
        return answers

    plain, direct = asyncio.run(both())
    assert direct.data == plain.data
    assert plain.data.count(b"data: ") > 6
    assert plain.pieces == 0
    assert direct.pieces > 2
    if name in ("completion", "chat"):  # prebuilt halves make nearly all events
        events = [json.loads(e[6:])["choices"][0] for e in plain.data.decode().split("\n\n")[:-2]]
        # The last event also has the versions of the weights.
        assert {tuple(e) for e in events[:-1]} == {tuple(events[0])}
        said = [e["text"] if api == "completion" else e["delta"].get("content") or "" for e in events]
        assert "".join(said) == TEXT
    assert direct.sent <= 3, "only the start and the end of an answer use ASGI"


def end(answer, how, num_tokens):
    """End an answer early: the worker is lost, it aborts after some tokens, or the client leaves."""
    if how == "lost":
        answer.fleet.give_up("worker 0 is gone")
    elif how == "aborted":
        counts = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": num_tokens}
        answer.fleet._heard(0, [Done(request_id="same-0", finish_reason="abort", **counts)])
    else:
        answer.generation.disconnect()


def ended_both_ways(job, codec, play):
    """Return a chat's bytes, or "gone", after `play` ends it; direct and ASGI streams must agree."""

    async def both():
        out = []
        for with_direct in (False, True):
            fleet = fleet_of_one()
            answer = Answer(fleet, codec, job, "chat", "same", with_direct=with_direct)
            try:
                await play(answer)
                await asyncio.wait_for(answer.task, HANG_SECONDS)
            except endpoints.ClientGone:
                out.append("gone")
            else:
                out.append(answer.data)
            fleet.close()
        return out

    plain, direct = asyncio.run(both())
    assert direct == plain
    return plain


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("ending", ["lost", "aborted", "gone"])
def test_early_end_between_pieces(job_of, tool_codec, ending, size):
    job = job_of("chat", SAID)

    async def play(answer):
        def last(step):
            if step == 12 // size - 1:
                if ending != "gone":
                    answer.fleet._heard(0, [Tokens(request_id="same-0", **token_fields(job, 0, (2,), 12))])
                end(answer, ending, 12)

        await run(answer, job, ids_of(tool_codec, "chat")[:12], size, after=last)

    said = ended_both_ways(job, tool_codec, play)
    assert (said == "gone") if ending == "gone" else (b'"error"' in said and b"[DONE]" not in said)


@pytest.mark.parametrize("ending", ["lost", "aborted", "gone"])
def test_early_end_with_the_first_tokens(job_of, tool_codec, ending):
    """One step has both the tokens and the end, and no later message wakes a waiter."""
    job = job_of("chat", SAID)

    async def play(answer):
        first = token_fields(job, 0, ids_of(tool_codec, "chat")[:3], 0)
        answer.fleet._heard(0, [Tokens(request_id="same-0", **first)])
        end(answer, ending, 3)

    said = ended_both_ways(job, tool_codec, play)
    assert (said == "gone") if ending == "gone" else (b'"content"' in said and b'"error"' in said)


@pytest.mark.parametrize("with_direct", [False, True])
@pytest.mark.parametrize("moment", ["with the first tokens", "while pieces are pushed"])
def test_refused_choice_with_the_end_of_the_others(job_of, tool_codec, moment, with_direct):
    """Both arrive before the next read. The answer must be an error, never an answer without a choice."""
    job = job_of("completion", {**PLAIN, "n": 2})
    ids = ids_of(tool_codec, "completion")

    async def answered():
        fleet = fleet_of_one()
        answer = Answer(fleet, tool_codec, job, "completion", "same", with_direct=with_direct)
        if moment != "with the first tokens":
            for place in (0, 1):
                fleet._heard(0, [Tokens(request_id="same-0", **token_fields(job, 0, ids[place : place + 1], place))])
                await settle()
        start = 0 if moment == "with the first tokens" else 2
        counts = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": len(ids)}
        last = Tokens(request_id="same-0", **token_fields(job, 0, ids[start:], start))
        done = Done(request_id="same-0", finish_reason="stop", stop_token_id=1, **counts)
        refused = Rejected(request_id="same-1", reason="queue_timeout", message="the request waited 5.0 s")
        fleet._heard(0, [last, done, refused])
        await asyncio.wait_for(answer.task, HANG_SECONDS)
        fleet.close()
        return answer.data

    data = asyncio.run(answered())
    assert b"the request waited 5.0 s" in data
    assert b"[DONE]" not in data


def test_refused_choice_of_a_whole_answer(job_of, tool_codec):
    job = job_of("completion", {**PLAIN, "stream": False, "n": 2})
    ids = ids_of(tool_codec, "completion")
    sent = []

    async def send(message):
        sent.append(message)

    async def answered():
        fleet, tokens = fleet_of_one(), tool_codec.token_bytes
        generation = Generation(
            job, reply_id="same", fleet=fleet, tokens=tokens, metrics=RouterMetrics("tiny"), arrived=0.0
        )
        writer = SURFACES["completion"].writer(
            job, reply_id="same", served=lambda: {"model": "tiny"}, created=0, tokens=tokens
        )
        task = asyncio.create_task(endpoints._whole(job, generation, writer, send, Inline()))
        await settle()
        counts = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": len(ids)}
        said = Tokens(request_id="same-0", **token_fields(job, 0, ids, 0))
        done = Done(request_id="same-0", finish_reason="stop", stop_token_id=1, **counts)
        refused = Rejected(request_id="same-1", reason="queue_timeout", message="the request waited 5.0 s")
        fleet._heard(0, [said, done, refused])
        try:
            await asyncio.wait_for(task, HANG_SECONDS)
        finally:
            generation.close()
            fleet.close()

    with pytest.raises(ApiError, match=r"waited 5\.0 s") as caught:
        asyncio.run(answered())
    assert caught.value.status == 429
    assert not sent


def test_reader_that_pauses(job_of, tool_codec):
    """While the reader pauses, its tokens wait in the fleet's mailbox, and nothing is written."""
    job, ids = job_of("completion", PLAIN), ids_of(tool_codec, "completion")

    async def main():
        fleet = fleet_of_one()
        answer = Answer(fleet, tool_codec, job, "completion", "slow", with_direct=True)
        seen = []

        def after(step):
            seen.append(answer.pieces)
            if step == 5:
                answer.reading.clear()
            if step == 15:
                answer.reading.set()

        await run(answer, job, ids, 1, after=after)
        fleet.close()
        return answer, seen

    answer, seen = asyncio.run(main())
    assert seen[5] > 1
    assert seen[15] == seen[5]
    assert seen[-1] > seen[15]
    events = [json.loads(e[6:]) for e in answer.data.decode().split("\n\n")[:-2]]
    assert "".join(e["choices"][0]["text"] for e in events) == TEXT
    assert answer.data.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("plain", [True, False])
def test_error_in_one_answer_leaves_others_alone(job_of, tool_codec, monkeypatch, plain):
    job, ids = job_of("completion", PLAIN), ids_of(tool_codec, "completion")

    async def main():
        fleet = fleet_of_one()
        bad = Answer(fleet, tool_codec, job, "completion", "bad", with_direct=True)
        good = Answer(fleet, tool_codec, job, "completion", "good", with_direct=True)
        whole = bad.writer.text_event if plain else bad.writer.chunk

        def broken(*added):
            if bad.pieces == 3:
                raise ZeroDivisionError
            return whole(*added)

        monkeypatch.setattr(bad.writer, "text_event", broken if plain else None)
        if not plain:
            monkeypatch.setattr(bad.writer, "chunk", broken)
        for step, token_id in enumerate(ids[:8]):
            rows = [Tokens(request_id=n, start=step, token_ids=(token_id,)) for n in ("bad-0", "good-0")]
            fleet._heard(0, rows)
            await settle()
        with pytest.raises(ZeroDivisionError):
            bad.task.result()
        bad.generation.close()
        assert fleet.admission.failure is None
        assert not good.task.done()
        assert good.pieces > bad.pieces
        good.task.cancel()
        good.generation.close()
        fleet.close()

    asyncio.run(main())


def test_pieces_leave_in_order_and_together():
    """Pieces leave once per turn of the loop, or at a flush. A closed connection does not delay others."""
    written = []

    class Transport:
        def __init__(self, name):
            self.name = name

        def is_closing(self):
            return self.name == "closed"

        def write(self, data):
            assert not self.is_closing()
            written.append((self.name, data))

    async def main():
        outbox, a, b = ChunkOutbox(), Transport("a"), Transport("b")
        outbox.add(a, b"1")
        outbox.add(Transport("closed"), b"0")
        outbox.add(b, b"2")
        assert written == []
        await asyncio.sleep(0)
        assert written == [("a", b"1"), ("b", b"2")]
        outbox.add(a, b"3")
        outbox.flush()
        assert written[2:] == [("a", b"3")]
        await asyncio.sleep(0)
        outbox.add(b, b"4")
        await asyncio.sleep(0)
        assert written[3:] == [("b", b"4")]

    asyncio.run(main())


def test_server_uses_the_direct_path(service, monkeypatch):
    """On a real connection pieces take the direct path, in valid chunks, and the connection stays open."""
    pieces, write = [], DirectChunks.write

    def counting(self, data):
        pieces.append(data)
        write(self, data)

    monkeypatch.setattr(DirectChunks, "write", counting)
    for worker in service.workers:
        worker.pace = 0.002
    for _ in range(2):
        events = service.stream("/v1/completions", prompt="x", max_tokens=60)
        assert sum(len(e["choices"]) for e in events) > 1
    assert len(pieces) > 20
    assert all(p.startswith(b"data: ") and p.endswith(b"\n\n") for p in pieces)


def test_client_that_does_not_read_uses_little_memory(start, wait_for):
    """The transport's buffer stays near its 64 KiB limit whatever the answer's size, and the whole answer arrives."""
    service = start(1, max_model_len=2048)
    [worker] = service.workers
    worker.chunk = 8
    # Connections inherit this: the kernel's own buffers are not under test.
    service.server._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    body = {"prompt": "x", "max_tokens": 300, "stream": True, "logprobs": 20, "n": 8, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    host, port = service.url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(HANG_SECONDS)
        sock.connect((host, int(port)))
        sock.sendall(head % len(data) + data)

        def computed():
            return worker.submits and service.client.get("/v1/fleet").json()["inflight"] == 0

        wait_for(computed, "the worker must compute all tokens, read or not")

        def buffered():
            connections = service.server._server.server_state.connections
            return max(c.transport.get_write_buffer_size() for c in connections)

        # The kernel may take some more before the buffer stays full.
        wait_for(lambda: buffered() > 64 * 1024, "the buffer must fill")
        full = buffered()
        assert full < 1024 * 1024
        got = b""
        while part := sock.recv(1 << 20):
            got += part
    assert got.endswith(b"0\r\n\r\n")
    assert b"data: [DONE]" in got
    assert got.count(b'"finish_reason":"length"') == 8
    assert len(got) > 4 * full
