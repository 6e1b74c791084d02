"""bench/drills.py: its counts of lost, repeated and different tokens, its plans, and a drill of a real fleet."""

import asyncio
import json
import os
import random
import struct
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import psutil
import pytest
from drilling.asks import fresh_ask, make_asks
from drilling.drive import Drill, Outcome, hit
from drilling.faults import Fault, plan, silence
from drilling.load import Exchange
from drilling.poison import poison
from drilling.soak import Held, Sample, table
from drilling.streams import Answer, Difference, compare, compare_ids
from drilling.watch import losses_since, recovered, unready_seconds
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.limits import HANG_SECONDS

from moeyard_router.api.schema import ChatRequest, CompletionRequest
from moeyard_router.api.validation import validate

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deploy" / "demo"
IDS = list(range(100, 140))


def streamed(ids: list[int], *, shift: float = 0.0, finish: str | None = "length", done: bool = True) -> Answer:
    """Return the events of an answer with one choice, one token each with a log-probability."""
    answer = Answer()
    for place, token in enumerate(ids):
        logprobs = {
            "tokens": [f"t{token}"],
            "token_logprobs": [-1.0 - token / 7 - shift],
            "top_logprobs": [{f"t{token}": -1.0}],
            "text_offset": [place],
        }
        answer.take({"choices": [{"index": 0, "text": f" {token}", "token_ids": [token], "logprobs": logprobs}]})
    if done:
        answer.take({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": finish}]})
        answer.take({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(ids)}})
    return answer


def test_equal_answers() -> None:
    assert not compare(streamed(IDS), streamed(IDS))
    whole = Answer()
    whole.take(
        {
            "choices": [{"index": 0, "text": " 7", "token_ids": [7], "logprobs": None, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1},
        }
    )
    assert whole.num_tokens == 1
    assert whole.choices[0].finish_reason == "stop"


@given(st.data())
def test_lost_and_repeated_tokens_are_counted(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 10**6), min_size=12, max_size=40, unique=True))
    begin = data.draw(st.integers(1, len(ids) - 2))
    size = data.draw(st.integers(1, min(begin, len(ids) - 1 - begin)))
    without = ids[:begin] + ids[begin + size :]
    assert compare_ids(ids, without) == Difference(lost=size)
    again = ids[:begin] + ids[begin - size : begin] + ids[begin:]
    assert compare_ids(ids, again) == Difference(repeated=size)
    other = ids[:begin] + [-1 - i for i in range(size)] + ids[begin + size :]
    assert compare_ids(ids, other) == Difference(different=size)
    more = ids[:begin] + [-1 - i for i in range(size)] + ids[begin:]
    assert compare_ids(ids, more) == Difference(different=size)


def test_whole_answers_are_compared_to_the_last_bit() -> None:
    reference = streamed(IDS)
    assert compare(reference, streamed(IDS, shift=1e-15)).different > 0
    assert compare(reference, streamed(IDS, finish="stop")) == Difference(different=1)
    assert compare(reference, streamed(IDS[:-2])) == Difference(lost=2)
    spelled = streamed(IDS)
    spelled.choices[0].text += "x"
    assert compare(reference, spelled) == Difference(different=1)
    counted = streamed(IDS)
    counted.usage = (3, 41)
    assert compare(reference, counted) == Difference(different=1)
    two = streamed(IDS)
    two.take({"choices": [{"index": 1, "text": "", "token_ids": []}]})
    assert compare(reference, two) == Difference(different=1)
    assert compare(two, reference) == Difference()  # it has no tokens
    silent = Answer(usage=reference.usage)
    assert compare(reference, silent) == Difference(lost=len(IDS))


def test_failed_answer_is_compared_up_to_its_failure() -> None:
    failed = streamed(IDS[:7], done=False)
    failed.take({"error": {"message": "rank 1 lost"}})
    assert failed.error == "rank 1 lost"
    assert not compare(streamed(IDS), failed)
    failed.choices[0].token_ids[3] = 1
    assert compare(streamed(IDS), failed) == Difference(different=1)


def test_prompt_logprobs_are_part_of_an_answer() -> None:
    def body(value: float) -> dict[str, Any]:
        scores = [None, {"7": {"logprob": value, "rank": 1, "decoded_token": "x"}}]
        return {"choices": [{"index": 0, "text": "x", "token_ids": [7], "prompt_logprobs": scores}]}

    first, second, third = Answer(), Answer(), Answer()
    first.take(body(-1.5))
    second.take(body(-1.5))
    third.take(body(-1.25))
    assert not compare(first, second)
    assert compare(first, third) == Difference(different=1)


def test_unready_time_adds_up() -> None:
    changes = [(1.0, True, ""), (4.0, False, "a"), (6.0, True, ""), (8.0, False, "b"), (8.5, True, "")]
    assert unready_seconds(changes, 0.0, 10.0) == 2.5
    assert unready_seconds(changes, 5.0, 10.0) == 1.5
    assert unready_seconds(changes[:2], 0.0, 10.0) == 6.0
    assert unready_seconds([], 0.0, 10.0) == 0.0


def test_plans_are_seeded_and_of_every_kind() -> None:
    assert plan(3, 20) == plan(3, 20) != plan(4, 20)
    found = Counter((fault.kind, fault.moment) for fault in plan(0, 20))
    assert found["kill", "exchange"] == 5
    assert {kind for kind, _ in found} == {"kill", "kill-two", "kill-in-recovery", "stop"}
    assert found["kill", "idle"] == 2
    assert sum(found.values()) == 20
    assert {fault.moment for fault in plan(0, 4, kind="stop")} == {"prefill", "decode", "exchange", "idle"}
    assert len(plan(0, 50)) == 50
    assert Fault("kill", "decode") in plan(1, 20)


def test_requests_are_seeded_valid_and_of_every_kind() -> None:
    asks = make_asks(5, 32, max_tokens=96)
    assert asks == make_asks(5, 32, max_tokens=96) != make_asks(6, 32, max_tokens=96)
    for ask in [*asks, fresh_ask(random.Random(1), 0, max_tokens=96)]:
        # The service accepts it without ignoring a field.
        kind = ChatRequest if "chat" in ask.endpoint else CompletionRequest
        assert validate(ask.body, kind).ignored == ()
        assert ask.body["max_tokens"] <= 96
        assert ask.body.get("temperature") == 0 or "seed" in ask.body, "its answer must be deterministic"
        length = len(ask.body["prompt"]) if isinstance(ask.body.get("prompt"), list) else 0
        assert length + ask.body["max_tokens"] <= 1024, "the demo's longest sequence"
    bodies = [ask.body for ask in asks]
    assert any(body.get("n") == 2 for body in bodies)
    assert any("logprobs" in body for body in bodies)
    assert any("prompt_logprobs" in body for body in bodies)
    assert any("messages" in body for body in bodies)
    assert any(ask.prefill for ask in asks)
    beginnings = Counter(tuple(b["prompt"][:96]) for b in bodies if isinstance(b.get("prompt"), list))
    assert beginnings.most_common(1)[0][1] == 4


def test_silence_is_the_longest_gap_after_the_fault() -> None:
    # Two gaps between tokens: steps before the fault and the fleet's recovery; the machine pauses long after.
    times = [9.9, 10.01, 10.02, 13.0, 13.1, 18.0]
    assert silence(10.0, times) == (10.02, 13.0)
    assert silence(10.0, [9.0]) is None
    assert silence(10.0, [9.0, 12.5]) == (10.0, 12.5)


def test_recovery_ends_with_lasting_readiness() -> None:
    up, down, again = (1.0, True, "ready"), (10.2, False, "rank 1 is lost"), (13.0, True, "ready")
    assert recovered([up], 10.0, 12.0, notice=15.0) is None
    assert recovered([up], 10.0, 26.0, notice=15.0) == (0.0, "")
    assert recovered([up, down], 10.0, 90.0, notice=15.0) is None
    assert recovered([up, down, again], 10.0, 13.1, notice=15.0) is None
    assert recovered([up, down, again], 10.0, 14.0, notice=15.0) == (3.0, "rank 1 is lost")
    # A second fault during the first recovery keeps the fleet unready.
    assert recovered([up, down], 12.0, 40.0, notice=15.0) is None
    assert recovered([up, down, again], 12.0, 40.0, notice=15.0) == (1.0, "rank 1 is lost")


def incident(when: float, *ranks: int, heard: tuple[float, ...] = (0.0,), launcher: bool = True) -> dict[str, Any]:
    """Return an incident in the format of /v1/fleet/incidents."""
    reports = [{"seconds": seconds, "reason": "a word"} for seconds in heard]
    lost = {"reason": "a word", "lost": [{"rank": rank} for rank in ranks], "reports": []}
    return {"when": when, "ranks": list(ranks), "reports": reports, "launcher": lost if launcher else None}


def test_fault_has_its_own_incident() -> None:
    before, back, lost = incident(10.0, 1), incident(20.5), incident(20.3, 1)
    assert losses_since([back, lost, before], 20.0, [1]) == [lost]
    assert losses_since([back, before], 20.0, [1]) == [], "other ranks and earlier losses must not count"
    assert losses_since([lost], 20.0, [0]) == []
    assert losses_since([lost], 20.0) == [lost]
    again = incident(18.0, 0, 1, heard=(0.0, 2.5), launcher=False)
    assert losses_since([again], 20.0, [1]) == [again], "a later incident without rank 0 must count"
    assert losses_since([], 20.0, [1]) == []


def test_only_effective_faults_count_as_survived() -> None:
    """A fault counts only if it hit a process and the server noticed it."""
    whole = Outcome(number=1, fault="kill", moment="decode", ranks=[1], ready_seconds=2.0, incident=incident(20.3, 1))
    assert whole.survived
    assert not replace(whole, ranks=[]).survived
    assert not replace(whole, incident={}, ready_seconds=0.0).survived
    assert not replace(whole, fault="kill-two", missed=1).survived
    assert not replace(whole, fault="stop", incident={}).survived
    assert not replace(whole, failed=1).survived
    assert not replace(whole, ready_seconds=None).survived
    # The bad request hits whichever rank runs it.
    assert replace(whole, fault="exception", ranks=[]).survived
    assert not replace(whole, fault="exception", ranks=[], incident={}).survived
    # Planned actions lose no rank.
    assert replace(whole, fault="restart", incident={}).survived
    assert not replace(whole, fault="restart", incident={}, ranks=[]).survived
    assert replace(whole, fault="router", incident={}, ranks=[], failed=3).survived


def test_ended_process_is_not_hit() -> None:
    outcome = Outcome(number=1, fault="kill-two", moment="decode")
    with subprocess.Popen(["sleep", "60"]) as child:
        process = psutil.Process(child.pid)
        hit(outcome, 0, process)
        assert (outcome.ranks, outcome.missed) == ([0], 0)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        hit(outcome, 1, process)  # no one has reaped it yet
        assert (outcome.ranks, outcome.missed) == ([0], 1)
    hit(outcome, 1, process, stop=True)
    assert (outcome.ranks, outcome.missed) == ([0], 2)
    assert not replace(outcome, ready_seconds=1.0, incident=incident(20.3, 0)).survived


class Idle:
    """A load without requests."""

    inflight: tuple[Exchange, ...] = ()
    history: tuple[Exchange, ...] = ()

    async def pause(self, seconds: float) -> bool:
        return True

    def resume(self) -> None:
        """There are no requests to resume."""

    async def ended(self, met: list[Exchange], seconds: float) -> bool:
        return True


class ReadyServer:
    """A watch on a server that is always ready; its page of incidents is `page`."""

    def __init__(self, page: list[dict[str, Any]]) -> None:
        self.page = page
        workers = [{"rank": 0, "endpoint": "tcp://127.0.0.1:1"}]
        answer = httpx.MockTransport(lambda request: httpx.Response(200, json={"workers": workers}))
        self.http = httpx.AsyncClient(transport=answer, base_url="http://server")

    async def ready_after(self, begun: float, *, patience: float, notice: float) -> tuple[float | None, str]:
        return 0.0, ""

    async def incidents(self) -> list[dict[str, Any]]:
        return self.page


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", ["kill", "stop"])
@pytest.mark.parametrize(
    ("there", "page", "note"),
    [
        (False, [], "there was no worker to hit"),
        (True, [], "no incident reports it"),
        (True, [incident(10.0, 0)], "no incident reports it"),
        (True, [incident(1e12, 0)], None),
    ],
    ids=["no process", "unnoticed", "earlier", "noticed"],
)
def test_fault_gets_a_verdict(kind: str, there: bool, page: list[dict[str, Any]], note: str | None) -> None:
    """A real process plays a rank of a server that stays ready."""
    with subprocess.Popen(["sleep", "60"]) as child:
        server: Any = SimpleNamespace(ranks=lambda fleet: {0: psutil.Process(child.pid)} if there else {})
        load, watch, client = cast(Any, Idle()), cast(Any, ReadyServer(page)), cast(Any, None)

        async def drive() -> Outcome:
            drill = Drill(server, client, load=load, watch=watch, known={}, rng=random.Random(0), patience=1.0)
            # The process is fenced once it is stopped, like a launcher does.
            fence = asyncio.create_task(asyncio.to_thread(fenced, child.pid)) if there and kind == "stop" else None
            outcome = await drill.inflict(1, Fault(kind, "idle"))
            if fence is not None:
                await fence
            return outcome

        outcome = asyncio.run(drive())
        child.kill()
    assert outcome.ranks == ([0] if there else [])
    assert outcome.survived == (note is None)
    assert note is None or note in outcome.note


def fenced(pid: int) -> None:
    """Kill a process once it is stopped."""
    process = psutil.Process(pid)
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    process.kill()


def test_exchanges_are_distinguished() -> None:
    ask = make_asks(0, 1, max_tokens=8)[0]
    assert len({Exchange(ask, 0.0), Exchange(ask, 0.0)}) == 2


def test_soak_detects_a_leak() -> None:
    before = Held(running=0, pages=0, connections=20, files=60, ranks=3)
    after = Held(running=0, pages=0, connections=1, files=41, ranks=3)
    flat = [Sample(5.0 * i, 200 << 20, 300 << 20) for i in range(30)]
    assert all(good for _, _, good in table(before, after, samples=flat, workers=3))
    for change, what in (
        ({"running": 1}, "running"),
        ({"pages": 2}, "pages"),
        ({"connections": 3, "files": 43}, "connections"),
        ({"files": 50}, "files"),
        ({"ranks": 2}, "rank processes"),
    ):
        rows = table(before, replace(after, **change), samples=flat, workers=3)
        [bad] = [name for name, _, good in rows if not good]
        assert what in bad
    growing = [Sample(5.0 * i, (200 + 3 * i) << 20, 300 << 20) for i in range(30)]
    [bad] = [name for name, _, good in table(before, after, samples=growing, workers=3) if not good]
    assert "router" in bad


def test_poisoned_checkpoint_has_one_row_of_nan(tmp_path: Path) -> None:
    poison(DEMO, tmp_path / "bad", token_id=4090)
    before = load_file(DEMO / "model.safetensors")
    after = load_file(tmp_path / "bad" / "model.safetensors")
    changed = [name for name, tensor in before.items() if not bool((tensor == after[name]).all())]
    assert changed == ["model.embed_tokens.weight"]
    rows = after["model.embed_tokens.weight"].isnan().any(dim=1).nonzero().flatten().tolist()
    assert rows == [4090]
    (length,) = struct.unpack("<Q", (tmp_path / "bad" / "model.safetensors").read_bytes()[:8])
    assert 0 < length < 10**6


@pytest.mark.slow
def test_short_drill(tmp_path: Path) -> None:
    """Two seeded faults under load: no request fails, no answer changes, and the fleet recovers."""
    figures = tmp_path / "drill.json"
    size = ["--workers", "2", "--streams", "6", "--asks", "8", "--max-tokens", "32"]
    arguments = ["--faults", "2", "--seed", "1", *size, "--pace", "0", "--patience", "300", "--json", str(figures)]
    drill = subprocess.Popen(
        [sys.executable, str(ROOT / "bench" / "drills.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        out, _ = drill.communicate()
    finally:
        drill.terminate()  # it ends its server then
        drill.wait(HANG_SECONDS)
    print(out)
    assert drill.returncode == 0, out
    found = json.loads(figures.read_text())
    assert len(found["outcomes"]) == 2
    assert all(outcome["survived"] and outcome["ranks"] for outcome in found["outcomes"])
    assert all(outcome["inflight"] for outcome in found["outcomes"])
    assert [len(outcome["ranks"]) for outcome in found["outcomes"]] == [1, 2], "the second fault must hit a recovery"
    assert found["beyond"] == 0
