"""Settings of `moeyard serve` beside those of its engines, its routers and its logs."""

import os
from dataclasses import dataclass

from moeyard.fleet.decisions import TAKEOVERS
from moeyard_router.config import KEY_VARIABLE
from moeyard_worker.options import option

# The value of --control-listen that means the API's own port.
API = "api"
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How the ranks are placed, started and replaced, and where the model's names and defaults come from."""

    revision: str | None = option(
        None, "branch, tag or commit on the hub (default: its main branch)", metavar="NAME", group="the model"
    )
    hf_config_path: str | None = option(
        None,
        "for a GGUF file: a directory with config.json and tokenizer of the original model (default: out of the file)",
        metavar="DIR",
    )
    tokenizer: str | None = option(
        None, "for a GGUF file: a directory with the tokenizer of the original model", metavar="DIR"
    )
    config: str | None = option(
        None, "flags out of a YAML file, keys without dashes; the command line goes first", metavar="FILE"
    )
    expert_placement: str = option(
        "linear",
        "which rank computes which expert: linear (contiguous shards), round_robin (in turn, for routers that choose "
        'by groups), or a FILE, {"owners": [rank, ...]} for all MoE layers or by layer, and "copies" on second ranks: '
        "see `moeyard experts`",
        metavar="HOW",
        group="workers",
    )
    routers: int = option(
        1, "processes that share the API's port; one serves about 25,000 tokens/s", kind="count", group="HTTP"
    )
    control_listen: str | None = option(
        None,
        "also serve the API of trainers (pauses, updates of the weights) on this address, or with the word api on the "
        "API's port, to clients with a key",
        metavar="HOST:PORT",
    )
    control_key_file: str | None = option(
        None, "the keys for --control-listen, in the form of --api-key-file", metavar="FILE"
    )
    expert_takeover: str = option(
        "auto",
        "whether the others take a lost rank's experts over until it is back; auto: if they have room and that is "
        "quicker",
        choices=TAKEOVERS,
        group="lost workers",
    )
    restart_limit: int = option(
        3,
        "a worker that is lost so often within the window ends the fleet, with exit code 1",
        kind="count",
    )
    restart_window: float = option(60.0, "seconds within which lost workers are counted", kind="duration")
    standby: int | None = option(
        None,
        "processes that wait, with everything imported, to take a lost worker's place; a few hundred MB of host memory "
        "each, none with --ray-address (default: 1 on GPUs, else 0)",
        kind="number",
    )
    ray_address: str | None = option(
        None,
        "a running Ray cluster; without it a private one is started here",
        metavar="HOST:PORT",
        group="a Ray cluster",
    )
    wait_for_cluster: float = option(
        0.0,
        "seconds for a Ray cluster to have as many CPUs (and GPUs) as there are workers (default 0)",
        kind="duration",
    )
    worker_host: str | None = option(
        None, "address workers bind (default: 127.0.0.1, or each node's own in a cluster)", metavar="ADDR"
    )
    metrics_port_base: int = option(
        0, "worker r exports metrics at P + r (default: any free port each)", kind="port", metavar="P"
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "names of the model in the API, the first is what answers say (default: the directory's, or the hub's id)",
        nargs="+",
        metavar="NAME",
        group="the model in the API",
    )
    generation_config: str = option(
        "auto",
        f"sampling where requests do not say: auto is by the checkpoint's {GENERATION_CONFIG}, none (or vllm) is "
        "OpenAI's defaults, a directory has such a file",
        metavar="WHICH",
    )


def traces_protocol() -> str | None:
    """The environment's protocol of traces, which OpenTelemetry and vLLM read too."""
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or None


def take_keys() -> tuple[str, ...]:
    """The API key of the environment, if any. It is taken out, so that no child process inherits it."""
    key = os.environ.pop(KEY_VARIABLE, "").strip()
    return (key,) if key else ()
