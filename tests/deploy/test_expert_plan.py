"""`moeyard experts plan`: its output, and `serve` with the file that it writes."""

import json
from pathlib import Path

import pytest

from moeyard.cli.commands import main
from moeyard.fleet.placing import placement_of
from moeyard_worker.experts.offline.loads import read_loads
from moeyard_worker.experts.offline.planning import balanced, copied, read_needs, together
from moeyard_worker.models.families import load_model_config
from moeyard_worker.models.shapes import quantization_config

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deploy" / "demo"
TRACE = ROOT / "tests" / "experts" / "data" / "demo-routing-4"


def test_written_plan_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "owners.json"
    command = ["experts", "plan", str(TRACE), "--workers", "3", "--model", str(DEMO)]
    assert main([*command, "--write", str(file)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 6
    assert last == f"moeyard serve --workers 3 --expert-placement {file}"
    needs, model = read_needs(TRACE), load_model_config(DEMO)
    assert placement_of(str(file), model, 3) == together(needs, 3)
    assert main([*command, "--copies", "6", "--write", str(file)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 8
    written = placement_of(str(file), model, 3)
    assert written == copied(needs, together(needs, 3), 6)
    assert written.copies
    assert main([*command, "--copies", "1", "4"]) == 0
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--copies", "1", "4", "--write", str(file)])
    assert "--write writes one placement: give one of --copies 1 4" in capsys.readouterr().err


def test_plan_from_a_fleets_counts_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model_config(DEMO)
    rows = [[1000 // (1 + expert) for expert in range(model.num_experts)] for _ in model.moe_layers]
    rank = {"rank": 0, "layers": list(model.moe_layers), "experts": list(range(model.num_experts)), "rows": rows}
    counted, file = tmp_path / "loads.json", tmp_path / "owners.json"
    counted.write_text(json.dumps({"ranks": [rank]}))
    command = ["experts", "plan", str(counted), "--workers", "3", "--model", str(DEMO)]
    assert main([*command, "--copies", "6", "--write", str(file)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in table[1:]] == [
        "contiguous (linear)",
        "in turn (round_robin)",
        "balanced by load",
        "balanced, 6 copied",
    ]
    assert last == f"moeyard serve --workers 3 --expert-placement {file}"
    loads = read_loads(counted)
    assert placement_of(str(file), model, 3) == copied(loads, balanced(loads, 3), 6)
    rank["experts"] = [expert + 1 for expert in range(model.num_experts)]
    counted.write_text(json.dumps({"ranks": [rank]}))
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert "tells nothing of" in capsys.readouterr().err


def test_quantised_experts_count_with_their_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((DEMO / "config.json").read_text()) | {"hidden_size": 1024, "moe_intermediate_size": 512}
    config |= {"head_dim": 64, "dtype": "bfloat16"}
    sizes = []
    for changes in ({}, {"quantization_config": quantization_config("fp8")}):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        assert main(["experts", "plan", str(TRACE), "--workers", "3", "--model", str(tmp_path)]) == 0
        sizes.append(float(capsys.readouterr().out.splitlines()[1].split()[-1]))
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.01)
