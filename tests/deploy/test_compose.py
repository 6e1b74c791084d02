"""docker-compose.yml and the image: valid by the specification, closed by default, no secret and no weight inside."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
OURS = ("ray-head", "worker", "router")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    return compose["services"]


def test_is_valid_by_the_specification() -> None:
    command = [Path(sys.executable).parent / "check-jsonschema", "--builtin-schema", "vendor.compose-spec"]
    result = subprocess.run([*command, ROOT / "docker-compose.yml"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_is_readable_by_docker_compose_1_29(compose: dict[str, Any]) -> None:
    assert compose["version"] == "3.8"
    assert "name" not in compose


def test_has_all_services(services: dict[str, Any]) -> None:
    assert set(services) == {*OURS, "prometheus", "grafana"}
    # --scale needs a service without a fixed name and without a published port.
    assert "container_name" not in services["worker"]
    assert "ports" not in services["worker"]
    assert "ports" not in services["ray-head"]


def test_publishes_on_the_loopback_only(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_every_ray_process_has_the_same_required_token(services: dict[str, Any]) -> None:
    for name in OURS:
        environment = services[name]["environment"]
        assert environment["RAY_AUTH_MODE"] == "token"
        assert environment["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?"), "the token must come from the user"
    assert len({services[name]["environment"]["RAY_AUTH_TOKEN"] for name in OURS}) == 1


def test_gcs_port_is_outside_rays_worker_ports(services: dict[str, Any]) -> None:
    for name in OURS:
        port = int(services[name]["environment"]["RAY_GCS_ADDRESS"].rpartition(":")[2])
        assert not 10002 <= port <= 19999


def test_containers_have_no_more_rights_than_needed(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["cap_drop"] == ["ALL"], name
        assert not service.get("privileged"), name
        assert service["restart"] == "unless-stopped", name
    for name in ("prometheus", "grafana"):
        assert not services[name]["user"].startswith(("0", "root")), name


def test_starts_in_order_and_is_watched(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        for other, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}, (name, other)
    assert set(services["router"]["depends_on"]) == {"ray-head", "worker"}
    assert set(services["worker"]["depends_on"]) == {"ray-head"}


def test_model_is_read_only_and_shared_memory_is_large_enough(services: dict[str, Any]) -> None:
    for name in ("worker", "router"):
        assert services[name]["volumes"] == ["${MOEYARD_MODEL:-./deploy/demo}:/model:ro"]
    for name in OURS:
        assert services[name]["shm_size"] == "1gb"
    assert "/model" in services["router"]["command"]


def test_image_is_non_root_pinned_and_without_weights() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    stages = re.findall(r"^FROM .*", dockerfile, re.M)
    assert len(stages) == 2
    final = dockerfile[dockerfile.index(stages[1], dockerfile.index(stages[0]) + 1) :]
    assert re.search(r"^USER \d+:\d+$", final, re.M)
    assert "HEALTHCHECK" in final
    assert "-c deploy/constraints.txt" in dockerfile
    for source in re.findall(r"^COPY (?!--from)(.*)", dockerfile, re.M):
        for path in source.split()[:-1]:
            assert (ROOT / path).exists() or path == "README.md", path
            assert not path.startswith("deploy/demo")
    assert "deploy/demo" in (ROOT / ".dockerignore").read_text().splitlines()


def test_entrypoint_knows_every_role_that_compose_gives_it(services: dict[str, Any]) -> None:
    script = ROOT / "deploy/container/entrypoint.sh"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    for name in OURS:
        assert services[name]["command"][0] == name
        assert re.search(rf"^{name}\)", text, re.M)
        assert services[name]["healthcheck"]["test"][1:] == ["/opt/moeyard/entrypoint.sh", "check", name]
    # Any other command is run as it is.
    assert subprocess.run([script, "true"]).returncode == 0
    assert subprocess.run([script, "check", "nothing"], capture_output=True).returncode == 2
