"""`moeyard serve --ray-address` with two GPU workers on one node of a Ray cluster that already runs."""

import signal
from collections.abc import Callable

import httpx
import pytest
from tests.deploy.test_serve import DEMO, Command, cluster, command
from tests.limits import HANG_SECONDS

__all__ = ["cluster", "command"]  # fixtures

pytestmark = pytest.mark.gpu(2)

BODY = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 1}


def test_two_gpus_of_a_node_exchange_over_nvlink(
    cluster: str, command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers equal those on a private Ray cluster."""
    answers = list[object]()
    for where in (["--ray-address", cluster, "--worker-host", "127.0.0.1"], []):
        served = command("serve", DEMO, "--workers", "2", "--device", "cuda", "--port", "0", *where)
        served.wait_ready()
        assert "exchange nvlink (2 GPUs of one host that reach each other)" in served.out.read_text()
        replies = [httpx.post(f"{served.url}/v1/completions", json=BODY, timeout=HANG_SECONDS).json() for _ in range(4)]
        answers += [each["choices"] for each in replies]
        served.process.send_signal(signal.SIGINT)
        served.check_end(0)
        # The fixture gave the cluster its GPUs in the order 1, 0.
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert all(answer == answers[0] for answer in answers), answers
