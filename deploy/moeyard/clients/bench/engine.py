"""`moeyard bench engine`: one worker's engine in process, without router, sockets and peers.

Prompts are distinct and random; weights are a checkpoint's, or of chance on a real model's scale for a published shape.
"""

import argparse
import dataclasses
import datetime
import gc
import json
import platform
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from moeyard.clients.bench.bandwidth import COPY_BYTES, copy_bandwidth, host_copy_bandwidth, link_bandwidth
from moeyard.clients.bench.drive import Subject
from moeyard.clients.bench.figures import of_bound
from moeyard.clients.bench.profile import profiled
from moeyard.clients.bench.report import latency_columns, table
from moeyard.clients.bench.scenarios import Ceilings, Decode, Mixed, Prefill, Scenario
from moeyard.local.model_source import checkpoint
from moeyard.options import DEFAULTS
from moeyard_worker.checkpoint.check import check_weights
from moeyard_worker.config.engine_config import DEVICE_DEFAULTS, DTYPE_BYTES, EngineConfig, format_size
from moeyard_worker.engine.assembly.device import check_gpu
from moeyard_worker.engine.loop.faults import first_sentence, out_of_memory
from moeyard_worker.models.shapes import served_model
from moeyard_worker.protocol import KvCompression, SamplingParams
from moeyard_worker.scheduling.sampling_check import sampling_error

COLUMNS = (
    ("case", "case"),
    ("residency", "resident"),
    *latency_columns("step", "step", "p50", "p99"),
    ("floor_ms", "floor"),
    *latency_columns("tpot", "TPOT", "p50", "p90", "p99"),
    ("replay_ms", "replay"),
    ("tpot_of_replay", "TPOT/replay"),
    *latency_columns("itl", "ITL", "p50", "p90", "p99"),
    *latency_columns("itl_alone", "alone", "p50"),
    *latency_columns("ttft", "TTFT", "p50", "p90", "p99"),
    ("prompt_tok_s", "prompt tok/s"),
    ("distinct_experts", "experts"),
    ("kv_pages", "KV pages"),
    ("replay_share", "replays"),
    ("padding_share", "padding"),
    *latency_columns("host", "host", "p50", "p99"),
    *latency_columns("device", "device", "p50"),
    ("hit_rate", "hits"),
    ("missed_mb", "missed MB"),
    ("link_ms", "link"),
    ("of_bound", "of bound"),
)
LEGEND = (
    "milliseconds; step: one that decodes every stream and no prompt; floor: the bytes that such a step must read, at "
    "the copy bandwidth; replay: the graph of such a step by itself, back to back; "
    "experts: distinct ones per MoE layer; KV pages: held at the end; "
    "replays: share of steps; padding: of replayed rows; "
    "link: missed bytes over the link; of bound: how near to the slower of link and all experts resident"
)


def bench_engine(args: argparse.Namespace) -> int:
    """Measure what the flags ask for, print a table and write --json; returns the exit code.

    Raises ValueError with one line for what cannot run here.
    """
    wanted = scenarios(args)
    config = engine_config(args, wanted)
    bench = Bench(
        wanted=wanted, ceilings=ceilings_of(config), sampling=sampling_of(args), report=print, profile=args.profile
    )
    result = bench.run(configs_of(args, config))
    print(f"\n{table(result['rows'], COLUMNS)}\n{LEGEND}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Scenarios, and how they are measured. `report` gets a line of text as each figure is known.

    With `profile` each scenario runs once more, and `report` gets where its time went.
    """

    wanted: Sequence[Scenario]
    ceilings: Ceilings
    sampling: SamplingParams
    report: Callable[[str], None]
    profile: bool = False

    def run(self, configs: Sequence[EngineConfig]) -> dict[str, Any]:
        """Run the scenarios on one engine after the other."""
        device, ceilings = configs[0].device, self.ceilings
        facts: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": platform.machine() if device == "cpu" else torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "copy_bandwidth": ceilings.copy,
            "link_bandwidth": ceilings.link,
            "model": configs[0].shape or configs[0].model_path,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "engines": [],
        }
        link = "" if ceilings.link is None else f", from the host {ceilings.link * 1e-9:.1f} GB/s"
        copy = f"copy {ceilings.copy * 1e-12:.2f} TB/s{link}"
        self.report(f"{facts['device']}, torch {torch.__version__}, {copy}; {facts['model']}")
        rows: list[dict[str, Any]] = []
        resident: dict[str, dict[str, Any]] = {}
        for config in configs:
            engine, found = self._run_one(config)
            facts["engines"].append(engine)
            for row in found:
                if engine["residency"] == 1:
                    resident[row["case"]] = row
                elif row["case"] in resident:
                    row["of_bound"] = of_bound(row, resident[row["case"]])
            rows += found
            # The next engine wants the memory.
            gc.collect()
            if config.device != "cpu":
                torch.cuda.empty_cache()
        return {"facts": facts, "rows": rows}

    def _run_one(self, config: EngineConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        model = served_model(config)
        budgets = [each.budget for each in self.wanted if isinstance(each, Decode) and each.budget is not None]
        if budgets and not model.state_spec(1).compressible:
            raise ValueError(f"--kv-budget {budgets[0]}: {model.family} cannot be compressed (docs/snapkv.md)")
        subject = Subject(config, check_weights(config, model).spec, self.sampling)
        try:
            slots, experts = subject.report["expert_slots"], subject.report["num_experts"]
            engine = {
                "layers": model.num_layers,
                "dtype": subject.report["dtype"],
                "expert_slots": slots,
                "num_experts": experts,
                "residency": slots / experts,
                "policy": config.expert_policy,
                "seconds_to_load": subject.seconds_to_load,
            }
            self.report(
                f"{model.num_layers} layers, {engine['dtype']}, {slots} of {experts} experts in slots; loaded and "
                f"captured in {subject.seconds_to_load:.1f} s"
            )
            rows = []
            for scenario in self.wanted:
                rows.append({"residency": engine["residency"], **scenario.run(subject, self.ceilings)})
                self.report(json.dumps(rows[-1]))
                if self.profile:
                    subject.times_replays = False
                    go = partial(scenario.run, subject, self.ceilings)
                    self.report("\n".join(profiled(go, device=config.device)))
                    subject.times_replays = True
            return engine, rows
        finally:
            subject.close()


def ceilings_of(config: EngineConfig) -> Ceilings:
    """Measured before anything is loaded: the copy takes 8 GiB, and a GPU that others fill is a ValueError."""
    if config.device == "cpu":
        return Ceilings(copy=host_copy_bandwidth())
    try:
        torch.cuda.set_device(check_gpu(config.device))
        free, total = torch.cuda.mem_get_info()
        if free < COPY_BYTES:
            raise ValueError(
                f"--device {config.device}: {format_size(free)} of {format_size(total)} are free, copies are measured "
                f"with {format_size(COPY_BYTES)}; end what else runs there"
            )
        ceilings = Ceilings(
            copy=copy_bandwidth(), link=link_bandwidth(served_model(config).expert_form("bfloat16").blob_bytes)
        )
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise ValueError(
            f"--device {config.device}: {first_sentence(error)}, while copies were measured; end what else runs there "
            "or in this host's memory"
        ) from error
    torch.cuda.empty_cache()
    return ceilings


def configs_of(args: argparse.Namespace, config: EngineConfig) -> list[EngineConfig]:
    """One engine per --residency, of otherwise the same kind; raises ValueError for a share that is none."""
    if args.expert_slots is not None and args.residency:
        raise ValueError("give --residency or --expert-slots, not both")
    model = served_model(config)
    experts = model.num_experts * len(model.moe_layers)
    for share in args.residency:
        if not 0 < share <= 1:
            raise ValueError(f"--residency {share:g} is not a share of the experts, above 0 and up to 1")
    sizes = [max(1, round(share * experts)) for share in args.residency] or [args.expert_slots]
    return [dataclasses.replace(config, expert_slots=slots) for slots in sizes]


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """How every request is sampled; raises ValueError for what no request may ask for."""
    sampling = SamplingParams(max_tokens=1, temperature=args.temperature, top_p=args.top_p, ignore_eos=True)
    if problem := sampling_error(sampling, vocab_size=1):
        raise ValueError(problem)
    return sampling


def scenarios(args: argparse.Namespace) -> list[Scenario]:
    """Scenarios of the flags, in order; raises ValueError for a flag that makes no sense."""
    found: list[Scenario] = [Decode(streams=n, prompt=args.prompt, output=args.output) for n in args.streams]
    for text in args.context:
        count, length = times(text, "--context")
        found.append(Decode(streams=count, prompt=length, output=args.output))
        if args.kv_budget is not None:
            found.append(Decode(streams=count, prompt=length, output=args.output, budget=args.kv_budget))
    for text in args.prefill:
        count, length = times(text, "--prefill")
        found.append(Prefill(count=count, length=length))
    if args.mixed:
        found.append(
            Mixed(
                streams=args.mixed,
                prompt=args.prompt,
                length=args.mixed_prompt,
                count=args.mixed_prompts,
                chunk=args.mixed_chunk,
            )
        )
    if args.kv_budget is not None:
        window = KvCompression(method="snapkv", budget=args.kv_budget).window
        if not args.context or args.kv_budget < window:
            raise ValueError(f"--kv-budget {args.kv_budget} wants --context, and is {window} at least")
    if not found:
        raise ValueError("nothing to measure: give --streams, --context, --prefill or --mixed")
    return found


def times(text: str, flag: str) -> tuple[int, int]:
    """(count, length) of "8x32768"."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"{flag} {text!r} is not COUNTxLENGTH, for example 8x32768")
    return int(match[1]), int(match[2])


def engine_config(args: argparse.Namespace, wanted: Sequence[Scenario]) -> EngineConfig:
    """An engine that is large enough for all that is wanted, and no larger."""
    if (args.model is None) == (args.shape is None):
        raise ValueError("give a MODEL directory or a --shape, one of both")
    if args.device != "cpu":
        check_gpu(args.device)
    usual = {**DEFAULTS, **DEVICE_DEFAULTS["cpu" if args.device == "cpu" else "cuda"]}
    page = usual["page_size"]
    chunk = args.chunk or usual["prefill_chunk"]
    streams = max(count for count, _ in (each.requests(chunk) for each in wanted))
    rows = max(chunk, 2 * streams, *(each.chunk + each.streams for each in wanted if isinstance(each, Mixed)))
    needs = [each.requests(min(rows, usual["mixed_prefill_tokens"] or rows)) for each in wanted]
    config = EngineConfig(
        model_path=None if args.model is None else checkpoint(args),
        load_format="dummy" if args.shape is not None else "auto",
        shape=args.shape,
        num_layers=args.layers,
        quantization=args.quantization,
        weights=args.weights,
        device=args.device,
        dtype=args.dtype,
        page_size=page,
        max_model_len=max(length for _, length in needs),
        max_num_seqs=streams,
        max_batch_tokens=rows,
        prefill_chunk=chunk,
        mixed_prefill_tokens=usual["mixed_prefill_tokens"],
        prefix_caching=False,
        async_scheduling=usual["async_scheduling"],
        enforce_eager=args.enforce_eager,
        expert_policy=args.expert_policy,
        expert_host_store=args.expert_host_store,
        # Replaced below: what a page takes is known of the model.
        kv_memory=1,
    )
    model = served_model(config)
    page_bytes = page * model.state_spec(DTYPE_BYTES[model.served_dtype(args.dtype)]).bytes_per_token
    pages = max(count * (-(-length // page) + 1) for count, length in needs) + max(2, len(needs))
    return dataclasses.replace(config, kv_memory=pages * page_bytes)
