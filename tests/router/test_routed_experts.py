"""Routed experts in answers: vLLM's base64 of a .npy file, whole and in the last event of a streamed choice."""

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.router import scripted_worker
from tests.router.scripted_worker import scripted_experts

from moeyard_router.api.replies import npy_header, routed_bytes
from moeyard_router.config import RoutedShape
from moeyard_worker.protocol import PromptExperts, Tokens

# The model has a dense layer, the second of 4.
PLACES = [0, 2, 3]
SHAPE = RoutedShape(top_k=2, id_bytes=1, places=tuple(PLACES), num_layers=4)
GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
IDS = [5, 6, 7, 8, 9, 10, 11]
HELLO = [{"role": "user", "content": "Hello world"}]


@pytest.fixture
def service(start):
    """A router whose one worker keeps routing."""
    return start(1, routing=SHAPE)


def body_of(path: str, **params: Any) -> dict[str, Any]:
    if path == GENERATE:
        return {"token_ids": IDS, "sampling_params": params}
    return {**({"messages": HELLO} if path == CHAT else {"prompt": IDS}), **params, "return_token_ids": True}


def array(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)))


def check(text: str, *, num_tokens: int, start: int = 0) -> None:
    """Compare with the worker's script for positions from `start` to the last but one. Dense layers have zeros."""
    expected = b"".join(map(scripted_experts, range(start, num_tokens - 1)))
    found = array(text)
    assert (found.dtype, found.shape) == (np.uint8, (num_tokens - 1 - start, 4, 2))
    assert found[:, PLACES].tobytes() == expected
    assert not found[:, 1].any()


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT])
@pytest.mark.parametrize("chunks", [(1, 1), (3, 2), (100, 100)], ids=str)
@pytest.mark.parametrize("first", [0, 4])
def test_every_choice_has_the_experts_of_all_tokens_but_the_last(service, path, chunks, first):
    for worker in service.workers:
        worker.chunk, worker.score_chunk = chunks
    params = {"max_tokens": 9, "seed": 3, "n": 2, "routed_experts_prompt_start": first}
    body = body_of(path, **params)
    answer = service.post(path, **body)
    assert answer.status_code == 200, answer.text
    num_prompt = answer.json()["usage"]["prompt_tokens"]
    whole = {choice["index"]: choice["routed_experts"] for choice in answer.json()["choices"]}
    for choice in answer.json()["choices"]:
        check(whole[choice["index"]], num_tokens=num_prompt + len(choice["token_ids"]), start=first)
    streamed = {}
    for event in service.stream(path, **body):
        for choice in event["choices"]:
            assert ("routed_experts" in choice) == (choice["finish_reason"] is not None)
            streamed |= {choice["index"]: choice["routed_experts"]} if choice["finish_reason"] else {}
    assert streamed == whole


def test_stop_string_cuts_the_experts(service, codec):
    service.workers[0].chunk = 40
    params = {"max_tokens": 60, "temperature": 0}
    (free,) = service.complete(prompt=IDS, **params, return_token_ids=True)["choices"]
    stop = free["text"][len(free["text"]) // 2 :][:3]
    for path in (COMPLETIONS, GENERATE):
        (cut,) = service.post(path, **body_of(path, **params, stop=[stop])).json()["choices"]
        assert len(cut["token_ids"]) < len(free["token_ids"])
        check(cut["routed_experts"], num_tokens=len(IDS) + len(cut["token_ids"]))


def test_prompt_alone(service):
    (choice,) = service.post(COMPLETIONS, prompt=IDS, max_tokens=0).json()["choices"]
    check(choice["routed_experts"], num_tokens=len(IDS))
    (choice,) = service.post(COMPLETIONS, prompt=IDS[:1], max_tokens=0).json()["choices"]
    assert array(choice["routed_experts"]).shape == (0, 4, 2)


def test_they_are_not_sent_if_they_are_not_wanted(service):
    for path, body in ((COMPLETIONS, body_of(COMPLETIONS)), (CHAT, body_of(CHAT))):
        answer = service.post(path, **body, max_tokens=2, return_routed_experts=False).json()
        assert "routed_experts" not in answer["choices"][0]
    # Other APIs have no place for them.
    assert service.post("/v1/responses", input="x", max_output_tokens=2).status_code == 200
    assert service.post("/v1/messages", messages=HELLO, max_tokens=2).status_code == 200
    assert [submit.sampling.routed_experts_start for submit in service.submits] == [None] * 4


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT])
def test_a_server_without_routing_refuses_by_name(start, path):
    service = start(1)
    prefix = "sampling_params." if path == GENERATE else ""
    for field, value in (("return_routed_experts", True), ("routed_experts_prompt_start", 1)):
        answer = service.post(path, **body_of(path, **{field: value}))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == prefix + field
        assert "--enable-return-routed-experts" in error["message"]
    for field, value in (("return_routed_experts", False), ("routed_experts_prompt_start", 0)):
        answer = service.post(path, **body_of(path, max_tokens=1, **{field: value}))
        assert answer.status_code == 200, answer.text
        assert "routed_experts" not in answer.text


def test_start_must_be_a_position_of_the_prompt(service):
    answer = service.post(COMPLETIONS, prompt=IDS, routed_experts_prompt_start=len(IDS))
    assert answer.json()["error"]["param"] == "routed_experts_prompt_start"
    assert service.post(COMPLETIONS, prompt=IDS, routed_experts_prompt_start=len(IDS) - 1).status_code == 200


@pytest.mark.parametrize("fault", ["no prompt", "gap", "width", "no output"])
def test_a_worker_that_omits_some_is_an_error(service, fault, monkeypatch):
    encode = scripted_worker.encode

    def wrong(message: Any) -> bytes:
        if isinstance(message, PromptExperts) and fault == "no prompt":
            message = Tokens(request_id="other", start=0, token_ids=(1,))
        elif isinstance(message, PromptExperts) and fault == "gap":
            message = replace(message, start=message.start + 1)
        elif isinstance(message, PromptExperts) and fault == "width":
            message = replace(message, experts=message.experts + bytes(message.count))
        elif isinstance(message, Tokens) and fault == "no output":
            message = replace(message, routed_experts=b"")
        return encode(message)

    monkeypatch.setattr(scripted_worker, "encode", wrong)
    answer = service.post(COMPLETIONS, prompt=IDS, max_tokens=3)
    assert answer.status_code == 500
    assert "did not send the routed experts" in answer.json()["error"]["message"]


def test_large_routing_is_sent_in_pieces(start, wait_for):
    """Two megabytes of experts: encoded in a thread, whole and streamed."""
    shape = RoutedShape(top_k=8, id_bytes=2, places=tuple(range(60)), num_layers=60)
    service = start(1, routing=shape, max_model_len=4096)
    worker = service.workers[0]
    worker.script = lambda submit: [7] * submit.sampling.max_tokens
    worker.chunk = 50
    worker.experts = lambda position: position.to_bytes(2, "little") * 480
    body = {"prompt": IDS, "max_tokens": 2500, "ignore_eos": True}
    (choice,) = service.complete(**body)["choices"]
    found = array(choice["routed_experts"])
    assert found.shape == (len(IDS) + 2499, 60, 8)
    assert found.dtype == np.dtype("<u2")
    assert (found == np.arange(len(found))[:, None, None]).all()
    *_, last = service.stream(COMPLETIONS, **body)
    assert last["choices"][0]["routed_experts"] == choice["routed_experts"]


@pytest.mark.parametrize(("id_bytes", "wider", "dtype"), [(1, 1, "u1"), (2, 2, "<u2"), (1, 4, "<i4"), (2, 4, "<i4")])
@pytest.mark.parametrize("places", [(0, 1, 2), (1, 3, 4)])
def test_layers_without_experts_have_zeros(id_bytes, wider, dtype, places):
    """Ids of two bytes use both bytes."""
    ids = np.arange(5 * 3 * 2).reshape(5, 3, 2) * (300 if id_bytes == 2 else 8)
    shape = RoutedShape(top_k=2, id_bytes=id_bytes, places=places, num_layers=places[-1] + 1)
    found = routed_bytes(shape, ids.astype(f"<u{id_bytes}").tobytes(), id_bytes=wider)
    expected = np.zeros((5, places[-1] + 1, 2), dtype)
    expected[:, places] = ids
    assert bytes(found) == expected.tobytes()


@pytest.mark.parametrize("rows", [0, 1, 9, 10, 12345])
@pytest.mark.parametrize(("id_bytes", "dtype"), [(1, np.uint8), (2, np.uint16)])
def test_npy_is_numpys_format(rows, id_bytes, dtype):
    rng = np.random.default_rng(rows)
    experts = rng.integers(0, 200, (rows, 4, 2)).astype(dtype)
    header = npy_header(replace(SHAPE, id_bytes=id_bytes), rows)
    found = np.load(io.BytesIO(header + experts.tobytes()))
    assert (found.dtype, found.shape) == (experts.dtype, experts.shape)
    assert np.array_equal(found, experts)
    assert len(header) == 192
