"""docker-compose.yml and the image: valid, closed by default, without secrets and weights."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GPU = {"worker-gpu": "worker", "router-gpu": "router"}
OURS = ("ray-head", "worker", "router", *GPU)


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
    assert set(services) == {*OURS, "dcgm-exporter", "prometheus", "grafana"}
    # --scale needs a service without a fixed name and without a published port.
    assert "container_name" not in services["worker"]
    for name in ("worker", "worker-gpu", "ray-head"):
        assert "ports" not in services[name]


def test_publishes_on_loopback_only(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    # Only one of the two routers runs.
    assert len(ports) == 4
    assert services["router"]["ports"] == services["router-gpu"]["ports"]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_every_ray_process_has_the_same_required_token(services: dict[str, Any]) -> None:
    for name in OURS:
        environment = services[name]["environment"]
        assert environment["RAY_AUTH_MODE"] == "token"
        assert environment["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?"), "the user must set the token"
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


def test_start_order_and_health_checks(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        for other, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}, (name, other)
    assert set(services["router"]["depends_on"]) == {"ray-head", "worker"}
    assert set(services["router-gpu"]["depends_on"]) == {"ray-head", "worker-gpu"}
    for name in ("worker", "worker-gpu"):
        assert set(services[name]["depends_on"]) == {"ray-head"}


def test_downloads_can_come_from_a_mirror(services: dict[str, Any]) -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    for name in OURS:
        arguments = services[name]["build"]["args"]
        assert set(arguments) == {"PYTHON_IMAGE", "PIP_INDEX_URL", "TORCH_CPU_INDEX_URL", "DEBIAN_MIRROR"}
        for argument, value in arguments.items():
            default = re.fullmatch(rf"\$\{{{argument}:-(.+)\}}", value)
            assert default is not None
            assert f"ARG {argument}={default[1]}\n" in dockerfile


def test_memory_and_logs_have_limits(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert re.fullmatch(r"\$\{[A-Z_]+:-\d+[mg]\}", service["mem_limit"]), name
        assert service["logging"]["driver"] == "json-file", name
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name
    for name in OURS:
        assert {"RAY_ROTATION_MAX_BYTES", "RAY_ROTATION_BACKUP_COUNT"} <= services[name]["environment"].keys()


def test_all_nodes_notice_a_lost_head_alike(services: dict[str, Any]) -> None:
    """All nodes leave a dead head within the same time; otherwise some would join the next head without the others."""
    for name in OURS:
        environment = services[name]["environment"]
        assert environment["RAY_gcs_rpc_server_reconnect_timeout_s"] == "10"


def test_model_is_read_only_and_shared_memory_is_large_enough(services: dict[str, Any]) -> None:
    for name in OURS[1:]:
        kernels = ["triton-cache:/home/moeyard/.triton"] if name == "worker-gpu" else []
        assert services[name]["volumes"] == ["${MOEYARD_MODEL:-./deploy/demo}:/model:ro", *kernels]
    for name in OURS:
        assert services[name]["shm_size"] == "1gb"
    for name in ("router", "router-gpu"):
        assert "/model" in services[name]["command"]


def test_only_the_profile_requests_gpus(services: dict[str, Any]) -> None:
    """`docker-compose up` needs no GPU; with the profile each worker gets one of the reserved GPUs."""
    assert {name for name, service in services.items() if service.get("profiles") == ["gpu"]} == {*GPU, "dcgm-exporter"}
    assert {name for name, service in services.items() if "deploy" in service} == {"worker-gpu", "dcgm-exporter"}
    worker, router = services["worker-gpu"], services["router-gpu"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    count = "${MOEYARD_GPUS:-1}"
    assert device == {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
    assert worker["environment"]["MOEYARD_WORKER_CPUS"] == count
    assert f"--workers={count}" in router["command"]
    assert "--device=cuda" in router["command"]
    # Only workers compute, so only their image has CUDA, under its own name.
    assert (worker["build"]["target"], worker["image"]) == ("cuda", "moeyard:cuda")
    for name in ("ray-head", "worker", "router", "router-gpu"):
        assert (services[name]["build"]["target"], services[name]["image"]) == ("cpu", "moeyard:local")
    assert router["networks"]["fleet"]["aliases"] == ["router"]


def test_compiled_kernels_outlive_their_container(compose: dict[str, Any]) -> None:
    name, folder = compose["services"]["worker-gpu"]["volumes"][1].split(":")
    assert name in compose["volumes"]
    # The volume has the owner of the image's folder, and Triton's cache is in it.
    image = stages()["cuda"]
    assert f"TRITON_CACHE_DIR={folder}/cache" in image
    user = re.findall(r"^USER (\d+):(\d+)$", image, re.M)[-1]
    assert "RUN install -d -o {} -g {} {}".format(*user, folder) in image


def stages() -> dict[str, str]:
    """Return the Dockerfile's stages by name, in order."""
    parts = re.split(r"^(?=FROM )", (ROOT / "deploy/Dockerfile").read_text(), flags=re.M)[1:]
    return {re.match(r"FROM \S+ AS (\S+)", part)[1]: part for part in parts}  # type: ignore[index]


def test_images_are_non_root_pinned_and_without_weights() -> None:
    every = stages()
    assert list(every)[-1] == "cpu", "the last stage is built by default"
    for name in ("cpu", "cuda"):
        assert every[name].startswith("FROM runtime")
        assert re.search(r"^USER \d+:\d+$", every[name].rstrip().splitlines()[-1])
        assert f"COPY --from=build-{name} " in every[name]
        assert "-c deploy/constraints.txt" in every[f"build-{name}"]
    assert "HEALTHCHECK" in every["runtime"]
    # torch for CPUs has its own index; torch for GPUs comes from the default one.
    assert "whl/cpu" in every["build-cpu"]
    assert "TORCH_CPU_INDEX_URL" not in every["build-cuda"] + every["base"]
    # Every download can come from a mirror.
    for name, text in every.items():
        assert (
            not re.search(r"^RUN.*\bpip (install|wheel) (?!--no-deps /)", text, re.M) or "ARG PIP_INDEX_URL" in text
        ), name
        assert "apt-get" not in text or "ARG DEBIAN_MIRROR" in text, name
    # Triton builds a launcher at run time.
    assert "gcc" in every["cuda"]
    for source in re.findall(r"^COPY (?!--from)(.*)", "".join(every.values()), re.M):
        for path in source.split()[:-1]:
            assert (ROOT / path).exists(), path
            assert not path.startswith("deploy/demo")
    assert "deploy/demo" in (ROOT / ".dockerignore").read_text().splitlines()


def test_entrypoint_knows_every_role_of_compose(services: dict[str, Any]) -> None:
    script = ROOT / "deploy/container/entrypoint.sh"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    for name in OURS:
        role = GPU.get(name, name)
        assert services[name]["command"][0] == role
        assert re.search(rf"^{role}\)", text, re.M)
        assert services[name]["healthcheck"]["test"][1:] == ["/opt/moeyard/entrypoint.sh", "check", role]
    for each in re.findall(r"\$home/(\w+\.py)", text):
        assert f" deploy/container/{each} " in (ROOT / "deploy/Dockerfile").read_text()
    # Any other command runs unchanged.
    assert subprocess.run([script, "true"]).returncode == 0
    assert subprocess.run([script, "check", "nothing"], capture_output=True).returncode == 2
