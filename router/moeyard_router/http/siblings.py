"""Router processes that share a port exchange pages over Unix sockets, and sum their counts.

A query is a line with a page's name. The answer is the page's size in bytes, then the page. Processes that have ended,
or do not answer within a second, are left out.
"""

import asyncio
import contextlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_ANSWER_SECONDS = 1.0
_MAX_NAME = 64  # bytes of a query
_SIZE = struct.Struct("<Q")


class Siblings:
    """The sockets of process `index` of `count`. It lives in one event loop: `start` it there, and `close` it."""

    def __init__(self, directory: Path, *, index: int, count: int) -> None:
        self._directory = directory
        self._others = [i for i in range(count) if i != index]
        self._index = index
        self._server: asyncio.Server | None = None
        self._pages: dict[str, Callable[[], bytes]] = {}

    def offer(self, name: str, page: Callable[[], bytes]) -> None:
        """Offer a page to the siblings. `page` runs at each query."""
        self._pages[name] = page

    async def start(self) -> None:
        """Listen for queries. A stale socket of an earlier process with this index is replaced."""
        path = self._path(self._index)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, path, limit=_MAX_NAME)

    def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._server is not None:
            self._server.close()
            self._path(self._index).unlink(missing_ok=True)

    async def ask(self, name: str) -> list[bytes]:
        """Return the siblings' pages of this name."""
        answers = await asyncio.gather(*(self._ask(index, name) for index in self._others))
        return [answer for answer in answers if answer is not None]

    async def _ask(self, index: int, name: str) -> bytes | None:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._path(index))
                try:
                    writer.write(name.encode() + b"\n")
                    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
                    return await reader.readexactly(size)
                finally:
                    writer.close()
        except (OSError, EOFError, TimeoutError):
            return None  # it has ended or is restarting

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, TimeoutError):  # boundary: the peer left or sent nonsense
            async with asyncio.timeout(_ANSWER_SECONDS):
                name = (await reader.readline()).decode("ascii", "replace").strip()
                if name in self._pages:
                    page = self._pages[name]()
                    writer.write(_SIZE.pack(len(page)) + page)
                    await writer.drain()
        writer.close()

    def _path(self, index: int) -> Path:
        return self._directory / f"router-{index}.sock"


def merged(figures: Sequence[Mapping[str, Any]], *, num_requests: int) -> dict[str, Any]:
    """Sum the figures of several routers. Keep the last `num_requests` requests to end, latest first."""
    samples: dict[str, float] = {}
    for each in figures:
        for name, value in each["samples"].items():
            samples[name] = samples.get(name, 0.0) + value
    requests = [request for each in figures for request in each["requests"]]
    refusals = [refusal for each in figures for refusal in each["refusals"]]
    return {
        "inflight": sum(each["inflight"] for each in figures),
        "router_inflight": [
            sum(counts) for counts in zip(*(each["router_inflight"] for each in figures), strict=False)
        ],
        "samples": samples,
        "requests": sorted(requests, key=lambda request: request["ended"], reverse=True)[:num_requests],
        "refusals": sorted(refusals, key=lambda refusal: refusal["when"], reverse=True),
    }


_TIMES = ("_created", "_start_time_seconds")  # Unix times at which a series or process began
_COUNTS = ("counter", "histogram")  # types of metrics that never fall


def summed(pages: Iterable[bytes]) -> bytes:
    """Sum all samples of pages in Prometheus' text format. Take the earliest creation times. Raises `ValueError`."""
    return _combined(pages, lambda family, sample: min if sample.endswith(_TIMES) else add)


def largest(pages: Iterable[bytes]) -> bytes:
    """Return the first page with the largest counts of all. Raises `ValueError`.

    A router that was started again has not seen what workers had counted that were lost before.
    """
    return _combined(pages, lambda family, sample: max if family.type in _COUNTS else lambda value, other: value)


def _combined(pages: Iterable[bytes], rule: Callable[[Metric, str], Callable[[float, float], float]]) -> bytes:
    """Combine samples of the same name and labels by the function that `rule` gives for family and name."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page.decode()):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            samples = values.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                known = samples.get(key)
                samples[key] = sample.value if known is None else rule(family, sample.name)(known, sample.value)
    for name, family in families.items():
        family.samples = [Sample(sample, dict(labels), value) for (sample, labels), value in values[name].items()]
    return generate_latest(_Collected(families.values()))


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
