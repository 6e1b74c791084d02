"""The server process: signals, open streams at shutdown, and imports."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import uvloop
from tests.limits import HANG_SECONDS

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.http.server import LISTENERS, listeners

ROOT = Path(__file__).parents[2]
PROGRAM = """
import socket, sys
from pathlib import Path
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.http.server import RouterServer, run_router
sock = socket.socket(fileno=int(sys.argv[1]))
config = RouterConfig(model_name="tiny", model_path=Path(sys.argv[2]), max_model_len=256, vocab_size=400,
    eos_token_ids=(1,), workers=(WorkerAddress(rank=0, endpoint=sys.argv[3]),), shutdown_grace=1.0)
ready, failed = lambda: print("ready", flush=True), lambda rank, why: print(why, flush=True)
run_router(RouterServer(config, sock, on_ready=ready, on_lost=failed))
print("ended", flush=True)
"""
CONFIG = {"model_name": "m", "model_path": Path("/m"), "max_model_len": 8, "vocab_size": 9}


def environment():
    return {**os.environ, "PYTHONPATH": f"{ROOT}/worker:{ROOT}/router:{os.environ.get('PYTHONPATH', '')}"}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_open_streams_cleanly(start, checkpoint, wait_for, signum):
    worker = start(1).workers[0]  # keeps its own router; a second router may use the same worker
    worker.pace = 0.02
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        command = [sys.executable, "-c", PROGRAM, str(sock.fileno()), str(checkpoint), worker.endpoint]
        with subprocess.Popen(
            command,
            pass_fds=[sock.fileno()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        ) as process:
            assert process.stdout.readline() == "ready\n"
            lines = []
            body = {"prompt": "x", "max_tokens": 250, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=HANG_SECONDS) as answer:
                for line in filter(None, answer.iter_lines()):
                    lines.append(line)
                    if len(lines) == 1:
                        process.send_signal(signum)
            out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, err
    assert out == "ended\n"
    assert err == ""
    assert "the router is shutting down" in lines[-1]
    assert 10 < len(lines) < 250, "the stream must continue for the grace period only"
    wait_for(lambda: len(worker.aborts) == 1, "the worker must receive the abort")


def test_requests_within_the_grace_period_finish(start, pool, wait_for):
    service = start(1, shutdown_grace=2 * HANG_SECONDS)
    service.workers[0].pace = 0.005
    answer = pool.submit(service.complete, prompt="x", max_tokens=60)
    wait_for(lambda: len(service.submits) == 1, "the request must run")
    service.server.stop()
    assert answer.result()["usage"]["completion_tokens"] == 60
    # The fixture waits for the server to stop, which must not take the whole grace period.


def test_imports_neither_torch_nor_ray_nor_the_worker():
    code = (
        "import sys, moeyard_router.http.server as s;"
        "bad = {'torch', 'ray', 'transformers', 'numpy', 'triton'} & set(sys.modules);"
        "names = ('protocol', 'wire', 'keys', 'options', 'refusals', 'sockets', 'tokenizer');"
        "boundary = {f'moeyard_worker.{name}' for name in names};"
        "bad |= {m for m in sys.modules if m.startswith('moeyard_worker.')} - boundary;"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=HANG_SECONDS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"workers": ()}, "workers"),
        ({"workers": (WorkerAddress(rank=1, endpoint="tcp://h:1"),)}, "ranks"),
        ({"max_inflight": 0}, "max_inflight"),
        ({"step_deadline": 0.0}, "step_deadline"),
        ({"eos_token_ids": (9,)}, "eos_token_ids"),
    ],
)
def test_bad_config(change, named):
    workers = (WorkerAddress(rank=0, endpoint="tcp://h:1"),)
    with pytest.raises(ValueError, match=named):
        RouterConfig(**{**CONFIG, "workers": workers, **change})


def test_one_turn_of_the_loop_accepts_many_connections():
    """Otherwise many new connections wait for many turns, which are long while many streams run."""
    count, turns, taken = 64, 0, []

    class Taken(asyncio.Protocol):
        def connection_made(self, transport):
            taken.append(transport)

    async def main():
        nonlocal turns
        loop = asyncio.get_running_loop()
        sock = socket.create_server(("127.0.0.1", 0), backlog=count)
        servers = [await loop.create_server(Taken, sock=each, backlog=count) for each in listeners(sock)]
        clients = [socket.create_connection(sock.getsockname()) for _ in range(count)]
        while len(taken) < count and turns < 10 * count:
            turns += 1
            await asyncio.sleep(0)
        for each in (*clients, *taken, *servers):
            each.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert len(taken) == count
    assert turns <= count // 2


def test_router_has_several_listeners(service):
    assert len(service.server._server.servers) == LISTENERS
