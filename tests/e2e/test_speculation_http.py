"""What a client gets with drafts is what it gets without: several choices of one request, over HTTP on two ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.http_fleet import HttpFleet, engine_config, events, serve_http, wait_until_idle
from tests.fleet import ProcessPool

pytestmark = pytest.mark.slow
ASKED: dict[str, Any] = {"prompt": "The captain said that", "n": 4, "temperature": 0.8, "top_p": 0.95, "seed": 17}
BODIES: dict[str, dict[str, Any]] = {
    "drawn": {**ASKED, "max_tokens": 32, "logprobs": 3, "ignore_eos": True},
    "penalised": {**ASKED, "max_tokens": 24, "repetition_penalty": 1.2, "presence_penalty": 0.3, "min_tokens": 24},
    "stopped": {**ASKED, "max_tokens": 48, "stop": ["the", "."], "logprobs": 0},
}


def answers(http: HttpFleet) -> dict[str, Any]:
    """Each body's choices in order, and its usage."""
    out = {}
    for name, body in BODIES.items():
        answer = http.complete(**body)
        out[name] = sorted(answer["choices"], key=lambda choice: choice["index"]), answer["usage"]["completion_tokens"]
    return out


@pytest.fixture(scope="module")
def plain(processes: ProcessPool, checkpoints: dict[str, Path]) -> dict[str, Any]:
    """What a fleet answers that has not loaded the layer that drafts."""
    with serve_http(processes, engine_config(checkpoints["demo"], num_workers=2), canary_interval=600.0) as http:
        return answers(http)


@pytest.fixture(scope="module", params=[1, 3])
def drafting(
    request: pytest.FixtureRequest, processes: ProcessPool, checkpoints: dict[str, Path]
) -> Iterator[HttpFleet]:
    """The same with drafts behind each token."""
    config = engine_config(checkpoints["demo"], num_workers=2, speculate="mtp", draft_tokens=request.param)
    with serve_http(processes, config, canary_interval=600.0) as http:
        yield http
        wait_until_idle(http)


@pytest.mark.sampled(0)
def test_seeded_choices_are_the_same(drafting: HttpFleet, plain: dict[str, Any]) -> None:
    """Whole: text, ids, log-probability bits, where each ends; each choice has a seed of its own, and drafts of it."""
    for choices, _ in plain.values():
        assert len({tuple(choice["token_ids"]) for choice in choices}) == 4
    assert answers(drafting) == plain
    accepted = drafting.total("moeyard_spec_decode_accepted_tokens_total")
    assert accepted > 0.3 * drafting.total("moeyard_spec_decode_draft_tokens_total") > 0


@pytest.mark.sampled(0)
def test_streamed_choices_are_the_same(drafting: HttpFleet, plain: dict[str, Any]) -> None:
    """What a step has accepted comes together: fewer events than tokens."""
    body = {**BODIES["drawn"], "stream": True, "return_token_ids": True}
    ids: list[list[int]] = [[], [], [], []]
    texts, sizes = [""] * 4, []
    with drafting.client.stream("POST", "/v1/completions", json=body) as answer:
        for choice in (choice for event in events(answer) for choice in event["choices"]):
            ids[choice["index"]] += choice["token_ids"]
            texts[choice["index"]] += choice["text"]
            sizes.append(len(choice["token_ids"]))
    choices, total = plain["drawn"]
    assert (ids, texts) == ([c["token_ids"] for c in choices], [c["text"] for c in choices])
    assert max(sizes) > 1
    assert sum(size > 0 for size in sizes) < 0.9 * total
