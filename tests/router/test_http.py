"""Successful requests over real HTTP and ZMQ: both endpoints, whole and streamed."""

import pytest

STORY = "The quick brown fox 你好 says 🙂 to the lazy dog, again and again. "
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello world"}]


def test_completion(service, codec):
    answer = service.complete(model="tiny", prompt="Hello world", max_tokens=12, seed=5)
    (submit,) = service.submits
    assert submit.prompt_token_ids == tuple(codec.encode("Hello world", add_special_tokens=True))
    assert submit.prompt_token_ids[0] == 0
    assert submit.sampling.seed == 5
    ids = codec.encode(STORY, add_special_tokens=False)[:12]
    (choice,) = answer["choices"]
    assert choice["text"] == codec._tokenizer.decode(ids)
    assert choice["finish_reason"] == "length"
    assert choice["index"] == 0
    assert choice["logprobs"] is None
    assert choice["stop_reason"] is None
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("cmpl-")
    prompt_tokens = len(submit.prompt_token_ids)
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 12,
        "total_tokens": prompt_tokens + 12,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_stream_equals_whole(service, codec, chunk):
    for worker in service.workers:
        worker.chunk = chunk
        worker.pace = 0.002
    count = len(codec.encode(STORY, add_special_tokens=False))
    assert len(codec.encode("🙂", add_special_tokens=False)) > 2, "a character must take several tokens"
    whole = service.complete(prompt="x", max_tokens=count, return_token_ids=True)["choices"][0]
    events = service.stream(COMPLETIONS, prompt="x", max_tokens=count, return_token_ids=True)
    choices = [e["choices"][0] for e in events]
    assert "".join(c["text"] for c in choices) == whole["text"] == STORY
    if chunk == 1:
        assert len(choices) > count / 3, "tokens must not wait for each other"
    assert not any("�" in c["text"] for c in choices)
    assert [i for c in choices for i in c["token_ids"]] == whole["token_ids"]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in c for c in choices[1:])
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert {e["object"] for e in events} == {"text_completion"}
    assert len({e["id"] for e in events}) == 1


@pytest.mark.parametrize("ids", [True, False], ids=["with ids", "text alone"])
@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_tokens_of_one_message_are_one_chunk(service, codec, accepted, ids):
    """Verified drafts come as several tokens at once. A busy machine may merge messages but never splits them, so one
    of many streams must show the sizes."""
    letters = codec.encode("abcdefghijkl", add_special_tokens=False)
    assert len(letters) == 12, "each token must be one character"
    for worker in service.workers:
        worker.chunk, worker.pace, worker.script = accepted, 0.01, lambda submit: letters
    sizes: list[list[int]] = []
    while [accepted] * (12 // accepted) not in sizes and len(sizes) < 40:
        events = service.stream(COMPLETIONS, prompt="x", max_tokens=12, ignore_eos=True, return_token_ids=ids)
        choices = [event["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == "abcdefghijkl"
        found = [len(choice["token_ids"]) if ids else len(choice["text"]) for choice in choices]
        sizes.append([size for size in found if size])
        assert all(size % accepted == 0 for size in sizes[-1])
    assert [accepted] * (12 // accepted) in sizes, sizes


def test_chat(service, codec):
    answer = service.chat(messages=HELLO, max_completion_tokens=5, return_token_ids=True)
    (submit,) = service.submits
    text = "<|bos|><|user|>Hello world<|eos|>\n<|assistant|>"
    assert list(submit.prompt_token_ids) == codec.encode(text, add_special_tokens=False)
    assert answer["prompt_token_ids"] == list(submit.prompt_token_ids)
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == codec._tokenizer.decode(choice["token_ids"])
    assert len(choice["token_ids"]) == 5
    assert answer["object"] == "chat.completion"


def test_chat_stream(service):
    for worker in service.workers:
        worker.pace = 0.002
    events = service.stream(
        CHAT, messages=HELLO, max_tokens=20, return_token_ids=True, stream_options={"include_usage": True}
    )
    first, *_, last, usage = events
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["prompt_token_ids"] == list(service.submits[0].prompt_token_ids)
    assert all(e["usage"] is None for e in events[:-1])
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 20
    deltas = [e["choices"][0]["delta"] for e in events[:-1]]
    assert all("role" not in d for d in deltas[1:])
    whole = service.chat(messages=HELLO, max_tokens=20)["choices"][0]["message"]["content"]
    assert "".join(d["content"] for d in deltas) == whole
    assert {e["object"] for e in events} == {"chat.completion.chunk"}


def test_continuous_usage(service):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = service.stream(COMPLETIONS, prompt=[5, 6], max_tokens=4, stream_options=options)
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert {e["usage"]["prompt_tokens"] for e in events} == {2}


def test_chat_default_max_tokens_is_the_remaining_length(service):
    answer = service.chat(messages=HELLO)
    prompt = len(service.submits[0].prompt_token_ids)
    assert answer["usage"]["completion_tokens"] == 256 - prompt
    assert service.complete(prompt="x")["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "count"),
    [([5, 6, 7], 1), (["a", "b c"], 2), ([[5, 6], [7]], 2)],
    ids=["ids", "texts", "lists of ids"],
)
def test_prompt_forms(service, prompt, count):
    answer = service.complete(prompt=prompt, max_tokens=3, n=2, return_token_ids=True)
    assert [c["index"] for c in answer["choices"]] == list(range(2 * count))
    prompts = [c["prompt_token_ids"] for c in answer["choices"]]
    assert prompts[::2] == prompts[1::2]
    if prompt == [[5, 6], [7]]:
        assert prompts[::2] == prompt
    total = sum(len(p) for p in prompts[::2])
    assert answer["usage"]["prompt_tokens"] == total
    assert answer["usage"]["completion_tokens"] == 6 * count


def test_seeds_of_choices(service):
    service.complete(prompt=["a", "b"], max_tokens=1, n=3, seed=2**63 - 2)
    by_choice = {int(s.request_id.rsplit("-", 1)[1]): s.sampling.seed for s in service.submits}
    assert [by_choice[i] for i in range(6)] == [2**63 - 2, 2**63 - 1, 0] * 2


def test_random_seeds_differ(service):
    service.complete(prompt=["a", "a"], max_tokens=1)
    service.complete(prompt="a", max_tokens=1)
    seeds = [s.sampling.seed for s in service.submits]
    assert len(set(seeds)) == 3
    assert all(0 <= s < 2**63 for s in seeds)


def test_sampling_fields_reach_the_worker(service):
    service.complete(
        prompt="a",
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=-1,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.2,
        logit_bias={"3": 4, "399": -100},
        stop_token_ids=[9, 9, 8],
        ignore_eos=True,
        logprobs=2,
        user="me",
    )
    sampling = service.submits[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k, sampling.seed) == (9, 2, 7, 2**63 - 1)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.5, 1.2)
    assert sampling.logit_bias == {3: 4.0, 399: -100.0}
    assert sampling.stop_token_ids == (9, 8)
    assert sampling.ignore_eos is True
    assert sampling.logprobs == 2


def test_defaults_and_nulls(service):
    service.complete(prompt="a", temperature=None, n=None, stop=None, stream=None, top_k=-1, logprobs=None)
    sampling = service.submits[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert sampling.logprobs is None


def test_echo(service):
    plain = service.complete(prompt="Hello", max_tokens=4)["choices"][0]["text"]
    assert service.complete(prompt="Hello", max_tokens=4, echo=True)["choices"][0]["text"] == "Hello" + plain
    events = service.stream(COMPLETIONS, prompt="Hello", max_tokens=4, echo=True)
    assert "".join(e["choices"][0]["text"] for e in events) == "Hello" + plain


def test_streams_of_several_choices(service):
    events = service.stream(COMPLETIONS, prompt=["a", "b"], n=2, max_tokens=7, stream_options={"include_usage": True})
    texts, reasons = [""] * 4, []
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(set(texts)) == 1
    assert reasons == ["length"] * 4
    assert events[-1]["usage"]["completion_tokens"] == 28


@pytest.mark.parametrize("chunk", [1, 4, 200])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens(service, chunk, include, wait_for):
    for worker in service.workers:
        worker.chunk = chunk
        worker.pace = 0.002 if chunk == 1 else 0.0
    body = {"prompt": "x", "max_tokens": 200, "stop": ["好 says", "never"], "include_stop_str_in_output": include}
    cut = STORY.index("好 says") + (len("好 says") if include else 0)
    whole = service.complete(**body, return_token_ids=True)
    choice = whole["choices"][0]
    assert choice["text"] == STORY[:cut]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "好 says")
    count = len(choice["token_ids"])
    assert whole["usage"]["completion_tokens"] == count
    events = service.stream(COMPLETIONS, **body, return_token_ids=True)
    assert "".join(e["choices"][0]["text"] for e in events) == STORY[:cut]
    assert sum(len(e["choices"][0]["token_ids"]) for e in events) == count
    assert events[-1]["choices"][0]["stop_reason"] == "好 says"
    if chunk == 1:
        wait_for(lambda: len(service.aborts) == 2, "the worker must receive the abort after a stop string")


def test_cached_tokens_are_reported_after_a_stop_string(service):
    """The worker reports it with the first tokens, because the router does not wait for the last `Done`."""
    body = {"max_tokens": 200, "stop": "fox"}
    details = {"cached_tokens": 3}
    assert service.complete(prompt="x", **body)["usage"]["prompt_tokens_details"] == details
    assert service.complete(prompt=["x", "y"], n=2, **body)["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
    assert service.chat(messages=HELLO, **body)["usage"]["prompt_tokens_details"] == details
    *_, last = service.stream(COMPLETIONS, prompt="x", stream_options={"include_usage": True}, **body)
    assert last["usage"]["prompt_tokens_details"] == details
    assert service.client.get("/v1/fleet/live").json()["requests"][0]["cached_tokens"] == 3


def test_stop_string_is_not_searched_within_min_tokens(service, codec):
    ids = codec.encode(STORY, add_special_tokens=False)
    answer = service.complete(prompt="x", max_tokens=100, stop=" quick", min_tokens=len(ids))
    assert answer["choices"][0]["text"] == STORY + "The"


def test_stop_tokens(service, codec):
    ids = codec.encode("one two", add_special_tokens=False)
    for worker in service.workers:
        worker.script = lambda submit: [*ids, 1, *ids]
    body = {"prompt": "x", "max_tokens": 50, "return_token_ids": True}
    choice = service.complete(**body)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one two", "stop", None)
    assert choice["token_ids"] == [*ids, 1]
    shown = service.complete(**body, skip_special_tokens=False, include_stop_str_in_output=True)["choices"][0]
    assert shown["text"] == "one two<|eos|>"
    hidden = service.complete(**body, skip_special_tokens=False)["choices"][0]
    assert hidden["text"] == "one two"
    by_id = service.complete(**body, stop_token_ids=[ids[-1]])["choices"][0]
    assert (by_id["finish_reason"], by_id["stop_reason"]) == ("stop", ids[-1])
    assert by_id["token_ids"] == ids
    assert by_id["text"] == codec.decode(ids[:-1])
    events = service.stream(COMPLETIONS, **body, stop_token_ids=[ids[-1]])
    assert "".join(e["choices"][0]["text"] for e in events) == codec.decode(ids[:-1])


def test_ignored_eos_is_ordinary_text(service, codec):
    ids = codec.encode("one two", add_special_tokens=False)
    for worker in service.workers:
        worker.script = lambda submit: [*ids, 1, *ids]
    count = 2 * len(ids) + 1
    choice = service.complete(prompt="x", max_tokens=count, ignore_eos=True, skip_special_tokens=False)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one two<|eos|>one two", "length")


def test_completion_logprobs(service, codec):
    choice = service.complete(prompt="x", max_tokens=9, logprobs=2, return_token_ids=True)["choices"][0]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert logprobs["token_logprobs"] == [-1.5] * 9
    for spelled, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        # Pieces of a character begin at its start; the last character here is incomplete.
        shown = choice["text"][offset:] or "\ufffd"
        assert shown[0] in "你\ufffd" if spelled.startswith("bytes:") else shown.startswith(spelled)
    for token_id, spelled, top in zip(choice["token_ids"], logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        raw = codec.token_bytes.of(token_id)
        assert spelled == (raw.decode() if raw.isascii() else "bytes:" + "".join(f"\\x{b:02x}" for b in raw))
        assert len(top) == 3, "expected two alternatives and the chosen token"
        assert top[spelled] == -1.5
    events = service.stream(COMPLETIONS, prompt="x", max_tokens=9, logprobs=2)
    streamed = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    for name in logprobs:
        assert [v for part in streamed for v in part[name]] == logprobs[name]


def test_chat_logprobs(service, codec):
    answer = service.chat(messages=HELLO, max_tokens=6, logprobs=True, top_logprobs=3, return_token_ids=True)
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    assert [bytes(c["bytes"]) for c in content] == [codec.token_bytes.of(i) for i in choice["token_ids"]]
    assert all(len(c["top_logprobs"]) == 3 and c["logprob"] == -1.5 for c in content)
    assert content[0]["top_logprobs"][0]["logprob"] == -0.25
    bare = service.chat(messages=HELLO, max_tokens=2, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [c["top_logprobs"] for c in bare] == [[], []]


def test_continue_final_message(service, codec):
    messages = [*HELLO, {"role": "assistant", "content": "I say "}]
    service.chat(messages=messages, max_tokens=1, continue_final_message=True)
    text = "<|bos|><|user|>Hello world<|eos|>\n<|assistant|>I say "
    assert list(service.submits[0].prompt_token_ids) == codec.encode(text, add_special_tokens=False)


def test_models(service):
    (card,) = service.client.get("/v1/models").json()["data"]
    assert card["id"] == "tiny"
    assert card["max_model_len"] == 256
    assert service.client.get("/v1/models/tiny").json() == card
    assert service.client.get("/v1/models/").json()["data"] == [card]


def test_model_with_a_slash_in_its_name(start):
    service = start(1, model_name="maker/tiny-1")
    for path in ("maker/tiny-1", "maker%2Ftiny-1"):
        assert service.client.get(f"/v1/models/{path}").json()["id"] == "maker/tiny-1"
    metrics = service.client.get("/metrics").text
    assert 'path="/v1/models/{id}",status="200"} 2.0' in metrics


def test_requests_spread_over_the_ranks(service):
    service.complete(prompt=["a"] * 6, max_tokens=3)
    assert [len(w.submits) for w in service.workers] == [3, 3]


def test_connection_is_kept_alive(service):
    first = service.post(COMPLETIONS, prompt="x", max_tokens=1)
    stream = service.client.stream("POST", COMPLETIONS, json={"prompt": "x", "max_tokens": 2, "stream": True})
    with stream as answer:
        answer.read()
    assert "close" not in (first.headers.get("connection", ""), answer.headers.get("connection", ""))


def test_a_choice_that_stops_is_aborted_while_others_run(service, codec, pool, wait_for):
    stopping = codec.encode("one two", add_special_tokens=False)
    story = codec.encode(STORY * 9, add_special_tokens=False)
    for worker in service.workers:
        worker.pace = 0.01
        worker.script = lambda submit: [*stopping, *story] if submit.sampling.seed == 7 else story
    answer = pool.submit(service.complete, prompt="x", n=2, seed=7, max_tokens=150, stop="two")
    wait_for(lambda: len(service.aborts) == 1, "the stopped choice must free its slot")
    assert not answer.done(), "the other choice must still run"
    assert [c["finish_reason"] for c in answer.result()["choices"]] == ["stop", "length"]


def test_route_is_reported_in_a_header(service):
    prompt = "Hello world. " * 12
    first = service.post(COMPLETIONS, prompt=prompt, max_tokens=2)
    rank = first.headers["x-moeyard-route"].split(";")[0]
    again = service.post(COMPLETIONS, prompt=prompt, max_tokens=2, n=1).headers["x-moeyard-route"]
    pages = len(service.submits[0].prompt_token_ids) // 16
    assert pages > 0
    assert again == f"{rank};reason=prefix;cached={pages * 16}"
    with service.client.stream("POST", COMPLETIONS, json={"prompt": prompt, "max_tokens": 2, "stream": True}) as answer:
        assert answer.headers["x-moeyard-route"] == again
        answer.read()


def test_route_header_lists_the_first_choices_only(service):
    """Proxies limit headers to some KiB."""
    routes = service.post(COMPLETIONS, prompt="x", max_tokens=1, n=20).headers["x-moeyard-route"].split(", ")
    assert len(routes) == 17
    assert routes[-1] == "more=4"


def test_client_keeps_its_rank(service):
    others = [service.post(COMPLETIONS, prompt=f"{i}", max_tokens=2, user="ann") for i in range(3)]
    assert len({answer.headers["x-moeyard-route"].split(";")[0] for answer in others}) == 1
    long = ["c" * 5000 + "1"] * 3
    answers = [service.post(COMPLETIONS, prompt=f"{i}", max_tokens=2, user=name) for i, name in enumerate(long)]
    assert [answer.headers["x-moeyard-route"].split(";")[1] for answer in answers[1:]] == ["reason=client"] * 2
    assert max(map(len, service.server._fleet.admission.placement._last_ranks)) <= 256
    named = {"x-session-id": "bob"}
    bodies = ({"prompt": f"{i}", "max_tokens": 2, "user": f"{i}"} for i in range(3))
    routes = [service.client.post(COMPLETIONS, json=body, headers=named).headers["x-moeyard-route"] for body in bodies]
    assert [route.split(";")[1] for route in routes[1:]] == ["reason=client"] * 2
