"""`moeyard cache-sim` and `moeyard experts plan`: caches and placements of experts by recorded routing."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moeyard.local.model_source import checkpoint
from moeyard_worker.config.placement import Placement
from moeyard_worker.experts.offline import loads, planning
from moeyard_worker.experts.offline.sim import belady, format_table, simulate
from moeyard_worker.models.families import load_model_config, with_codes


def cache_sim(args: argparse.Namespace) -> int:
    """Print hits of a policy, and the best possible ones, for each number of slots."""
    path = Path(args.file)
    for slots in args.slots or [None]:
        result = simulate(path, args.policy, slots)
        print(format_table(result, belady(path, slots)))
    return 0


def experts_plan(args: argparse.Namespace) -> int:
    """Compare placements, and write the best. Raises ValueError and OSError for files that cannot be used."""
    if args.write is not None and len(args.copies) > 1:
        raise ValueError(f"--write writes one placement: give one of --copies {' '.join(map(str, args.copies))}")
    path = Path(args.file)
    counted = loads.is_loads(path)
    needs: Any = loads.read_loads(path) if counted else planning.read_needs(path)
    expert_bytes = None
    if args.model is not None:
        directory = checkpoint(args)
        model = load_model_config(directory)
        if (model.num_experts, set(needs.layers) - set(model.moe_layers)) != (needs.num_experts, set()):
            raise ValueError(f"{args.file} tells nothing of {args.model}: it has other layers or experts")
        expert_bytes = with_codes(model, directory).expert_form(model.dtype).blob_bytes
    if counted:
        print(loads.format_loads(planning.compare_loads(needs, args.workers, num_copies=args.copies)))
    else:
        predictions = planning.compare(needs, args.workers, num_copies=args.copies)
        print(planning.format_plan(predictions, expert_bytes=expert_bytes))
    if args.write is not None:
        best = planning.balanced if counted else planning.together
        placement = planning.copied(needs, best(needs, args.workers), *(args.copies or [0]))
        Path(args.write).write_text(placement_text(placement), encoding="utf-8")
        print(f"moeyard serve --workers {args.workers} --expert-placement {args.write}")
    return 0


def placement_text(placement: Placement) -> str:
    """A placement file, a line per layer."""
    owners = _lines(placement.layers, map(list, placement.owners))
    copies = _lines(placement.layers, map(dict, placement.copies)) if placement.copies else ""
    return f'{{"owners": {{\n{owners}\n}}' + (f', "copies": {{\n{copies}\n}}' if copies else "") + "}\n"


def _lines(layers: Iterable[int], rows: Iterable[object]) -> str:
    return ",\n".join(f'"{layer}": {json.dumps(row)}' for layer, row in zip(layers, rows, strict=True))
