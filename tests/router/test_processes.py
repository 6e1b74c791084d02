"""Several routers on one port: every request ends, their counts are summed, and a killed router is replaced."""

import json
import multiprocessing
import re
import threading

import httpx
import pytest
from tests.limits import HANG_SECONDS

from moeyard.listen import bind
from moeyard_router.http.process import Ready, Seat, SharedAddress, run_router_process


def ask(service, **body):
    """Send a request on a new connection, which the kernel gives to either router."""
    with httpx.Client(base_url=service.url, timeout=HANG_SECONDS) as client:
        return client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4, **body})


def ended(page):
    """Return the choices that ended by their limit, over all routers."""
    found = re.search(r'moeyard_request_success_total\{[^}]*finished_reason="length"[^}]*\} (\S+)', page)
    return float(found[1]) if found else 0.0


def poll(client, wait_for, path, done):
    """Poll a page until it is complete: a router omits another that does not answer within a second."""
    pages = []
    wait_for(lambda: pages.append(client.get(path)) or done(pages[-1]), f"{path} lacks what another router counts")
    return pages[-1]


def routers():
    return {p.pid: p for p in multiprocessing.active_children() if p.name.startswith("router-")}


def check_page(service, page, wait_for):
    """The page at / shows the requests of all routers, whichever one answers, like /metrics."""
    for _ in range(4):
        with httpx.Client(base_url=service.url, timeout=HANG_SECONDS) as client:
            live = poll(client, wait_for, "/v1/fleet/live", lambda page: len(page.json()["requests"]) == 12).json()
            fleet = client.get("/v1/fleet").json()
        assert len({request["id"] for request in live["requests"]}) == 12
        times = [request["ended"] for request in live["requests"]]
        assert times == sorted(times, reverse=True)
        for name in ("prompt_tokens", "output_tokens"):
            assert live["counters"][name] == value_of(page, f"{name}_total")
        assert live["counters"]["request_success"] == {"length": 12, "stop": 0, "abort": 0, "error": 0}
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            reported = live["histograms"][name]
            assert reported["count"] == value_of(page, f"{name}_count") == 12
            assert reported["sum"] == pytest.approx(value_of(page, f"{name}_sum"))
            buckets = re.findall(rf'moeyard_{name}_bucket\{{le="([^"]+)"[^}}]*\}} (\S+)', page)
            assert reported["buckets"] == [[None if le == "+Inf" else float(le), float(count)] for le, count in buckets]
        assert live["inflight"] == fleet["inflight"] == value_of(page, "num_requests_inflight") == 0
        assert [worker["router_inflight"] for worker in fleet["workers"]] == [0, 0]


def value_of(page, name):
    found = re.findall(rf"(?m)^moeyard_{name}\{{[^}}]*\}} (\S+)$", page)
    assert len(found) == 1
    return float(found[0])


def test_requests_of_one_router_are_visible_at_all(start, wait_for):
    service = start(num_workers=1, num_routers=2)
    (worker,) = service.workers
    worker.pace = 0.05
    body = {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=HANG_SECONDS) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        next(lines)
        worker.paused = True
        for _ in range(6):
            with httpx.Client(base_url=service.url, timeout=HANG_SECONDS) as client:
                live, fleet = (
                    poll(client, wait_for, path, lambda page: page.json()["inflight"] == 1).json()
                    for path in ("/v1/fleet/live", "/v1/fleet")
                )
            assert live["workers"][0]["router_inflight"] == fleet["workers"][0]["router_inflight"] == 1
            assert live["requests"] == []


def once(call):
    """Return a function that calls `call` the first time and does nothing later."""
    calls = iter((call,))
    return lambda: next(calls, lambda: None)()


def test_all_routers_answer_and_a_killed_one_is_replaced(start, wait_for, caplog, pool):
    service = start(num_workers=2, num_routers=2)
    with pytest.raises(ValueError, match="in use"):
        bind("127.0.0.1", int(service.url.rpartition(":")[2]), shared=True)
    pids = set(routers())
    assert len(pids) == 2
    assert {ask(service).status_code for _ in range(12)} == {200}
    page = poll(service.client, wait_for, "/metrics", lambda page: ended(page.text) == 12).text
    assert page.count("moeyard_workers{") == 7, "series of the fleet must appear once"
    assert re.search(r'moeyard_workers\{[^}]*state="ready"[^}]*\} 2\.0', page)
    check_page(service, page, wait_for)

    def text(*, begun=lambda: None):
        """Return one answer, streamed over its own connection, or None if the connection breaks."""
        body = {"prompt": "Hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
        found = []
        try:
            with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=HANG_SECONDS) as answer:
                for line in filter(None, answer.iter_lines()):
                    begun()
                    found.append(line)
        except httpx.TransportError:
            return None
        assert found[-1] == "data: [DONE]"
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in found[:-1])

    expected = text()
    for worker in service.workers:
        worker.pace = 0.05
    all_run = threading.Barrier(13)
    streams = [pool.submit(text, begun=once(all_run.wait)) for _ in range(12)]
    all_run.wait(HANG_SECONDS)
    poll(service.client, wait_for, "/metrics", lambda page: ended(page.text) == 13)
    routers()[min(pids)].kill()
    for worker in service.workers:
        worker.pace = 0.0
    texts = [stream.result() for stream in streams]
    assert {*texts} <= {expected, None}, "requests of the other router must continue"
    again = [text() for found in texts if found is None]
    assert again == [expected] * len(again), "the other router must answer while the third one starts"
    wait_for(lambda: len(set(routers()) - {min(pids)}) == 2, "no router replaced the killed one")
    assert {ask(service).status_code for _ in range(12)} == {200}
    assert "ended by itself (exit code -9)" in caplog.text
    counts = [13.0]

    def all_counted():
        page = httpx.get(f"{service.url}/metrics", timeout=HANG_SECONDS).text  # either router answers
        counts.append(ended(page))
        return counts[-1] == 13 + 12 + 12

    wait_for(all_counted, "counts of the killed router are missing")
    assert counts == sorted(counts), "counters fell"


def test_lost_worker_is_reported_once_by_name(start, wait_for):
    service = start(num_workers=1, num_routers=2, recovery_timeout=0.0)
    service.workers[0].die()

    def reported_by_all():
        # Each new connection may go to either router.
        with httpx.Client(base_url=service.url, timeout=HANG_SECONDS) as client:
            return all(client.get("/v1/fleet", headers={"connection": "close"}).json()["failure"] for _ in range(8))

    wait_for(reported_by_all, "a router has not noticed the loss")
    assert service.lost == [0]
    assert "worker 0" in service.failures[0]
    assert "is gone" in service.failures[0]
    answer = ask(service)
    assert answer.status_code == 503
    assert "is gone" in answer.json()["error"]["message"]


def test_router_without_launcher_stops(start, tmp_path):
    """It stops at once, so that its port is free for the next one; the workers stop separately."""
    service = start(num_workers=1)
    service.workers[0].pace = 0.05
    config = service.server._config
    with bind("127.0.0.1", 0, shared=True) as sock:
        seat = Seat(index=0, count=1, address=SharedAddress.of(sock), directory=tmp_path)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=run_router_process, args=(config, seat, theirs))
        process.start()
        theirs.close()
        assert isinstance(ours.recv(), Ready)
        body = {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=HANG_SECONDS) as answer:
            lines = answer.iter_lines()
            next(lines)
            ours.close()
            assert "moeyard serve has ended, and its workers with it" in [line for line in lines if line][-1]
        process.join(HANG_SECONDS)
        assert process.exitcode == 0
