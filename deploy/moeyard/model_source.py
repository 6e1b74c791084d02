"""Which checkpoint a command is given: a directory here, an id of the Hugging Face hub, or the bundled demo."""

import argparse
import re
from pathlib import Path

from moeyard.lazy import load

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo"


def add_model_argument(parser: argparse.ArgumentParser, otherwise: str = "", nargs: str | None = "?") -> None:
    """A checkpoint, here or on the hub."""
    parser.add_argument("model", nargs=nargs, help=f"local Hugging Face directory, or an id of the hub{otherwise}")
    parser.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit on the hub (default: its main branch)"
    )


def checkpoint(args: argparse.Namespace) -> str:
    """The directory of the checkpoint that was named, fetched from the hub where it is one's id, or of the demo's."""
    revision = getattr(args, "revision", None)
    if hub_id(args.model) is not None:
        return str(load("moeyard.hub").fetch(args.model, revision))
    if revision is not None:
        raise ValueError(f"--revision {revision}: only a model of the Hugging Face hub has revisions")
    return str(Path(args.model or bundled_model()).resolve())


def hub_id(model: str | None) -> str | None:
    """`model` where it has the form of an id of the hub (organisation/name) and no file here is called so."""
    form = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
    return model if model is not None and re.fullmatch(form, model) and not Path(model).exists() else None


def bundled_model() -> str:
    """Directory of the demo checkpoint, which only a checkout of the project has; raises ValueError elsewhere."""
    if not DEMO_MODEL.is_dir():
        raise ValueError("the demo checkpoint is not part of an installed package; name a MODEL or use a checkout")
    return str(DEMO_MODEL)
