"""Tests with other versions of Python and of the dependencies: `make versions`, a part of `make test-all`.

.venv has the versions of deploy/constraints.txt. Each session here makes a new environment in .cache/nox and lets uv
choose from the ranges in pyproject.toml. It serves the demo from the installed wheel and runs tests. nox prints a table
at the end and skips a Python that this machine lacks. torch and Triton keep their pins, because other pairs need a GPU.

    .venv/bin/nox                         every session
    .venv/bin/nox -s newest-3.13 -- -x    one session; pytest gets what follows --
"""

import os
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "uv"
nox.options.envdir = ".cache/nox"
nox.options.error_on_missing_interpreters = False

PROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PROJECT)
LOWEST = "--resolution=lowest-direct"
# These need no transformers, whose own requirements would raise lower bounds of the server's.
ROUTER = ("tests/router", "tests/scheduling")
ROUTER_TOOLS = (
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "httpx", "jsonschema", "trustme"),
    *("openai", "anthropic", "deepseek-recipe"),
)
# These compare with transformers.
MODELS = (
    *("tests/models/test_families.py", "tests/models/test_deepseek_v4.py", "tests/models/test_linear_attention.py"),
    *("tests/models/test_model_config.py", "tests/models/test_tokenizer.py", "tests/models/test_verify.py"),
    *("tests/models/test_converting.py", "tests/models/test_gguf_metadata.py", "tests/models/test_gguf_writing.py"),
    *("tests/trainer", "tests/deploy/test_demo_checkpoint.py", "tests/deploy/test_hub.py"),
)


def install(session: nox.Session, *arguments: str) -> None:
    """Install the pinned torch and Triton, then what `arguments` ask uv for."""
    pins = Path("deploy/constraints.txt").read_text().splitlines()
    # uv does not read pip's settings.
    env = {
        "UV_FIND_LINKS": os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS"),
        # Ray waits 15 s for a process of its own, which takes longer on a busy machine if it must compile.
        "UV_COMPILE_BYTECODE": "1",
    }
    session.install(*(pin for pin in pins if pin.startswith(("torch==", "triton=="))), env=env)
    # uv would take the wheel of an earlier run if pyproject.toml is the same.
    session.install("--reinstall-package=moeyard", *arguments, env=env)


def serve_demo(session: nox.Session) -> None:
    """Serve the demo from a folder outside the checkout. Ray refuses temporary files in a virtual environment."""
    with tempfile.TemporaryDirectory() as folder, session.chdir(folder):
        session.run("moeyard", "doctor", "--device", "cpu", "--port", "0")
        session.run("moeyard", "demo", "--once", "--device", "cpu", "--port", "0", env={"OMP_NUM_THREADS": "1"})


def test(session: nox.Session, *arguments: str) -> None:
    """Run the fast tier of these tests."""
    command = ("python", "-m", "pytest", "-p", "no:cacheprovider", "-n=auto", "--dist=loadfile", "-m", "not timing")
    session.run(*command, *arguments, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """The newest release of each dependency."""
    install(session, ".[dev,verify,gguf,tracing,bench,gpu]")
    serve_demo(session)
    test(session, *ROUTER, *MODELS)


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """The lower bound of each dependency of the server."""
    dev = PROJECT["project"]["optional-dependencies"]["dev"]
    tools = [line for line in dev if line.startswith(tuple(f"{name}>" for name in ROUTER_TOOLS))]
    install(session, LOWEST, ".[gguf,tracing,bench,gpu]", *tools)
    serve_demo(session)
    test(session, *ROUTER, "-k", "not transformers")


@nox.session(python=PYTHONS[0])
def lowest_dev(session: nox.Session) -> None:
    """The lower bound of each dependency of the tests, transformers among them."""
    install(session, LOWEST, ".[dev,verify]")
    test(session, *MODELS)
