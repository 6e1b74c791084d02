"""deploy/kubernetes: rendered by kubectl, and valid by strict schemas of Kubernetes, KubeRay, KEDA and Prometheus.

schemas/raycluster-v1.schema.json is that of KubeRay's CRD (Apache-2.0, 2026-08-19) without descriptions.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as monitoring
from cloudcoil.models.prometheus_operator import v1alpha1 as monitoring_alpha

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ("overlays/cpu", "overlays/gpu", "overlays/two-nodes")
SCHEMA = Path(__file__).parent / "schemas" / "raycluster-v1.schema.json"
MODELS: dict[str, Any] = {
    "ScaledObject": keda.ScaledObject,
    "PodMonitor": monitoring.PodMonitor,
    "ScrapeConfig": monitoring_alpha.ScrapeConfig,
}


def closed(schema: Any) -> Any:
    """Return the schema with unknown fields forbidden, as strict validation does in a cluster."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(part) for key, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


def ray_schema() -> dict[str, Any]:
    schema = closed(json.loads(SCHEMA.read_text()))
    # Kubernetes, not the CRD, checks metadata.
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def check(manifest: dict[str, Any]) -> None:
    """Raise an error if a manifest has unknown, missing or wrong fields."""
    kind = manifest["kind"]
    if kind == "RayCluster":
        jsonschema.Draft202012Validator(ray_schema()).validate(manifest)
    elif kind in MODELS:
        # These models ignore unknown fields, so a round trip shows them.
        found = MODELS[kind].model_validate(manifest).model_dump(by_alias=True, exclude_unset=True, mode="json")
        assert found == manifest
    else:
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def render(overlay: str) -> list[dict[str, Any]]:
    """Return the objects of an overlay."""
    command = [Path(sys.executable).parent / "kubectl", "kustomize", ROOT / "deploy/kubernetes" / overlay]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module", params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return render(request.param)


def pods(manifests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            yield manifest["spec"]["template"]
        if manifest["kind"] == "RayCluster":
            groups = [manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]]
            yield from (group["template"] for group in groups)


def test_every_manifest_is_valid(manifests: list[dict[str, Any]]) -> None:
    for manifest in manifests:
        check(manifest)


def test_unknown_fields_are_found(manifests: list[dict[str, Any]]) -> None:
    for manifest in manifests:
        if "spec" in manifest:
            with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError, AssertionError)):
                check({**manifest, "spec": {**manifest["spec"], "unknownField": 1}})


def test_pods_are_restricted_and_have_shared_memory(manifests: list[dict[str, Any]]) -> None:
    for pod in pods(manifests):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert spec["enableServiceLinks"] is False, "MOEYARD_PORT of a Service would reach the program"
        assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/dev/shm"}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


def test_server_drains_within_the_grace_period(manifests: list[dict[str, Any]]) -> None:
    (pod,) = (pod for pod in pods(manifests) if pod["metadata"]["labels"]["component"] == "api")
    (container,) = pod["spec"]["containers"]
    (timeout,) = (int(a.partition("=")[2]) for a in container["args"] if a.startswith("--shutdown-timeout="))
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    # The program that watches the router's container kills it after this time.
    stop = [int(e["value"]) for e in container.get("env", ()) if e["name"] == "MOEYARD_STOP_SECONDS"] or [timeout + 10]
    assert timeout < stop[0] < pod["spec"]["terminationGracePeriodSeconds"] - pause


def test_workers_and_places_agree(manifests: list[dict[str, Any]]) -> None:
    for manifest in manifests:
        if manifest["kind"] == "RayCluster":
            (group,) = manifest["spec"]["workerGroupSpecs"]
            (container,) = group["template"]["spec"]["containers"]
            places = next((int(e["value"]) for e in container["env"] if e["name"] == "MOEYARD_WORKER_CPUS"), 1)
            assert int(container["resources"]["limits"].get("nvidia.com/gpu", places)) == places
            (router,) = (
                m for m in manifests if m["metadata"]["name"] == "moeyard-router" and m["kind"] == "Deployment"
            )
            args = router["spec"]["template"]["spec"]["containers"][0]["args"]
            assert f"--workers={group['replicas'] * places}" in args
            pins = (ROOT / "deploy/constraints.txt").read_text().splitlines()
            assert f"ray=={manifest['spec']['rayVersion']}" in pins
