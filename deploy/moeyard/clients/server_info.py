"""What a running server says of itself."""

import http.client
import json
import ssl
from typing import Any

from moeyard.clients.target import Target

SECONDS = 10.0


def connect(target: Target, *, timeout: float) -> http.client.HTTPConnection:
    """A connection that is not open yet; seconds."""
    if target.tls:
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(target.host, target.port, timeout=timeout, context=context)
    return http.client.HTTPConnection(target.host, target.port, timeout=timeout)


def unreachable(target: Target, error: BaseException) -> ValueError:
    """What is said when no answer comes."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ValueError(f"no server answers at {target.url}: {reason}; start one with `moeyard serve`, or name its URL")


def first_model(target: Target) -> str:
    """The first name of /v1/models. Raises ValueError with one line when there is none to be had."""
    connection = connect(target, timeout=SECONDS)
    try:
        connection.request("GET", target.path("models"), headers=target.headers())
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise unreachable(target, error) from error
    finally:
        connection.close()
    if response.status in (401, 403):
        raise ValueError(f"{target.url} wants a key (HTTP {response.status}); give one with --api-key")
    try:
        found: Any = json.loads(body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(
            f"{target.url}/v1/models names no model (HTTP {response.status}); is it an OpenAI-compatible server?"
        ) from None
    return str(found)
