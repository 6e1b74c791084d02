"""examples/demo_model/model_card.py and curves.py: the card shows the figures that the other scripts recorded."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from examples.demo_model import evaluate, measure, model_card
from examples.demo_model.curves import draw, nice_ticks
from safetensors.torch import load_file
from tests.deploy.tiny_demo import MTP, TEXTS, make_demo, write_heldout


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo(tmp_path_factory.mktemp("card"))


@pytest.fixture(scope="module")
def result(directory: Path) -> dict[str, Any]:
    model = measure.DemoModel(directory)
    documents = measure.read_documents(write_heldout(directory / "heldout.jsonl"), model)
    return evaluate.evaluate(model, documents, seed=5, num_prompts=3, prompt_tokens=8, num_tokens=6)


def curve_row(step: int) -> dict[str, float]:
    return {"step": step, "tokens": 100 * step, "loss": 9 - step / 100, "mtp_loss": 9.5 - step / 100, "lr": 1e-3}


@pytest.fixture(scope="module")
def folder(directory: Path, result) -> Path:
    """Write model_card.py's input in the formats of the other scripts, and run it."""
    (directory / "evaluation.json").write_text(json.dumps(result))
    curve = [
        curve_row(step) | ({"heldout_bpb": 3.0, "max_load": 4.5} if step % 200 == 0 else {})
        for step in range(50, 850, 50)
    ]
    training = {
        "command": "python train.py --steps 800",
        "seed": 77,
        "device": "Abacus",
        "torch": "9.9",
        "seconds": 90.0,
    }
    (directory / "training.json").write_text(json.dumps(training | {"tokens": 80000, "curve": curve}))
    source = {
        "source": "sea",
        "package": "sea-stories",
        "version": "1.2",
        "registry": "npm",
        "package_licence": "nobody's",
        "why_public_domain": "drowned in 1700",
        "train": {"documents": 1234, "bytes": 56789},
        "heldout": {"documents": 2, "bytes": 99},
    }
    split = {"share": 0.013, "max_shared_shingles": 0.03, "left_out_for_shared_passages": ["sea: Storms"]}
    (directory / "data.json").write_text(json.dumps({"sources": [source], "split": split}))
    forms = {"int4-g32": {"bits_per_byte": 1.23456, "bytes": 7654321, "tpot_ms": 8.765}}
    (directory / "forms.json").write_text(json.dumps({"forms": forms}))
    model_card.write_card(directory)
    return directory


def test_card_shows_the_recorded_figures(folder: Path, result) -> None:
    card = (folder / "README.md").read_text()
    for row in result["bounds"]:
        value = f"{row['value']:.3f}" if isinstance(row["value"], float) else str(row["value"])
        assert any(all(part in line for part in (row["figure"], value, row["bound"])) for line in card.splitlines())
    for row in result["experts"]:
        assert f"{row['busiest']:.3f}" in card
        assert f"{row['least']:.3f}" in card
    for row in result["heldout"]["sources"].values():
        assert f"{row['bits_per_byte']:.3f}" in card
    for text in ("python train.py --steps 800", "77", "Abacus", "1.5 minutes", "80,000", "curves.svg"):
        assert text in card
    assert re.search(r"\| int4-g32 +\| +1\.2346 +\| +7\.7 +\| +8\.77 +\|", card)
    for text in ("sea-stories", "1.2", "nobody's", "drowned in 1700", "1,234 / 56.8", "2 / 0.1", "1.3%", "sea: Storms"):
        assert text in card
    assert card.count("seed ") >= len(result["samples"]) == len(TEXTS["sea"]) + len(TEXTS["verse"])


def test_card_counts_every_parameter(folder: Path) -> None:
    counts = model_card.count_parameters(folder)
    stored = load_file(folder / "model.safetensors")
    assert counts["total"] == sum(tensor.numel() for tensor in stored.values())
    assert sum(counts.values()) == 2 * counts["total"] + counts["used per token"]
    assert counts["MTP layer"] == sum(tensor.numel() for name, tensor in stored.items() if name.startswith(MTP))
    experts = sum(t.numel() for name, t in stored.items() if ".mlp.experts." in name and not name.startswith(MTP))
    assert counts["routed experts"] == experts
    idle = experts * 6 // 8
    assert counts["used per token"] == counts["total"] - counts["MTP layer"] - counts["embedding"] - idle


def test_quotations_keep_special_characters() -> None:
    row = {
        "kind": "text",
        "title": "T",
        "prompt": "a *b ",
        "output": "<c>\n_d_",
        "ended": False,
        "temperature": 0.7,
        "seed": 1,
    }
    assert model_card.quote(row).split("\n\n")[1] == "> **a \\*b** \\<c\\>  \n> \\_d\\_ ..."


def test_picture_holds_every_curve(folder: Path) -> None:
    root = ElementTree.parse(folder / "curves.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    panels = root.findall(f"{space}g")
    lines = [[p for p in panel.findall(f"{space}path") if p.get("stroke-width")] for panel in panels]
    assert [len(panel) for panel in lines] == [2, 1, 1]
    # 16 rows of losses, 4 of them measured on held-out text.
    assert [[len(p.attrib["d"].split("L")) for p in panel] for panel in lines] == [[16, 16], [4], [4]]
    width, height = (float(part) for part in root.attrib["viewBox"].split()[2:])
    assert width > 2 * height > 0


def test_picture_of_a_flat_and_of_a_long_curve() -> None:
    rows = [
        curve_row(step) | {"loss": 1.0, "mtp_loss": 1.0, "heldout_bpb": 1.9, "max_load": 2.0} for step in range(1, 2001)
    ]
    picture = draw(rows, 1.9, 2.0)
    ElementTree.fromstring(picture)
    assert len(picture) < 20_000
    assert "nan" not in picture


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1.7, 5.3), (0, 12000), (1.899, 1.901)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert 3 <= len(ticks) <= 7
    assert low <= ticks[0]
    assert ticks[-1] <= high
    assert all(len(f"{tick:.6g}") <= 6 for tick in ticks)
