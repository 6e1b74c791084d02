"""The one place of the launcher that imports late.

A command loads what it needs and no more: Ray takes a second to import and reads its settings while it does, torch
takes two and 200 MB, and transformers need not be installed. `--help`, a wrong flag and the router pay for nothing.
"""

import importlib
from typing import Any


def load(module: str) -> Any:
    """The module of that name, imported now."""
    return importlib.import_module(module)
