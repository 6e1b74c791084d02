"""Opens the traces that `--otlp-traces-endpoint` asks for. OpenTelemetry is an extra, loaded only with that flag."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moeyard_router.config import AccessConfig, RouterConfig

if TYPE_CHECKING:
    from moeyard_router.api.spans import Traces


def check_traces(access: AccessConfig) -> None:
    """Raise ValueError if traces are wanted and OpenTelemetry is not installed."""
    if access.otlp_traces_endpoint is not None:
        _spans()


def open_traces(config: RouterConfig) -> "Traces | None":
    """Return the traces that `config` asks for, if any. Raises ValueError if OpenTelemetry is not installed."""
    if config.access.otlp_traces_endpoint is None:
        return None
    traces: Traces = _spans().Traces(config)
    return traces


def _spans() -> Any:
    try:
        return import_module("moeyard_router.api.spans")
    except ImportError as error:
        if not (error.name or "").startswith(("opentelemetry", "grpc")):
            raise
        message = f"--otlp-traces-endpoint needs OpenTelemetry ({error.name}): pip install 'moeyard[tracing]'"
        raise ValueError(message) from error
