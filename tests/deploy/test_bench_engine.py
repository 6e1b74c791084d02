"""`moeyard bench engine`: its arithmetic, and every scenario on a tiny model, on a CPU and on a GPU."""

import argparse
import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.captured_on_cpu import PLACE, Event, Graph, gpu_steps
from tests.gpus import GIB, pretend

from moeyard.cli.commands import build_parser
from moeyard.clients.bench import engine
from moeyard.clients.bench.drive import REPLAYS, TURNS, Run, Subject, replay_seconds
from moeyard.clients.bench.figures import (
    Course,
    StepRecord,
    beside_replay,
    floor_bytes,
    full_steps,
    missed,
    of_bound,
    shares,
)
from moeyard.clients.bench.profile import chain
from moeyard.clients.bench.report import table
from moeyard.clients.bench.scenarios import Ceilings, Decode, Mixed, Prefill
from moeyard_worker.checkpoint.check import check_weights
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.models.shapes import served_model, shape_model
from moeyard_worker.models.spec import model_spec
from moeyard_worker.protocol import SamplingParams, Tokens


def parse(*flags: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", "engine", *flags])


def test_timeline_of_a_request() -> None:
    course = Course(1.0, [3.0, 4.0, 6.0, 7.0])
    assert course.first == 2.0
    assert course.per_token == pytest.approx(4 / 3)
    assert course.gaps() == [1.0, 2.0, 1.0]
    assert course.gaps(since=4.0) == [2.0, 1.0]
    assert course.until(6.0).gaps() == [1.0, 2.0]
    assert Course(1.0, [3.0]).per_token is None


def test_full_steps_decode_every_stream_and_nothing_else() -> None:
    rows = [(16, 16), (2, 0), (2, 0), (2, 0), (10, 8), (2, 0), (2, 0), (1, 0)]
    records = [StepRecord(at=i * i, host=0, rows=n, prompt_rows=p) for i, (n, p) in enumerate(rows)]
    assert full_steps(records, 2) == [3, 5, 11]


def test_shares() -> None:
    assert shares({}) == {}
    assert shares({"num_replayed": 0, "num_eager": 0, "num_rows": 0, "num_padded_rows": 0}) == {}
    counts = {"num_replayed": 3, "num_eager": 1, "num_rows": 18, "num_padded_rows": 24}
    assert shares(counts) == {"replay_share": 0.75, "padding_share": 0.25}


def test_replay_of_a_graph_by_itself() -> None:
    assert beside_replay({"p50": 2.06, "p90": 9.0}, 0.002) == {"replay_ms": 2.0, "tpot_of_replay": pytest.approx(1.03)}
    assert beside_replay({"p50": 2.06}, None) == {}
    assert beside_replay({}, 0.002) == {}, "a single token must have no time per token"
    assert replay_seconds(()) is None


def subject_of(rows: int, **options: Any) -> Subject:
    """Return a subject of two layers of the demo model with at most `rows` rows per step."""
    config = EngineConfig(
        model_path=None,
        load_format="dummy",
        shape="moeyard-demo",
        num_layers=2,
        max_model_len=64,
        kv_memory=1 << 20,
        max_batch_tokens=rows,
        max_num_seqs=4,
        prefill_chunk=rows,
        prefix_caching=False,
        **options,
    )
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    return Subject(config, check_weights(config, served_model(config)).spec, sampling)


def graph_subject(**options: Any) -> Subject:
    """The caller is within `gpu_steps`."""
    return subject_of(32, async_scheduling=True, **PLACE, **options)


def answers(subject: Subject) -> dict[str, list[int]]:
    """Return the answers to three fixed requests."""
    subject._random, subject._names = random.Random(3), 0
    run, answers_by_id = Run(subject, subject.scheduler()), dict[str, list[int]]()
    complete = run.scheduler.complete

    def keep(*args: Any, **options: Any) -> Any:
        replies = complete(*args, **options)
        for reply in replies:
            if isinstance(reply.message, Tokens):
                answers_by_id.setdefault(reply.message.request_id, []).extend(reply.message.token_ids)
        return replies

    run.scheduler.complete = keep  # type: ignore[method-assign]
    for i in range(3):
        subject.submit(run, prompt=7 + i, output=6)
    run.go()
    return answers_by_id


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_the_last_decode_step_is_replayed_by_itself(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """The same graphs run back to back more than 50 times after the streams are measured, and change no answer."""
    decode, sampling = Decode(streams=3, prompt=9, output=10), SamplingParams(max_tokens=1, temperature=temperature)
    with gpu_steps():
        subject = graph_subject()
        subject._sampling = replace(sampling, ignore_eos=True)
        try:
            expected = answers(subject)
            replays: list[object] = []
            if not torch.cuda.is_available():
                once = Graph.replay
                monkeypatch.setattr(Graph, "replay", lambda graph: (replays.append(graph), once(graph))[1])
                # a turn takes 90 ms
                monkeypatch.setattr(Event, "elapsed_time", lambda *_: 90.0)
            row = decode.run(subject, Ceilings(copy=1e9))
            if replays:
                assert row["replay_ms"] == 90.0 / REPLAYS
                number = REPLAYS * (1 + TURNS) * (2 if temperature else 1)
                again, before = replays[-number:], replays[:-number]
                assert REPLAYS >= 50
                assert len(set(again)) == (2 if temperature else 1)
                assert set(again) <= set(before)
                # The rest is earlier decode steps, without further replays.
                assert before.count(again[0]) < 20
            assert row["tpot_of_replay"] == pytest.approx(row["tpot_ms"]["p50"] / row["replay_ms"])
            assert answers(subject) == expected
            text = engine.table([row], engine.COLUMNS)
            assert "replay" in text.split()
            assert "TPOT/replay" in text.split()
            subject.times_replays = False
            assert "replay_ms" not in decode.run(subject, Ceilings(copy=1e9))
        finally:
            subject.close()


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"expert_slots": 8}], ids=["launched", "missing experts"])
def test_meaningless_replays_are_not_timed(options: dict[str, Any]) -> None:
    """Launched steps are not replays, and a repeated step would find all its experts."""
    with gpu_steps():
        subject = graph_subject(**options)
        try:
            row = Decode(streams=2, prompt=9, output=10).run(subject, Ceilings(copy=1e9))
        finally:
            subject.close()
    assert (row["replay_share"] == 0) == ("enforce_eager" in options)
    assert not {"replay_ms", "tpot_of_replay"} & row.keys()


def test_misses_and_their_bound() -> None:
    row = missed(hits=6, misses=2, expert_bytes=500_000, times=4, link=1e8)
    assert row == {"hit_rate": 0.75, "missed_mb": 0.25, "link_ms": 2.5}
    assert missed(hits=0, misses=0, expert_bytes=9, times=1, link=None) == {"hit_rate": 0.0, "missed_mb": 0.0}
    assert of_bound({"took_ms": 5.0, **row}, {"took_ms": 2.0}) == 0.5
    assert of_bound({"took_ms": 5.0, **row}, {"took_ms": 4.0}) == 0.8
    assert of_bound({"took_ms": None, **row}, {"took_ms": 4.0}) is None


def bench(args: argparse.Namespace, wanted: list[engine.Scenario], report: Callable[[str], None]) -> engine.Bench:
    """The ceilings are given, not measured."""
    ceilings = Ceilings(copy=1e9, link=1e8)
    return engine.Bench(wanted=wanted, ceilings=ceilings, sampling=engine.sampling_of(args), report=report)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Return the results for these arguments."""
    wanted = engine.scenarios(args)
    return bench(args, wanted, lambda _: None).run(engine.configs_of(args, engine.engine_config(args, wanted)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_residency_levels_are_measured_in_turn(device: str) -> None:
    args = parse(
        *("--shape", "moeyard-demo", "--layers", "3", "--device", device, "--streams", "2", "--prompt", "9"),
        *("--output", "10", "--prefill", "1x30", "--chunk", "32", "--residency", "1", "0.25"),
    )
    result = measured(args)
    assert [(e["expert_slots"], e["num_experts"]) for e in result["facts"]["engines"]] == [(64, 64), (16, 64)]
    whole, whole_prompt, quarter, quarter_prompt = result["rows"]
    assert "hit_rate" not in whole
    assert "hit_rate" not in whole_prompt
    for row, full in ((quarter, whole), (quarter_prompt, whole_prompt)):
        assert 0 <= row["hit_rate"] < 1
        assert row["missed_mb"] > 0
        assert row["link_ms"] == pytest.approx(row["missed_mb"] * 1e6 / 1e8 * 1e3)
        assert row["of_bound"] == pytest.approx(max(full["took_ms"], row["link_ms"]) / row["took_ms"])


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", ["cpu", "gpu steps"])
@pytest.mark.parametrize(("chunk", "steps"), [("1", 20), ("32", 1)])
def test_prefill_by_single_rows(chunk: str, steps: int, kind: str) -> None:
    """Per-token prefill below full residency, compared with the same prompt in one step."""
    args = parse(
        *("--shape", "moeyard-demo", "--layers", "3", "--device", "cpu", "--dtype", "float32", "--streams"),
        *("--prefill", "1x20", "--chunk", chunk, "--residency", "1", "0.25"),
    )
    with gpu_steps() if kind == "gpu steps" else nullcontext():
        result = measured(args)
    whole, quarter = result["rows"]
    assert whole["steps"] == quarter["steps"] == steps
    for row in (whole, quarter):
        assert row["prompt_tok_s"] == pytest.approx(20 / row["took_ms"] * 1e3)
    assert quarter["missed_mb"] > 0
    assert quarter["residency"] == 0.25


def test_floor_of_a_shape_by_hand() -> None:
    """Qwen3-30B-A3B, one layer: attention with two norms of heads, router, two norms; the last norm, the head."""
    model = shape_model("Qwen3-30B-A3B", 1)
    attention = 2048 * 128 * (32 + 2 * 4 + 32) + 2 * 128
    dense = attention + 128 * 2048 + 2 * 2048 + 2048 + 151936 * 2048
    expert = 3 * 2048 * 768
    kv = 2 * 4 * 128
    found = floor_bytes(model_spec(model, ()), distinct=8.5, rows=3, context=100, dtype="bfloat16")
    assert found == 2 * (dense + 8.5 * expert + 3 * 100 * kv)


def test_table_omits_empty_columns() -> None:
    rows = [{"case": "a", "ms": {"p50": 1.234}}, {"case": "bb", "rate": 12345.6}]
    columns = [("case", "case"), ("ms.p50", "ms"), ("ms.p99", "no"), ("rate", "tok/s")]
    assert table(rows, columns).splitlines() == ["case    ms   tok/s", "   a  1.23", "  bb        12,346"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_scenario(device: str, temperature: float, tmp_path: Path) -> None:
    args = parse(
        *("--shape", "moeyard-demo", "--layers", "2", "--device", device, "--streams", "3", "--prompt", "9"),
        *("--output", "10", "--context", "2x70", "--prefill", "2x30", "--chunk", "48"),
        *("--kv-budget", "40"),
        *(
            "--temperature",
            str(temperature),
            "--mixed",
            "2",
            "--mixed-prompt",
            "40",
            "--mixed-prompts",
            "2",
            "--mixed-chunk",
            "16",
        ),
    )
    wanted = engine.scenarios(args)
    assert wanted == [
        Decode(streams=3, prompt=9, output=10),
        Decode(streams=2, prompt=70, output=10),
        Decode(streams=2, prompt=70, output=10, budget=40),
        Prefill(count=2, length=30),
        Mixed(streams=2, prompt=9, length=40, count=2, chunk=16),
    ]
    said: list[str] = []
    result = bench(args, wanted, said.append).run(engine.configs_of(args, engine.engine_config(args, wanted)))
    assert len(said) == 2 + len(wanted)
    assert [row["residency"] for row in result["rows"]] == [1.0] * len(wanted)
    assert json.loads(json.dumps(result)) == result
    short, long, kept, prompts, mixed = result["rows"]
    model = shape_model("moeyard-demo", 2)
    assert kept["case"] == "decode 2x70+10 kept 40"
    assert 0 < kept["kv_pages"] < long["kv_pages"]
    for row, streams, kept_of in ((short, 3, 9), (long, 2, 70), (kept, 2, 40)):
        assert model.top_k <= row["distinct_experts"] <= streams * model.top_k
        assert 0 < row["step_ms"]["p50"] <= row["step_ms"]["p99"]
        assert row["tpot_ms"]["p50"] > 0
        assert row["ttft_ms"]["p50"] > 0
        if device == "cuda":
            # Steps that end partly kept prompts are launched.
            assert (row["replay_share"] == 1.0) == (row is not kept)
            # Decode steps have the rows of a graph; prompts in graphs are padded.
            assert (0 < row["padding_share"] < 1) == (row is not kept)
            assert row["tpot_of_replay"] == pytest.approx(row["tpot_ms"]["p50"] / row["replay_ms"])
        positions = kept_of + 10 / 2
        needed = floor_bytes(
            model_spec(model, ()), distinct=row["distinct_experts"], rows=streams, context=positions, dtype="bfloat16"
        )
        assert row["floor_ms"] == pytest.approx(needed / 1e9 * 1e3)
    assert prompts["prompt_tok_s"] > 0
    assert mixed["prompt_tok_s"] > 0
    assert 0 < mixed["itl_alone_ms"]["p50"] <= mixed["itl_ms"]["p99"] * 1000
    assert engine.table(result["rows"], engine.COLUMNS).count("\n") == len(wanted)


def test_streams_with_chunked_prompts() -> None:
    """The first streams still run when the last one begins."""
    shape = ("--shape", "moeyard-demo", "--layers", "2", "--device", "cpu")
    args = parse(*shape, "--streams", "7", "--prompt", "20", "--output", "3", "--chunk", "8", "--prefill")
    wanted = engine.scenarios(args)
    config = engine.engine_config(args, wanted)
    result = bench(args, wanted, lambda _: None).run([config])
    assert result["rows"][0]["step_ms"]["p50"] > 0


def test_profile_names_the_slowest_parts(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--shape", "moeyard-demo", "--layers", "2", "--device", "cpu", "--dtype", "float32")
    engine.bench_engine(parse(*shape, "--streams", "2", "--output", "4", "--prefill", "--profile"))
    lines = capsys.readouterr().out.splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.startswith("host: "))
    times = [float(line.split()[0]) for line in lines[head + 1 : head + 11]]
    assert times == sorted(times, reverse=True)
    assert any("aten::" in line for line in lines[head + 1 : head + 11])


def test_run_serves_the_configured_requests() -> None:
    """Every request gets its tokens, prompts and seeds differ, and the row counts add up."""
    subject = subject_of(24)
    try:
        run = Run(subject, subject.scheduler())
        for i in range(6):
            subject.submit(run, prompt=10 + i, output=5)
        run.go()
        assert [len(course.tokens) for course in run.courses.values()] == [5] * 6
        assert sum(record.prompt_rows for record in run.records) == sum(10 + i for i in range(6))
        # The first token follows the prompt's last row.
        assert sum(record.rows - record.prompt_rows for record in run.records) == 6 * 4
        assert all(record.rows <= 24 for record in run.records)
        run.scheduler.validate()
        assert not run.scheduler.has_work()
    finally:
        subject.close()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "give a MODEL directory or a --shape"),
        (("/m", "--shape", "Kimi-K2"), "one of both"),
        (("--shape", "Kimi-K2", "--prefill", "8"), "--prefill '8' is not COUNTxLENGTH, for example 8x32768"),
        (("--shape", "Kimi-K2", "--context", "0x9"), "--context '0x9' is not COUNTxLENGTH"),
        (("--shape", "Kimi-K2", "--mixed", "0", "--streams", "--prefill"), "nothing to measure"),
        (("--shape", "moeyard-demo", "--device", "cpu", "--top-p", "0"), "top_p"),
        (("--shape", "Kimi-K2", "--streams", "--prefill"), "nothing to measure"),
        (("--shape", "moeyard-demo", "--device", "cpu", "--residency", "1.5"), "--residency 1.5 is not a share"),
        (("--shape", "Kimi-K2", "--layers", "62", "--device", "cpu"), "num_layers 62: Kimi-K2 has 61"),
    ],
    ids=" ".join,
)
def test_bad_arguments(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match="(?i)" + says.replace("(", r"\(")):
        engine.bench_engine(parse(*flags))


def test_prompts_that_the_model_cannot_compress_are_refused_before_it_loads() -> None:
    args = parse(*("--shape", "DeepSeek-V4-Flash", "--device", "cpu", "--context", "1x200", "--kv-budget", "64"))
    wanted = engine.scenarios(args)
    with pytest.raises(ValueError, match=r"^--kv-budget 64: deepseek_v4 cannot be compressed \(docs/snapkv.md\)$"):
        bench(args, wanted, print).run([engine.engine_config(args, wanted)])


KIMI = ("--shape", "Kimi-K2", "--layers", "2")


@pytest.mark.parametrize(
    ("capabilities", "free", "device", "says"),
    [
        ([(9, 0)] * 2, 70 * GIB, "cuda:9", "--device cuda:9: there are 2 GPUs, the last is cuda:1; choose one"),
        ([(10, 0)], 70 * GIB, "cuda", "--device cuda: NVIDIA B200 has compute capability 10.0, the kernels need 9.0"),
        (
            [(9, 0)],
            3 * GIB,
            "cuda",
            "--device cuda: 3 GiB of 80 GiB are free, copies are measured with 8 GiB; end what else runs there",
        ),
        (
            [(9, 0)],
            torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere"),
            "cuda:0",
            "--device cuda:0: CUDA error: out of memory, while copies were measured; end what else runs there",
        ),
    ],
    ids=["number", "generation", "full", "no context"],
)
def test_unsuitable_gpu_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], free: int | Exception, device: str, says: str
) -> None:
    """The check comes before any allocation; the copy that measures bandwidth would be the first."""
    pretend(monkeypatch, *capabilities, free=free)
    monkeypatch.setattr(engine, "copy_bandwidth", lambda: pytest.fail("something was allocated"))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is what matters
        engine.bench_engine(parse(*KIMI, "--device", device))
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_memory_taken_by_others_during_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))

    def full() -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total of ...")

    monkeypatch.setattr(engine, "copy_bandwidth", full)
    with pytest.raises(ValueError, match="--device cuda: CUDA out of memory, while copies were measured; end what"):
        engine.bench_engine(parse(*KIMI))


def test_other_device_errors_are_not_memory_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0), free=torch.AcceleratorError("CUDA error: an illegal memory access"))
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        engine.bench_engine(parse(*KIMI))


def test_gaps_between_launches_of_a_graph() -> None:
    """Two replays of three launches, the second begun within the first; a replay of another graph, and a lone copy."""
    first = [(7, "a", 1000, 3000), (7, "b", 2000, 4000), (7, "c", 4500, 5000)]
    # On the second stream, c began first and ended while b had not.
    second = [(8, "c", 10_000, 10_400), (8, "a", 10_100, 12_000), (8, "b", 11_000, 13_000)]
    lines = chain([*second, *first, (9, "d", 0, 100), (9, "e", 100, 200), (3, "copy", 0, 10_000)])
    assert lines[0] == "a step of 3 launches, replayed 2 times: 3.5 us; what each adds:"
    assert [line.split() for line in lines[1:]] == [
        ["1.80", "us", "a"],
        ["1.00", "us", "b"],
        ["0.70", "us", "c"],
    ]
    assert chain([(3, "copy", 0, 10_000)]) == []
