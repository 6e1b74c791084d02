"""Real clients against a live fleet: `python tests/clients/run.py [openai litellm ...] [--url URL]`.

The script starts `moeyard serve` of the demo with two workers and a tool template. Each suite runs in its own virtual
environment (created on the first run, below --venvs; needs a package index). The script prints each check and a
summary, and exits with 1 if a suite fails. `make test` does not run it, because it needs these clients.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
START_SECONDS = 180.0
AIPERF_REQUESTS = 32


@dataclass(frozen=True, slots=True)
class Suite:
    """One environment's packages, and its program: a file in this folder or a command of the package.

    `machine` names a program of the machine, for a suite that needs no environment.
    """

    packages: tuple[str, ...] = ()
    program: str | None = None
    command: tuple[str, ...] = ()
    machine: str | None = None


SUITES = {
    "openai": Suite(("openai",), "with_openai.py"),
    "responses": Suite(("openai",), "with_responses.py"),
    "anthropic": Suite(("anthropic",), "with_anthropic.py"),
    "litellm": Suite(("litellm",), "with_litellm.py"),
    "langchain": Suite(("langchain-openai",), "with_langchain.py"),
    "generated": Suite(("openapi-python-client",), "with_generated.py"),
    "pydantic_ai": Suite(("pydantic-ai-slim[openai]",), "with_pydantic_ai.py"),
    "lm_eval": Suite(("lm_eval", "transformers", "aiohttp", "tenacity", "tiktoken"), "with_lm_eval.py"),
    "aiperf": Suite(
        ("aiperf",),
        command=(
            *("aiperf", "profile", "--model", "demo", "--url", "{url}", "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", "{root}/deploy/demo", "--concurrency", "8", "--request-count", str(AIPERF_REQUESTS)),
            *("--synthetic-input-tokens-mean", "100", "--output-tokens-mean", "32"),
            *("--extra-inputs", "ignore_eos:true"),
            *("--artifact-dir", "{out}", "--use-server-token-count", "--ui", "none"),
        ),
    ),
    "java": Suite(machine="java", command=("java", "{root}/tests/clients/StreamChat.java", "{url}", "demo")),
}


def environment(directory: Path, suite: Suite) -> Path:
    """Return the `bin` of the suite's virtual environment, or of the machine's program."""
    if suite.machine is not None:
        found = shutil.which(suite.machine)
        if found is None:
            raise SystemExit(f"{suite.machine} is not installed")
        return Path(found).parent
    home = directory / "-".join(re.sub(r"\W+", "_", p) for p in suite.packages)
    if not (home / "ready").exists():
        venv.create(home, with_pip=True)
        packages = [*suite.packages, "jsonschema"]
        subprocess.run([home / "bin" / "pip", "install", "-q", *packages], check=True)
        (home / "ready").touch()
    return home / "bin"


@contextlib.contextmanager
def fleet(log: Path) -> Iterator[str]:
    """Serve the demo on two workers; yield its address."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("kernels", "worker", "router", "deploy"))
    command = [
        *(sys.executable, "-m", "moeyard", "serve", "--workers", "2", "--port", "0", "--served-model-name", "demo"),
        *("--chat-template", str(HERE / "tools.jinja"), "--tool-call-parser", "hermes"),
    ]
    with log.open("w") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        )
        try:
            yield _address(server, log)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        found = re.search(r"ready: (http://\S+)/v1 ", log.read_text())
        if found:
            return found[1]
        if server.poll() is not None:
            break
        time.sleep(0.2)
    raise SystemExit(f"the fleet did not start:\n{log.read_text()}")


def run_suite(name: str, bin_directory: Path, url: str, out: Path) -> bool:
    """Return whether the suite passes."""
    suite = SUITES[name]
    if suite.program:
        return subprocess.run([bin_directory / "python", suite.program, url], cwd=HERE).returncode == 0
    words = [word.format(url=url, root=ROOT, out=out / name) for word in suite.command]
    with (out / f"{name}.log").open("w") as log:
        code = subprocess.run([bin_directory / words[0], *words[1:]], cwd=out, stdout=log, stderr=log).returncode
    return code == 0 and (suite.machine is not None or saw_no_error(out / name))


def saw_no_error(directory: Path) -> bool:
    """Check aiperf's export, because aiperf exits with 0 in any case. Print the figures of docs/clients.md."""
    seen = json.loads((directory / "profile_export_aiperf.json").read_text())
    print(f"aiperf {seen['aiperf_version']}: {seen['request_count']['avg']:.0f} requests", end="")
    for key in ("output_token_throughput", "time_to_first_token", "inter_token_latency"):
        print(f", {key} {seen[key]['avg']:.1f} {seen[key]['unit']}", end="")
    print(flush=True)
    return seen["request_count"]["avg"] == AIPERF_REQUESTS and not seen["error_summary"]


def main() -> None:
    """Run the suites."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)} (default: all)")
    parser.add_argument("--url", help="a fleet that runs already, started with the flags in docs/clients.md")
    parser.add_argument("--venvs", type=Path, default=Path("/tmp/moeyard-clients"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the fleet ends with this process
    names = args.suites or [name for name, s in SUITES.items() if s.machine is None or shutil.which(s.machine)]
    if unknown := set(names) - set(SUITES):
        parser.error(f"no suite {', '.join(sorted(unknown))}")
    bins = {name: environment(args.venvs, SUITES[name]) for name in names}
    with contextlib.nullcontext(args.url) if args.url else fleet(args.venvs / "fleet.log") as url:
        held = {name: run_suite(name, bins[name], url, args.venvs) for name in names}
    for name, good in held.items():
        print(f"{name:12} {'holds' if good else 'DOES NOT HOLD'}")
    sys.exit(not all(held.values()))


if __name__ == "__main__":
    main()
