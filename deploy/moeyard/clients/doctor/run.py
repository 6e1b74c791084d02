"""`moeyard doctor`: what this machine has, and what `moeyard serve` with the same flags would trip over."""

import argparse
import json
from collections.abc import Iterator

from moeyard.clients.doctor.machine import (
    OK,
    PROBLEM,
    WARNING,
    Finding,
    check_clock,
    check_leftovers,
    check_limits,
    check_memory,
    check_port,
    check_processor,
    check_software,
    ok,
    problem,
)
from moeyard.entry import load
from moeyard.local.before_start import check_before_start, needs
from moeyard.local.device_choice import choose_device, device_reason
from moeyard.local.model_source import hub_id
from moeyard.local.settings import api_settings, engine_config
from moeyard_worker.models.shapes import served_model


def doctor(args: argparse.Namespace) -> int:
    """Print a line per finding, or one JSON object; 1 if there is a problem."""
    findings: list[Finding] = []
    for finding in examine(args):
        findings.append(finding)
        if not args.json:
            print(finding, flush=True)
    counts = {level: sum(f.level == level for f in findings) for level in (PROBLEM, WARNING, OK)}
    if args.json:
        print(json.dumps({"findings": [f.as_json() for f in findings], **counts}, indent=1))
    else:
        print(f"\n{counts[PROBLEM]} problems, {counts[WARNING]} warnings")
    return 1 if counts[PROBLEM] else 0


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """All findings, the quick ones first."""
    choose_device(args)
    yield from check_software()
    yield from check_processor(args.workers, on_cpu=args.device == "cpu")
    yield from check_memory()
    yield from check_limits(args.workers)
    yield check_port(args.host, args.port)
    yield check_clock()
    yield check_leftovers()
    if (why := device_reason(args)) is not None:
        yield ok("device", f"{args.device} ({why})")
    # Of a Ray cluster's machines each has its own.
    yield from check_torch(args.device, args.workers if args.ray_address is None else 1)
    if args.model is not None or args.load_format == "dummy":
        yield from check_model(args)


def check_torch(device: str, num_workers: int) -> Iterator[Finding]:
    """torch, if it can be loaded at all, and the GPUs that it sees."""
    try:
        gpus = load("moeyard.clients.doctor.gpus")
    except (ImportError, OSError) as error:
        first = str(error).splitlines()[0]
        yield problem("torch", f"cannot be loaded: {first}", "install it again, for this Python and this machine")
        return
    yield from gpus.check_gpus(device, num_workers)


def check_model(args: argparse.Namespace) -> Iterator[Finding]:
    """Check what `serve` checks before it starts: the family, the files, the tokenizer, and whether it fits."""
    local, hub_model = args.ray_address is None, hub_id(args.model)
    try:
        config = engine_config(args)
        model, api = served_model(config), api_settings(args, config)
        yield ok(
            "model",
            f"{api.names[0]}: {model.num_layers} layers, {model.num_experts} experts (top {model.top_k}), "
            f"up to {model.max_position} tokens",
        )
        checked = check_before_start(config, model, api=api, local=local, hub_model=hub_model)
    except ValueError as error:
        text, _, advice = str(error).rpartition("; ")
        yield problem("model", text or advice, advice if text else "see README.md for the families")
        return
    if checked.download is not None:
        yield ok("download", f"{checked.download}; {needs(checked, config, model)}")
    elif checked.plan is None:
        yield ok("fit", "the files are whole; whether they fit is known where the workers run")
    else:
        yield ok("fit", f"{config.num_workers} workers, each: {checked.plan}")
