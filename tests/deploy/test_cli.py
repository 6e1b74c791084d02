"""Bad input through the real command line: one line with the error and its fix, soon, and no process left."""

import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.checkpoints import edit_config, edit_tensors, make_checkpoint
from tests.deploy.test_serve import MARKER, free_port, marked
from tests.limits import HANG_SECONDS

from moeyard_worker.exchange.membership.shared_files import sweep

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deploy" / "demo"
TRACE = ROOT / "tests" / "experts" / "data" / "demo-routing-4"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a command."""

    code: int
    out: str
    err: str


def moeyard(*arguments: str, without: str | None = None) -> Outcome:
    """Run a command to its end; fail the test if a process remains. `without` is a module to hide."""
    marker = secrets.token_hex(8)
    folders = os.pathsep.join(str(ROOT / name) for name in ("worker", "router", "kernels", "deploy"))
    command = [sys.executable, "-m", "moeyard", *arguments]
    if without is not None:
        hide = f"import sys; sys.modules[{without!r}] = None; from moeyard.cli.commands import main; sys.exit(main())"
        command = [sys.executable, "-c", hide, *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={**os.environ, "PYTHONPATH": folders, MARKER: marker},
        check=False,
    )
    left = marked(f"{MARKER}={marker}")
    assert not left, f"still running: {left}"
    return Outcome(done.returncode, done.stdout, done.stderr)


def check_refused(outcome: Outcome, *says: str) -> None:
    """Require one line on stderr, nothing on stdout, and an exit code other than 0.

    A command may first remove files that killed ranks of other tests left, and log a line for it.
    """
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    (line,) = (line for line in outcome.err.splitlines() if sweep.__module__ not in line)
    assert line.startswith("moeyard: "), line
    assert len(line) < 350, line
    for part in says:
        assert part in line, line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small valid checkpoint; tests damage a copy."""
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "tiny", "qwen3_moe", tokenizer=True)


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint."""
    copy = tmp_path / "spoilt"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def test_truncated_file(damaged: Path) -> None:
    file = damaged / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 100)
    check_refused(moeyard("serve", str(damaged), "--port", "0"), str(file), "download")


def test_speculation_without_a_layer_for_it(checkpoint: Path) -> None:
    outcome = moeyard("serve", str(checkpoint), "--port", "0", "--speculate", "mtp")
    check_refused(outcome, f"--speculate mtp: {checkpoint}", "no layer for multi-token prediction")


def test_file_cut_within_its_header(damaged: Path) -> None:
    os.truncate(damaged / "model.safetensors", 20)
    check_refused(moeyard("serve", str(damaged), "--port", "0"), str(damaged / "model.safetensors"))


def test_missing_tensor(damaged: Path) -> None:
    key = "model.layers.1.mlp.experts.3.up_proj.weight"
    edit_tensors(damaged, remove=[key])
    check_refused(moeyard("serve", str(damaged), "--port", "0"), key, str(damaged))


def test_unsupported_architecture(damaged: Path) -> None:
    edit_config(damaged, model_type="llama", architectures=["LlamaForCausalLM"])
    check_refused(moeyard("serve", str(damaged), "--port", "0"), "llama", "deepseek_v3")


def test_no_tokenizer(damaged: Path) -> None:
    (damaged / "tokenizer.json").unlink()
    check_refused(moeyard("serve", str(damaged), "--port", "0"), "tokenizer.json")


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        check_refused(moeyard("serve", "--port", port), f"127.0.0.1:{port}", "choose another --port")


@pytest.fixture
def not_ray() -> Iterator[str]:
    """The address of a server that does not speak Ray's protocol."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().split(" port ")[1].split()[0]
        yield f"127.0.0.1:{port}"
        server.terminate()


def test_address_without_ray(not_ray: str) -> None:
    check_refused(moeyard("serve", "--port", "0", "--ray-address", not_ray), not_ray, "no Ray", "ray start --head")


def test_dead_ray_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    outcome = moeyard("serve", "--port", "0", "--ray-address", address)
    check_refused(outcome, address, "ray start --head")


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "/no/such/checkpoint"], ["/no/such/checkpoint", "Hugging Face directory"]),
        (["serve", "--expert-slots", "0"], ["--expert-slots", "at least 1", "got 0"]),
        (["serve", "--expert-memory", "1KiB"], ["--expert-memory", "1 KiB", "at least one expert"]),
        (["serve", "--workers", "33"], ["33", "32 experts"]),
        (["serve", "--workers", "0"], ["--workers", "got 0"]),
        (["serve", "--kv-memory", "100TiB"], ["--kv-memory 100 TiB", "free memory"]),
        (["serve", "--kv-memory", "12XB"], ["--kv-memory", "'12XB'", "2GiB"]),
        (["serve", "--max-model-len", "9999999"], ["--max-model-len 9999999", "1024"]),
        (["serve", "--port", "99999"], ["--port", "99999", "65535"]),
        (["serve", "--host", "203.0.113.7"], ["203.0.113.7", "choose another --host"]),
        (["serve", "--host", "no.such.host.invalid"], ["--host", "no.such.host.invalid", "unknown"]),
        (["serve", "--record-routing", str(DEMO)], ["--record-routing", "is a directory; name a file"]),
        (["serve", "--shutdown-timeout", "-1"], ["--shutdown-timeout", "'-1'", "0 or more"]),
        (["bench", "http://127.0.0.1:9"], ["no server answers at http://127.0.0.1:9"]),
        (["bench", "--prompt-tokens", "some"], ["--prompt-tokens", "'some'", "lognormal"]),
        (["bench", "--compare", "/no/such/result"], ["--compare /no/such/result: No such file"]),
        (["serve", "--otlp-traces-endpoint", "foo"], ["--otlp-traces-endpoint foo: ", "such as http://localhost:4317"]),
        (["chat", "ftp://host"], ["'ftp://host'", "no address of a server"]),
        (["completion", "cmd"], ["'cmd'", "fish"]),
        (["serve", "--record-routing", "/no/such/folder/trace"], ["--record-routing", "/no/such/folder/trace"]),
        (["serve", "--ray-address", "127.0.0.1:1", "--device", "cuda:1"], ["--device cuda:1", "use --device cuda"]),
        (["serve", "--ray-address", "nonsense"], ["--ray-address", "'nonsense'", "HOST:PORT"]),
        (["serve", "--exchange", "pigeon"], ["--exchange", "pigeon", "zmq-tcp"]),
        (["serve", "--step-deadline", "-1"], ["--step-deadline", "-1"]),
        (["serve", "--load-format", "dummy"], ["--load-format dummy", "shape"]),
        (["serve", "--load-format", "dummy", "--shape", "GPT-5"], ["--shape", "'GPT-5'", "Qwen3-30B-A3B", "Kimi-K2"]),
        (["serve", "--load-format", "dummy", "--shape", "Kimi-K2", "--layers", "62"], ["--layers 62", "has 61"]),
        (["serve", "--load-format", "dummy", "--shape", "Kimi-K2", "--layers", "0"], ["--layers", "got 0"]),
        (["serve", "--load-format", "dummy", "--shape", "Kimi-K2", "--layers", "1"], ["1 layers of Kimi-K2", "Expert"]),
        (["serve", str(DEMO), "--load-format", "dummy", "--shape", "Kimi-K2"], ["reads no checkpoint", str(DEMO)]),
        (["serve", "--shape", "Kimi-K2"], ["Kimi-K2", "goes with --load-format dummy"]),
        (["serve", "--layers", "2"], ["--layers 2", "none is given"]),
        (["serve", "--load-format", "gguf"], ["--load-format", "gguf", "dummy"]),
        # No test machine has this shape, so the plan is refused before any byte is created.
        (["serve", "--load-format", "dummy", "--shape", "Kimi-K2", "--kv-memory", "90TiB"], ["free memory"]),
        (["serve", "--api-key-file", "/no/such/keys"], ["--api-key-file /no/such/keys: No such file"]),
        (["serve", "--api-key-file", str(DEMO / "config.json")], [str(DEMO / "config.json"), "line 2"]),
        (["serve", "--api-key", "sk-secret"], ["--api-key-file", "MOEYARD_API_KEY"]),
        (["serve", "--ssl-certfile", "/no/such/cert"], ["--ssl-certfile /no/such/cert: No such file"]),
        (["serve", "--ssl-certfile", str(DEMO / "config.json")], [str(DEMO / "config.json"), "no usable PEM"]),
        (["serve", "--ssl-keyfile", "key.pem"], ["--ssl-keyfile", "--ssl-certfile"]),
        (["serve", "--allowed-origins", "chat.example.com"], ["--allowed-origins", "chat.example.com", "https://"]),
        (["serve", "--log-level", "loud"], ["--log-level", "loud", "warning"]),
        (["serve", "--speculate", "mtp", "--draft-tokens", "6"], ["--draft-tokens", "'6' is not auto", "1 to 5"]),
        (["serve", "--speculate", "mtp", "--draft-tokens", "4"], ["--draft-tokens must be in [1, 3] for mtp, got 4"]),
        (
            ["serve", "--speculate", "mtp", "--max-num-seqs", "9", "--max-batch-tokens", "17"],
            ["--max-num-seqs 9", "--draft-tokens auto", "36 rows", "--max-batch-tokens 17"],
        ),
        (["serve", "--prot", "8000"], ["--prot", "did you mean", "--port?"]),
        (["serve", "--device", "gpu"], ["--device", "'gpu' is not auto, cpu, cuda or cuda:N"]),
        (["serve", "https://huggingface.co/Qwen/Qwen3-30B-A3B"], ["give `Qwen/Qwen3-30B-A3B`"]),
        (["serve", "qwen3:30b"], ["Ollama", "Qwen/Qwen3-30B-A3B"]),
        (["serve", "--bogus"], ["--bogus", "see `moeyard serve --help`"]),
        (["bench", "engine", "--shape", "Kimi-K2", "--bogus"], ["--bogus", "see `moeyard bench engine --help`"]),
        (["bogus"], ["bogus", "serve", "--help"]),
        ([], ["COMMAND", "--help"]),
        (["verify", "/no/such/checkpoint"], ["/no/such/checkpoint", "Hugging Face directory"]),
        (["dequantize", str(DEMO), "--out", "/no/such/out"], [str(DEMO), "weights are not quantised"]),
        (["dequantize", str(DEMO)], ["--out", "dequantize --help"]),
        (["cache-sim", "/no/such/trace"], ["moeyard: /no/such/trace: No such file"]),
        (["cache-sim", str(DEMO / "config.json")], [str(DEMO / "config.json")]),
        (["experts"], ["SUBJECT", "experts --help"]),
        (["experts", "plan", str(TRACE)], ["--workers"]),
        (["experts", "plan", str(TRACE), "--workers", "33"], ["33 ranks for 32 experts"]),
        (["experts", "plan", str(TRACE), "--workers", "1", "--copies", "1"], ["second rank"]),
        (["experts", "plan", str(DEMO / "config.json"), "--workers", "2"], ["not a reply of /v1/fleet/experts"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_arguments(arguments: list[str], says: list[str]) -> None:
    check_refused(moeyard(*arguments), *says)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU to serve from")
def test_serve_without_a_gpu() -> None:
    """The check for a GPU comes before Ray starts."""
    outcome = moeyard("serve", "--device", "cuda", "--port", "0")
    check_refused(outcome)
    line = outcome.err.splitlines()[-1]
    assert re.fullmatch(r"moeyard: --device cuda: torch \S+ sees no CUDA GPU here; use --device cpu", line)


@pytest.mark.slow
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU to measure")
def test_bench_engine_without_a_gpu() -> None:
    check_refused(moeyard("bench", "engine", "--shape", "Kimi-K2"), "sees no CUDA GPU", "--device cpu")


def test_help_and_version() -> None:
    """Help loads neither torch nor Ray, so that it appears quickly."""
    outcome = moeyard("--version")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("moeyard 0.")
    outcome = moeyard("serve", "--help")
    assert outcome.code == 0
    assert "--expert-slots" in outcome.out


@pytest.mark.slow
def test_verify_of_the_demo() -> None:
    outcome = moeyard("verify", str(DEMO))
    assert outcome.code == 0, outcome
    assert outcome.err == ""
    assert outcome.out.endswith("agrees with transformers\n")


def test_verify_without_transformers() -> None:
    check_refused(moeyard("verify", str(DEMO), without="transformers"), "transformers", "pip install")
