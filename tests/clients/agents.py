"""Run coding agents against a router: `python tests/clients/agents.py [codex claude ...] [--home DIR] [--record]`.

The script installs the newest version of each agent below --home (npm and pip), and runs it without other network
access. A scripted worker answers first with a call of the agent's own command tool, which writes a file, and then with
a text. A run passes if the file exists, the agent exits with 0, and no request was refused. `--record` writes the
shapes of all requests to tests/clients/requests, which tests/router/test_agents.py replays.
"""

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import venv
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / part) for part in ("kernels", "worker", "router", "deploy"))]

from tests.clients.shapes import shape  # noqa: E402 - needs the path above
from tests.router.conftest import Starter  # noqa: E402
from tests.router.scripted_worker import ScriptedWorker  # noqa: E402

from moeyard_router.text.chat import TextCodec  # noqa: E402
from moeyard_worker.protocol import Submit  # noqa: E402

DEMO = ROOT / "deploy" / "demo"
REQUESTS = Path(__file__).resolve().parent / "requests"
NODE = "node@22"  # several agents need it
VOCAB_SIZE = 4096
MAX_LEN = 400_000  # the demo's tokens are short, and agents send up to 100 kB of instructions
SECONDS = 180.0
WRITE = "echo proof > proof.txt"
ASK = "Write a file."
EDIT = "proof.txt\n```\nproof\n```\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """Installation, configuration and prompt of one agent. {url} is the server without /v1, {home} the agent's folder.

    `tool` and `arguments` are a call of the agent's command tool; agents without one read files from the answer.
    """

    package: str
    command: tuple[str, ...]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    before: tuple[str, ...] = ()
    tool: str | None = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    pip: bool = False


def _opencode(package: str, base: str) -> str:
    options = {"baseURL": base, "apiKey": "none"}
    model = {"name": "demo", "limit": {"context": 200_000, "output": 1000}}
    provider = {"npm": package, "name": "moeyard", "options": options, "models": {"demo": model}}
    return json.dumps({"model": "moeyard/demo", "small_model": "moeyard/demo", "provider": {"moeyard": provider}})


CODEX = """model = "demo"
model_provider = "moeyard"
[model_providers.moeyard]
name = "moeyard"
base_url = "{url}/v1"
wire_api = "responses"
"""
CONTINUE = """name: local
version: 0.0.1
schema: v1
models:
  - {{name: demo, provider: openai, model: demo, apiBase: "{url}/v1", apiKey: none, roles: [chat]}}
"""
OPENCODE = Agent(
    package="opencode-ai",
    command=("opencode", "run", ASK, "--model", "moeyard/demo"),
    environment={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    files={"work/opencode.json": _opencode("@ai-sdk/openai-compatible", "{url}/v1")},
    tool="bash",
    arguments={"command": WRITE, "description": "Write a file"},
)
AGENTS = {
    "codex": Agent(
        package="@openai/codex",
        command=("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASK),
        environment={"CODEX_HOME": "{home}/codex"},
        files={"codex/config.toml": CODEX},
        tool="exec_command",
        arguments={"cmd": WRITE},
    ),
    "claude": Agent(
        package="@anthropic-ai/claude-code",
        command=("claude", "-p", ASK, "--model", "demo", "--dangerously-skip-permissions"),
        environment={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        tool="Bash",
        arguments={"command": WRITE, "description": "Write a file"},
    ),
    "cline": Agent(
        package="cline",
        before=(
            "cline",
            "auth",
            "-p",
            "openai-compatible",
            "-k",
            "none",
            "-m",
            "demo",
            "-b",
            "{url}/v1",
            "--data-dir",
            "{home}/cline",
        ),
        command=("cline", "--data-dir", "{home}/cline", ASK),
        tool="run_commands",
        arguments={"commands": [WRITE]},
    ),
    "continue": Agent(
        package="@continuedev/cli",
        command=("cn", "-p", "--auto", "--config", "{home}/continue.yaml", ASK),
        files={"continue.yaml": CONTINUE},
        tool="Bash",
        arguments={"command": WRITE},
    ),
    "opencode": OPENCODE,
    "opencode-anthropic": dataclasses.replace(
        OPENCODE, files={"work/opencode.json": _opencode("@ai-sdk/anthropic", "{url}/v1")}
    ),
    "qwen": Agent(
        package="@qwen-code/qwen-code",
        command=("qwen", "-p", ASK, "--auth-type", "openai", "--yolo"),
        environment={"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "demo"},
        tool="run_shell_command",
        arguments={"command": WRITE, "is_background": False, "description": "Write a file"},
    ),
    "aider": Agent(
        package="aider-chat",
        pip=True,
        command=(
            "aider",
            "--model",
            "openai/demo",
            "--no-git",
            "--yes-always",
            "--no-check-update",
            "--no-show-model-warnings",
            "--analytics-disable",
            "--message",
            ASK,
            "proof.txt",
        ),
        environment={"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "none"},
    ),
}


@dataclasses.dataclass(slots=True)
class Recorded:
    """One request with its status, the fields that the server named as ignored, and its refusal."""

    path: str
    body: dict[str, Any]
    status: int
    ignored: str
    refusal: str = ""


class RecordingProxy(ThreadingHTTPServer):
    """A proxy that forwards requests to a server and records them."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.upstream = port
        self.seen: list[Recorded] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _ProxyHandler(BaseHTTPRequestHandler):
    server: RecordingProxy

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Forward a request without a body."""
        self._forward(b"")

    def do_POST(self) -> None:
        """Forward a request with its body."""
        self._forward(self.rfile.read(int(self.headers.get("content-length", 0))))

    def _forward(self, body: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=SECONDS)
        passed = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        connection.request(self.command, self.path, body, passed)
        answer = connection.getresponse()
        refusal = answer.read() if answer.status >= 400 else b""
        if body:
            ignored = answer.headers.get("x-moeyard-ignored", "")
            self.server.seen.append(Recorded(self.path, json.loads(body), answer.status, ignored, refusal.decode()))
        self.send_response(answer.status)
        for name in ("content-type", "retry-after"):
            if name in answer.headers:
                self.send_header(name, answer.headers[name])
        self.end_headers()
        self.wfile.write(refusal)
        while piece := answer.read1(65536):
            self.wfile.write(piece)
            self.wfile.flush()
        connection.close()


@contextlib.contextmanager
def service(agent: Agent) -> Iterator[RecordingProxy]:
    """A router with one scripted worker that answers for `agent`."""
    codec = TextCodec(DEMO, Path(__file__).with_name("tools.jinja"))
    end = codec.encode("<|end|>", add_special_tokens=False)
    call = json.dumps({"name": agent.tool, "arguments": agent.arguments})

    def script(submit: Submit) -> list[int]:
        prompt = codec.decode(submit.prompt_token_ids)
        text = EDIT if agent.tool is None else "All is done."
        if agent.tool is not None and f'"name": "{agent.tool}"' in prompt and "<tool_response>" not in prompt:
            text = f"<tool_call>\n{call}\n</tool_call>"
        return [*codec.encode(text, add_special_tokens=False), *end]

    def prepare(worker: ScriptedWorker) -> None:
        worker.snapshot = dataclasses.replace(worker.snapshot, vocab_size=VOCAB_SIZE)

    starter = Starter(DEMO, script)
    try:
        started = starter(
            1,
            prepare=prepare,
            model_path=DEMO,
            model_name="demo",
            max_model_len=MAX_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=tuple(end),
            chat_template=Path(__file__).with_name("tools.jinja"),
            tool_call_parser="hermes",
        )
        tap = RecordingProxy(int(started.url.rpartition(":")[2]))
        try:
            yield tap
        finally:
            tap.shutdown()
            tap.server_close()
    finally:
        starter.close()


def install(home: Path, names: list[str]) -> dict[str, str]:
    """Install missing packages of the agents below `home`; return their versions."""
    home.mkdir(parents=True, exist_ok=True)
    versions = {}
    npm = [AGENTS[name].package for name in names if not AGENTS[name].pip]
    modules = home / "node_modules"
    # Node comes first: npm installs an older version of a package that does not support npm's own Node.
    for packages in ([NODE], npm) if npm else ():
        missing = [package for package in packages if not (modules / package.removesuffix("@22")).exists()]
        if missing:
            path = os.pathsep.join([str(modules / "node" / "bin"), os.environ["PATH"]])
            command = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", home, *missing]
            subprocess.run(command, cwd=home, check=True, env={**os.environ, "PATH": path})
    for package in npm:
        versions[package] = json.loads((modules / package / "package.json").read_text())["version"]
    for package in (AGENTS[name].package for name in names if AGENTS[name].pip):
        environment = home / package
        if not (environment / "ready").exists():
            venv.create(environment, with_pip=True)
            subprocess.run([environment / "bin" / "pip", "install", "-q", package], check=True)
            (environment / "ready").touch()
        shown = subprocess.run(
            [environment / "bin" / "pip", "show", package], capture_output=True, text=True, check=True
        )
        versions[package] = shown.stdout.partition("Version: ")[2].partition("\n")[0]
    return versions


def run(name: str, home: Path) -> tuple[list[Recorded], str | None]:
    """Run one agent; return its requests and the failure or None."""
    agent = AGENTS[name]
    with service(agent) as tap, tempfile.TemporaryDirectory() as folder:
        own, work = Path(folder), Path(folder) / "work"
        work.mkdir()
        places = {"url": f"http://127.0.0.1:{tap.server_port}", "home": folder}
        for path, text in agent.files.items():
            (own / path).parent.mkdir(parents=True, exist_ok=True)
            is_json = path.endswith(".json")
            (own / path).write_text(text.replace("{url}", places["url"]) if is_json else text.format(**places))
        tools = [home / "node_modules" / "node" / "bin", home / "node_modules" / ".bin", home / agent.package / "bin"]
        environment = {
            **{key: value for key, value in os.environ.items() if key in ("LANG", "TERM", "TMPDIR")},
            **{key: value.format(**places) for key, value in agent.environment.items()},
            "HOME": folder,
            "PATH": os.pathsep.join([*map(str, tools), os.environ["PATH"]]),
        }
        output = ""
        for command in filter(None, (agent.before, agent.command)):
            words = [word.format(**places) for word in command]
            words[0] = shutil.which(words[0], path=environment["PATH"]) or words[0]
            done = subprocess.run(
                words,
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            output += done.stdout
            if done.returncode:
                return tap.seen, f"{words[0]} ends with {done.returncode}:\n{output[-2000:]}"
        refused = [f"{seen.path}: {seen.refusal}" for seen in tap.seen if seen.status >= 400]
        if refused or not tap.seen:
            return tap.seen, f"refused: {refused or 'no request'}\n{output[-2000:]}"
        proof = work / "proof.txt"
        if not proof.exists() or proof.read_text().strip() != "proof":
            return tap.seen, f"the tool did not run:\n{output[-2000:]}"
        return tap.seen, None


def main() -> None:
    """Parse the command line and run the agents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="*", help=f"of {', '.join(AGENTS)} (default: all)")
    parser.add_argument("--home", type=Path, default=Path("/tmp/moeyard-clients/agents"))
    parser.add_argument("--record", action="store_true", help="write the requests' shapes to tests/clients/requests")
    args = parser.parse_args()
    names = args.agents or list(AGENTS)
    if unknown := set(names) - set(AGENTS):
        parser.error(f"no agent {', '.join(sorted(unknown))}")
    versions = install(args.home, names)
    failed = False
    for name in names:
        seen, problem = run(name, args.home)
        failed |= problem is not None
        ignored = sorted({each for one in seen for each in one.ignored.split(", ") if each})
        version = versions[AGENTS[name].package]
        print(f"{name:20} {version:10} {len(seen)} requests, {'holds' if problem is None else 'DOES NOT HOLD'}")
        print(f"{'':20} ignored: {', '.join(ignored) or 'nothing'}", flush=True)
        if problem is not None:
            print(problem, flush=True)
        elif args.record:
            REQUESTS.mkdir(exist_ok=True)
            lines = [json.dumps({"path": one.path, "body": shape(one.body)}, ensure_ascii=False) for one in seen]
            (REQUESTS / f"{name}.jsonl").write_text("\n".join([json.dumps({"version": version}), *lines, ""]))
    sys.exit(failed)


if __name__ == "__main__":
    main()
