"""Calculations of `moeyard bench URL`: percentiles, objectives, lengths, arrivals and stream parsing."""

import itertools
import random
import statistics

import pytest

from moeyard.clients.api_client import EventStream, StreamedAnswer
from moeyard.clients.bench.figures import (
    LoadRun,
    errors,
    figures,
    is_good,
    latencies,
    parse_slo,
    per_second,
    summary,
)
from moeyard.clients.bench.report import compare, describe
from moeyard.clients.bench.server import fit
from moeyard.clients.bench.workload import Lengths, Workload, Yardstick, arrivals, parse_lengths
from moeyard.clients.target_config import parse_target


def answer(*, sent: float = 0.0, times: tuple[float, ...] = (), ended: float = 0.0, tokens: int = 0) -> StreamedAnswer:
    usage = {"prompt_tokens": 7, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 3}}
    return StreamedAnswer(sent, sent=sent, ended=ended, status=200, times=list(times), usage=usage, done=True)


def test_percentiles_interpolate_between_ranks() -> None:
    """For 1 to 101 ms, percentile p is p + 1; for 10 and 20, each percentile interpolates."""
    values = [i / 1000 for i in range(1, 102)]
    random.Random(1).shuffle(values)
    assert summary(values) == pytest.approx({"mean": 51, "p50": 51, "p90": 91, "p95": 96, "p99": 100})
    assert summary([0.02, None, 0.01]) == pytest.approx({"mean": 15, "p50": 15, "p90": 19, "p95": 19.5, "p99": 19.9})
    assert summary([None]) == {}


def test_latencies_of_an_answer() -> None:
    """Five tokens in three events: times per token divide by the server's count, not by events."""
    found = latencies(answer(sent=1.0, times=(1.5, 1.7, 2.3), ended=2.4, tokens=5))
    assert found == pytest.approx({"ttft": 0.5, "tpot": 0.2, "e2e": 1.4})
    assert latencies(answer(times=(0.5,), ended=0.5, tokens=1))["tpot"] is None
    assert latencies(answer(ended=0.5))["ttft"] is None


def test_figures_of_a_run() -> None:
    whole = [answer(sent=i, times=(i + 0.1, i + 0.3), ended=i + 0.5, tokens=2) for i in range(4)]
    late = StreamedAnswer(0.0, sent=0.25, ended=1.0, status=429, error="the queue of cmpl-123abc is full")
    found = figures(LoadRun(begun=0, ended=4.0, cpu_seconds=0.04, answers=[*whole, late]), {"ttft": 0.2, "tpot": 0.1})
    assert (found["completed"], found["failed"]) == (4, 1)
    assert found["output_tokens_per_s"] == pytest.approx(2)
    assert found["total_tokens_per_s"] == pytest.approx(9)
    assert found["itl_ms"]["p99"] == pytest.approx(200)
    assert found["late_ms"]["p50"] == 0
    assert (found["client_cpu_share"], found["client_us_per_token"]) == pytest.approx((0.01, 5000))
    assert found["goodput"]["share"] == 0
    assert found["cached_tokens"] == 12


def test_goodput_requires_every_objective() -> None:
    one = answer(times=(0.4, 0.5), ended=0.6, tokens=2)
    found = parse_slo("ttft=500ms, tpot=0.2s,e2el:900000us")
    assert found == pytest.approx({"ttft": 0.5, "tpot": 0.2, "e2e": 0.9})
    assert is_good(one, parse_slo("ttft=500ms,tpot=200ms"))
    assert not is_good(one, parse_slo("ttft=399ms,tpot=200ms"))
    assert not is_good(one, parse_slo("tpot=99ms"))
    one.error = "broken"
    assert not is_good(one, {})
    for text in ("", "ttft", "ttft=5", "speed=5ms", "ttft=-1ms"):
        with pytest.raises(ValueError, match="no objective"):
            parse_slo(text)


def test_errors_are_counted_by_status_and_message() -> None:
    failed = [StreamedAnswer(0, status=429, error=f"request chatcmpl-{i}f waits\nno more") for i in range(3)]
    failed.append(StreamedAnswer(0, error="Connection refused"))
    assert errors([*failed, answer()]) == [
        {"status": 429, "message": "request <id> waits no more", "count": 3},
        {"status": 0, "message": "Connection refused", "count": 1},
    ]


def test_tokens_of_each_second_add_up() -> None:
    rows = [{"error": None, "sent": 0.0, "ttft": 0.5, "e2e": 2.5, "output_tokens": 20}]
    rows.append({"error": None, "sent": 2.0, "ttft": 0.25, "e2e": 0.25, "output_tokens": 1})
    assert per_second(rows) == pytest.approx([5, 10, 6], abs=1e-3)
    assert per_second([]) == []


def test_events_are_parsed_for_any_chunking() -> None:
    """The answer does not depend on chunk boundaries; comments, CRLF and events without output are not tokens."""
    stream = (
        ': ping\r\n\r\ndata: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        'data: {"choices":[{"delta":{"content":"Grüße"}}]}\r\n\r\ndata:{"choices":[{"text":" 🙂"}]}\n\n'
        'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n'
        'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    ).encode()
    for size in (1, 2, 7, 64, len(stream)):
        found = StreamedAnswer(0.0)
        events = EventStream(found)
        for i in range(0, len(stream), size):
            events.feed(stream[i : i + size], i)
        assert (found.text, found.output_tokens, found.done, len(found.times)) == ("Grüße 🙂", 3, True, 3)
    broken = StreamedAnswer(0.0)
    EventStream(broken).feed(b'data: {"error": {"message": "rank 1 lost", "code": 503}}\n\n', 0.0)
    assert broken.error == "rank 1 lost"


def test_lengths() -> None:
    rng = random.Random(0)
    assert {parse_lengths("512").draw(rng) for _ in range(9)} == {512}
    drawn = [parse_lengths("10:12").draw(rng) for _ in range(200)]
    assert set(drawn) == {10, 11, 12}
    drawn = [parse_lengths("lognormal:100:0.5").draw(rng) for _ in range(4000)]
    assert statistics.median(drawn) == pytest.approx(100, rel=0.05)
    assert statistics.mean(drawn) == pytest.approx(113, rel=0.05)  # 100 exp(0.5^2 / 2)
    assert max(parse_lengths("lognormal:100:2:150").draw(rng) for _ in range(100)) == 150
    for text in ("0", "x", "5:4", "1:2:3", "lognormal:5", "lognormal:5:0", "lognormal:0:1", "lognormal:5:1:0"):
        with pytest.raises(ValueError, match="no distribution"):
            parse_lengths(text)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_spread_of_a_gamma_process(burstiness: float) -> None:
    due = list(itertools.islice(arrivals(5.0, burstiness, 3), 20001))
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2 / burstiness**0.5, rel=0.05)
    assert list(itertools.islice(arrivals(float("inf"), 1.0, 3), 3)) == [0, 0, 0]


def workload(**changes: object) -> Workload:
    fields = {"kind": "words", "turns": 1, "shared_prefix": 0, "seed": 5, "vocab_size": 256, "yardstick": Yardstick()}
    lengths: dict[str, Lengths] = {"prompt": parse_lengths("20"), "output": parse_lengths("4:8")}
    return Workload(**{**fields, **lengths, **changes})  # type: ignore[arg-type]


def test_prompts_are_distinct_and_seeded() -> None:
    many = workload(shared_prefix=6, turns=2)
    conversations = [many.conversation(i) for i in range(50)]
    firsts = [str(turns[0].prompt).split() for turns in conversations]
    assert {tuple(words[:6]) for words in firsts} == {tuple(firsts[0][:6])}
    assert len({tuple(words[6:14]) for words in firsts}) == 50
    assert {len(words) for words in firsts} == {26}
    assert conversations[7] == workload(shared_prefix=6, turns=2).conversation(7)
    assert conversations[7] != workload(shared_prefix=6, turns=2, seed=6).conversation(7)
    ids = workload(kind="ids").conversation(0)[0].prompt
    assert len(ids) == 20
    assert all(isinstance(i, int) and 0 <= i < 256 for i in ids)


def test_yardstick_makes_prompts_of_the_wanted_length() -> None:
    """A template of 11 tokens and 1.5 tokens per word."""
    found = fit([(4, 17), (28, 53), (300, 461)])
    assert (found.base, found.per_word) == pytest.approx((11, 1.5))
    assert found.words(161) == 100
    assert found.words(5) == 1
    assert fit([(4, 9), (28, 9)]).per_word > 0


def test_two_results_side_by_side() -> None:
    def result(seconds: float) -> dict[str, object]:
        answers = [answer(sent=0, times=(seconds, 2 * seconds), ended=3 * seconds, tokens=2)]
        facts = {"url": "u", "model": "m", "load": "l", "lengths": "d", "interrupted": False}
        return {"facts": facts, "figures": figures(LoadRun(0.0, 3 * seconds, 0.001, False, answers), {}), "errors": []}

    lines = compare(result(0.1), result(0.2), ("one.json", "two.json")).splitlines()
    (row,) = [line.split() for line in lines if "TTFT median" in line]
    assert row == ["TTFT", "median", "ms", "100.00", "200.00", "2.00", "worse"]
    (row,) = [line.split() for line in lines if "output tokens/s" in line]
    assert row[-2:] == ["0.5", "worse"]
    assert "TTFT" in describe(result(0.1))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("host:81", "http://host:81"),
        ("https://host/proxy/v1", "https://host:443/proxy"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses_of_servers(url: str, expected: str) -> None:
    assert parse_target(url).url == expected


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:99999", "http://host:x"])
def test_invalid_addresses(url: str) -> None:
    with pytest.raises(ValueError, match="no address of a server"):
        parse_target(url)
