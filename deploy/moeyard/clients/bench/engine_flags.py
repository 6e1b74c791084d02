"""The flags of `moeyard bench engine`."""

import argparse
from pathlib import Path

from moeyard.cli.flags import DEFAULTS, add_shape_arguments, both
from moeyard.local.model_source import add_model_argument
from moeyard_worker.config.engine_config import DTYPES, EXPERT_POLICIES


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moeyard bench engine`."""
    add = parser.add_argument
    add_model_argument(parser, otherwise=" (or --shape)")
    add_shape_arguments(parser)
    add("--device", default="cuda", metavar="NAME", help="cpu, cuda or cuda:N (default %(default)s)")
    add("--dtype", choices=DTYPES, default="auto", help="of weights and activations (default: the checkpoint's)")
    add("--enforce-eager", action="store_true", help="capture no step in a CUDA graph")
    add("--streams", type=int, nargs="*", default=[1, 8, 64], metavar="N", help="requests at once (default 1 8 64)")
    add("--prompt", type=int, default=128, metavar="N", help="tokens of their prompts (default %(default)s)")
    add("--output", type=int, default=128, metavar="N", help="tokens answered to each (default %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy; otherwise each its own seed")
    add("--top-p", type=float, default=1.0, metavar="P", help="where tokens are sampled (default %(default)s)")
    add("--context", nargs="*", default=[], metavar="CxN", help="C streams whose prompts have N tokens, e.g. 8x32768")
    add(
        "--kv-budget",
        type=int,
        metavar="N",
        help="measure --context once more with N tokens of each prompt kept (SnapKV)",
    )
    add(
        "--prefill",
        nargs="*",
        default=["1x256", "1x1024", "1x8192", "4x4096"],
        metavar="CxN",
        help="C prompts of N tokens at once, a token answered to each (default 1x256 1x1024 1x8192 4x4096)",
    )
    add("--chunk", type=int, metavar="N", help=f"rows of a step (default {both('max_batch_tokens')})")
    add(
        "--mixed",
        type=int,
        nargs="?",
        const=16,
        default=0,
        metavar="STREAMS",
        help="latencies of so many streams (16) while prompts arrive one behind the other",
    )
    add("--mixed-prompt", type=int, default=8192, metavar="N", help="tokens of those prompts (default %(default)s)")
    add("--mixed-prompts", type=int, default=4, metavar="N", help="how many of them (default %(default)s)")
    add("--mixed-chunk", type=int, default=2048, metavar="N", help="their rows in a step (default %(default)s)")
    add(
        "--residency",
        type=float,
        nargs="+",
        default=[],
        metavar="SHARE",
        help="shares of the experts in slots, in turn",
    )
    add("--expert-slots", type=int, metavar="N", help="the same as a number (default: as many as fit)")
    add("--expert-policy", choices=EXPERT_POLICIES, default=DEFAULTS["expert_policy"], help="default %(default)s")
    add("--profile", action="store_true", help="run each once more under torch's profiler, and show where time goes")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
