"""A client that is generated from /openapi.json talks to a real server. Needs a package index for the generator."""

import subprocess
from pathlib import Path

import pytest
from tests.clients.run import SUITES, environment, fleet, run_suite


@pytest.mark.slow
def test_generated_client_runs_a_chat_a_stream_and_an_error(tmp_path: Path) -> None:
    try:
        programs = environment(tmp_path, SUITES["generated"])
    except subprocess.CalledProcessError:  # boundary: pip printed the reason
        pytest.skip("openapi-python-client cannot be installed here")
    with fleet(tmp_path / "fleet.log") as url:
        assert run_suite("generated", programs, url, tmp_path)
