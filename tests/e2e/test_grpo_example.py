"""examples/grpo.py in miniature: every ratio of the first update is exactly 1, and with transformers none is near."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from examples import grpo
from peering.programs import free_port
from tests.e2e.http_fleet import engine_config, serve_http
from tests.fleet import ProcessPool

from moeyard.local.settings import routed_shape
from moeyard_worker.models.families import load_model_config


class FleetServer:
    """`grpo.Server` of two ranks without Ray. New weights start new ranks."""

    def __init__(self, processes: ProcessPool, stack: ExitStack) -> None:
        self._processes, self._stack = processes, stack
        self.served: list[Path] = []
        self.url = ""
        self.update(grpo.DEMO)

    def update(self, directory: Path) -> None:
        self._stack.close()
        config = engine_config(directory, num_workers=2, expert_slots=40, enable_return_routed_experts=True)
        routing = routed_shape(config, load_model_config(directory))
        fleet = serve_http(self._processes, config, model_path=None, routing=routing, canary_interval=600.0)
        self.url = self._stack.enter_context(fleet).url
        self.served.append(directory)


@pytest.fixture
def server(processes: ProcessPool) -> Iterator[FleetServer]:
    with ExitStack() as stack:
        yield FleetServer(processes, stack)


def test_ratios_are_exactly_1(server: FleetServer, tmp_path: Path) -> None:
    lines: list[str] = []
    reports = grpo.train(server, grpo.DEMO, tmp_path, steps=2, group=3, max_tokens=12, lr=1e-3, show=lines.append)
    assert server.served == [grpo.DEMO, tmp_path / "step-0"]
    for report in reports:
        count = report.ours.count
        assert count > 100
        assert report.ours == grpo.Ratios(count, count, 1.0, 1.0)
        assert report.transformers.count == count
        assert report.transformers.exact < count // 2
        assert report.transformers.least < 0.99
        assert report.transformers.most > 1.01
    first = reports[0].ours.count
    assert lines[1] == f"  ratio, moeyard.torch: exactly 1 for {first} of {first} tokens, from 1.0000 to 1.0000"
    # An update of this size moves the model, so the second step's equality is about the new weights.
    old, new = (grpo.TrainableModel(each) for each in server.served)
    assert any((a != b).any() for a, b in zip(old.parameters(), new.parameters(), strict=True))


@pytest.mark.slow
def test_the_server_of_the_example_changes_its_weights_while_it_runs(tmp_path: Path) -> None:
    """The command of the docs, with `moeyard serve` and an update between two steps."""
    sizes = ("--steps", "2", "--group", "3", "--max-tokens", "12", "--lr", "1e-3", "--port", str(free_port()))
    command = [sys.executable, grpo.__file__, "--out", str(tmp_path / "out"), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    exact = [line for line in done.stdout.splitlines() if "moeyard.torch" in line]
    assert len(exact) == 2
    for line in exact:
        assert re.fullmatch(r"  ratio, moeyard.torch: exactly 1 for (\d+) of \1 tokens, from 1.0000 to 1.0000", line), (
            line
        )
    assert {each.name for each in (tmp_path / "out").iterdir()} >= {"step-0", "step-1"}
