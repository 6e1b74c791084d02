"""Names of faults: CUDA errors in one line, non-finite logits in every kind of row, out of memory."""

from typing import Any

import pytest
import torch

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.assembly.worker import Worker
from moeyard_worker.engine.loop.faults import RankFault, describe_fault, not_finite
from moeyard_worker.engine.sampling.sampling import SampledRow, chosen_logits, sample_logits, unsound
from moeyard_worker.protocol import SamplingParams
from moeyard_worker.scheduling.request import Request
from moeyard_worker.scheduling.step import Chunk, Step

ILLEGAL = """CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1"""


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (RuntimeError(ILLEGAL), "rank 2: CUDA error: an illegal memory access was encountered at step 812"),
        (
            RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
            "rank 2: CUDA error: device-side assert triggered at step 812",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
            "rank 2: out of device memory at step 812: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
        (MemoryError(), "rank 2: out of host memory at step 812: MemoryError"),
        (
            MemoryError("Unable to allocate 9.31 GiB for an array"),
            "rank 2: out of host memory at step 812: Unable to allocate 9.31 GiB for an array",
        ),
        (RankFault("logits of step 9 are not finite: request r"), "rank 2: logits of step 9 are not finite: request r"),
        (AssertionError("page 7 is owned twice"), "rank 2 failed at step 812: AssertionError: page 7 is owned twice"),
        (RuntimeError("no such thing"), "rank 2 failed at step 812: RuntimeError: no such thing"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_fault_messages(error: BaseException, named: str) -> None:
    assert describe_fault(error, rank=2, step=812) == named


def test_torch_without_host_memory_is_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert describe_fault(caught.value, rank=2, step=812).startswith("rank 2: out of host memory at step 812: ")


def test_accelerator_error_is_a_runtime_error() -> None:
    """Torch raises this class for CUDA errors."""
    assert issubclass(torch.AcceleratorError, RuntimeError)


def test_many_requests_are_named_briefly() -> None:
    assert str(not_finite(["r17"], step=812)) == "logits of step 812 are not finite: request r17"
    first = not_finite(["r17"], step=812, weights="v2")
    assert str(first) == "weights v2 give logits that are not finite: request r17, step 812"
    many = not_finite([f"r{i}" for i in range(6)], step=3)
    assert str(many).endswith("request r0, r1, r2, r3 and 2 more")
    assert many.requests == tuple(f"r{i}" for i in range(6)), "the error lists all requests"


NAN, INF = float("nan"), float("inf")
PARAMS = {
    "greedy": SamplingParams(max_tokens=8, temperature=0.0),
    "sampled": SamplingParams(max_tokens=8, temperature=0.7, seed=3),
    "cut": SamplingParams(max_tokens=8, temperature=0.7, seed=3, top_k=4, top_p=0.9, min_p=0.05),
    "edited": SamplingParams(max_tokens=8, temperature=1.0, repetition_penalty=1.3, logit_bias={3: 5.0}),
    "logprobs": SamplingParams(max_tokens=8, temperature=0.0, logprobs=3),
    "min_tokens": SamplingParams(max_tokens=8, min_tokens=4, temperature=1.0, stop_token_ids=(5, 6)),
}


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_non_finite_rows_are_found(kind: str, bad: float, seed: int) -> None:
    """One value is NaN or infinite, or all are -inf, in any kind of row. The neighbour rows are finite."""
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(seed))
    # A single minus infinity is valid, because a model may exclude a token.
    logits[2] = bad if bad == -INF else logits[2]
    logits[2, 1234], logits[0, 77] = bad, -INF
    params = [PARAMS["greedy"], PARAMS[kind], PARAMS[kind], PARAMS["sampled"]]
    rows = [SampledRow(params=p, prompt=(1, 2), output=(3,)) for p in params]
    tokens = sample_logits(CpuBackend(page_size=16), logits, rows, ())
    step = Step(decode=tuple(chunk(i) for i in range(4)))
    requests = [request(f"r{i}", p) for i, p in enumerate(params)]
    assert unsound(step, requests, chosen_logits(logits, tokens.ids)) == ("r2",)


def chunk(i: int, num_sampled: int = 1) -> Chunk:
    return Chunk(
        key=(b"", f"r{i}"), start=2, token_ids=(3,) * num_sampled, pages=(0,), prompt=False, num_sampled=num_sampled
    )


def request(name: str, params: SamplingParams) -> Request:
    return Request(client=b"", request_id=name, prompt=(1, 2), sampling=params, arrived=0.0, hashes=[], serial=0)


def test_draft_rows_belong_to_their_request() -> None:
    step = Step(decode=(chunk(0, 2), chunk(1, 3), chunk(2)))
    requests = [request(f"r{i}", PARAMS["greedy"]) for i in range(3)]
    assert unsound(step, requests, torch.tensor([0.0, 1.0, 2.0, NAN, INF, 5.0])) == ("r1",)
    assert unsound(Step.empty(), [], torch.empty(0)) == ()


# Torch's allocator, graph instantiation or pinned memory, Triton, the host.
FULL = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    MemoryError(),
)


@pytest.mark.parametrize("error", FULL, ids=["allocator", "driver", "triton", "host", "python"])
@pytest.mark.parametrize("doing", ["loading weights", "capturing steps"])
def test_out_of_memory_is_one_line_with_the_plan(
    doing: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model_path=None, load_format="dummy", shape="moeyard-demo", num_layers=2, kv_memory=1 << 20, max_model_len=64
    )
    worker = Worker(WorkerSpec(config=config, rank=0, epoch=1, host="127.0.0.1", version="test"))

    def runs_out(*_: Any, **__: Any) -> Any:
        raise error

    try:
        worker.connect([worker.endpoints()["mesh"]])
        monkeypatch.setattr(worker._device, "staging" if doing == "loading weights" else "step_runner", runs_out)
        with pytest.raises(ValueError, match=f"^cpu ran out of memory while {doing}: ") as refused:
            worker.load(1)
    finally:
        worker.stop()
    text = str(refused.value)
    assert "\n" not in text
    for part in ("planned of", "dense weights", "32 of 32 experts", "KV pages", "a reserve of", "lower --kv-memory"):
        assert part in text


def test_other_errors_at_the_start_do_not_name_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model_path=None, load_format="dummy", shape="moeyard-demo", num_layers=2, kv_memory=1 << 20)
    worker = Worker(WorkerSpec(config=config, rank=0, epoch=1, host="127.0.0.1", version="test"))

    def breaks() -> Any:
        raise RuntimeError(ILLEGAL)

    try:
        worker.connect([worker.endpoints()["mesh"]])
        monkeypatch.setattr(worker._device, "staging", breaks)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            worker.load(1)
    finally:
        worker.stop()
