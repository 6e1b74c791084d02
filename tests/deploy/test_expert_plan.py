"""`moeyard experts plan`: what it prints, and that what it writes is what `serve` reads."""

from pathlib import Path

import pytest

from moeyard.cli import main
from moeyard.placing import placement_of
from moeyard_worker.experts.planning import read_needs, together
from moeyard_worker.models.families import load_model_config

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deploy" / "demo"
TRACE = ROOT / "tests" / "experts" / "data" / "demo-routing-4"


def test_what_is_written_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "owners.json"
    command = ["experts", "plan", str(TRACE), "--workers", "3", "--copies", "1", "4", "--model", str(DEMO)]
    assert main([*command, "--write", str(file)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 8
    assert last == f"moeyard serve --workers 3 --expert-placement {file}"
    assert placement_of(str(file), load_model_config(DEMO), 3) == together(read_needs(TRACE), 3)
