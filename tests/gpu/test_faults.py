"""Faults of a GPU: a failed device assertion, out of memory at the start, a GPU that does not exist.

A CUDA error ends only its own process, because only that process loses its CUDA context.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import make_checkpoint
from tests.fleet import ProcessPool, RankProcess, start_fleet
from tests.limits import HANG_SECONDS

from moeyard_worker.config.engine_config import EngineConfig

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model"), "qwen3_moe", dtype=torch.bfloat16, max_position_embeddings=4096
    )


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    found = ProcessPool()
    yield found
    found.close()


def config(model: Path, **options: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "device": "cuda",
        "page_size": 64,
        "kv_memory": 1 << 22,
        "max_batch_tokens": 64,
        "max_num_seqs": 4,
        "prefill_chunk": 64,
        "max_model_len": 4096,
        "async_scheduling": True,
    }
    return EngineConfig(model_path=str(model), **{**fields, **options})


def serve_and_break(connection: Connection) -> None:
    """Serve as a rank until `break` launches a kernel that reads past the end of a tensor."""
    from moeyard_worker.config.worker_spec import WorkerSpec
    from moeyard_worker.engine.assembly.worker import Worker

    worker: Any = None
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            return
        try:
            if name == "setup":
                worker = Worker(WorkerSpec(**args[0]))
                result = worker.endpoints()
            elif name == "break":
                torch.zeros(4, device="cuda").index_select(0, torch.tensor([9], device="cuda"))
                result = None
            elif name in ("validate", "stop"):
                # The test learns the engine's end from `wait`. No call can use this device now.
                result = None
            else:
                result = getattr(worker, name)(*args)
            connection.send((True, result))
        except Exception as error:  # boundary: the test process raises it
            connection.send((False, f"{type(error).__name__}: {error}"))


class Breakable(ProcessPool):
    """A pool whose ranks obey `break`."""

    def take(self, count: int) -> list[RankProcess]:
        self._ranks += [RankProcess(serve_and_break) for _ in range(count - len(self._ranks))]
        return self._ranks[:count]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_device_error_ends_only_its_process_and_names_the_rank(eager: bool, model: Path, pool: ProcessPool) -> None:
    """Two workers of two fleets share a GPU: the failure of one does not affect the other."""
    breakable = Breakable()
    served = config(model, enforce_eager=eager)
    prompt, params = (1, 2, 3), {"max_tokens": 2000, "ignore_eos": True, "temperature": 0.0}
    try:
        with start_fleet(pool, served) as sound, start_fleet(breakable, served) as broken:
            sound.client.submit(0, "before", prompt, **params)
            (before,) = sound.client.wait("before")
            for fleet in (sound, broken):
                fleet.client.submit(0, "r", prompt, **params)
            broken.client.wait_for(lambda: len(broken.client.answers["r"].token_ids) > 3)
            broken.ranks[0].call("break")
            with pytest.raises(RuntimeError, match=r"RankFault: rank 0: CUDA error: .*assert.* at step \d+"):
                broken.ranks[0].call("wait")
            assert broken.client.answers["r"].end is None, "another rank may continue this request"
            (answer,) = sound.client.wait("r")
            assert answer.token_ids == before.token_ids
    finally:
        breakable.close()


def test_too_large_kv_budget_error_gives_the_free_memory(model: Path, pool: ProcessPool) -> None:
    fits = r"--kv-memory 64 TiB does not fit: this worker has [\d.]+ GiB of free memory beside .*; lower --kv-memory"
    with pytest.raises(RuntimeError, match=fits), start_fleet(pool, config(model, kv_memory=64 << 40)):
        pass


def serve_with_little_memory(connection: Connection) -> None:
    """Serve as a rank whose allocator may use a thousandth of the device, as if another process had the rest."""
    from tests.fleet import serve

    torch.cuda.set_per_process_memory_fraction(0.001)
    serve(connection)


def test_out_of_memory_during_load_reports_the_plan(model: Path) -> None:
    rank = RankProcess(serve_with_little_memory)

    class Limited(ProcessPool):
        def take(self, count: int) -> list[RankProcess]:
            return [rank][:count]

    big = config(model, kv_memory=8 << 30)
    pool = Limited()
    plan = r"cuda ran out of memory while loading weights: CUDA out of memory; planned of [\d.]+ GiB free: .*lower --kv"
    with pytest.raises(RuntimeError, match=plan), start_fleet(pool, big):
        pass
    rank.hang_up()
    rank.join()


def test_missing_gpu_is_reported_before_a_cuda_context_exists(model: Path) -> None:
    code = f"""
import torch
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.assembly.worker import Worker
config = EngineConfig(model_path={str(model)!r}, device="cuda:9", page_size=64)
try:
    Worker(WorkerSpec(config=config, rank=0, epoch=1, host="127.0.0.1", version="test"))
except ValueError as error:
    print(error)
print("a context" if torch.cuda.is_initialized() else "no context")
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    message, context = run.stdout.splitlines()
    assert re.fullmatch(r"--device cuda:9: there are \d+ GPUs, the last is cuda:\d+; choose one of these", message)
    assert context == "no context"
