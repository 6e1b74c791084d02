"""`echo` with logprobs, `prompt_logprobs` and `max_tokens` 0: log-probabilities of the prompt itself."""

import pytest

COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello world"}]
# The tokenizer adds <|bos|>, and splits the second word into tokens that are parts of characters.
PROMPT = "Hello 你 world"


@pytest.fixture(scope="module")
def ids(codec):
    return codec.encode(PROMPT, add_special_tokens=True)


def spelled(codec, token_id):
    raw = codec.token_bytes.of(token_id)
    return raw.decode() if raw.isascii() else "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def test_echo_with_logprobs(service, codec, ids):
    """Like lm-eval: the prompt's tokens and one more, the first without a log-probability."""
    answer = service.complete(prompt=PROMPT, max_tokens=1, echo=True, logprobs=1, temperature=0, seed=1234)
    (choice,) = answer["choices"]
    (submit,) = service.submits
    assert (submit.sampling.prompt_logprobs, submit.sampling.logprobs) == (1, 1)
    scores, count = choice["logprobs"], len(ids)
    assert set(scores) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert all(len(values) == count + 1 for values in scores.values())
    assert scores["tokens"][:count] == [spelled(codec, i) for i in ids]
    assert scores["token_logprobs"] == [None] + [-1.5] * count
    assert scores["top_logprobs"][0] is None
    for token_id, top in zip(ids[1:], scores["top_logprobs"][1:count], strict=True):
        assert top == {spelled(codec, token_id + 1): -0.25, spelled(codec, token_id): -1.5}
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (count, 1, count + 1)


def test_offsets_are_positions_in_the_text(service, codec, ids):
    choice = service.complete(prompt=PROMPT, max_tokens=20, echo=True, logprobs=0)["choices"][0]
    text, scores = choice["text"], choice["logprobs"]
    assert text.startswith(PROMPT)
    assert scores["text_offset"] == sorted(scores["text_offset"])
    assert scores["text_offset"][:2] == [0, 0], "<|bos|> must have no length"
    fragments = 0
    for token, offset in zip(scores["tokens"][1:], scores["text_offset"][1:], strict=True):
        if token.startswith("bytes:"):
            fragments += 1
            assert text[offset] in "你好🙂", "a piece of a character must begin at the character"
        else:
            assert text.startswith(token, offset)
    assert fragments > 3
    # If the prompt is given as token ids, echoed text includes special tokens.
    choice = service.complete(prompt=ids, max_tokens=0, echo=True, logprobs=0)["choices"][0]
    assert choice["text"] == "<|bos|>" + PROMPT
    shifted = [0, *(offset + len("<|bos|>") for offset in scores["text_offset"][1 : len(ids)])]
    assert choice["logprobs"]["text_offset"] == shifted
    plain = service.complete(prompt=PROMPT, max_tokens=20, logprobs=0)["choices"][0]["logprobs"]["text_offset"]
    assert plain == [offset - len(PROMPT) for offset in scores["text_offset"][len(ids) :]]


@pytest.mark.parametrize("score_chunk", [1, 3, 100])
def test_streamed_echo_equals_the_whole_one(service, score_chunk):
    for worker in service.workers:
        worker.score_chunk = score_chunk
    body = {"prompt": PROMPT, "max_tokens": 9, "echo": True, "logprobs": 2}
    whole = service.complete(**body)["choices"][0]
    choices = [e["choices"][0] for e in service.stream(COMPLETIONS, **body)]
    assert "".join(c["text"] for c in choices) == whole["text"]
    parts = [c["logprobs"] for c in choices if c["logprobs"]]
    for name, values in whole["logprobs"].items():
        assert [v for part in parts for v in part[name]] == values
    assert choices[0]["text"].startswith(PROMPT)


def test_max_tokens_zero(service, ids):
    """The answer has only the prompt's scores; with `echo` alone it has the prompt's text."""

    def counted():
        (line,) = (
            x for x in service.client.get("/metrics").text.split("\n") if x.startswith("moeyard_prompt_tokens_t")
        )
        return float(line.split()[-1])

    before = counted()
    answer = service.complete(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(ids), 0)
    assert service.complete(prompt=PROMPT, max_tokens=0, echo=True)["choices"][0]["text"] == PROMPT
    bare = service.complete(prompt=PROMPT, max_tokens=0)["choices"][0]
    assert (bare["text"], bare["finish_reason"], bare["logprobs"]) == ("", "length", None)
    (event,) = service.stream(COMPLETIONS, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    assert event["choices"][0]["text"] == PROMPT
    assert len(event["choices"][0]["logprobs"]["tokens"]) == len(ids)
    assert event["choices"][0]["finish_reason"] == "length"
    events = service.stream(COMPLETIONS, prompt=PROMPT, max_tokens=0, stream_options={"include_usage": True})
    assert events[-1]["usage"]["completion_tokens"] == 0
    assert counted() - before == 5 * len(ids)
    # A prompt as long as the model fits, because no token follows.
    assert service.complete(prompt=[5] * 256, max_tokens=0, echo=True, logprobs=0)["usage"]["total_tokens"] == 256
    assert service.post(COMPLETIONS, prompt=[5] * 256, max_tokens=1).status_code == 400
    assert service.post(COMPLETIONS, prompt=[5] * 257, max_tokens=0).status_code == 400


def test_prompt_logprobs_have_vllms_format(service, codec, ids):
    answer = service.complete(prompt=PROMPT, max_tokens=2, prompt_logprobs=2, logprobs=1)
    scores = answer["choices"][0]["prompt_logprobs"]
    assert len(scores) == len(ids)
    assert scores[0] is None
    for token_id, entry in zip(ids[1:], scores[1:], strict=True):
        assert list(entry) == [str(token_id), str(token_id + 1), str(token_id + 2)]
        text = codec.token_bytes.of(token_id).decode("utf-8", "replace")
        assert entry[str(token_id)] == {"logprob": -1.5, "rank": 2, "decoded_token": text}
        assert (entry[str(token_id + 2)]["logprob"], entry[str(token_id + 2)]["rank"]) == (-0.5, 2)
    assert "prompt_logprobs" not in service.complete(prompt=PROMPT, max_tokens=1)["choices"][0]
    answer = service.chat(messages=HELLO, max_tokens=1, prompt_logprobs=0)
    prompt = service.submits[-1].prompt_token_ids
    assert [list(entry) for entry in answer["prompt_logprobs"][1:]] == [[str(i)] for i in prompt[1:]]
    assert "prompt_logprobs" not in answer["choices"][0]
    # Workers compute the larger number of alternatives, and each field shows its own number.
    choice = service.complete(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1, prompt_logprobs=3)["choices"][0]
    assert service.submits[-1].sampling.prompt_logprobs == 3
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {2}
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} == {4}


def test_several_choices_and_prompts(service, codec):
    """A prompt is scored for its first choice only, unless the choices are streamed and cannot wait for it."""
    prompts = ["Hello world", "one two three"]
    answer = service.complete(prompt=prompts, n=2, max_tokens=1, echo=True, logprobs=0)
    assert sorted(s.sampling.prompt_logprobs is not None for s in service.submits) == [False, False, True, True]
    choices = answer["choices"]
    assert [c["text"].startswith(prompts[i // 2]) for i, c in enumerate(choices)] == [True] * 4
    assert choices[0]["logprobs"] == choices[1]["logprobs"]
    tokens = [[spelled(codec, i) for i in codec.encode(p, add_special_tokens=True)] for p in prompts]
    assert [c["logprobs"]["tokens"][:-1] for c in choices] == [tokens[0], tokens[0], tokens[1], tokens[1]]
    events = service.stream(COMPLETIONS, prompt=prompts, n=2, max_tokens=1, echo=True, logprobs=0)
    for i, choice in enumerate(choices):
        parts = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["index"] == i]
        assert [t for part in parts if part for t in part["tokens"]] == choice["logprobs"]["tokens"]


def test_limits(start):
    service = start(1, max_logprobs=3, max_model_len=200)
    answer = service.post(COMPLETIONS, prompt="x", prompt_logprobs=4)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs"
    assert "above the limit of 3" in answer.json()["error"]["message"]
    assert service.post(COMPLETIONS, prompt="x", echo=True, logprobs=4).status_code == 400


def test_number_of_scores_is_limited(start):
    service = start(1, max_model_len=40000)
    body = {"prompt": [[5] * 20000, [6] * 30000], "max_tokens": 0, "prompt_logprobs": 20}
    answer = service.post(COMPLETIONS, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("1050000 logprobs of prompt tokens, at most 262144")
    assert not service.submits


def test_missing_scores_are_an_error(service):
    """A worker that omits scores fails the request, not the fleet."""
    for worker in service.workers:
        worker._score = lambda running: None
    answer = service.post(COMPLETIONS, prompt=[5, 6, 7, 8], max_tokens=0, prompt_logprobs=0)
    assert answer.status_code == 500
    assert "did not send the logprobs" in answer.json()["error"]["message"]
    for worker in service.workers:
        del worker._score
    assert service.post(COMPLETIONS, prompt=[5, 6, 7, 8], max_tokens=0, prompt_logprobs=0).status_code == 200


def test_tokens_are_named_by_their_ids(service, ids):
    body = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 3, "temperature": 0}
    (choice,) = service.complete(prompt=PROMPT, logprobs=1, echo=True, **body)["choices"]
    all_ids = [*ids, *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in all_ids]
    assert choice["logprobs"]["top_logprobs"][-1] == {
        f"token_id:{all_ids[-1]}": -1.5,
        f"token_id:{all_ids[-1] + 1}": -0.25,
    }
    (choice,) = service.chat(messages=HELLO, logprobs=True, top_logprobs=1, **body)["choices"]
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        name = f"token_id:{token_id}"
        assert (entry["token"], bytes(entry["bytes"])) == (name, name.encode())
        assert entry["top_logprobs"][0]["token"] == f"token_id:{token_id + 1}"
