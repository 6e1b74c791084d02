"""A real `moeyard serve` grows and shrinks under load: no request fails and no answer changes."""

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.deploy.test_restart import ask
from tests.deploy.test_serve import DEMO, Command, command, get

__all__ = ["command"]  # the fixture
TOKENS = 25


@pytest.mark.slow
def test_two_four_two_under_load(command: Callable[..., Command]) -> None:
    server = command("serve", DEMO, "--workers", "2", "--port", "0", "--served-model-name", "demo")
    server.wait_ready()
    streams = 4
    with ThreadPoolExecutor(streams) as pool:
        expected = list(pool.map(lambda i: ask(server.url, i, TOKENS), range(streams)))
        assert all(len(each["ids"]) == TOKENS + 5 * i for i, each in enumerate(expected))
        before = {process.pid for process in server.workers()}
        over: list[bool] = []

        def load(i: int) -> int:
            count = 0
            while not over:
                assert ask(server.url, i, TOKENS) == expected[i]
                count += 1
            return count

        def fleet() -> list[tuple[int, str]]:
            workers = get(f"{server.url}/v1/fleet").json()["workers"]
            return [(worker["rank"], worker["state"]) for worker in workers]

        loads = [pool.submit(load, i) for i in range(streams)]
        results: list[subprocess.CompletedProcess[str]] = []
        try:
            results.append(server.run("scale", "4"))
            assert results[0].returncode == 0, server.report(results[0].stderr)
            server.wait_for(lambda: fleet() == [(rank, "ready") for rank in range(4)])
            assert before < {process.pid for process in server.workers()}, "the old ranks must stay"
            targets = get(f"{server.url}/metrics/targets").json()
            assert [each["labels"]["worker"] for each in targets] == ["0", "1", "2", "3"]
            assert all("moeyard_" in get(f"http://{each['targets'][0]}/metrics").text for each in targets)
            # The new ranks serve: every rank has computed tokens, not only a canary's two.
            server.wait_for(lambda: all(count > 4 for count in sampled(server)))
            results.append(server.run("scale", "2", "--drain-timeout", "0.2"))
            assert results[1].returncode == 0, server.report(results[1].stderr)
        finally:
            over.append(True)
        counts = [each.result() for each in loads]
        server.wait_for(lambda: {process.pid for process in server.workers()} == before)
        assert fleet() == [(0, "ready"), (1, "ready")]
        assert ask(server.url, 0, TOKENS) == expected[0]
    assert min(counts) >= 1
    assert results[0].stdout.startswith("4 workers in place of 2, after "), results[0].stdout
    assert "starting rank 2, rank 3\n" in results[0].stderr
    assert results[1].stdout.startswith("2 workers in place of 4, after "), results[1].stdout
    assert "ranks 2 and 3 take no new requests, and have " in results[1].stderr
    page = server.incidents()
    assert [(each["planned"], each["reason"], each["launcher"]["planned"]) for each in page] == [
        (True, f"going on with {size} workers", True) for size in (2, 4)
    ]
    for words, code, said in (
        (("scale", "2"), 0, "there are 2 workers already"),
        (("scale", "1000"), 2, "every rank must own one; the fleet goes on with 2 workers"),
    ):
        answer = server.run(*words)
        assert answer.returncode == code, answer
        assert said in answer.stdout + answer.stderr
    server.process.terminate()
    server.check_end(0)


def sampled(server: Command) -> list[float]:
    """Return the tokens of each worker."""
    found = []
    for target in get(f"{server.url}/metrics/targets").json():
        page = get(f"http://{target['targets'][0]}/metrics").text
        name = "moeyard_generation_tokens_total"
        found.append(sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)))
    return found
