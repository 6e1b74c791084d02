"""Pauses and updates in the router: which requests run, wait or end, and what answers say of the weights."""

from dataclasses import replace

import pytest
from tests.router.scripted_worker import ready_snapshot
from tests.router.test_admission import RANKS, MachineDriver, done, of, where

from moeyard_router.config import system_fingerprint
from moeyard_router.fleet.instructions import Aborted, Ended, Run, Stop
from moeyard_router.fleet.orders import UNKNOWN, Cancel, Hold
from moeyard_worker.protocol import PromptLogprobs, TokenLogprob, Tokens


def hold(played, mode, **fields):
    """Give an order; return its answer and the instructions."""
    order, answers = Hold(mode=mode, **fields), []
    original = type(played.machine).hold
    played.machine.hold = lambda *args: answers.append(original(played.machine, *args))
    done_ = played.do("hold", order)
    del played.machine.hold
    return answers[0], done_


def test_wait_lets_requests_end_and_queues_new_ones():
    played = MachineDriver()
    played.submit("a")
    assert hold(played, "wait")[0] == 1
    assert of(Run, played.submit("b")) == []
    played.wait(500.0)
    assert "b-0" not in played.events, "the time of a pause does not count as waiting"
    played.end("a-0")
    assert hold(played, "wait")[0] == 0
    _, resumed = hold(played, None)
    assert [run[1] for run in where(resumed)] == ["b-0"]


def test_keep_lets_requests_where_they_are():
    played = MachineDriver()
    played.submit("a")
    answer, instructions = hold(played, "keep")
    assert answer == 1
    assert of(Stop, instructions) == []
    assert played.machine.held is not None
    assert played.machine.unavailable() is None, "clients may still ask"


def test_abort_ends_running_and_queued_requests_with_their_output():
    played = MachineDriver(worker_places=1)
    for name in ("a", "b", "c"):
        played.submit(name)
    tokens = Tokens(request_id="a-0", start=0, token_ids=(3, 4))
    played.do("heard", 0, [tokens])
    answer, instructions = hold(played, "abort")
    assert {each.request_id for each in of(Stop, instructions)} == {"a-0", "b-0"}
    assert answer == 2, "the workers have not confirmed yet"
    assert played.events == {"a-0": [tokens, Aborted()], "b-0": [Aborted()], "c-0": [Aborted()]}
    for rank, name in ((0, "a-0"), (1, "b-0")):
        played.do("heard", rank, [done(name, "abort")])
    assert hold(played, "abort")[0] == 0
    assert len(played.events["a-0"]) == 2, "each request ends once"


def test_unknown_while_a_rank_is_missing():
    played = MachineDriver()
    played.do("lose", 1, "its port refuses")
    assert hold(played, "wait")[0] == UNKNOWN


def change(played, version, fingerprint="f"):
    """Let all ranks report a new epoch with other weights, and the launcher hand them over."""
    addresses = played.machine.ranks.addresses
    for rank in range(RANKS):
        state = ready_snapshot(rank=rank, world_size=RANKS, epoch=7)
        played.do("heard", rank, [replace(state, state="recovering", failure="changing", epoch=0)])
        played.do("heard", rank, [replace(state, weight_version=version, fingerprint=fingerprint)])
    return played.do("replace", addresses, {"weight_version": version})


def test_update_is_planned_and_requests_stay_at_their_ranks():
    played = MachineDriver()
    played.submit("a")
    assert hold(played, "keep", switches=True)[0] == 1
    assert hold(played, None)[0] == UNKNOWN, "nothing runs until the workers are handed over"
    assert of(Run, played.submit("b")) == []
    instructions = change(played, "v2", "print")
    (ended,) = of(Ended, instructions)
    assert (ended.incident.planned, ended.incident.change) == (frozenset(), "update")
    assert [run[1] for run in where(instructions)] == ["b-0"], "a-0 goes on where it is"
    assert played.machine.flights.by_name["a-0"].rank == 0


@pytest.mark.parametrize("lost", [False, True])
def test_scores_of_old_weights_do_not_count(lost):
    """The worker scores the prompt again. A rank that takes the request over must do so, too."""
    played = MachineDriver()
    played.submit("a")
    scores = PromptLogprobs(request_id="a-0", start=1, logprobs=(TokenLogprob(logprob=-1.0, rank=1),))
    played.do("heard", 0, [scores])
    assert played.machine.flights.by_name["a-0"].scored == 1
    hold(played, "keep", switches=True)
    if lost:
        played.do("lose", 0, "it was killed")
        addresses = tuple(
            replace(each, endpoint="tcp://127.0.0.1:77") if each.rank == 0 else each
            for each in played.machine.ranks.addresses
        )
        played.do("replace", addresses, {"weight_version": "v2"})
        assert played.machine.flights.by_name["a-0"].submit().num_scored == 0
        return
    change(played, "v2")
    played.do("heard", 0, [scores])
    assert played.machine.flights.by_name["a-0"].scored == 1


def test_fingerprint_follows_the_weights():
    played = MachineDriver(fingerprint="start")
    assert played.machine.identified() == {"system_fingerprint": "fp_start"}
    for version in ("v1", "v2"):
        hold(played, "keep", switches=True)
        change(played, version, f"print of {version}")
        expected = {"system_fingerprint": f"fp_{system_fingerprint([f'print of {version}'], None)}"}
        assert played.machine.identified() == played.machine.identified(version) == expected
    assert played.machine.identified("v1") != played.machine.identified("v2"), "answers that began before keep theirs"


def test_fingerprints_of_the_latest_256_versions_are_kept():
    played = MachineDriver(fingerprint="start")
    for number in range(300):
        change(played, f"v{number}")
    known = [
        number for number in range(300) if played.machine.identified(f"v{number}") != {"system_fingerprint": "fp_start"}
    ]
    assert known == list(range(44, 300))


def test_sleep_outlasts_a_resume():
    """Requests queue until the server is awake, and until nobody pauses it."""
    played = MachineDriver()
    assert hold(played, "keep", asleep=2)[0] == 0
    assert of(Run, played.submit("a")) == []
    assert "sleeps at level 2" in played.machine.held
    _, resumed = hold(played, None)
    assert of(Run, resumed) == []
    assert "sleeps at level 2" in played.machine.held
    hold(played, "keep", asleep=0)
    assert "paused" in played.machine.held
    _, resumed = hold(played, None)
    assert [run[1] for run in where(resumed)] == ["a-0"]


def test_requests_end_by_their_names():
    played = MachineDriver(worker_places=1)
    for name in ("a", "b", "c"):
        played.submit(name, names=frozenset((f"my-{name}", "x")))
    cancelled = Cancel(names=frozenset(("my-a", "other")))
    played.do("cancel", cancelled)
    assert played.events["a-0"] == [Aborted()]
    assert not any(isinstance(event, Aborted) for name in ("b-0", "c-0") for event in played.events.get(name, []))
    assert played.machine.cancel(0.0, Cancel()) == 3, "the worker has not confirmed, and one is queued"
