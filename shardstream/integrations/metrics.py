"""Timings of a `ShardLoader` as metrics of Prometheus or OpenTelemetry; each library is imported where it is used.

The metrics are gauges, because they begin at 0 in each epoch: ``shardstream_loader_samples``, ``..._loop_wait_seconds``,
``..._read_bytes`` and all others of ``loader.stats().as_dict()``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardstream.errors import OptionError
from shardstream.loader import ShardLoader

_PREFIX = "shardstream_loader_"


def _metrics_of(loader: ShardLoader) -> dict[str, float]:
    """Return the timings of the current or last epoch by the name of their metric; times are in seconds."""
    return {
        f"{_PREFIX}{name.removesuffix('_s')}_seconds"
        if name.endswith("_s")
        else _PREFIX + name: value
        for name, value in loader.stats().as_dict().items()
    }


class PrometheusCollector:
    """A collector for ``prometheus_client``: ``REGISTRY.register(PrometheusCollector(loader))``. Reads the timings when it is scraped.

    Args:
        loader: The loader.
        labels: Labels of all metrics, such as ``{"rank": "0"}``.

    Raises:
        OptionError: If prometheus_client is not installed.
    """

    def __init__(self, loader: ShardLoader, labels: Mapping[str, str] | None = None) -> None:
        try:
            from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415  (optional)
        except ImportError as error:
            raise OptionError("PrometheusCollector needs: pip install prometheus-client") from error
        self._new_metric = GaugeMetricFamily
        self._loader, self._labels = loader, dict(labels or {})

    def collect(self) -> Iterator[Any]:
        """Yield the metrics."""
        for name, value in _metrics_of(self._loader).items():
            text = f"{name.removeprefix(_PREFIX)} of the epoch so far, see LoaderStats"
            metric = self._new_metric(name, text, labels=[*self._labels])
            metric.add_metric([*self._labels.values()], value)
            yield metric


def observe_loader(
    loader: ShardLoader, *, meter: Any = None, attributes: Mapping[str, str] | None = None
) -> None:
    """Add observable gauges to an OpenTelemetry meter; they are read when it exports.

    Args:
        loader: The loader.
        meter: A meter of OpenTelemetry; by default one of its global provider, called "shardstream".
        attributes: Attributes of all observations, such as ``{"rank": "0"}``.

    Raises:
        OptionError: If opentelemetry-api is not installed.
    """
    try:
        from opentelemetry import metrics  # noqa: PLC0415  (optional)
    except ImportError as error:
        raise OptionError("observe_loader needs: pip install opentelemetry-api") from error
    meter = meter or metrics.get_meter("shardstream")

    def observe(name: str) -> Any:
        return lambda _options: [
            metrics.Observation(_metrics_of(loader)[name], dict(attributes or {}))
        ]

    for name in _metrics_of(loader):
        unit = "s" if name.endswith("_seconds") else "By" if name.endswith("_bytes") else "1"
        meter.create_observable_gauge(name, callbacks=[observe(name)], unit=unit)
