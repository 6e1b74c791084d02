"""The operator's settings: sampling defaults, names of the model, another chat template."""

import pytest

from moeyard_router.config import RouterConfig, SamplingDefaults, WorkerAddress
from moeyard_router.text.chat import TextCodec, open_codec

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
DEFAULTS = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05, max_tokens=7)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A chat template in a file."""
    path = tmp_path_factory.mktemp("template") / "own.jinja"
    path.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    return path


@pytest.fixture(scope="module")
def shared_service(template, starter):
    """A service with all of these settings."""
    return starter(1, sampling_defaults=DEFAULTS, model_aliases=("org/small", "it"), chat_template=template)


def sampling(service, path=CHAT, **body):
    answer = service.post(path, **body)
    assert answer.status_code == 200, answer.text
    return service.submits[-1].sampling


def test_defaults_fill_absent_fields(service):
    chosen = sampling(service, messages=HELLO, top_p=None)
    assert {name: getattr(chosen, name) for name in DEFAULTS.given()} == DEFAULTS.given()


def test_request_overrides_defaults(service):
    body = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "max_tokens": 9}
    chosen = sampling(service, messages=HELLO, **body)
    assert {name: getattr(chosen, name) for name in body} == body
    assert sampling(service, messages=HELLO, top_k=-1).top_k == 0


def test_completions_keep_openais_limit_unless_it_is_above_the_default(service, start):
    assert sampling(service, "/v1/completions", prompt="x").max_tokens == 7
    other = start(1, sampling_defaults=SamplingDefaults(max_tokens=100))
    assert sampling(other, "/v1/completions", prompt="x").max_tokens == 16
    assert sampling(other, messages=HELLO).max_tokens == 100


def test_every_alias_is_answered_with_the_first_name(service):
    for name in ("tiny", "org/small", "it"):
        assert service.chat(model=name, messages=HELLO)["model"] == "tiny"
        assert service.client.get(f"/v1/models/{name}").json()["id"] == name
    assert [card["id"] for card in service.client.get("/v1/models").json()["data"]] == ["tiny", "org/small", "it"]
    answer = service.post(CHAT, model="other", messages=HELLO)
    assert answer.status_code == 404
    assert "this server has 'tiny', 'org/small', 'it'" in answer.json()["error"]["message"]


def test_template_from_a_file(service, codec):
    service.chat(messages=HELLO)
    assert list(service.submits[0].prompt_token_ids) == codec.encode("[Hello]", add_special_tokens=False)


@pytest.mark.parametrize(("source", "says"), [("{% if %}", "line 1"), (None, "No such file")])
def test_a_bad_template_is_named(checkpoint, tmp_path, source, says):
    path = tmp_path / "bad.jinja"
    if source is not None:
        path.write_text(source)
    with pytest.raises((ValueError, OSError), match=rf"{says}.*|.*bad\.jinja.*{says}") as caught:
        TextCodec(checkpoint, path)
    assert str(path) in str(caught.value)


def test_a_template_needs_a_tokenizer(template):
    with pytest.raises(ValueError, match=r"own\.jinja.*tokenizer"):
        open_codec(None, template)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
    ],
)
def test_invalid_defaults_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingDefaults(**{name: value})


@pytest.mark.parametrize("aliases", [("m",), ("a", "a"), ("",)])
def test_invalid_names_are_refused(aliases):
    with pytest.raises(ValueError, match="model names"):
        RouterConfig(
            model_name="m",
            model_aliases=aliases,
            model_path=None,
            workers=(WorkerAddress(rank=0, endpoint="ipc://unused"),),
            max_model_len=8,
            vocab_size=9,
        )
