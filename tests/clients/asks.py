"""Requests and output shared by all suites. This file runs in each client's own virtual environment."""

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema

MODEL = "demo"
HELLO = [{"role": "user", "content": "Tell me of the captain and his ship."}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
PORT: dict[str, Any] = {
    "type": "object",
    "properties": {"harbour": {"type": "string", "maxLength": 20}, "open": {"type": "boolean"}},
    "required": ["harbour", "open"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "harbour": PORT}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"The {name}", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def hold(name: str, arguments: Any) -> None:
    """Raise if `arguments` do not fit the tool of this name."""
    jsonschema.validate(arguments, SCHEMAS[name])


def refused(kind: type[Exception], ask: Callable[[], object]) -> Any:
    """Return the exception of this kind that `ask` must raise."""
    try:
        ask()
    except kind as refusal:
        return refusal
    raise AssertionError(f"no {kind.__name__}")


def run(title: str, checks: Sequence[Callable[[], None]]) -> None:
    """Run each check, print its result, and exit with 1 if one failed."""
    failed = 0
    print(title, flush=True)
    for check in checks:
        begun = time.monotonic()
        try:
            check()
        except Exception:  # boundary: a suite reports every failure
            failed += 1
            print(f"  FAIL {check.__name__}", traceback.format_exc(), sep="\n", flush=True)
        else:
            print(f"  ok   {check.__name__} {time.monotonic() - begun:.1f} s", flush=True)
    print(f"  {len(checks) - failed} of {len(checks)} hold", flush=True)
    sys.exit(failed > 0)
