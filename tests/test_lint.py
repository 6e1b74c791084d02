"""Format, lint and types of the whole tree, so that the test suite alone keeps them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("command", ["ruff format --check", "ruff check", "mypy"])
def test_tool_has_nothing_to_say(command: str) -> None:
    tool, *arguments = command.split()
    result = subprocess.run(
        [Path(sys.executable).parent / tool, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-8000:]}{result.stderr[-2000:]}"
