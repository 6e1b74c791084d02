"""`moeyard experts plan`: which rank ought to compute which expert, by a recorded trace."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from moeyard.door_flags import count
from moeyard.lazy import load
from moeyard.model_source import checkpoint
from moeyard_worker.config.engine_config import DTYPE_BYTES


def add_experts_command(parser: argparse.ArgumentParser) -> None:
    """The subjects of `moeyard experts`."""
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    plan = subjects.add_parser("plan", help="compare placements of experts over ranks by recorded routing")
    plan.add_argument("file", help="what --record-routing wrote")
    plan.add_argument("--workers", type=count, required=True, metavar="N", help="ranks to place experts on")
    plan.add_argument(
        "--copies", type=count, nargs="+", default=[], metavar="R",
        help="also with second copies of the R most needed experts of a layer (a prediction; nothing serves them)",
    )  # fmt: skip
    plan.add_argument("--model", metavar="MODEL", help="the checkpoint: also bytes of weights")
    plan.add_argument("--write", metavar="FILE", help="write the best placement for `serve --expert-placement FILE`")
    plan.set_defaults(run=run_experts_plan)


def run_experts_plan(args: argparse.Namespace) -> int:
    """`moeyard experts plan`. Raises ValueError and OSError for what cannot be read, placed or written."""
    planning = load("moeyard_worker.experts.planning")
    needs = planning.read_needs(Path(args.file))
    expert_bytes = None
    if args.model is not None:
        model = load("moeyard_worker.models.families").load_model_config(checkpoint(args))
        if (model.num_experts, set(needs.layers) - set(model.moe_layers)) != (needs.num_experts, set()):
            raise ValueError(f"{args.file} is no trace of {args.model}: it has other layers or experts")
        expert_bytes = model.expert_bytes(DTYPE_BYTES[model.dtype])
    predictions = planning.compare(needs, args.workers, num_replicas=args.copies)
    print(planning.format_plan(predictions, expert_bytes=expert_bytes))
    if args.write is not None:
        placement = planning.together(needs, args.workers)
        Path(args.write).write_text(owners_text(placement.layers, placement.owners), encoding="utf-8")
        print(f"moeyard serve --workers {args.workers} --expert-placement {args.write}")
    return 0


def owners_text(layers: Sequence[int], owners: Sequence[Sequence[int]]) -> str:
    """A placement file, a line per layer."""
    rows = ",\n".join(f'"{layer}": {json.dumps(list(row))}' for layer, row in zip(layers, owners, strict=True))
    return f'{{"owners": {{\n{rows}\n}}}}\n'
