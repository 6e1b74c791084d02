"""Grammars in a real fleet: one answer for any ranks and batch, and a bad grammar ends only its own request."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fleet import Answer, Fleet, ProcessPool, start_fleet

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.protocol import Done, Grammar, Rejected

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS = {
    "free": None,
    "choice": Grammar(kind="choice", text='["yes", "no", "perhaps"]'),
    "schema": Grammar(kind="json_schema", text=json.dumps(SCHEMA)),
    "regex": Grammar(kind="regex", text="[a-f]{3}-[0-9]{5}"),
    "digits": Grammar(kind="regex", text="[0-9]{20}"),
}
CASES = {"2ranks": {"num_workers": 2}, "2deep-scarce": {"async_scheduling": True, "scarce": True}}


def config(model: Path, *, scarce: bool = False, **options: Any) -> EngineConfig:
    return EngineConfig(
        model_path=str(model),
        page_size=16,
        kv_memory=1 << (16 if scarce else 20),
        max_model_len=128,
        max_batch_tokens=64,
        max_num_seqs=8,
        **options,
    )


def submit(fleet: Fleet, label: str, name: str) -> None:
    rank = len(label) % len(fleet.endpoints)
    sampling = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "logprobs": 1, "grammar": GRAMMARS[name]}
    fleet.client.submit(rank, f"{label}-{name}", [5, 9, 40, len(name)] * 3 + [7], **sampling)


def result(answer: Answer) -> Any:
    assert isinstance(answer.end, Done), answer.end
    return answer.token_ids, answer.logprobs, answer.end.finish_reason


@pytest.fixture(scope="module")
def alone(processes: ProcessPool, checkpoints: dict[str, Path]) -> dict[str, Any]:
    """Answer each request alone on one rank."""
    with start_fleet(processes, config(checkpoints["mla"])) as fleet:
        found = {}
        for name in GRAMMARS:
            submit(fleet, "alone", name)
            found[name] = result(fleet.client.wait(f"alone-{name}")[0])
    return found


@pytest.mark.parametrize("case", CASES)
def test_one_answer_with_grammars(
    case: str, alone: dict[str, Any], processes: ProcessPool, checkpoints: dict[str, Path]
) -> None:
    """Run all requests at once, twice, beside requests whose grammars are refused or aborted."""
    with start_fleet(processes, config(checkpoints["mla"], **CASES[case])) as fleet:
        client = fleet.client
        client.submit(0, "bad", [1, 2], max_tokens=4, grammar=Grammar(kind="regex", text="("))
        client.submit(0, "long", [1, 2], max_tokens=4, grammar=Grammar(kind="regex", text="a" * 70000))
        client.submit(0, "gone", [1, 2], max_tokens=90, grammar=Grammar(kind="regex", text="[a-z]{80}"))
        client.abort(0, "gone")
        for label in ("a", "bb"):
            for name in GRAMMARS:
                submit(fleet, label, name)
        client.wait()
        for again in range(20):
            # Preemption depends on when the grammars finish compiling, so try again until it happens.
            (stats, *_) = fleet.call("stats")
            if "scarce" not in case or stats["num_preemptions"]:
                break
            for label in (f"again{again}", f"beside{again}"):
                for name in GRAMMARS:
                    submit(fleet, label, name)
            client.wait()
        assert (stats["num_preemptions"] > 0) == ("scarce" in case), stats
        ends = {name: client.answers[name].end for name in ("bad", "long", "gone")}
        for label in ("a", "bb"):
            assert {name: result(client.answers[f"{label}-{name}"]) for name in GRAMMARS} == alone
    bad, long, gone = ends["bad"], ends["long"], ends["gone"]
    assert isinstance(bad, Rejected)
    assert (bad.reason, "the grammar cannot be compiled" in bad.message) == ("bad_request", True)
    assert isinstance(long, Rejected)
    assert "70000 bytes" in long.message
    assert isinstance(gone, Done)
    assert gone.finish_reason == "abort"
