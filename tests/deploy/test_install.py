"""Installation: pins within the project's ranges, a stamp that follows them, one command for CI."""

import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from tests.scripts import loaded

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    lines = (ROOT / "deploy/constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[ModuleType]:
    with loaded(ROOT / "deploy/tools/bootstrap.py") as module:
        yield module


def test_every_dependency_is_pinned_within_its_range(pins: dict[str, str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} has no pin"
        assert requirement.specifier.contains(pins[name]), f"{requirement} does not admit {pins[name]}"


def test_torch_is_pinned_to_the_version_with_a_cpu_build(pins: dict[str, str]) -> None:
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")


def test_supported_pythons_agree(bootstrap: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = SpecifierSet(project["requires-python"])
    minors = [minor for minor in range(30) if wanted.contains(f"3.{minor}.1")]
    assert ((3, minors[0]), (3, minors[-1])) == (bootstrap.OLDEST, bootstrap.NEWEST)
    assert f"(3, {minors[0]}) <= sys.version_info[:2] <= (3, {minors[-1]})" in (ROOT / "Makefile").read_text()
    named = [line for line in project["classifiers"] if "Python" in line]
    assert named == [f"Programming Language :: Python :: 3.{minor}" for minor in minors]


def test_stamp_follows_the_pins(bootstrap: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    for name in ("pyproject.toml", "deploy/constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    before = bootstrap.digest(tmp_path)
    assert bootstrap.digest(ROOT) == before
    with (tmp_path / "deploy/constraints.txt").open("a") as f:
        f.write("another==1.0\n")
    assert bootstrap.digest(tmp_path) != before


def test_stamped_environment_is_unchanged(bootstrap: ModuleType, tmp_path: Path) -> None:
    # Neither stamp's folder is an environment, so any installation attempt would fail.
    (tmp_path / f".installed-{bootstrap.digest(ROOT)}-dev").touch()
    assert bootstrap.install(ROOT, tmp_path, dev=True) == 0
    assert bootstrap.install(ROOT, tmp_path, dev=False) == 0
    assert not bootstrap.venv_is_usable(tmp_path)


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[1:] == ["exec make test"]


def test_make_passes_once_and_arguments() -> None:
    plan = subprocess.run(["make", "-n", "demo", "ONCE=1"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "bin/moeyard demo --once" in plan
    plan = subprocess.run(
        ["make", "-n", "test", "ARGS=-x"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "-m pytest -x" in plan
    plan = subprocess.run(["make", "-n", "versions", "ARGS=-l"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "bin/nox -l" in plan.stdout


def test_prometheus_is_optional_without_apt_get(tmp_path: Path) -> None:
    for tool in ("dirname", "sh"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    tools = tmp_path / "deploy" / "tools"
    tools.mkdir(parents=True)
    script = shutil.copy(ROOT / "deploy/tools/get_prometheus.sh", tools)
    result = subprocess.run([tmp_path / "sh", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "no apt-get" in result.stderr
