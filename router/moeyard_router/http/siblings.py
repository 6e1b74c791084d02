"""Router processes that share a port: each answers the others over a Unix socket, and sums what all of them count.

A question is a line with the name of a page; the answer is the page's size in bytes, then the page. A process that is
gone, or does not answer within a second, is left out.
"""

import asyncio
import contextlib
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_ANSWER_SECONDS = 1.0
_MAX_NAME = 64  # bytes of a question
_SIZE = struct.Struct("<Q")


class Siblings:
    """What process `index` of `count` is asked and asks. Lives in one event loop: `start` it there, and `close` it."""

    def __init__(self, directory: Path, *, index: int, count: int) -> None:
        self._directory = directory
        self._others = [i for i in range(count) if i != index]
        self._index = index
        self._server: asyncio.Server | None = None
        self._pages: dict[str, Callable[[], bytes]] = {}

    def offer(self, name: str, page: Callable[[], bytes]) -> None:
        """Have a page to be asked for; it is made when it is."""
        self._pages[name] = page

    async def start(self) -> None:
        """Answer from now on; a socket left by a process that took this place before is replaced."""
        path = self._path(self._index)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, path, limit=_MAX_NAME)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path(self._index).unlink(missing_ok=True)

    async def ask(self, name: str) -> list[bytes]:
        """The others' pages of this name."""
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
            return None  # it ended, or is being started again

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, TimeoutError):  # boundary: who asked has left or wrote nonsense
            async with asyncio.timeout(_ANSWER_SECONDS):
                name = (await reader.readline()).decode("ascii", "replace").strip()
                if name in self._pages:
                    page = self._pages[name]()
                    writer.write(_SIZE.pack(len(page)) + page)
                    await writer.drain()
        writer.close()

    def _path(self, index: int) -> Path:
        return self._directory / f"router-{index}.sock"


Figures = Mapping[str, Any]


def merged(own: Figures, others: Iterable[Figures], *, num_requests: int) -> dict[str, Any]:
    """One router's figures for all; of requests the last `num_requests` to end, latest first."""
    every = (own, *others)
    return {
        "inflight": sum(each["inflight"] for each in every),
        "router_inflight": [sum(counts) for counts in zip(*(each["router_inflight"] for each in every), strict=False)],
        "counters": _counters(each["counters"] for each in every),
        "histograms": _histograms(each["histograms"] for each in every),
        "requests": sorted(
            (request for each in every for request in each["requests"]), key=lambda r: r["ended"], reverse=True
        )[:num_requests],
    }


def _counters(every: Iterable[Figures]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for counters in every:
        for name, value in counters.items():
            if not isinstance(value, Mapping):
                found[name] = found.get(name, 0.0) + value
                continue
            labels = found.setdefault(name, {})
            for label, count in value.items():
                labels[label] = labels.get(label, 0.0) + count
    return found


def _histograms(every: Iterable[Figures]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for histograms in every:
        for name, histogram in histograms.items():
            known = found.setdefault(name, {"buckets": [[bound, 0.0] for bound, _ in histogram["buckets"]]})
            for bucket, (_, count) in zip(known["buckets"], histogram["buckets"], strict=True):
                bucket[1] += count
            for part in ("sum", "count"):
                known[part] = known.get(part, 0.0) + histogram[part]
    return found


_TIMES = ("_created", "_start_time_seconds")  # Unix times at which a series, or a process, began


def summed(pages: Iterable[bytes]) -> bytes:
    """Sum every sample over pages in the text format; of times of creation take the earliest. Raises `ValueError`."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page.decode()):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            samples = values.setdefault(known.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                if sample.name.endswith(_TIMES):
                    samples[key] = min(samples.get(key, sample.value), sample.value)
                else:
                    samples[key] = samples.get(key, 0.0) + sample.value
    for name, family in families.items():
        family.samples = [Sample(*key_of(key), value) for key, value in values[name].items()]
    registry = CollectorRegistry()
    registry.register(_Found(families.values()))
    return generate_latest(registry)


def key_of(key: tuple[str, tuple[tuple[str, str], ...]]) -> tuple[str, dict[str, str]]:
    return key[0], dict(key[1])


class _Found(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
