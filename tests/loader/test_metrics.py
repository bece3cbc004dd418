"""Test metrics of a loader for Prometheus and OpenTelemetry."""

from __future__ import annotations

from pathlib import Path

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from shardstream.integrations.metrics import PrometheusCollector, observe_loader
from tests.small_datasets import loader, numbered


def test_prometheus_reads_the_timings(tmp_path: Path) -> None:
    one, registry = loader(numbered(tmp_path, 30, 10), batch_size=10), CollectorRegistry()
    registry.register(PrometheusCollector(one, {"rank": "3"}))
    assert 'shardstream_loader_batches{rank="3"} 0.0' in generate_latest(registry).decode()
    list(one)
    text = generate_latest(registry).decode()
    assert 'shardstream_loader_samples{rank="3"} 30.0' in text
    assert "shardstream_loader_loop_wait_seconds{" in text
    names = [line.split("{")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(set(names)) == len(one.stats().as_dict())


def test_opentelemetry_reads_the_timings(tmp_path: Path) -> None:
    one, reader = loader(numbered(tmp_path, 30, 10), batch_size=10), InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    observe_loader(one, meter=meter, attributes={"rank": "3"})
    list(one)
    data = reader.get_metrics_data()
    assert data is not None
    found = {
        metric.name: (metric.unit, metric.data.data_points[0])
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    unit, point = found["shardstream_loader_read_bytes"]
    assert (unit, point.attributes) == ("By", {"rank": "3"})
    assert found["shardstream_loader_samples"][1].value == 30  # type: ignore[union-attr]
    assert found["shardstream_loader_read_seconds"][0] == "s"
