"""Router processes of one port exchange pages over Unix sockets, and sum their counts and those of ended processes.

A query is a line with a page's name. The answer is a size in bytes, then two pages in MessagePack: that of the process,
and the counts of earlier processes with its index. A process writes its answer to a file before it sends it. The file
outlives the process. It stands for a process that has ended or does not answer within a second, and the next process
with this index begins with it. So a count that was once shown stays in the sum.
"""

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_ANSWER_SECONDS = 1.0
_MAX_NAME = 64  # bytes of a query
_SIZE = struct.Struct("<Q")
log = logging.getLogger(__name__)

# Combines the pages of living processes with the last pages of ended ones, in this order.
Join = Callable[[Sequence[bytes], Sequence[bytes]], bytes]


class _Pages(NamedTuple):
    """The page of a process, and the joined pages of earlier processes with its index, empty if there were none."""

    own: bytes
    before: bytes


class Siblings:
    """The sockets and files of process `index` of `count`, in one event loop: `start` it there, and `close` it.

    Earlier processes with this index must have ended.
    """

    def __init__(self, directory: Path, *, index: int, count: int) -> None:
        self._directory = directory
        self._others = [i for i in range(count) if i != index]
        self._index = index
        self._server: asyncio.Server | None = None
        self._offers: dict[str, tuple[Callable[[], bytes], bytes, Join]] = {}
        self._stored: set[str] = set()

    def offer(self, name: str, page: Callable[[], bytes], join: Join, *, store: bool = True) -> None:
        """Offer a page to the siblings. `page` runs at each query. `store`: its counts outlive this process."""
        if store:
            self._stored.add(name)
        last = self._last(self._index, name)
        self._offers[name] = page, b"" if last is None else _joined(join, ended=[last]), join

    async def start(self) -> None:
        """Listen for queries. A stale socket of an earlier process with this index is replaced."""
        path = self._path(self._index)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, path, limit=_MAX_NAME)

    def close(self) -> None:
        """Stop listening, remove the socket, and store the last counts."""
        if self._server is not None:
            self._server.close()
            self._path(self._index).unlink(missing_ok=True)
            for name in self._stored:
                self._own(name)

    async def joined(self, name: str) -> bytes:
        """Return the page of this name, joined over all processes of the port."""
        own, (_, _, join) = self._own(name), self._offers[name]
        answers = await asyncio.gather(*(self._ask(index, name) for index in self._others))
        silent = [self._last(i, name) for i, answer in zip(self._others, answers, strict=True) if answer is None]
        return _joined(join, living=[own, *filter(None, answers)], ended=[*filter(None, silent)])

    def _own(self, name: str) -> _Pages:
        """Return this process's pages after storing them, if they are stored."""
        page, before, _ = self._offers[name]
        pages = _Pages(page(), before)
        if name not in self._stored:
            return pages
        path = self._file(self._index, name)
        try:
            new = path.with_name(f"{path.name}.new")
            new.write_bytes(msgpack.packb(pages))
            new.replace(path)
        except OSError as error:  # boundary: the disk is full
            log.warning("the counts of router %d are not stored: %s; they fall if it ends", self._index, error)
        return pages

    def _last(self, index: int, name: str) -> _Pages | None:
        """Return the latest pages that a process with this index has stored."""
        try:
            return _Pages(*msgpack.unpackb(self._file(index, name).read_bytes()))
        except OSError:  # boundary: it has stored none yet
            return None

    async def _ask(self, index: int, name: str) -> _Pages | None:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._path(index))
                try:
                    writer.write(name.encode() + b"\n")
                    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
                    return _Pages(*msgpack.unpackb(await reader.readexactly(size)))
                finally:
                    writer.close()
        except (OSError, EOFError, TimeoutError):
            return None  # it has ended or is restarting

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, TimeoutError):  # boundary: the peer left or sent nonsense
            async with asyncio.timeout(_ANSWER_SECONDS):
                name = (await reader.readline()).decode("ascii", "replace").strip()
                if name in self._offers:
                    pages = msgpack.packb(self._own(name))
                    writer.write(_SIZE.pack(len(pages)) + pages)
                    await writer.drain()
        writer.close()

    def _path(self, index: int) -> Path:
        return self._directory / f"router-{index}.sock"

    def _file(self, index: int, name: str) -> Path:
        return self._directory / f"router-{index}.{name}"


def _joined(join: Join, *, living: Sequence[_Pages] = (), ended: Sequence[_Pages] = ()) -> bytes:
    """Join pages. Those of a living process's earlier lives count as ended."""
    past = [each.before for each in (*living, *ended)] + [each.own for each in ended]
    return join([each.own for each in living], [page for page in past if page])


def merged(
    figures: Sequence[Mapping[str, Any]], ended: Sequence[Mapping[str, Any]] = (), *, num_requests: int
) -> dict[str, Any]:
    """Sum the figures of routers, and the samples of ended ones.

    Keep the last `num_requests` requests to end, latest first.
    """
    samples: dict[str, float] = {}
    for each in (*figures, *ended):
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


_CREATED = "_created"  # Unix time at which a series began
_TIMES = (_CREATED, "_start_time_seconds")
_COUNTS = ("counter", "histogram")  # types of metrics that never fall


def summed(living: Sequence[bytes], ended: Sequence[bytes] = ()) -> bytes:
    """Sum all samples of pages in Prometheus' text format. Take the earliest creation times. Raises `ValueError`.

    Pages of ended routers add their counts. Their gauges ended with them.
    """
    return _combined(living, ended, lambda family, sample: min if sample.endswith(_TIMES) else add)


def largest(living: Sequence[bytes]) -> bytes:
    """Return the first page with the largest counts of all. Raises `ValueError`.

    A router that was started again has not seen what workers had counted that were lost before.
    """
    return _combined(living, (), lambda family, sample: max if family.type in _COUNTS else lambda value, other: value)


def _combined(
    living: Sequence[bytes],
    ended: Sequence[bytes],
    rule: Callable[[Metric, str], Callable[[float, float], float]],
) -> bytes:
    """Combine samples of the same name and labels by the function that `rule` gives for family and name."""
    if len(living) == 1 and not ended:
        return living[0]
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    parsed = [family for page in living for family in text_string_to_metric_families(page.decode())]
    for page in ended:
        found = text_string_to_metric_families(page.decode())
        parsed += [family for family in found if family.type in _COUNTS or family.name.endswith(_CREATED)]
    for family in parsed:
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
