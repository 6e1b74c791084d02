"""The distributions: their contents and metadata, and a clean environment that installs one and serves the demo."""

import email
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_sdist_filename, parse_wheel_filename
from tests.limits import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = {"moeyard": "deploy", "moeyard_router": "router", "moeyard_worker": "worker", "moeyard_kernels": "kernels"}
# A package index may be slow: an installation downloads hundreds of megabytes.
INSTALL_SECONDS = 10 * HANG_SECONDS


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The paths of a wheel and an sdist of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", folder]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert result.returncode == 0, result.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module")
def metadata(built: dict[str, Path]) -> Message:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(wheel.read(name))


def package_files(package: str) -> set[str]:
    """Return the names that git tracks in a package, as a wheel spells them."""
    folder = f"{PACKAGES[package]}/{package}"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {
        name.removeprefix(f"{PACKAGES[package]}/") for name in output.split("\0") if (ROOT / name).is_file() and name
    }


def test_one_wheel_serves_every_platform(built: dict[str, Path]) -> None:
    name, version, build, tags = parse_wheel_filename(built["wheel"].name)
    assert (name, str(version), build) == (PROJECT["name"], PROJECT["version"], ())
    assert {str(tag) for tag in tags} == {"py3-none-any"}
    assert parse_sdist_filename(built["sdist"].name) == (name, version)


def test_wheel_holds_the_packages_the_demo_and_the_licences(built: dict[str, Path]) -> None:
    demo = ("config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
    wanted = set().union(*map(package_files, PACKAGES))
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        licences = {name.partition("/licenses/")[2] for name in wheel.namelist() if "/licenses/" in name}
        for name in (*demo, "model.safetensors"):
            assert wheel.read(f"moeyard/bundled/demo/{name}") == (ROOT / "deploy/demo" / name).read_bytes()
    assert names == wanted | {f"moeyard/bundled/demo/{name}" for name in (*demo, "model.safetensors")}
    assert {"moeyard_router/http/static/index.html", "moeyard_router/text/deepseek_v4.jinja"} <= names
    others = {path.relative_to(ROOT).as_posix() for path in (ROOT / "router").rglob("*.LICENSE.txt")}
    assert len(others) == 2
    assert licences == {"LICENSE", *others}


def test_sdist_holds_what_a_wheel_is_built_from(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    for package, folder in PACKAGES.items():
        assert {f"{folder}/{name}" for name in package_files(package)} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "deploy/tools/bundle_demo.py"} <= names
    assert "deploy/demo/model.safetensors" in names
    assert not [name for name in names if name.startswith((".venv", ".git/")) or "__pycache__" in name]


def test_metadata_names_pythons_extras_and_ranges(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"
    assert set(metadata.get_all("Provides-Extra", [])) >= {"gpu", "tracing", "bench", "verify", "dev"}
    base = {str(Requirement(line)) for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert base == {str(Requirement(line)) for line in PROJECT["dependencies"]}


def with_pip(venv: Path, torch: str, distribution: Path) -> list[list[str | Path]]:
    pip: list[str | Path] = [venv / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return [[sys.executable, "-m", "venv", venv], [*pip, torch], [*pip, distribution]]


def with_uv(venv: Path, torch: str, distribution: Path) -> list[list[str | Path]]:
    uv: list[str | Path] = [sys.executable, "-m", "uv", "--quiet"]
    # pip compiles too. Without that, Ray's agent may take longer than the 15 s that Ray waits for it on a busy machine.
    install: list[str | Path] = [*uv, "pip", "install", "--compile-bytecode", "--python", venv]
    return [[*uv, "venv", "--python", sys.executable, venv], [*install, torch], [*install, distribution]]


@pytest.mark.slow
@pytest.mark.timeout(5 * INSTALL_SECONDS)
@pytest.mark.parametrize(("kind", "steps"), [("wheel", with_pip), ("sdist", with_uv)])
def test_clean_environment_serves_the_demo(
    kind: str, steps: Callable[[Path, str, Path], list[list[str | Path]]], built: dict[str, Path], tmp_path: Path
) -> None:
    """Versions follow from the metadata, not from constraints.txt. Torch alone is pinned: its newest build is large."""
    pins = (ROOT / "deploy/constraints.txt").read_text().splitlines()
    (torch,) = (line for line in pins if line.startswith("torch=="))
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    # uv reads none of pip's settings.
    if "PIP_FIND_LINKS" in os.environ:
        environment.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])

    def run(*command: str | Path, seconds: float = HANG_SECONDS) -> str:
        folder = tmp_path / "empty"
        folder.mkdir(exist_ok=True)
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    venv = tmp_path / "venv"
    for step in steps(venv, torch, built[kind]):
        run(*step, seconds=INSTALL_SECONDS)
    program = venv / "bin/moeyard"
    assert PROJECT["version"] in run(program, "--version")
    findings = run(program, "doctor", "--device", "cpu", "--port", "0")
    assert "0 problems" in findings
    assert str(ROOT) not in run(venv / "bin/python", "-c", "import moeyard; print(moeyard.__path__)")
    answer = run(program, "demo", "--once", "--device", "cpu", "--port", "0", seconds=3 * HANG_SECONDS)
    assert "TPOT" in answer
    # pytest keeps the temporary files of three runs, and this is a gigabyte.
    shutil.rmtree(venv)
