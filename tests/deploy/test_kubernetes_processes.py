"""The containers of deploy/kubernetes/overlays/cpu as processes on hosts made of namespaces (drilling/hosts.py).

Commands, arguments, environment, ports, probes, hooks and grace periods are those of the rendered objects. The test
does with them what a kubelet does. DIFFERENCES lists everything else.
"""

import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from drilling.containers import ENTRYPOINT, MODEL, Container
from drilling.hosts import Network, missing
from tests.deploy.test_kubernetes import pods, render
from tests.limits import HANG_SECONDS

pytestmark = pytest.mark.slow

# A host hides /tmp, so the file of the secret is elsewhere.
SECRETS = Path(f"/var/tmp/moeyard-secrets-{os.getpid()}")
# In a cluster, here (a path stands for it in commands; None: not reproduced), and why.
DIFFERENCES: Sequence[tuple[str, Path | None, str]] = (
    (
        "/opt/moeyard",
        ENTRYPOINT.parent,
        "the image has copies of these files; MOEYARD_CONTAINER_HOME names this folder",
    ),
    ("/model", MODEL, "there is no claim moeyard-model, and the folder is not mounted, so it is not read-only"),
    ("/etc/moeyard", SECRETS, "there is no secret moeyard-api-keys; a file holds the key"),
    (
        "image",
        None,
        "there is no registry: this checkout and its Python run, with PATH and PYTHONPATH, without the image's ENV",
    ),
    ("Service", None, "/etc/hosts names the pods; nothing translates ports, so port and targetPort must be equal"),
    ("KubeRay", None, "this test adds its variables and waits for the head, as its init container does"),
    ("restartPolicy", None, "the pause between restarts is Docker's (drilling/containers.py)"),
    ("securityContext", None, "processes are root's, because another user may not read the checkout"),
    ("resources", None, "no control group limits memory or processors"),
    ("NetworkPolicy", None, "no rule closes a port"),
)
Result = TypeVar("Result")
TOKEN, KEY = secrets.token_hex(32), secrets.token_hex(16)
SECRET_KEYS = {("moeyard-ray", "token"): TOKEN}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Who keeps the lighthouse?"}], "temperature": 0}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
HEADERS = {"Authorization": f"Bearer {KEY}"}
GCS = "moeyard-head-svc"


def here(text: str) -> str:
    """Return a word of a command with this machine's paths."""
    for path, replacement, _ in DIFFERENCES:
        if replacement is not None and (text == path or f"{path}/" in text or text.endswith(f"={path}")):
            text = text.replace(path, str(replacement))
    return text


class Pod:
    """A pod's container with its probes."""

    def __init__(self, name: str, template: Mapping[str, Any], objects: Sequence[Mapping[str, Any]]) -> None:
        self.name, self.labels, self.spec = name, template["metadata"]["labels"], template["spec"]
        (self.container,) = self.spec["containers"]
        self.ports = {port["name"]: port["containerPort"] for port in self.container.get("ports", ())}
        self.running: Container | None = None
        self._objects = objects

    def start(self, network: Network, folder: Path) -> Container:
        assert "command" not in self.container, "the image's entry point runs"
        command = [str(ENTRYPOINT), *map(here, self.container["args"])]
        self.address = network.addresses[self.name]
        self.running = Container(network, self.name, command, environment=self.environment(), folder=folder)
        return self.running

    def environment(self) -> dict[str, str]:
        """Return the variables of envFrom and env, as a kubelet resolves them, and those that KubeRay adds."""
        found: dict[str, str] = {}
        for source in self.container.get("envFrom", ()):
            name = source["configMapRef"]["name"]
            (data,) = (o["data"] for o in self._objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == name)
            found |= data
        for variable in self.container.get("env", ()):
            source = variable.get("valueFrom", {})
            if (secret := source.get("secretKeyRef")) is not None:
                found[variable["name"]] = SECRET_KEYS[secret["name"], secret["key"]]
            elif source:
                assert source == {"fieldRef": {"fieldPath": "status.podIP"}}, source
                found[variable["name"]] = self.address
            else:
                found[variable["name"]] = variable["value"]
        component = self.labels["component"]
        if component.startswith("ray-"):
            head = "127.0.0.1" if component == "ray-head" else GCS
            added = {"RAY_ADDRESS": f"{head}:6379", "RAY_PORT": "6379", "RAY_CLUSTER_NAME": "moeyard"}
            added |= {"FQ_RAY_IP": GCS, "RAY_IP": GCS} if component == "ray-worker" else {}
            found = {**added, "RAY_USAGE_STATS_KUBERAY_IN_USE": "1", **found}
        return found

    def run(self, command: Sequence[str], *, seconds: float = HANG_SECONDS) -> tuple[bool, str]:
        assert self.running is not None
        return self.running.run([here(word) for word in command], seconds=seconds)

    def passes(self, probe: Mapping[str, Any]) -> tuple[bool, str]:
        """Run a probe once."""
        if "exec" in probe:
            return self.run(probe["exec"]["command"], seconds=probe["timeoutSeconds"])
        get = probe["httpGet"]
        url = f"http://{self.address}:{self.ports[get['port']]}{get['path']}"
        try:
            answer = httpx.get(url, timeout=probe["timeoutSeconds"])
        except httpx.HTTPError as error:
            return False, f"{url}: {error!r}"
        return 200 <= answer.status_code < 400, f"{url}: {answer.status_code} {answer.text}"

    def await_probe(self, name: str) -> None:
        """Wait for a probe as long as its threshold allows. Fails with the container's log."""
        probe, words = self.container[name], ""
        for _ in range(probe["failureThreshold"]):
            passed, words = self.passes(probe)
            if passed:
                return
            time.sleep(probe["periodSeconds"])
        pytest.fail(f"{name} of {self.name}: {words}\n{self.log()}")

    def log(self) -> str:
        """Return the end of the container's output."""
        assert self.running is not None
        return self.running.log.read_text()[-3000:]

    def reaches(self, command: Sequence[str]) -> bool:
        """Return whether a command succeeds inside before a hang, once the container runs."""
        limit = time.monotonic() + HANG_SECONDS
        while not (done := self.run(command)[0]) and time.monotonic() < limit:
            time.sleep(0.5)
        return done

    def stop(self, *, pause: float = 0.0) -> int | None:
        """Send SIGTERM, and SIGKILL at the end of the grace period. Return the exit code; None: it was killed.

        `pause`: seconds of the grace period that the hook has taken.
        """
        assert self.running is not None
        return self.running.stop(self.spec["terminationGracePeriodSeconds"] - pause)


class Release:
    """All pods of the overlay."""

    def __init__(self) -> None:
        self.objects = render("overlays/cpu")
        self.pods: dict[str, Pod] = {}
        replicas = {"ray-head": 1}
        for manifest in self.objects:
            if manifest["kind"] == "RayCluster":
                for group in manifest["spec"]["workerGroupSpecs"]:
                    replicas[group["template"]["metadata"]["labels"]["component"]] = group["replicas"]
            if manifest["kind"] == "Deployment":
                replicas[manifest["spec"]["template"]["metadata"]["labels"]["component"]] = manifest["spec"]["replicas"]
        for template in pods(self.objects):
            component = template["metadata"]["labels"]["component"]
            for number in range(replicas[component]):
                name = f"{component}-{number}"
                self.pods[name] = Pod(name, template, self.objects)

    def services(self) -> dict[str, str]:
        """Return the pod of each Service. KubeRay makes the one of the head."""
        found = {GCS: "ray-head-0"}
        for manifest in (each for each in self.objects if each["kind"] == "Service"):
            selector = manifest["spec"]["selector"].items()
            (pod,) = (pod for pod in self.pods.values() if selector <= pod.labels.items())
            for port in manifest["spec"]["ports"]:
                assert port["port"] == pod.ports[port["targetPort"]], "nothing translates ports here"
            found[manifest["metadata"]["name"]] = pod.name
        return found

    def of(self, component: str) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.labels["component"] == component]

    def bring_up(self, network: Network, folder: Path) -> None:
        """Start all pods and wait until they are ready. The router starts first, so it waits for head and workers."""
        self.network = network
        self._node = ThreadPoolExecutor(1, initializer=network.enter)
        network.at_end(self._node.shutdown)
        for pod in self.of("api") + self.of("ray-head"):
            pod.start(network, folder)
        (head,) = self.of("ray-head")
        self.on_node(head.await_probe, "startupProbe")
        for pod in self.of("ray-worker"):
            pod.start(network, folder)
            # The container that KubeRay puts before a worker's.
            assert pod.reaches(["ray", "health-check", "--address", f"{GCS}:6379"])
        for name in PROBES:
            for pod in self.pods.values():
                self.on_node(pod.await_probe, name)

    def on_node(self, work: Callable[..., Result], *args: Any) -> Result:
        """Run a function in the network of the node."""
        return self._node.submit(work, *args).result()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    if (lacking := missing()) is not None:
        pytest.skip(lacking)
    release = Release()
    SECRETS.mkdir(mode=0o700)
    try:
        (SECRETS / "keys").write_text(f"{KEY}\n")
        with Network(list(release.pods), aliases=release.services()) as network:
            release.bring_up(network, tmp_path_factory.mktemp("pods"))
            yield release
    finally:
        shutil.rmtree(SECRETS)


def test_differences_name_every_path_of_the_manifests() -> None:
    here_too = ("/dev/shm",)
    rows = [*here_too, *(path for path, replacement, _ in DIFFERENCES if replacement is not None)]
    for pod in Release().pods.values():
        probes = [pod.container[name] for name in PROBES]
        words = [
            *pod.container["args"],
            *(word for probe in probes for word in probe.get("exec", {}).get("command", ())),
        ]
        words += [mount["mountPath"] for mount in pod.container["volumeMounts"]]
        for path in (word.partition("=")[2] or word for word in words):
            assert not path.startswith("/") or any(path == row or path.startswith(f"{row}/") for row in rows), path


def test_probes_pass_while_pods_run(release: Release) -> None:
    (router,) = release.of("api")
    assert [pod.name for pod in release.of("ray-worker")] == ["ray-worker-0", "ray-worker-1"]
    paths = {router.container[name]["httpGet"]["path"] for name in PROBES}
    assert paths == {"/livez", "/readyz"}
    for pod in release.pods.values():
        for name in PROBES:
            release.on_node(pod.await_probe, name)
        for port in pod.ports.values():
            release.on_node(socket.create_connection, (pod.address, port), HANG_SECONDS).close()


def test_service_names_lead_to_the_router(release: Release) -> None:
    """Workers ask it which ranks they should have. Their own check passes without an answer, so it would not tell."""
    read = "import json, os, urllib.request as r; "
    read += "print(len(json.load(r.urlopen(os.environ['MOEYARD_ROUTER_URL'] + '/metrics/targets'))))"
    for pod in release.of("ray-worker"):
        assert pod.run(["python", "-c", read]) == (True, "2")


def test_chat_needs_the_key_of_the_secret(release: Release) -> None:
    (router,) = release.of("api")
    url = f"http://{router.address}:{router.ports['http']}/v1/chat/completions"
    for headers, status in (({}, 401), (HEADERS, 200)):
        answer = release.on_node(
            lambda headers=headers: httpx.post(url, json=CHAT, headers=headers, timeout=HANG_SECONDS)
        )
        assert answer.status_code == status, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
    fleet = release.on_node(lambda: httpx.get(url.replace("chat/completions", "fleet"), headers=HEADERS)).json()
    hosts = {worker["endpoint"].removeprefix("tcp://").partition(":")[0] for worker in fleet["workers"]}
    assert hosts == {pod.address for pod in release.of("ray-worker")}, "each worker has a pod of its own"


def test_metrics_are_at_the_ports_that_the_policy_opens(release: Release) -> None:
    (router,) = release.of("api")
    targets = release.on_node(
        lambda: httpx.get(f"http://{router.address}:{router.ports['http']}/metrics/targets")
    ).json()
    found = {target for group in targets for target in group["targets"]}
    (policy,) = (each for each in release.objects if each["metadata"]["name"] == "moeyard-metrics")
    opened = policy["spec"]["ingress"][0]["ports"]
    assert {target.partition(":")[0] for target in found} == {pod.address for pod in release.of("ray-worker")}
    for target in found:
        port = int(target.partition(":")[2])
        assert any(each["port"] <= port <= each.get("endPort", each["port"]) for each in opened)
        assert (
            "moeyard_engine_steps_total"
            in release.on_node(lambda target=target: httpx.get(f"http://{target}/metrics")).text
        )


def test_router_drains_within_its_grace_period(release: Release) -> None:
    """A request that is open when the signal comes is answered."""
    (router,) = release.of("api")
    url = f"http://{router.address}:{router.ports['http']}/v1/completions"
    body = {"prompt": [500, 600, 700], "max_tokens": 400, "ignore_eos": True, "stream": True}
    begun = threading.Event()

    def read() -> list[str]:
        lines = []
        with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=HANG_SECONDS) as answer:
            for line in answer.iter_lines():
                begun.set()
                lines.append(line)
        return [line for line in lines if line]

    hook = time.monotonic()
    assert router.run(router.container["lifecycle"]["preStop"]["exec"]["command"])[0]
    with ThreadPoolExecutor(1, initializer=release.network.enter) as client:
        reading = client.submit(read)
        assert begun.wait(HANG_SECONDS)
        code = router.stop(pause=time.monotonic() - hook)
        lines = reading.result()
    assert code == 0, router.log()
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_ray_pods_end_within_their_grace_period(release: Release) -> None:
    for pod in (*release.of("ray-worker"), *release.of("ray-head")):
        assert pod.stop() is not None, pod.log()
