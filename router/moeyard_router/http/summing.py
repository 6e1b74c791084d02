"""Prometheus pages of several processes as one: what each of them counted, added up."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_TIMES = ("_created", "_start_time_seconds")  # Unix times at which a series, or a process, began


def summed(pages: Iterable[bytes]) -> bytes:
    """One page in the text format with the sum of every sample over the pages; of times of creation the earliest.

    For counters, histograms and gauges of which each process has a part. Raises `ValueError` for what is no such page.
    """
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
    """Name and labels of a sample."""
    return key[0], dict(key[1])


class _Found(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
