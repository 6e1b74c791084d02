"""Create `.venv` and install the project into it, for `make demo` and `make test`.

Needs nothing but Python 3.11 to 3.14 and a package index. Versions come from `deploy/constraints.txt`. A finished
install leaves a stamp named after the hash of `pyproject.toml` and the constraints: a second run does nothing, a change
of either file installs again. `--dev` adds what the tests need.

    python3 deploy/tools/bootstrap.py [--dev] [--root DIR] [--venv DIR]
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 14)


def digest(root: Path) -> str:
    """Return twelve hex digits of a hash over the dependency files and the interpreter's version."""
    h = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for name in ("pyproject.toml", "deploy/constraints.txt"):
        h.update((root / name).read_bytes())
    return h.hexdigest()[:12]


def venv_is_usable(venv: Path) -> bool:
    """Return whether the environment's interpreter starts and is a supported Python."""
    python = venv / "bin" / "python"
    if not python.exists():
        return False
    probe = subprocess.run(
        [python, "-c", "import sys, pip; print(sys.version_info[:2])"], capture_output=True, text=True
    )
    return probe.returncode == 0 and probe.stdout.strip() == str(sys.version_info[:2])


def install(root: Path, venv: Path, dev: bool) -> int:
    """Install into `venv` unless its stamp says that it is done; returns the exit code of the first failing step."""
    stamp, dev_stamp = (venv / f".installed-{digest(root)}{suffix}" for suffix in ("", "-dev"))
    if dev_stamp.exists() or (stamp.exists() and not dev):
        return 0
    if not venv_is_usable(venv):
        print(f"creating {venv} with Python {sys.version.split()[0]}", flush=True)
        shutil.rmtree(venv, ignore_errors=True)
        code = subprocess.run([sys.executable, "-m", "venv", venv]).returncode
        if code:
            print(f"could not create {venv} (on Debian the package python3-venv is needed)", file=sys.stderr)
            return code
    for old in venv.glob(".installed-*"):
        old.unlink()
    print("installing moeyard and its dependencies (a few minutes the first time)", flush=True)
    command: list[str | Path] = [
        venv / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    command += ["-c", root / "deploy" / "constraints.txt", "-e", f"{root}[dev]" if dev else str(root)]
    code = subprocess.run(command).returncode
    if code == 0:
        (dev_stamp if dev else stamp).touch()
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description="make .venv and install the project into it")
    parser.add_argument("--dev", action="store_true", help="also install what the tests need")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2], help="the checkout")
    parser.add_argument("--venv", type=Path, help="where the environment lives (default: ROOT/.venv)")
    args = parser.parse_args()
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        print(f"Python 3.11 to 3.14 is needed, this is {sys.version.split()[0]} at {sys.executable}", file=sys.stderr)
        return 1
    venv = args.venv or args.root / ".venv"
    # Two makes at once must not install into one environment; the lock ends with the process.
    venv.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(f"{venv}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return install(args.root, venv, args.dev)


if __name__ == "__main__":
    sys.exit(main())
