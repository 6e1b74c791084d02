"""`moeyard serve`: run the cheap checks, start the fleet, then start the routers.

The launcher process starts and watches Ray and the routers, and never imports torch. A failure before the fleet is
ready prints one line on stderr and leaves no process behind.
"""

import argparse
import dataclasses
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moeyard import __version__, logs
from moeyard.entry import load
from moeyard.fleet.control import ControlPort, ControlSocket, commands, open_control, socket_path
from moeyard.fleet.messages import Rank
from moeyard.fleet.placing import placement_of
from moeyard.fleet.ray import config as ray_config
from moeyard.fleet.routers import RouterProcesses, addresses
from moeyard.fleet.weights_api import WeightsApi
from moeyard.listen import bind, most_connections, outside_url, raise_file_limit, reachable_url
from moeyard.local.before_start import check_before_start, fetch_missing
from moeyard.local.device_choice import check_device, device_reason
from moeyard.local.effective import effective_settings
from moeyard.local.model_source import hub_id
from moeyard.local.serve_config import API, ServeConfig
from moeyard.local.settings import (
    ApiSettings,
    access_config,
    api_settings,
    engine_config,
    log_config,
    routed_shape,
    router_fields,
    start_notes,
)
from moeyard.local.startup import startup
from moeyard.logs import LogConfig
from moeyard.options import values
from moeyard.signals import noted
from moeyard_router.api.request_log import check_log
from moeyard_router.api.request_scope import log_context
from moeyard_router.api.tracing import check_traces
from moeyard_router.config import AccessConfig, RouterConfig, system_fingerprint
from moeyard_router.http.credentials import KeyRing, open_certificate
from moeyard_router.http.origins import is_loopback
from moeyard_worker.config.engine_config import EngineConfig, loading_rates
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.shapes import served_model
from moeyard_worker.protocol import KvCompression
from moeyard_worker.sockets import make_keys

DUMMY_NOTE = (
    'random weights and no tokenizer: prompts are token ids ("prompt": [1, 2, 3] of /v1/completions), answers are '
    "token ids and mean nothing"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Addresses of a fleet that is ready. `stopping`: whether it shuts down."""

    url: str
    model_name: str
    metrics_urls: tuple[str, ...]
    stopping: Callable[[], bool]


def run(args: argparse.Namespace) -> int:
    logs.outlive_full_disk()
    access, log = access_config(args), log_config(args)
    return serve(args, engine_config(args), access=access, log=log)


def serve(
    args: argparse.Namespace,
    config: EngineConfig,
    *,
    access: AccessConfig,
    log: LogConfig,
    on_ready: Callable[[Running], None] | None = None,
) -> int:
    """Run until SIGINT, SIGTERM or SIGHUP and return the exit code. `on_ready` is called once, in the router's loop.

    Raises ValueError with one line on what to change if the fleet cannot start.
    """
    begun = time.monotonic()
    options = ServeConfig(**values(ServeConfig, args))
    logs.start(log, context=log_context)
    # Raise the limit first: Ray, the ranks and the routers inherit it.
    connections = most_connections(files := raise_file_limit(), config.num_workers)
    KeyRing(access)
    open_certificate(access)
    check_log(access)
    check_control(options)
    check_traces(access)
    model = served_model(config)
    api = api_settings(args, config)
    placement = placement_of(options.expert_placement, model, config.num_workers)
    local, hub_model = options.ray_address is None, hub_id(args.model)
    checked = check_before_start(config, model, api=api, local=local, placement=placement, hub_model=hub_model)
    sock = bind(args.host, args.port, shared=True)
    check_device(args)
    warn_if_open(access, args.host)
    fetch_missing(checked, config, model)
    if local:
        ray_config.prepare_local(config.threads)
    else:
        ray_config.prepare_remote()
    keys = make_keys()
    control: ControlSocket | None = None
    control_port: ControlPort | None = None
    failure: str | None = None
    with noted() as interrupts:
        # Import Ray after the cheap checks: the import takes a second and reads Ray's settings.
        fleet = load("moeyard.fleet.ray.fleet").RayFleet(
            config,
            log,
            address=options.ray_address,
            worker_host=options.worker_host,
            metrics_port_base=options.metrics_port_base,
            cluster_wait=options.wait_for_cluster,
            keys=keys,
            placement=placement,
            takeover=options.expert_takeover,
            standby=options.standby,
            device=device_named(args),
            model_name=api.names[0],
            limit=options.restart_limit,
            window=options.restart_window,
        )
        try:
            interrupts.check()
            with startup(captures=config.device != "cpu" and not config.enforce_eager) as progress:
                ranks = fleet.start(progress.loading, stage=progress.stage, interrupts=interrupts)
            interrupts.check()
            each = "each router serves" if options.routers > 1 else "served"
            for line in (
                *loading_notes(config, ranks),
                *start_notes(api, config, model),
                checked.formats.describe(),
                f"{each} at once: {connections} connections, by the limit of {files} open files",
            ):
                print(line, file=sys.stderr, flush=True)
            router = dataclasses.replace(
                router_config(args, config, model, api=api, ranks=ranks, port=sock.getsockname()[1]),
                access=access,
                keys=keys.of_router(),
                max_connections=connections,
                control=trainers_here(options, sock.getsockname()[1]),
            )
            shown = effective_settings(
                args,
                config,
                model=model,
                options=options,
                router=router,
                log=log,
                api=api,
                formats=checked.formats,
                ranks=ranks,
            )
            router = dataclasses.replace(router, settings=shown)
            was_ready = False

            def ready() -> None:
                nonlocal was_ready
                if interrupts.count:
                    # The signal came before the routers had a handler.
                    server.stop()
                    return
                was_ready = True
                url = report_ready(router, ranks, device=device_named(args), seconds=time.monotonic() - begun)
                if on_ready is not None:
                    on_ready(
                        Running(
                            url=url,
                            model_name=router.model_name,
                            metrics_urls=tuple(rank.metrics_url for rank in ranks),
                            stopping=lambda: server.stopping,
                        )
                    )

            # Even a single router has its own process, so that its crash leaves the fleet alone.
            server = RouterProcesses(router, sock, count=options.routers, on_ready=ready, on_lost=fleet.lost, log=log)
            fleet.serve(server)
            trainers = WeightsApi(fleet.command, fleet.state)
            control = open_control(router.port, commands(fleet.command, config), trainers)
            control_port = listen_for_trainers(options, trainers)
            interrupts.check()
            server.run()
            failure = server.failure
            if not was_ready and failure is None and fleet.failure is None:
                # A signal ended the start of the routers. Treat it as one that came earlier.
                interrupts.note(signal.SIGTERM, None)
                interrupts.check()
        except Exception:
            # Ctrl-C also reaches Ray's processes. Report the interrupt, not the failures that it causes.
            interrupts.check()
            raise
        finally:
            for listener in (control, control_port):
                if listener is not None:
                    listener.close()
            fleet.stop()
            sock.close()
    return 1 if failure or fleet.failure is not None else 0


def check_control(options: ServeConfig) -> None:
    """Raise ValueError for flags of the control port that cannot work."""
    if options.control_listen is None:
        if options.control_key_file is not None:
            raise ValueError("--control-key-file is for --control-listen HOST:PORT")
        return
    if options.control_key_file is None:
        raise ValueError(
            "--control-listen needs --control-key-file FILE: a client that updates weights decides all answers"
        )
    host, _, number = options.control_listen.rpartition(":")
    if options.control_listen != API and not (host and number.isdecimal() and int(number) <= 65535):
        raise ValueError(f"--control-listen {options.control_listen}: expected HOST:PORT, or {API} for the API's port")
    KeyRing(AccessConfig(api_key_file=Path(options.control_key_file)))


def trainers_here(options: ServeConfig, port: int) -> tuple[Path, Path] | None:
    """Return the control socket and the file of keys, if routers serve the API of trainers on the API's `port`."""
    if options.control_listen != API or options.control_key_file is None:
        return None
    return socket_path(port), Path(options.control_key_file)


def listen_for_trainers(options: ServeConfig, api: WeightsApi) -> ControlPort | None:
    """Open the control port, if there is to be one. Raises ValueError."""
    if options.control_listen in (None, API) or options.control_key_file is None:
        return None
    host, _, number = options.control_listen.rpartition(":")
    found = ControlPort(host.strip("[]"), int(number), Path(options.control_key_file), api)
    print(f"the API of trainers listens on {host}:{found.server_address[1]}", file=sys.stderr, flush=True)
    return found


def router_config(
    args: argparse.Namespace,
    config: EngineConfig,
    model: ModelConfig,
    *,
    api: ApiSettings,
    ranks: list[Rank],
    port: int,
) -> RouterConfig:
    """Return the config of the routers for these ranks. The smallest `max_model_len` of a rank applies."""
    return RouterConfig(
        **{**router_fields(args, config), "kv_compression": api.kv_compression, "port": port},
        model_name=api.names[0],
        model_aliases=api.names[1:],
        model_path=None if config.model_path is None else Path(config.model_path),
        sampling_defaults=api.defaults,
        workers=addresses(ranks),
        max_model_len=min(rank.report["max_model_len"] for rank in ranks),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        step_deadline=config.step_deadline,
        routing=routed_shape(config, model),
        prefix_caching=all(rank.report["prefix_caching"] for rank in ranks),
        version=__version__,
        fingerprint=fleet_fingerprint(ranks, api.kv_compression),
    )


def fleet_fingerprint(ranks: list[Rank], compression: KvCompression | None) -> str:
    """Return the fingerprint of a fleet's answers: that of its ranks, and the default compression of prompts."""
    found = {rank.report["fingerprint"] for rank in ranks}
    if len(found) > 1:
        print(
            "moeyard: warning: ranks differ in device or versions, so an answer may depend on the rank that gives it",
            file=sys.stderr,
        )
    return system_fingerprint(found, compression)


def device_named(args: argparse.Namespace) -> str:
    """Return the device, with the reason if --device is auto."""
    why = device_reason(args)
    return args.device if why is None else f"{args.device} ({why})"


def report_ready(router: RouterConfig, ranks: list[Rank], *, device: str, seconds: float) -> str:
    """Print that the fleet is ready, and return its URL."""
    scheme = router.access.scheme
    url = reachable_url(router.host, router.port, scheme)
    outside = outside_url(router.host, router.port, scheme)
    report = ranks[0].report
    between = f", exchange {report['exchange']} ({report['exchange_why']})" if len(ranks) > 1 else ""
    also = f", also called {', '.join(router.model_aliases)}" if router.model_aliases else ""
    elsewhere = f"; on all addresses, from other machines as {outside}/v1" if outside else ""
    print(
        f"ready: {url}/v1 serves {router.model_name}{also} ({report['dtype']}) on {len(ranks)} "
        f"worker{'s'[: len(ranks) > 1]}, device {device}, expert slots {report['expert_slots']}/"
        f"{report['num_experts']} per worker{between}, up to {router.max_model_len} tokens, after {seconds:.1f} s"
        f"{elsewhere}",
        flush=True,
    )
    return url


def warn_if_open(access: AccessConfig, host: str) -> None:
    """Print a warning if other machines can use the API without a key."""
    if not access.asks_for_key and not is_loopback(host):
        print(
            f"moeyard: warning: the API listens on {host} and asks for no key, so anyone who reaches it can use it; "
            "see --api-key-file",
            file=sys.stderr,
            flush=True,
        )


def loading_notes(config: EngineConfig, ranks: list[Rank]) -> list[str]:
    """Return lines on the load rate, on skipped tensors and on random weights.

    The rate is all ranks' bytes over the slowest rank's time. The rate of files is the mean over ranks.
    """
    reports = [rank.report for rank in ranks]
    rates = [report["read_rate"] for report in reports if report["read_rate"] is not None]
    loaded = loading_rates(
        sum(report["loaded_bytes"] for report in reports),
        max(report["seconds"]["weights"] for report in reports),
        sum(rates) / len(rates) if rates else None,
    )
    by_reason: dict[str, list[str]] = {}
    for key, reason in reports[0]["skipped"].items():
        by_reason.setdefault(reason, []).append(key)
    skipped = [f"skipped {len(keys)} tensors ({why}), {keys[0]} first" for why, keys in sorted(by_reason.items())]
    return [loaded, *skipped, *([DUMMY_NOTE] if config.load_format == "dummy" else [])]
