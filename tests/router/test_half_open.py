"""1,500 half-open connections (bench/half_open.py): the router serves other clients and closes these on time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timing
def test_half_open_connections_delay_no_request():
    folders = os.pathsep.join(str(ROOT / name) for name in ("worker", "router", "kernels", "deploy", "bench"))
    program = f"import half_open; half_open.SLACK_SECONDS = {HANG_SECONDS}; raise SystemExit(half_open.main())"
    command = [sys.executable, "-c", program, "--header-timeout", "3", "--body-timeout", "4"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": folders})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": 500 cut after") == 3
