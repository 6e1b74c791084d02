"""A router without a tokenizer: prompts and answers are token ids, and fields that need text are refused by name."""

import json

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = [5, 6, 7]


@pytest.fixture
def service(start):
    """A router without text and its one worker."""
    return start(1, model_path=None, model_name="a-shape")


def test_completion(service, codec):
    answer = service.complete(prompt=PROMPT, max_tokens=4, temperature=0)
    (choice,) = answer["choices"]
    (submit,) = service.submits
    assert submit.prompt_token_ids == tuple(PROMPT)
    assert choice["text"] == ""
    assert len(choice["token_ids"]) == 4
    assert choice["prompt_token_ids"] == PROMPT
    assert answer["usage"]["completion_tokens"] == 4
    (again,) = service.complete(prompt=PROMPT, max_tokens=4, temperature=0, return_token_ids=False)["choices"]
    assert "token_ids" not in again


def test_every_token_is_an_event_of_a_stream(service):
    answer = service.post(COMPLETIONS, prompt=PROMPT, max_tokens=5, temperature=0, stream=True)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert all(choice["text"] == "" for choice in choices)
    assert sum(len(choice["token_ids"]) for choice in choices) == 5
    assert choices[-1]["finish_reason"] == "length"


def test_logprobs_name_tokens_by_their_ids(service):
    (choice,) = service.complete(prompt=PROMPT, max_tokens=2, temperature=0, logprobs=1)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": "text"}, "no tokenizer: give 'prompt' as a list of token ids"),
        ({"prompt": PROMPT, "stop": "x"}, "no tokenizer to find it with; use 'stop_token_ids'"),
    ],
)
def test_fields_that_need_text_are_refused(service, body, says):
    answer = service.post(COMPLETIONS, **body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_chat_is_refused(service):
    answer = service.post(CHAT, messages=[{"role": "user", "content": "Hello"}])
    assert answer.status_code == 400
    assert "'a-shape' has no chat template" in answer.json()["error"]["message"]


def test_card_names_the_model(service):
    (card,) = service.client.get("/v1/models").json()["data"]
    assert card["id"] == card["root"] == "a-shape"
