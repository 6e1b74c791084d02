"""/generate: SGLang's API, with token ids or text in, and both out."""

import base64
import itertools
import json
from typing import Any

import numpy as np
import pytest
from tests.router.scripted_worker import scripted_experts

from moeyard_router.config import RoutedShape, SamplingDefaults

PATH = "/generate"
PROMPT = [5, 6, 7, 300]
# The story ends at 4 tokens.
SHORT = {"max_new_tokens": 4, "sampling_seed": 1}


def generate(service, **body: Any) -> Any:
    """Return an answer that must succeed."""
    answer = service.post(PATH, **{"input_ids": PROMPT, "sampling_params": SHORT, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_answer_is_sglangs(service, codec):
    answer = generate(service, rid="mine")
    (submit,) = service.submits
    ids = service.workers[0].default_script(submit)[:4]
    assert answer == {
        "text": codec.decode(ids),
        "output_ids": ids,
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 4},
            "prompt_tokens": 4,
            "completion_tokens": 4,
            "cached_tokens": 3,
            "weight_version": "default",
            "weight_versions": [{"version": "default", "start": 0, "end": 4}],
        },
    }
    assert submit.sampling.seed == 1


def test_version_without_output(service):
    """SGLang's clients warm up a prefix without output, and read which weights computed it."""
    meta = generate(service, sampling_params={"max_new_tokens": 0})["meta_info"]
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]


def test_log_probabilities(service, codec):
    asked = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    answer = generate(service, **asked)
    meta, ids = answer["meta_info"], answer["output_ids"]

    def scored(token_id: int, value: float | None) -> list[Any]:
        return [value, token_id, service.client.post("/detokenize", json={"tokens": [token_id]}).json()["prompt"]]

    assert [each[:2] for each in meta["output_token_logprobs"]] == [[-1.5, i] for i in ids]
    assert meta["output_token_logprobs"][0] == scored(ids[0], -1.5)
    assert [[each[:2] for each in top] for top in meta["output_top_logprobs"]] == [
        [[-0.25, i + 1], [-0.5, i + 2]] for i in ids
    ]
    assert [each[:2] for each in meta["input_token_logprobs"]] == [[None, 6], [-1.5, 7], [-1.5, 300]]
    assert meta["input_top_logprobs"][0] is None
    assert meta["logprob_temperature"] == 1.0
    plain = generate(service, return_logprob=True)["meta_info"]
    assert plain["output_token_logprobs"] == [[-1.5, i, None] for i in ids]
    assert "input_token_logprobs" not in plain
    assert "output_top_logprobs" not in plain
    none = generate(service, logprob_start_len=0, top_logprobs_num=1)["meta_info"]
    assert not any("logprob" in name for name in none), "return_logprob is false"


def test_prompt_alone_is_scored(service):
    answer = generate(service, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    assert answer["output_ids"] == []
    assert len(answer["meta_info"]["input_token_logprobs"]) == len(PROMPT)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_each_event_has_the_whole_output(service, chunk):
    for worker in service.workers:
        worker.chunk = chunk
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 20, "n": 2, "sampling_seed": 3}}
    body |= {"return_logprob": True, "rid": "r"}
    whole = service.post(PATH, **body).json()
    events = service.stream(PATH, **body)
    for index, expected in enumerate(whole):
        parts = [event for event in events if event["index"] == index]
        assert parts[-1] == {**expected, "index": index}
        assert all(part["meta_info"]["finish_reason"] is None for part in parts[:-1])
        for before, after in itertools.pairwise(parts):
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            assert after["text"].startswith(before["text"])
            assert len(after["meta_info"]["output_token_logprobs"]) == len(after["output_ids"])


def test_ends(service, codec):
    free = generate(service, sampling_params={"max_new_tokens": 60, "temperature": 0})
    stop = free["text"][20:24]
    for trimmed in (True, False):
        params = {"max_new_tokens": 60, "temperature": 0, "stop": stop, "no_stop_trim": not trimmed}
        cut = generate(service, sampling_params=params)
        assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert cut["text"].endswith(stop) != trimmed
        assert stop in codec.decode(cut["output_ids"]), "ids are never trimmed"
    for worker in service.workers:
        worker.script = lambda submit: [9, 8, 1]
    ended = generate(service, sampling_params={"max_new_tokens": 60})
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
    chosen = generate(service, sampling_params={"max_new_tokens": 60, "stop_token_ids": [8]})
    assert chosen["meta_info"]["finish_reason"] == {"type": "stop", "matched": 8}


def test_several_prompts(service):
    several = generate(service, input_ids=[PROMPT, [9]], rid="b")
    assert [each["meta_info"]["id"] for each in several] == ["b-0", "b-1"]
    assert [each["meta_info"]["prompt_tokens"] for each in several] == [4, 1]
    answer = service.post(PATH, text=["Hello", "world"], sampling_params=SHORT).json()
    assert len(answer) == 2
    assert isinstance(service.post(PATH, text=["Hello"], sampling_params=SHORT).json(), list)
    assert service.post(PATH, text="Hello", sampling_params=SHORT).json()["meta_info"]["prompt_tokens"] > 1


def test_defaults_are_sglangs(start):
    service = start(1, sampling_defaults=SamplingDefaults(temperature=0.6, top_k=20))
    assert service.post(PATH, input_ids=PROMPT).status_code == 200
    (submit,) = service.submits
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.max_tokens) == (1.0, 0, 128)


@pytest.mark.parametrize(("places", "layers"), [((0, 1, 2), 3), ((1, 2, 4), 5)])
@pytest.mark.parametrize("first", [0, 2])
def test_routed_experts_are_of_all_layers(start, places, layers, first):
    service = start(1, routing=RoutedShape(top_k=2, id_bytes=1, places=places, num_layers=layers))
    assert "routed_experts" not in generate(service)["meta_info"]
    meta = generate(service, return_routed_experts=True, routed_experts_start_len=first)["meta_info"]
    rows = meta["prompt_tokens"] + meta["completion_tokens"] - 1 - first
    found = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32).reshape(rows, -1, 2)
    expected = np.zeros((rows, layers, 2), np.int32)
    scripted = b"".join(map(scripted_experts, range(first, rows + first)))
    expected[:, list(places)] = np.frombuffer(scripted, np.uint8).reshape(rows, 3, 2)
    assert np.array_equal(found, expected)
    assert meta["routed_experts_start_len"] == first


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": "x"}, "input_ids"),
        ({"colour": 1}, "colour"),
        ({"lora_path": "a"}, "lora_path"),
        ({"image_data": ["x"]}, "image_data"),
        ({"token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [399999]}, "input_ids"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"return_logprob": True, "logprob_start_len": 0, "stream": True}, "logprob_start_len"),
        ({"return_logprob": True, "logprob_start_len": 1 << 63}, "logprob_start_len"),
        ({"top_logprobs_num": 21}, "top_logprobs_num"),
        ({"sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"seed": 3}}, "sampling_params.seed"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_new_tokens": 999}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 2}}, "sampling_params.min_new_tokens"),
        ({"sampling_params": {"custom_params": {"return_top_p_token_ids": True}}}, "sampling_params.custom_params"),
        ({"sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
    ],
    ids=str,
)
def test_refusals_name_the_field(service, body, param):
    answer = service.post(PATH, **{"input_ids": PROMPT, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.rpartition(".")[2] in error["message"]


def test_fields_without_effect(service):
    sampling = {**SHORT, "spaces_between_special_tokens": False, "stream_interval": 2, "custom_params": {}}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "image_data": [], "lora_path": None, "log_metrics": True}
    answer = service.post(PATH, **body)
    assert answer.status_code == 200, answer.text
    names = {"log_metrics", "sampling_params.spaces_between_special_tokens", "sampling_params.stream_interval"}
    assert set(answer.headers["x-moeyard-ignored"].split(", ")) == names


def test_facts_of_the_engine(service):
    get = service.client.get
    assert get("/health_generate").status_code == 200
    assert get("/model_info").json() == get("/get_model_info").json()
    assert get("/model_info").json()["model_path"] == "tiny"
    server = get("/server_info").json()
    assert (server["tp_size"], server["dp_size"], server["pp_size"], server["num_gpus"]) == (2, 2, 1, 2)
    assert server["disaggregation_mode"] == "null"
    assert json.dumps(server) == json.dumps(get("/get_server_info").json())


def test_loads(service, pool, wait_for):
    for worker in service.workers:
        worker.paused = True

    def loads() -> list[dict[str, int]]:
        return service.client.get("/v1/loads?include=core").json()["loads"]

    assert [each["num_total_reqs"] for each in loads()] == [0, 0]
    pending = [pool.submit(generate, service) for _ in range(3)]
    wait_for(lambda: sum(each["num_total_reqs"] for each in loads()) == 3, "three requests run")
    for worker in service.workers:
        worker.paused = False
    for each in pending:
        each.result()
