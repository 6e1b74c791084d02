"""Every stored config is among those that the kernels' own tests run and compare for equal bits."""

import importlib
import json
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases.case import assert_bits, with_own_tensors
from kernel_times import Selection, all_cases

import moeyard_kernels
from moeyard_kernels.common import tuning
from moeyard_kernels.common.tuning import RowConfig, parse
from moeyard_kernels.linear.linear_configs import KINDS, Skinny

FILES = sorted(tuning.FOLDER.glob("*.json"))
# Ops of the bench whose configs are stored under another name.
SHARES = {"linear": "linear_pair"}
PARTS = 12
# Ops whose module has another name than their store.
MODULE_OF = {
    "rope_cache_write_mla": "rope_cache_write",
    "rope_cache_write_gqa": "rope_cache_write",
    "scale_rows_": "scale_rows",
    "causal_conv1d_update": "causal_conv1d",
    "gdn_recurrent": "delta_recurrent",
    "kda_recurrent": "delta_recurrent",
    "gdn_step": "delta_step",
    "kda_step": "delta_step",
}


# Promises that a step may give a config.
KEYWORDS = {op: {"static_state": True} for op in ("gdn_recurrent", "kda_recurrent", "gdn_step", "kda_step")}


def configs_of(op: str) -> tuple[tuning.Config, ...]:
    """Return the configs of the op's module, which tests compare for equal bits."""
    [file_of] = Path(moeyard_kernels.__path__[0]).glob(f"[aels]*/{MODULE_OF.get(op, op)}.py")
    module = importlib.import_module(f"moeyard_kernels.{file_of.parent.name}.{file_of.stem}")
    return tuple(module.CONFIGS)


def parsed(op: str, config: Mapping[str, Any]) -> tuning.Config:
    """Return a stored config of an op."""
    return parse(tuple({type(known) for known in configs_of(op)}), config)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_stored_config_is_tested_for_equal_bits(file: Path) -> None:
    table = json.loads(file.read_text())
    assert table, "an empty file is no store"
    unknown = []
    for op, classes in table.items():
        known = configs_of(op)
        unknown += [(op, shape) for shape, config in classes.items() if parsed(op, config) not in known]
    assert unknown == []


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_stored_configs_give_equal_bits_at_their_shapes(part: int) -> None:
    """The parts limit the time, because each config needs two builds and all together need minutes."""
    stored = tuning.stored(torch.cuda.get_device_name())
    known = sorted((op, shape) for op, classes in stored.items() for shape in classes)
    begin, end = (len(known) * i // PARTS for i in (part, part + 1))
    unseen = {(op, shape): stored[op][shape] for op, shape in known[begin:end]}
    if not unseen:
        pytest.skip(f"nothing is stored for {torch.cuda.get_device_name()}")
    ops = [name for op in {op for op, _ in unseen} for name in (op, SHARES.get(op, op))]
    for case in chain(all_cases(Selection(ops=ops)), all_cases(Selection(ops=ops, models=["all"]))):
        if not unseen:
            break
        chosen = unseen.pop(case.tune_key, None) if case.tune_key else None
        if chosen is not None and case.tune_key:
            other = next(run for config, run in case.variants if config.as_dict() != chosen)
            run = partial(other, config=parsed(case.tune_key[0], chosen), **KEYWORDS.get(case.op, {}))
            # Both run on complete copies, so each finds what the op writes in place unchanged.
            ours, theirs = with_own_tensors(run), with_own_tensors(other)
            torch.cuda.synchronize()
            assert_bits(f"{case.op} {case.shape}", ours(), theirs())
    assert unseen == {}, "stored for shapes that the bench has no case of"


def test_device_file_depends_on_the_name() -> None:
    assert tuning.device_file("NVIDIA H200").name == "NVIDIA_H200.json"
    assert tuning.stored("no such device") == {}


def test_configs_of_the_same_chip_are_the_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, read = "NVIDIA H100 80GB HBM3", tuning.stored.__wrapped__
    assert read(name).keys() == read("NVIDIA H200").keys() != set()
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    assert read(name) == {}
    (tmp_path / "NVIDIA_H200.json").write_text('{"rope": {"a": {}, "b": {"num_warps": 2}}}')
    assert read(name) == {"rope": {"a": {}, "b": {"num_warps": 2}}} == read("NVIDIA H200")
    (tmp_path / "NVIDIA_H100_80GB_HBM3.json").write_text('{"linear": {}, "rope": {"b": {"num_warps": 8}}}')
    assert read(name) == {"linear": {}, "rope": {"a": {}, "b": {"num_warps": 8}}}
    assert read("NVIDIA H200") == {"rope": {"a": {}, "b": {"num_warps": 2}}}


def test_broken_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    (tmp_path / "Broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"Broken\.json"):
        tuning.stored("Broken")


def test_cpu_runs_the_default() -> None:
    default = RowConfig(BLOCK=16, num_warps=2)
    assert tuning.choose("rope", "any", torch.zeros(1), (RowConfig,), lambda: default) is default
    assert default.as_dict() == {"kernel": "rows", "BLOCK": 16, "num_warps": 2, "num_stages": 3}


def test_stored_config_must_fit_a_kernel() -> None:
    good = {"kernel": "skinny", "BM": 8, "BN": 64, "BK": 256, "EARLY": 4, "num_stages": 6, "num_warps": 4}
    good["LEFT"] = True
    assert parse(KINDS, good) == Skinny(BM=8, BN=64, BK=256, EARLY=4, LEFT=True, num_stages=6)
    for message, change in (
        (r"no kernel of that name in \['Tiles', 'Stream', 'Skinny', 'Wide'\]", {"kernel": "thin"}),
        (r"Wide has the fields \['BK', 'BM', 'BN', 'GROUP', 'kernel', 'num_stages', 'num_warps'\]", {"kernel": "wide"}),
        (r"Skinny has the fields", {"TMA": 2}),
        (r"BM is True, expected <class 'int'>", {"BM": True}),
        (r"EARLY is '4', expected <class 'int'>", {"EARLY": "4"}),
    ):
        with pytest.raises(ValueError, match=message):
            parse(KINDS, good | change)


def test_invalid_config_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    (tmp_path / "Odd.json").write_text(json.dumps({"rope": {"any": {"kernel": "rows", "BN": 4}}}))
    with pytest.raises(ValueError, match=r"Odd\.json: rope any: .* RowConfig has the fields"):
        tuning._found("Odd", "rope", "any", (RowConfig,))
