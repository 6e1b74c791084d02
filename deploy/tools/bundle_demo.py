"""Hatchling's hook for a wheel (pyproject.toml): it puts the demo checkpoint in, which `moeyard demo` serves.

An editable install finds the checkpoint in its checkout. An image is built without it, because it is given a model.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "deploy/demo"
# moeyard/local/model_source.py looks for it there.
TARGET = "moeyard/bundled/demo"
FILES = (
    *("config.json", "generation_config.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "model.safetensors"),
)


class BundleDemo(BuildHookInterface):
    """16 MB of checkpoint, as package data."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files. `version`: "standard" for a wheel, "editable" for what points to a checkout."""
        folder = Path(self.root) / SOURCE
        if version == "standard" and folder.is_dir():
            build_data["force_include"].update({str(folder / name): f"{TARGET}/{name}" for name in FILES})
